//! One sequence's rounds as a pure state machine: what to send, what a reply means, and what the target
//! may not answer. No IO, no clock.

use eyrie_speculation::Proposal;
use eyrie_wire::v1::{Committed, FinishReason, Propose, Verify};

use crate::draft_side::DraftSide;
use crate::policy::{Ask, Standing};

/// The target's answer contradicts what was asked; the sequence cannot go on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Violation {
    #[error("the target answered round {given}, expected {want}")]
    Round { want: u32, given: u32 },
    #[error("the target says kv_len {given} after round {round}, expected {want}")]
    Length { round: u32, want: u32, given: u32 },
    #[error("the target emitted {given} tokens in round {round}, expected {want}")]
    Count { round: u32, want: usize, given: usize },
    #[error("the target accepted node {node} in round {round}, which does not follow node {parent}")]
    Path { round: u32, parent: usize, node: u32 },
    #[error("the target emitted {given} in round {round} where it accepted draft {want}")]
    Draft { round: u32, want: u32, given: u32 },
    #[error("the target emitted token {given}, the vocabulary size is {vocab}")]
    Token { vocab: u32, given: u32 },
    #[error("the target committed round {given} when nothing was asked")]
    Unasked { given: u32 },
}

/// What one Committed added.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Commit {
    /// What was verified; empty in a plain round and at the opening.
    pub(crate) proposal: Proposal,
    /// Accepted nodes, not cut at the finish.
    pub(crate) path: Vec<u32>,
    /// Emitted tokens, cut at the finish.
    pub(crate) tokens: Vec<u32>,
    /// UNSPECIFIED while the sequence goes on.
    pub(crate) finish: FinishReason,
    /// Nothing further was asked: the next round is the gateway's to start.
    pub(crate) last: bool,
    /// Positions of the opening that a prefix cache held.
    pub(crate) cached: u32,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Phase {
    Opening,
    Ready,
    Verifying { proposal: Proposal, steps: u32 },
    Finished,
}

/// The rounds of one sequence at one target.
#[derive(Debug, Clone)]
pub(crate) struct Rounds {
    /// Prompt and generated tokens; while the sequence goes on the last one is the root.
    tokens: Vec<u32>,
    vocab: u32,
    kv_len: u32,
    round: u32,
    phase: Phase,
    /// Positions of the opening that a prefix cache held: their rows are published when they are asked for.
    cached: u32,
    /// What the draft has of this sequence.
    pub(crate) draft: DraftSide,
}

impl Rounds {
    /// A sequence that is being opened with `tokens`, not empty.
    pub(crate) fn opening(tokens: Vec<u32>, vocab: u32) -> Self {
        let draft = DraftSide::default();
        Self { tokens, vocab, kv_len: 0, round: 0, phase: Phase::Opening, cached: 0, draft }
    }

    pub(crate) fn vocab(&self) -> u32 {
        self.vocab
    }

    /// The target was asked to open it and has drawn no token yet.
    pub(crate) fn is_opening(&self) -> bool {
        self.phase == Phase::Opening
    }

    /// Where the sequence stands, with `remaining` tokens to go.
    pub(crate) fn standing(&self, remaining: u32, context: u32) -> Standing {
        Standing { kv_len: self.kv_len, remaining, context }
    }

    /// The first round follows an opening whose rows were not all published: a draft has to ask for them.
    pub(crate) fn begins_with_cached_rows(&self) -> bool {
        self.round == 0 && self.cached > 0
    }

    /// While the prompt is prefilled: hand the draft the finished chunks, so that its own prefill runs
    /// beside the target's and no ring slot is overwritten before it was read.
    pub(crate) fn ingest(&mut self) -> Option<Propose> {
        let end = self.draft.features_end()?;
        let is_last = end as usize >= self.tokens.len();
        if self.phase != Phase::Opening || is_last || self.draft.is_healing() {
            return None;
        }
        Some(self.draft.propose(&self.tokens, 0, end, None))
    }

