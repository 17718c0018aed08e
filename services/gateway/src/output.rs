//! From committed rounds to what the client sees: text, stop strings, usage and the trace. Ids, text
//! and rounds are cut together, and whole replies are the same chunks joined.

use std::collections::VecDeque;

use eyrie_speculation::Acceptance;
use eyrie_text::{Detokenizer, Emit, Matched, StopMatcher, TextError, Tokenizer};
use eyrie_wire::v1::round::Mode;
use eyrie_wire::v1::{FinishReason, Finished, GenerateChunk, Round, Usage};

use crate::round::Commit;

/// The ids of one commit that are not all released: a stop string may still take them back.
#[derive(Debug)]
struct Held {
    ids: VecDeque<u32>,
    /// How many of `ids`, from the front, are accepted drafts.
    accepted: usize,
    released: usize,
    round: Option<Round>,
}

/// The client's side of one request.
#[derive(Debug)]
pub(crate) struct Output {
    detokenizer: Option<Detokenizer>,
    matcher: StopMatcher,
    held: VecDeque<Held>,
    trace: bool,
    prompt_tokens: u32,
    completion_tokens: u32,
    rounds: u32,
    drafted: u32,
    accepted: u32,
    without_draft: u32,
    /// Of the prompt, at the first opening.
    cached: Option<u32>,
    positions: Acceptance,
    ended: Option<FinishReason>,
}

impl Output {
    /// The output of a request; without a tokenizer only ids come out.
    ///
    /// # Errors
    /// An empty stop string.
    pub(crate) fn try_new(
        tokenizer: Option<&Tokenizer>,
        stop: Vec<String>,
        trace: bool,
        prompt_tokens: u32,
    ) -> Result<Self, TextError> {
        Ok(Self {
            detokenizer: tokenizer.map(|t| t.detokenizer(true)),
            matcher: StopMatcher::try_new(stop)?,
            held: VecDeque::new(),
            trace,
            prompt_tokens,
            completion_tokens: 0,
            rounds: 0,
            drafted: 0,
            accepted: 0,
            without_draft: 0,
            cached: None,
            positions: Acceptance::default(),
            ended: None,
        })
    }

    /// Why the reply is complete, once it is.
    pub(crate) fn ended(&self) -> Option<FinishReason> {
        self.ended
    }

    /// Tokens released to the client so far.
    pub(crate) fn completion_tokens(&self) -> u32 {
        self.completion_tokens
    }

    /// A round that wanted a draft goes without one.
    pub(crate) fn went_without_draft(&mut self) {
        self.without_draft += 1;
    }

    /// A token that came from a prefill, the first or that of a sequence opened again: it belongs to
    /// no round.
    pub(crate) fn prefilled(&mut self, commit: Commit) -> Vec<GenerateChunk> {
        self.cached.get_or_insert(commit.cached);
        self.take(commit, None)
    }

    /// One verified round.
    pub(crate) fn round(&mut self, commit: Commit) -> Vec<GenerateChunk> {
        let depth = commit.proposal.max_depth();
        self.rounds += 1;
        self.drafted += commit.proposal.len() as u32;
        self.accepted += commit.path.len() as u32;
        self.positions.record(depth, commit.path.len());
        let round = self.trace.then(|| traced(&commit));
        self.take(commit, round)
    }

    fn take(&mut self, commit: Commit, round: Option<Round>) -> Vec<GenerateChunk> {
        let Commit { tokens, path, finish, .. } = commit;
        let mut chunks = Vec::new();
        let accepted = path.len().min(tokens.len());
        let by_id = finish == FinishReason::Stop;
        let last = tokens.len();
        self.held.push_back(Held { ids: tokens.iter().copied().collect(), accepted, released: 0, round });
        for (i, &id) in tokens.iter().enumerate() {
            // An id without text, such as a padding row of the embedding, is still a token.
            let text = self.detokenizer.as_mut().and_then(|d| d.push(id).ok()).unwrap_or_default();
            if by_id && i + 1 == last {
                // A stop id goes before a stop string that the same token would complete.
                let matched = self.matcher.push("");
                self.emit(matched, &mut chunks);
                self.end(FinishReason::Stop, &text, &mut chunks);
                return chunks;
            }
            let matched = self.matcher.push(&text);
            if self.emit(matched, &mut chunks) {
                return chunks;
            }
        }
        if finish != FinishReason::Unspecified {
            self.end(finish, "", &mut chunks);
        }
        chunks
    }

