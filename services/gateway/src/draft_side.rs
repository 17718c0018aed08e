//! What the draft has of one sequence, and how it gets what it lacks. The draft is a cache: whatever
//! it answers, the worst outcome is a plain round.

use eyrie_speculation::Proposal;
use eyrie_wire::v1::draft_out::Body;
use eyrie_wire::v1::{DraftOut, FeatureRef, Features, ItemError, Propose, TreeShape};

use crate::policy::Ask;

/// References kept for a draft that cannot be asked; those let go are fetched again later.
const MAX_PENDING: usize = 1024;
/// Longest pause, in rounds, after a draft refused this sequence.
const MAX_PAUSE: u32 = 64;

/// What a draft's reply means for the round that waits.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Heard {
    /// Well-formed and for this round; empty if the draft had nothing.
    Proposal(Proposal),
    /// For another round: nothing is learnt, keep waiting.
    Stale,
    /// The draft lacks rows; the round goes without.
    Need,
    /// The draft cannot serve this sequence now.
    Refused(ItemError),
    /// Not what was asked; one line of why.
    Garbage(String),
}

/// The draft's share of one sequence, seen from the gateway.
#[derive(Debug, Clone, Default)]
pub(crate) struct DraftSide {
    /// Position of the first token the draft lacks.
    from: u32,
    /// Features that were published and not handed over yet, ascending.
    pending: Vec<FeatureRef>,
    /// Features below are gone for good.
    start: u32,
    /// The draft asked for rows from here, and they were not asked of the target yet.
    need: Option<u32>,
    /// The target was asked for rows from here and has not answered.
    fetching: Option<u32>,
    /// Needs of rounds before this one were answered by what was sent since.
    answered: u32,
    /// Round whose Propose missed its deadline and is still to be answered.
    late: Option<u32>,
    /// What is pending includes the answer to a Need.
    fetched: bool,
    /// Rounds to leave the draft alone.
    pause: u32,
    next_pause: u32,
}

impl DraftSide {
    /// A draft that knows nothing of the sequence: a new stream.
    pub(crate) fn joined(&mut self) {
        self.from = 0;
        self.need = None;
        self.late = None;
        self.answered = 0;
        self.pause = 0;
        self.next_pause = 0;
    }

    /// The draft can be asked this round; counts the round if it is to be left alone.
    pub(crate) fn ready(&mut self) -> bool {
        if self.pause > 0 {
            self.pause -= 1;
            return false;
        }
        self.late.is_none() && !self.is_healing()
    }

    /// The Propose of `round` missed its deadline: another one would only queue up behind it.
    pub(crate) fn missed(&mut self, round: u32) {
        self.late = Some(round);
    }

    /// Rows that the draft lacks are on their way.
    pub(crate) fn is_healing(&self) -> bool {
        self.need.is_some() || self.fetching.is_some()
    }

    /// The target published rows.
    pub(crate) fn published(&mut self, refs: Vec<FeatureRef>) {
        self.pending.extend(refs);
        self.bound();
    }

    fn bound(&mut self) {
        if self.fetched {
            // The draft can use nothing without the first rows that it asked for.
            self.pending.truncate(MAX_PENDING);
        } else {
            let excess = self.pending.len().saturating_sub(MAX_PENDING);
            self.pending.drain(..excess);
        }
    }

    /// The target's Features message: rows of a prompt chunk, or the answer to a fetch.
    pub(crate) fn features(&mut self, features: Features) {
        let Features { refs, first_held, fetched } = features;
        if !fetched {
            return self.published(refs);
        }
        if self.fetching.take().is_some_and(|from| first_held > from) {
            self.start = self.start.max(first_held);
        }
        self.fetched = true;
        self.pending.splice(..0, refs);
        self.pending.sort_by_key(|r| r.first);
        self.bound();
    }

    /// The target answered a fetch with an error. Returns whether one was under way.
    pub(crate) fn fetch_failed(&mut self) -> bool {
        let failed = self.fetching.take().is_some();
        if failed {
            self.leave_alone();
        }
        failed
    }

    /// Position after the last row that waits to be handed over.
    pub(crate) fn features_end(&self) -> Option<u32> {
        self.pending.iter().map(|r| r.first.saturating_add(r.rows)).max()
    }

