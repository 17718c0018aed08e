//! One sequence: its tokens, its KV pages and what it has still to compute.

use std::ops::RangeInclusive;

use eyrie_model::SeqTable;
use eyrie_speculation::{Finish, Proposal, SamplingParams, StopRules, Verdict};
use eyrie_wire::v1;
use tokio::time::Instant;

use super::StreamId;

/// Name of a sequence: the gateway's boot, and its number there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Key {
    pub(crate) boot: u64,
    pub(crate) seq: u64,
}

impl Key {
    /// The keys of all sequences of a boot.
    pub(crate) fn all_of(boot: u64) -> RangeInclusive<Self> {
        Self { boot, seq: 0 }..=Self { boot, seq: u64::MAX }
    }
}

/// Place of a sequence among all others; the smaller one is the better.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Rank {
    /// The request's priority.
    pub(crate) class: i32,
    /// Its place among all that were opened.
    pub(crate) arrival: u64,
}

/// What a sequence computes next, once it has all rows of its KV length.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Work {
    /// Nothing until a Verify comes.
    Idle,
    /// The prompt, and the first token from its last row.
    Prefill,
    /// One verify, or a credit of plain steps.
    Round {
        /// Drafted tokens; empty in a credit.
        proposal: Proposal,
        /// Root and drafted tokens: the rows of the step.
        rows: Vec<u32>,
        /// Steps of the credit that are left, this one included.
        steps: u32,
    },
    /// Ended: without pages, kept for replays until it is closed.
    Finished,
}

/// The replies to the latest item, kept so that a repeated one is answered alike.
#[derive(Debug, Default)]
struct Answered {
    /// Round and base length of the Verify; zeros for Open.
    first: (u32, u32),
    replies: Vec<v1::Committed>,
}

/// How a Verify's (round, base_len) relates to the sequence.
#[derive(Debug, PartialEq)]
pub(crate) enum Turn {
    /// It is the next round.
    Next,
    /// It was seen before: these replies were given so far.
    Repeated(Vec<v1::Committed>),
    /// It is neither; these values would have been the next.
    Wrong { expected_len: u32, expected_round: u32 },
}

/// What [`Sequence::new`] is made from, validated.
#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) tokens: Vec<u32>,
    /// How many of `tokens`, from the end, were generated before.
    pub(crate) generated: u32,
    pub(crate) sampling: SamplingParams,
    pub(crate) rules: StopRules,
    pub(crate) features: bool,
    /// Lower runs earlier.
    pub(crate) priority: i32,
}

/// A sequence. Invariants: once the first token is drawn, `tokens.len() == kv_len + 1` and the last one is the root;
/// `table.len()` rows are computed, which is `kv_len` unless it was preempted: then they are computed again.
#[derive(Debug)]
pub(crate) struct Sequence {
    pub(crate) tokens: Vec<u32>,
    /// Rows that its gateway knows of, as features or as tokens.
    pub(crate) kv_len: u32,
    pub(crate) table: SeqTable,
    pub(crate) work: Work,
    pub(crate) features: bool,
    pub(crate) sampling: SamplingParams,
    /// Where replies go: the stream that spoke of the sequence last.
    pub(crate) route: StreamId,
    pub(crate) rank: Rank,
    /// When an item of it came last, or a reply to it was computed.
    pub(crate) active: Instant,
    /// Set while its stream is gone: when it is freed.
    pub(crate) expires: Option<Instant>,
    rules: StopRules,
    generated: u32,
    round: u32,
    prompt_len: usize,
    /// Leading rows that were never computed for it.
    cached: u32,
    answered: Answered,
}

impl Sequence {
    /// A sequence that has computed nothing and holds no pages.
    pub(crate) fn new(request: Request, route: StreamId, arrival: u64) -> Self {
        Self {
            prompt_len: request.tokens.len(),
            tokens: request.tokens,
            kv_len: 0,
            table: SeqTable::default(),
            work: Work::Prefill,
            features: request.features,
            sampling: request.sampling,
            route,
            rank: Rank { class: request.priority, arrival },
            active: Instant::now(),
            expires: None,
            rules: request.rules,
            generated: request.generated,
            round: 0,
            cached: 0,
            answered: Answered::default(),
        }
    }

    /// Whether a step can do something for it.
    pub(crate) fn has_work(&self) -> bool {
        matches!(self.work, Work::Prefill | Work::Round { .. })
    }

