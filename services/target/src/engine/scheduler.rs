//! Which rows the next step computes, and who gives up pages when there are too few for all.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use super::sequence::{Key, Rank, Sequence, Work};

/// One sequence's part of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) key: Key,
    pub(crate) rows: Rows,
}

/// Which rows a piece has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rows {
    /// This many known tokens from the last computed row on; `last` when a prompt ends with them.
    Prompt { tokens: usize, last: bool },
    /// The rows of the sequence's round.
    Round,
}

/// Prompt rows that a step takes even when rounds use up the budget, as a part of it: prompts get through.
const PROMPT_SHARE: usize = 4;

/// Plans a step over those of `sequences` that hold pages and `may_run`, the best first. Rounds never wait for prompts;
/// prompts, and rows that are computed again after a preemption, share what `budget` leaves: no gateway's prompts pass
/// another's for ever.
pub(crate) fn plan(
    sequences: &BTreeMap<Key, Sequence>,
    budget: usize,
    may_run: impl Fn(&Sequence) -> bool,
) -> Vec<Piece> {
    let runs = |s: &Sequence| s.has_work() && s.holds_pages() && may_run(s);
    let mut able: Vec<_> = sequences.iter().filter(|(_, sequence)| runs(sequence)).collect();
    able.sort_unstable_by_key(|(_, sequence)| sequence.rank);
    let round_rows: usize = able.iter().map(|(_, sequence)| sequence.round_rows().len()).sum();
    let mut left = budget.saturating_sub(round_rows).max(budget.div_ceil(PROMPT_SHARE));
    let piece = |(&key, sequence): (&Key, &Sequence)| {
        if !sequence.round_rows().is_empty() {
            return Some(Piece { key, rows: Rows::Round });
        }
        let backlog = sequence.backlog();
        let tokens = backlog.min(left);
        left -= tokens;
        let last = tokens == backlog && sequence.work == Work::Prefill;
        (tokens > 0).then_some(Piece { key, rows: Rows::Prompt { tokens, last } })
    };
    able.into_iter().filter_map(piece).collect()
}

/// Those of `sequences` that hold pages and may be made to give them up, in that order: the `worse` ones, the worst and
/// newest first, then those that do nothing with them, if not even that is enough.
pub(crate) fn victims(
    sequences: &BTreeMap<Key, Sequence>,
    worse: impl Fn(Rank) -> bool,
    is_dormant: impl Fn(&Sequence) -> bool,
) -> Vec<Key> {
    let mut victims: Vec<_> = sequences
        .iter()
        .filter(|(_, sequence)| sequence.holds_pages())
        .map(|(&key, sequence)| (worse(sequence.rank), sequence, key))
        .filter(|&(worse, sequence, _)| worse || is_dormant(sequence))
        .collect();
    victims.sort_unstable_by_key(|(worse, sequence, _)| Reverse((*worse, sequence.rank)));
    victims.into_iter().map(|(_, _, key)| key).collect()
}

#[cfg(test)]
mod tests {
    use eyrie_model::PageAllocator;
    use eyrie_speculation::{Proposal, SamplingParams, StopRules};

    use super::super::StreamId;
    use super::super::sequence::Request;
    use super::*;

    const PAGE_ROWS: usize = 16;

    fn sequences(prompts: &[usize]) -> BTreeMap<Key, Sequence> {
        let mut pages = PageAllocator::new(100, PAGE_ROWS);
        let with_pages = |(i, &len): (usize, &usize)| {
            let request = Request {
                tokens: vec![1; len],
                generated: 0,
                sampling: SamplingParams::default(),
                rules: StopRules::max_tokens(9),
                features: false,
                priority: 0,
            };
            let mut sequence = Sequence::new(request, StreamId(i as u64), i as u64);
            let slots = sequence.slots_wanted();
            pages.reserve(&mut sequence.table, slots).unwrap();
            (Key { boot: 1, seq: i as u64 }, sequence)
        };
        prompts.iter().enumerate().map(with_pages).collect()
    }

    fn begin(sequence: &mut Sequence, drafts: u32) {
        let len = sequence.tokens.len() as u32;
        sequence.advance(len);
        sequence.table.commit(len, PAGE_ROWS).unwrap();
        sequence.first_token(2);
        sequence.begin_round(2, Proposal::chain((0..drafts).collect()).unwrap(), 0);
    }