    /// Rows to ask of the target, if the draft lacks some and none are on their way.
    pub(crate) fn fetch(&mut self) -> Option<u32> {
        let from = self.need.take().filter(|_| self.fetching.is_none())?;
        self.fetching = Some(from);
        Some(from)
    }

    /// The message that brings the draft to `base_len`; `tokens` reach at least to that position.
    pub(crate) fn propose(&mut self, tokens: &[u32], round: u32, base_len: u32, ask: Option<Ask>) -> Propose {
        let token_from = self.from.min(base_len);
        let (k, tree) = match ask {
            None => (0, None),
            Some(Ask::Chain(k)) => (k, None),
            Some(Ask::Tree(shape)) => (0, Some(wire_tree(shape))),
        };
        if std::mem::take(&mut self.fetched) {
            self.answered = round;
        }
        self.from = base_len + 1;
        Propose {
            round,
            base_len,
            token_from,
            tokens: tokens.get(token_from as usize..=base_len as usize).unwrap_or_default().to_vec(),
            features: std::mem::take(&mut self.pending),
            k,
            tree,
            start: self.start,
        }
    }

    /// Reads a reply while round `next` = (round, base_len) waits for what `ask` wanted.
    pub(crate) fn hear(&mut self, out: DraftOut, next: (u32, u32), ask: Ask, vocab: u32) -> Heard {
        let (round, base_len) = next;
        self.heard_of(out.round);
        match out.body {
            Some(Body::Need(need)) => self.heard_need(out.round, need.from, next),
            Some(Body::Proposal(_) | Body::Error(_)) | None if out.round != round => Heard::Stale,
            Some(Body::Proposal(proposal)) if proposal.base_len != base_len => Heard::Stale,
            Some(Body::Proposal(proposal)) => match checked(proposal.tokens, proposal.parents, ask, vocab) {
                Ok(proposal) => {
                    self.next_pause = 0;
                    Heard::Proposal(proposal)
                }
                Err(why) => {
                    self.leave_alone();
                    Heard::Garbage(why)
                }
            },
            Some(Body::Error(error)) => {
                self.leave_alone();
                Heard::Refused(error)
            }
            None => {
                self.leave_alone();
                Heard::Garbage("an empty reply".to_owned())
            }
        }
    }

    /// A reply that nobody waits for: only a Need still matters.
    pub(crate) fn overhear(&mut self, out: DraftOut, next: (u32, u32)) {
        self.heard_of(out.round);
        if let Some(Body::Need(need)) = out.body {
            self.heard_need(out.round, need.from, next);
        }
    }

    fn heard_of(&mut self, round: u32) {
        self.late = self.late.filter(|&late| round < late);
    }

    fn heard_need(&mut self, asked_in: u32, from: u32, (round, base_len): (u32, u32)) -> Heard {
        if asked_in < self.answered || asked_in > round {
            return Heard::Stale;
        }
        if from > base_len {
            self.leave_alone();
            return Heard::Garbage(format!("needs rows from {from}, the sequence has {base_len}"));
        }
        self.from = self.from.min(from);
        if self.fetching.is_none() {
            self.need = Some(self.need.map_or(from, |known| known.min(from)));
        }
        if asked_in == round { Heard::Need } else { Heard::Stale }
    }

    /// Asks again later, from the beginning, and ever later while it goes on refusing.
    fn leave_alone(&mut self) {
        self.from = 0;
        self.next_pause = (self.next_pause * 2).clamp(1, MAX_PAUSE);
        self.pause = self.next_pause;
    }
}

fn wire_tree(shape: eyrie_speculation::TreeShape) -> TreeShape {
    TreeShape { top_k: shape.top_k() as u32, levels: shape.levels() as u32, nodes: shape.nodes() as u32 }
}