    /// Whether it is admitted.
    pub(crate) fn holds_pages(&self) -> bool {
        !self.table.pages().is_empty()
    }

    /// Whether it cannot go on before it is admitted.
    pub(crate) fn waits(&self) -> bool {
        self.has_work() && !self.holds_pages()
    }

    /// Whether somebody has tokens or rows of it: it may wait, but is not refused any more.
    pub(crate) fn has_begun(&self) -> bool {
        self.kv_len > 0 || self.generated > 0
    }

    pub(crate) fn is_finished(&self) -> bool {
        self.work == Work::Finished
    }

    /// Rows of known tokens to compute before a token can be drawn: of the prompt, or those it was preempted with.
    pub(crate) fn backlog(&self) -> usize {
        let wanted = match &self.work {
            Work::Prefill => self.prompt_len,
            Work::Round { .. } => self.kv_len as usize,
            Work::Idle | Work::Finished => 0,
        };
        wanted.saturating_sub(self.table.len() as usize)
    }

    /// Rows of the round that is due; none where it is not, or where a backlog comes first.
    pub(crate) fn round_rows(&self) -> &[u32] {
        match &self.work {
            Work::Round { rows, .. } if self.backlog() == 0 => rows,
            _ => &[],
        }
    }

    /// Slots it fills until its work is done; for a prompt one more, for the round that follows.
    pub(crate) fn slots_wanted(&self) -> usize {
        match &self.work {
            Work::Prefill => self.prompt_len + 1,
            Work::Round { rows, .. } => self.kv_len as usize + rows.len(),
            Work::Idle | Work::Finished => 0,
        }
    }

    /// Tokens whose rows it may take over where they were computed before: all that it has to compute before a token can
    /// be drawn, and not the last of a prompt, which the token is drawn from.
    pub(crate) fn reusable(&self) -> &[u32] {
        let known = self.kv_len as usize;
        let len = match &self.work {
            // Once its gateway has rows, it is given those that follow them.
            Work::Prefill if known > 0 => known.min(self.prompt_len - 1),
            Work::Prefill => self.prompt_len - 1,
            Work::Round { .. } => known,
            Work::Idle | Work::Finished => 0,
        };
        &self.tokens[..len]
    }

    /// Begins behind `cached` rows that were computed for others.
    pub(crate) fn skip(&mut self, cached: u32) {
        self.cached = cached;
        self.kv_len = cached;
    }

    /// Notes that rows `0..len` are computed; returns how many of them are old news.
    pub(crate) fn advance(&mut self, len: u32) -> u32 {
        let known = self.kv_len;
        self.kv_len = known.max(len);
        known
    }

    /// The token at position `kv_len`, once drawn.
    pub(crate) fn root(&self) -> Option<u32> {
        let at = self.kv_len as usize;
        self.tokens.get(at).copied().filter(|_| at >= self.prompt_len)
    }

    /// Whether it was opened with `tokens` and has not gone on since, so that a repeated Open is no error: it was
    /// answered, or the prefill that still runs will answer it.
    pub(crate) fn is_reopened_by(&self, tokens: &[u32]) -> bool {
        let is_answerable = self.work == Work::Prefill || self.opened().is_some();
        is_answerable && self.tokens.get(..self.prompt_len) == Some(tokens)
    }

    /// The reply to Open, once given and while no round followed.
    pub(crate) fn opened(&self) -> Option<v1::Committed> {
        self.answered.replies.first().filter(|reply| reply.round == 0).cloned()
    }

    /// How a Verify of `round` at `base_len` is to be taken.
    pub(crate) fn turn(&self, round: u32, base_len: u32) -> Turn {
        if round > 0 && (round, base_len) == self.answered.first {
            return Turn::Repeated(self.answered.replies.clone());
        }
        let next = self.round + 1;
        if self.work == Work::Idle && (round, base_len) == (next, self.kv_len) {
            return Turn::Next;
        }
        Turn::Wrong { expected_len: self.kv_len, expected_round: next }
    }

    /// Takes a Verify whose turn is [`Turn::Next`].
    pub(crate) fn begin_round(&mut self, root: u32, proposal: Proposal, steps: u32) {
        let rows = std::iter::once(root).chain(proposal.tokens().iter().copied()).collect();
        self.answered = Answered { first: (self.round + 1, self.kv_len), replies: Vec::new() };
        self.work = Work::Round { proposal, rows, steps: steps.max(1) };
    }