    fn shape(pieces: &[Piece]) -> Vec<(u64, Rows)> {
        pieces.iter().map(|piece| (piece.key.seq, piece.rows)).collect()
    }

    #[test]
    fn prompts_share_the_budget_that_rounds_leave() {
        let mut sequences = sequences(&[4, 10, 30, 5]);
        begin(sequences.values_mut().next().unwrap(), 7);
        let pieces = plan(&sequences, 32, |_| true);
        let prompt = |tokens, last| Rows::Prompt { tokens, last };
        assert_eq!(shape(&pieces), [(0, Rows::Round), (1, prompt(10, true)), (2, prompt(14, false))]);
    }

    #[test]
    fn prompts_are_taken_by_priority_and_arrival() {
        let mut sequences = sequences(&[30, 30, 30]);
        let mut ranks = [(0, 7), (0, 6), (-1, 8)].into_iter();
        for sequence in sequences.values_mut() {
            let (class, arrival) = ranks.next().unwrap();
            sequence.rank = Rank { class, arrival };
        }
        let prompt = |tokens, last| Rows::Prompt { tokens, last };
        assert_eq!(shape(&plan(&sequences, 40, |_| true)), [(2, prompt(30, true)), (1, prompt(10, false))]);
    }

    #[test]
    fn a_preempted_round_comes_after_its_rows_which_share_the_budget_with_prompts() {
        let mut sequences = sequences(&[40, 10]);
        let round = sequences.values_mut().next().unwrap();
        begin(round, 3);
        let mut pages = PageAllocator::new(100, PAGE_ROWS);
        pages.free(round.preempt());
        assert!(round.waits() && round.slots_wanted() == 44);
        pages.reserve(&mut round.table, 44).unwrap();
        let prompt = |tokens, last| Rows::Prompt { tokens, last };
        assert_eq!(shape(&plan(&sequences, 32, |_| true)), [(0, prompt(32, false))]);
        sequences.values_mut().next().unwrap().table.commit(32, PAGE_ROWS).unwrap();
        let pieces = plan(&sequences, 32, |_| true);
        assert_eq!(shape(&pieces), [(0, prompt(8, false)), (1, prompt(10, true))]);
        sequences.values_mut().next().unwrap().table.commit(40, PAGE_ROWS).unwrap();
        assert_eq!(shape(&plan(&sequences, 32, |_| true))[0], (0, Rows::Round));
    }

    #[test]
    fn the_newest_of_the_worst_gives_way_first_and_a_better_one_only_if_dormant() {
        let mut sequences = sequences(&[4; 6]);
        let classes = [0, 5, 5, 0, -1, 9];
        for (sequence, class) in sequences.values_mut().zip(classes) {
            sequence.rank.class = class;
        }
        sequences.values_mut().last().unwrap().table = Default::default();
        let asking = Rank { class: 0, arrival: 0 };
        let seqs = |victims: Vec<Key>| victims.into_iter().map(|key| key.seq).collect::<Vec<_>>();
        let dormant = |s: &Sequence| s.rank.class == -1;
        assert_eq!(seqs(victims(&sequences, |rank| rank > asking, |_| false)), [2, 1, 3]);
        assert_eq!(seqs(victims(&sequences, |rank| rank.class > asking.class, dormant)), [2, 1, 4]);
    }

    #[test]
    fn rounds_over_the_budget_leave_prompts_their_share() {
        let mut sequences = sequences(&[4, 4, 40]);
        for sequence in sequences.values_mut().take(2) {
            begin(sequence, 20);
        }
        let pieces = plan(&sequences, 16, |_| true);
        assert_eq!(pieces.len(), 3);
        assert_eq!(pieces[2].rows, Rows::Prompt { tokens: 4, last: false });
    }

    #[test]
    fn sequences_that_wait_or_may_not_run_have_no_piece() {
        let mut sequences = sequences(&[4, 4]);
        sequences.values_mut().next().unwrap().table = Default::default();
        assert_eq!(shape(&plan(&sequences, 16, |_| true)).len(), 1);
        assert_eq!(plan(&sequences, 16, |sequence| sequence.route != StreamId(1)), []);
    }
}