/// A proposal that may be verified: no more than asked, real tokens, a proper tree.
fn checked(tokens: Vec<u32>, parents: Vec<u32>, ask: Ask, vocab: u32) -> Result<Proposal, String> {
    if tokens.len() > ask.tokens() {
        return Err(format!("{} tokens proposed, asked for {}", tokens.len(), ask.tokens()));
    }
    if let Some(token) = tokens.iter().find(|&&t| t >= vocab) {
        return Err(format!("token {token} proposed, the vocabulary size is {vocab}"));
    }
    let proposal = match parents.is_empty() {
        true => Proposal::chain(tokens),
        false => {
            let parents: Result<Vec<u16>, _> = parents.into_iter().map(u16::try_from).collect();
            let parents = parents.map_err(|_| "a parent beyond 65535".to_owned())?;
            Proposal::try_new(tokens, parents)
        }
    };
    let proposal = proposal.map_err(|e| e.to_string())?;
    if matches!(ask, Ask::Chain(_)) && !proposal.is_chain() {
        return Err("a tree proposed, asked for a chain".to_owned());
    }
    Ok(proposal)
}

#[cfg(test)]
mod tests {
    use eyrie_wire::v1::{Need, Proposal as WireProposal};

    use super::*;

    const NEXT: (u32, u32) = (3, 10);

    fn proposal(round: u32, base_len: u32, tokens: &[u32], parents: &[u32]) -> DraftOut {
        let body =
            Body::Proposal(WireProposal { base_len, tokens: tokens.to_vec(), parents: parents.to_vec() });
        DraftOut { seq: 1, round, body: Some(body) }
    }

    fn need(round: u32, from: u32) -> DraftOut {
        DraftOut { seq: 1, round, body: Some(Body::Need(Need { from })) }
    }

    fn rows(first: u32, rows: u32) -> FeatureRef {
        FeatureRef { first, rows, at: None }
    }

    fn hear(out: DraftOut, ask: Ask) -> Heard {
        DraftSide::default().hear(out, NEXT, ask, 100)
    }

    #[test]
    fn only_a_well_formed_proposal_of_this_round_counts() {
        let chain = Ask::Chain(3);
        let tree = Ask::Tree(eyrie_speculation::TreeShape::try_new(2, 2, 4).unwrap());
        let good = Proposal::chain(vec![1, 2, 3]).unwrap();
        assert_eq!(hear(proposal(3, 10, &[1, 2, 3], &[]), chain), Heard::Proposal(good));
        assert_eq!(hear(proposal(2, 10, &[1], &[]), chain), Heard::Stale);
        assert_eq!(hear(proposal(3, 9, &[1], &[]), chain), Heard::Stale);
        for (tokens, parents, ask, why) in [
            (&[1, 2, 3, 4][..], &[][..], chain, "4 tokens proposed, asked for 3"),
            (&[1, 100], &[], chain, "token 100 proposed, the vocabulary size is 100"),
            (&[1, 2], &[0, 0], chain, "a tree proposed, asked for a chain"),
            (&[1, 2], &[0, 2], tree, "parents[1] must be at most 1"),
            (&[1, 1], &[0, 0], tree, "siblings must have distinct tokens"),
            (&[1, 2], &[0], tree, "given 1 parents"),
            (&[1], &[70000], tree, "a parent beyond 65535"),
        ] {
            match hear(proposal(3, 10, tokens, parents), ask) {
                Heard::Garbage(line) => assert!(line.contains(why), "{line} lacks {why}"),
                other => panic!("{why}: {other:?}"),
            }
        }
    }

    #[test]
    fn a_need_is_fetched_once_and_the_answer_goes_first() {
        let tokens: Vec<u32> = (0..=12).collect();
        let mut side = DraftSide::default();
        side.published(vec![rows(8, 2)]);
        assert_eq!(side.propose(&tokens, 3, 10, Some(Ask::Chain(2))).token_from, 0);
        assert_eq!(side.hear(need(3, 4), NEXT, Ask::Chain(2), 100), Heard::Need);
        assert!(side.is_healing() && !side.ready());
        assert_eq!(side.fetch(), Some(4));
        assert_eq!(side.fetch(), None);
        side.published(vec![rows(10, 1)]);
        side.features(Features { refs: vec![rows(5, 5)], first_held: 5, fetched: true });
        assert!(side.ready());
        let next = side.propose(&tokens, 4, 11, Some(Ask::Chain(2)));
        assert_eq!((next.token_from, next.tokens.len(), next.start), (4, 8, 5));
        assert_eq!(next.features.iter().map(|r| r.first).collect::<Vec<_>>(), [5, 10]);
        // The Need of an earlier round was answered by what has just been sent.
        side.overhear(need(3, 4), (5, 12));
        assert!(!side.is_healing());
        side.overhear(need(4, 11), (5, 12));
        assert!(side.is_healing());
        // Another draft knows nothing, and nothing was asked of it yet.
        side.joined();
        assert!(side.ready());
        assert_eq!(side.propose(&tokens, 5, 12, None).token_from, 0);
    }