    /// Ends a credit after its next step.
    pub(crate) fn revoke(&mut self) {
        if let Work::Round { steps, .. } = &mut self.work {
            *steps = 1;
        }
    }

    /// Gives up work that cannot be computed. A round may be tried again with other tokens.
    pub(crate) fn abandon(&mut self) {
        self.answered = Answered::default();
        self.work = if self.root().is_some() { Work::Idle } else { Work::Finished };
    }

    /// Makes its round a plain one, which commits the same tokens if fewer; false where nothing was drafted.
    pub(crate) fn drop_drafts(&mut self) -> bool {
        match &mut self.work {
            Work::Round { proposal, rows, .. } if rows.len() > 1 => {
                *proposal = Proposal::empty();
                rows.truncate(1);
                true
            }
            _ => false,
        }
    }

    /// Ends it without a finish: its rows cannot be computed.
    pub(crate) fn fail(&mut self) {
        self.answered = Answered::default();
        self.work = Work::Finished;
    }

    /// Lets go of its pages. What it has still to do stays, and all it takes to compute its rows again.
    pub(crate) fn preempt(&mut self) -> SeqTable {
        std::mem::take(&mut self.table)
    }

    /// Lets go of its pages and of all that only further rounds would need, once it has finished.
    pub(crate) fn release(&mut self) -> SeqTable {
        if self.opened().is_none() {
            self.tokens = Vec::new();
        }
        std::mem::take(&mut self.table)
    }

    /// Takes the first token, drawn from the prompt's last row: the reply to Open.
    pub(crate) fn first_token(&mut self, token: u32) -> v1::Committed {
        let (_, finish) = self.take(&[token]);
        self.work = if finish.is_some() { Work::Finished } else { Work::Idle };
        self.answer(v1::Committed {
            round: 0,
            kv_len: self.kv_len,
            tokens: vec![token],
            finish: finish_reason(finish) as i32,
            last: true,
            cached: self.cached,
            ..Default::default()
        })
    }

    /// How many tokens of `verdict` will be kept: all, or up to the one that ends the sequence.
    pub(crate) fn kept(&self, verdict: &Verdict) -> usize {
        self.rules.admit(self.generated, &verdict.emitted).keep
    }

    /// Commits a round's verdict; the KV length grows by the tokens kept. `features` refer to those rows.
    pub(crate) fn commit(&mut self, verdict: &Verdict, features: Vec<v1::FeatureRef>) -> v1::Committed {
        let (keep, finish) = self.take(&verdict.emitted);
        self.kv_len += keep as u32;
        self.round += 1;
        let last = self.next_work(finish);
        self.answer(v1::Committed {
            round: self.round,
            kv_len: self.kv_len,
            tokens: verdict.emitted[..keep].to_vec(),
            path: verdict.path.iter().map(|&node| node as u32).collect(),
            finish: finish_reason(finish) as i32,
            features,
            last,
            cached: 0,
        })
    }

    /// Appends what the stop rules keep of `emitted`.
    fn take(&mut self, emitted: &[u32]) -> (usize, Option<Finish>) {
        let admitted = self.rules.admit(self.generated, emitted);
        self.tokens.extend_from_slice(&emitted[..admitted.keep]);
        self.generated += admitted.keep as u32;
        (admitted.keep, admitted.finish)
    }

    /// Sets up the credit's next step, if it has one; true if none follows.
    fn next_work(&mut self, finish: Option<Finish>) -> bool {
        let root = self.tokens.last().copied();
        match (&mut self.work, root, finish) {
            (Work::Round { proposal, rows, steps }, Some(root), None) if *steps > 1 => {
                *steps -= 1;
                *proposal = Proposal::empty();
                rows.clear();
                rows.push(root);
                false
            }
            (work, _, None) => {
                *work = Work::Idle;
                true
            }
            (work, _, Some(_)) => {
                *work = Work::Finished;
                true
            }
        }
    }

    fn answer(&mut self, reply: v1::Committed) -> v1::Committed {
        self.active = Instant::now();
        self.answered.replies.push(reply.clone());
        reply
    }
}