    /// The usage so far.
    pub(crate) fn usage(&self) -> Usage {
        let counts = |by: &[u64]| by.iter().map(|&n| n as u32).collect();
        Usage {
            prompt_tokens: self.prompt_tokens,
            completion_tokens: self.completion_tokens,
            rounds: self.rounds,
            drafted_tokens: self.drafted,
            accepted_tokens: self.accepted,
            drafted_by_position: counts(self.positions.proposed()),
            accepted_by_position: counts(self.positions.accepted()),
            rounds_without_draft: self.without_draft,
            cached_tokens: self.cached.unwrap_or(0),
        }
    }

    /// Releases what is final; true if a stop string ended the reply.
    fn emit(&mut self, matched: Matched, chunks: &mut Vec<GenerateChunk>) -> bool {
        let (emit, hit) = match matched {
            Matched::Emit(emit) => (emit, false),
            Matched::Hit { emit, .. } => (emit, true),
        };
        self.release(emit, chunks);
        if hit {
            self.finish(FinishReason::Stop, chunks);
        }
        hit
    }

    /// The target ended the sequence: what is held back belongs to the reply, unless the very end
    /// completes a stop string. `tail` is text that no stop string may take.
    fn end(&mut self, reason: FinishReason, tail: &str, chunks: &mut Vec<GenerateChunk>) {
        let rest = self.detokenizer.as_mut().map(Detokenizer::flush).unwrap_or_default();
        let (scanned, after) = match reason {
            FinishReason::Stop => (String::new(), format!("{tail}{rest}")),
            FinishReason::Length | FinishReason::Unspecified => (rest, String::new()),
        };
        let matched = self.matcher.finish(&scanned);
        if self.emit(matched, chunks) {
            return;
        }
        self.release(Emit { text: after, ids: 0 }, chunks);
        self.finish(reason, chunks);
    }

    fn finish(&mut self, reason: FinishReason, chunks: &mut Vec<GenerateChunk>) {
        let cut: Vec<Round> = self.held.drain(..).filter_map(Held::into_cut_round).collect();
        self.ended = Some(reason);
        let usage = Some(self.usage());
        let last = last_chunk(chunks);
        last.rounds.extend(cut);
        last.finished = Some(Finished { reason: reason as i32, usage });
    }

    /// Ids go out in chunks of one round each, so that the accepted ones come first in every chunk.
    fn release(&mut self, emit: Emit, chunks: &mut Vec<GenerateChunk>) {
        let mut left = emit.ids;
        while let Some(front) = self.held.front_mut() {
            let count = left.min(front.ids.len());
            if count > 0 {
                let accepted = front.accepted.min(count);
                front.accepted -= accepted;
                let fresh = front.released == 0 || chunks.is_empty();
                front.released += count;
                left -= count;
                self.completion_tokens += count as u32;
                if fresh {
                    chunks.push(GenerateChunk::default());
                }
                let chunk = last_chunk(chunks);
                chunk.token_ids.extend(front.ids.drain(..count));
                chunk.accepted += accepted as u32;
            }
            if !front.ids.is_empty() {
                break;
            }
            let done = self.held.pop_front().and_then(|held| held.round);
            last_chunk(chunks).rounds.extend(done);
        }
        for chunk in chunks.iter_mut() {
            chunk.text_ends.resize(chunk.token_ids.len(), chunk.text.len() as u32);
        }
        if !emit.text.is_empty() {
            let chunk = last_chunk(chunks);
            chunk.text.push_str(&emit.text);
            // The newest id is the one that made this text final.
            let end = chunk.text.len() as u32;
            if let Some(last) = chunk.text_ends.last_mut() {
                *last = end;
            }
        }
    }
}

impl Held {
    /// The trace of a round that a stop string cut.
    fn into_cut_round(self) -> Option<Round> {
        let mut round = self.round?;
        round.emitted.truncate(self.released);
        Some(round)
    }
}

fn last_chunk(chunks: &mut Vec<GenerateChunk>) -> &mut GenerateChunk {
    if chunks.is_empty() {
        chunks.push(GenerateChunk::default());
    }
    let last = chunks.len() - 1;
    &mut chunks[last]
}

fn traced(commit: &Commit) -> Round {
    let proposal = &commit.proposal;
    let mode = match (proposal.is_empty(), proposal.is_chain()) {
        (true, _) => Mode::Plain,
        (false, true) => Mode::Chain,
        (false, false) => Mode::Tree,
    };
    Round {
        mode: mode as i32,
        proposed: proposal.tokens().to_vec(),
        parents: proposal.parents().iter().map(|&p| u32::from(p)).collect(),
        accepted_path: commit.path.clone(),
        accepted: commit.path.len() as u32,
        emitted: commit.tokens.clone(),
    }
}

#[cfg(test)]
#[path = "output_tests.rs"]
mod tests;