    #[test]
    fn a_draft_that_refuses_is_asked_ever_more_rarely() {
        let mut side = DraftSide::default();
        let mut gaps = Vec::new();
        for _ in 0..9 {
            let error = DraftOut { seq: 1, round: 3, body: Some(Body::Error(ItemError::default())) };
            assert!(matches!(side.hear(error, NEXT, Ask::Chain(1), 100), Heard::Refused(_)));
            gaps.push((0..).take_while(|_| !side.ready()).count());
        }
        assert_eq!(gaps, [1, 2, 4, 8, 16, 32, 64, 64, 64]);
        assert!(matches!(
            side.hear(proposal(3, 10, &[1], &[]), NEXT, Ask::Chain(1), 100),
            Heard::Proposal(_)
        ));
        assert!(matches!(side.hear(need(3, 11), NEXT, Ask::Chain(1), 100), Heard::Garbage(_)));
        assert_eq!((0..).take_while(|_| !side.ready()).count(), 1);
    }

    #[test]
    fn a_fetch_that_fails_makes_drafting_rare_and_only_that() {
        let mut side = DraftSide::default();
        let mut gaps = Vec::new();
        for _ in 0..8 {
            assert_eq!(side.hear(need(3, 4), NEXT, Ask::Chain(2), 100), Heard::Need);
            assert_eq!(side.fetch(), Some(4));
            assert!(side.fetch_failed());
            gaps.push((0..).take_while(|_| !side.ready()).count());
        }
        assert_eq!(gaps, [1, 2, 4, 8, 16, 32, 64, 64]);
        assert!(!side.fetch_failed(), "no fetch is under way");
    }

    #[test]
    fn a_draft_that_is_late_is_not_asked_again_before_it_answers() {
        let mut side = DraftSide::default();
        side.missed(3);
        assert!(!side.ready() && !side.is_healing());
        side.overhear(proposal(2, 9, &[], &[]), (4, 11));
        assert!(!side.ready(), "an earlier round's answer");
        side.overhear(proposal(3, 10, &[1], &[]), (4, 11));
        assert!(side.ready());
        side.missed(4);
        side.joined();
        assert!(side.ready(), "another stream owes no answer");
    }

    #[test]
    fn an_answer_too_long_to_keep_loses_its_end() {
        let tokens: Vec<u32> = (0..=3001).collect();
        let mut side = DraftSide::default();
        side.published(vec![rows(2999, 1)]);
        let (mut base_len, mut built) = (3000, 4);
        for round in 3.. {
            let propose = side.propose(&tokens, round, base_len, Some(Ask::Chain(2)));
            for part in propose.features {
                if part.first <= built {
                    built = built.max(part.first + part.rows);
                }
            }
            if built >= base_len {
                break;
            }
            assert!(round < 8, "{built} of {base_len} rows after {round} rounds");
            side.overhear(need(round, built), (round, base_len));
            assert_eq!(side.fetch(), Some(built));
            let refs = (built..base_len).map(|first| rows(first, 1)).collect();
            side.features(Features { refs, first_held: built, fetched: true });
            side.published(vec![rows(base_len, 1)]);
            base_len = 3001;
        }
    }

    #[test]
    fn references_nobody_takes_are_bounded() {
        let mut side = DraftSide::default();
        for first in 0..3000 {
            side.published(vec![rows(first, 1)]);
        }
        let features = side.propose(&(0..3001).collect::<Vec<_>>(), 1, 3000, None).features;
        assert_eq!((features.len(), features[0].first), (MAX_PENDING, 3000 - MAX_PENDING as u32));
    }
}