    /// Asks the draft for the next round.
    pub(crate) fn propose(&mut self, ask: Ask) -> Propose {
        self.draft.propose(&self.tokens, self.round + 1, self.kv_len, Some(ask))
    }

    /// The number and base of the round that comes next, which a proposal has to name.
    pub(crate) fn next(&self) -> (u32, u32) {
        let base_len = if self.is_opening() { self.tokens.len() as u32 } else { self.kv_len };
        (self.round + 1, base_len)
    }

    /// Starts the next round with `proposal`, or `steps` plain steps if it is empty.
    pub(crate) fn verify(&mut self, proposal: Proposal, steps: u32) -> Verify {
        let steps = if proposal.is_empty() { steps.max(1) } else { 1 };
        let parents = match proposal.is_chain() {
            true => Vec::new(),
            false => proposal.parents().iter().map(|&p| u32::from(p)).collect(),
        };
        let verify = Verify {
            round: self.round + 1,
            base_len: self.kv_len,
            root: self.tokens.last().copied().unwrap_or_default(),
            tokens: proposal.tokens().to_vec(),
            parents,
            steps: if proposal.is_empty() { steps } else { 0 },
        };
        self.phase = Phase::Verifying { proposal, steps };
        verify
    }

    /// Takes in what the target committed; `None` for a round that was taken in before, which the target repeats when
    /// a frame reaches it twice.
    ///
    /// # Errors
    /// The answer contradicts what was asked.
    pub(crate) fn committed(&mut self, committed: Committed) -> Result<Option<Commit>, Violation> {
        let given = committed.round;
        if !self.is_opening() && given <= self.round {
            return Ok(None);
        }
        let (proposal, steps, want) = match std::mem::replace(&mut self.phase, Phase::Finished) {
            Phase::Opening => (Proposal::empty(), 1, 0),
            Phase::Verifying { proposal, steps } => (proposal, steps, self.round + 1),
            Phase::Ready | Phase::Finished => return Err(Violation::Unasked { given }),
        };
        if given != want {
            return Err(Violation::Round { want, given });
        }
        let finish = committed.finish();
        let goes_on = finish == FinishReason::Unspecified;
        self.check(&committed, &proposal, goes_on)?;
        let Committed { kv_len, tokens, path, features, last, cached, .. } = committed;
        let last = last || steps == 1 || !proposal.is_empty() || !goes_on;
        self.round = want;
        self.kv_len = kv_len;
        self.cached = cached;
        self.tokens.extend_from_slice(&tokens);
        self.draft.published(features);
        if goes_on {
            self.phase = match last {
                true => Phase::Ready,
                false => Phase::Verifying { proposal: Proposal::empty(), steps: steps - 1 },
            };
        }
        Ok(Some(Commit { proposal, path, tokens, finish, last, cached }))
    }

    fn check(&self, committed: &Committed, proposal: &Proposal, goes_on: bool) -> Result<(), Violation> {
        let Committed { round, kv_len, tokens, path, .. } = committed;
        let round = *round;
        let mut parent = 0;
        for (i, &node) in path.iter().enumerate() {
            if node == 0 || proposal.parent(node as usize) != Some(parent) {
                return Err(Violation::Path { round, parent, node });
            }
            parent = node as usize;
            if let (Some(want), Some(&given)) = (proposal.token(parent), tokens.get(i))
                && want != given
            {
                return Err(Violation::Draft { round, want, given });
            }
        }
        let emitted = path.len() + 1;
        if tokens.len() > emitted || (goes_on && tokens.len() != emitted) {
            return Err(Violation::Count { round, want: emitted, given: tokens.len() });
        }
        if let Some(&given) = tokens.iter().find(|&&t| t >= self.vocab) {
            return Err(Violation::Token { vocab: self.vocab, given });
        }
        let want = match self.round == round {
            // Round 0, the opening.
            true => self.tokens.len() as u32,
            false => self.kv_len + emitted as u32,
        };
        if goes_on && *kv_len != want {
            return Err(Violation::Length { round, want, given: *kv_len });
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "round_tests.rs"]
mod tests;