fn finish_reason(finish: Option<Finish>) -> v1::FinishReason {
    match finish {
        None => v1::FinishReason::Unspecified,
        Some(Finish::Stop { .. }) => v1::FinishReason::Stop,
        Some(Finish::Length) => v1::FinishReason::Length,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn opened(max_tokens: u32) -> Sequence {
        let request = Request {
            tokens: vec![5, 6, 7],
            generated: 0,
            sampling: SamplingParams::default(),
            rules: StopRules::max_tokens(max_tokens).stop_ids([99]),
            features: false,
            priority: 0,
        };
        let mut sequence = Sequence::new(request, StreamId(1), 0);
        assert_eq!((sequence.backlog(), sequence.slots_wanted(), sequence.root()), (3, 4, None));
        assert_eq!((sequence.advance(3), sequence.advance(2)), (0, 3));
        let reply = sequence.first_token(10);
        assert_eq!((reply.round, reply.kv_len, reply.tokens), (0, 3, vec![10]));
        sequence
    }

    fn verdict(path: &[usize], emitted: &[u32]) -> Verdict {
        Verdict { path: path.to_vec(), emitted: emitted.to_vec() }
    }

    #[test]
    fn a_round_moves_length_root_and_turn() {
        let mut s = opened(100);
        assert_eq!(s.root(), Some(10));
        assert_eq!(s.turn(1, 3), Turn::Next);
        assert_eq!(s.turn(1, 4), Turn::Wrong { expected_len: 3, expected_round: 1 });
        s.begin_round(10, Proposal::chain(vec![11, 12]).unwrap(), 0);
        assert_eq!(s.turn(1, 3), Turn::Repeated(vec![]), "still running: the reply is to come");
        let reply = s.commit(&verdict(&[1], &[11, 20]), vec![]);
        assert_eq!((reply.kv_len, reply.tokens.as_slice(), reply.last), (5, &[11, 20][..], true));
        assert_eq!((s.root(), s.kv_len), (Some(20), 5));
        assert_eq!(s.turn(1, 3), Turn::Repeated(vec![reply]));
        assert_eq!(s.turn(2, 5), Turn::Next);
        assert_eq!(s.turn(3, 5), Turn::Wrong { expected_len: 5, expected_round: 2 });
    }

    #[test]
    fn a_finish_inside_a_run_cuts_tokens_and_length_but_not_the_path() {
        let mut s = opened(100);
        s.begin_round(10, Proposal::chain(vec![11, 99, 13]).unwrap(), 0);
        let reply = s.commit(&verdict(&[1, 2, 3], &[11, 99, 13, 14]), vec![]);
        assert_eq!(reply.tokens, [11, 99]);
        assert_eq!(reply.path, [1, 2, 3]);
        assert_eq!((reply.kv_len, reply.finish), (5, v1::FinishReason::Stop as i32));
        assert!(s.is_finished());
        assert_eq!(s.turn(1, 3), Turn::Repeated(vec![reply]));
    }

    #[test]
    fn a_credit_steps_until_used_up_revoked_or_finished() {
        let mut s = opened(5);
        s.begin_round(10, Proposal::empty(), 3);
        let one = s.commit(&verdict(&[], &[11]), vec![]);
        assert!(!one.last && s.has_work());
        s.revoke();
        let two = s.commit(&verdict(&[], &[12]), vec![]);
        assert_eq!((two.round, two.last, two.kv_len), (2, true, 5));
        s.revoke();
        assert!(!s.has_work(), "no credit is running");
        assert_eq!(s.turn(1, 3), Turn::Repeated(vec![one, two]));
        s.begin_round(12, Proposal::empty(), 9);
        assert!(!s.commit(&verdict(&[], &[13]), vec![]).last);
        let end = s.commit(&verdict(&[], &[14]), vec![]);
        assert_eq!((end.round, end.last, end.finish), (4, true, v1::FinishReason::Length as i32));
    }

    #[test]
    fn an_open_is_repeated_only_before_the_first_round() {
        let mut s = opened(9);
        assert!(s.is_reopened_by(&[5, 6, 7]) && !s.is_reopened_by(&[5, 6]));
        assert_eq!(s.opened().map(|reply| reply.tokens), Some(vec![10]));
        s.begin_round(10, Proposal::empty(), 1);
        assert!(!s.is_reopened_by(&[5, 6, 7]));
        s.commit(&verdict(&[], &[11]), vec![]);
        assert_eq!(s.opened(), None);
    }

    #[test]
    fn an_abandoned_round_may_be_tried_again() {
        let mut s = opened(9);
        s.begin_round(10, Proposal::chain(vec![11]).unwrap(), 0);
        s.abandon();
        assert_eq!(s.turn(1, 3), Turn::Next);
        assert!(!s.is_reopened_by(&[5, 6, 7]), "nothing would answer it");
    }
}
