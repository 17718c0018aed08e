//! Which rows the next step computes: every round that is ready, and prompt rows under a token budget.

use std::collections::BTreeMap;

use super::sequence::{Key, Sequence, Work};

/// One sequence's part of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) key: Key,
    pub(crate) rows: Rows,
}

/// Which rows a piece has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rows {
    /// This many prompt tokens from the KV length on; `last` when the prompt ends with them.
    Prompt { tokens: usize, last: bool },
    /// The rows of the sequence's round.
    Round,
}

/// Prompt rows that a step takes even when rounds use up the budget, as a part of it: prompts get through.
const PROMPT_SHARE: usize = 4;

/// Plans a step over those of `sequences` that `may_run`. Rounds never wait for prompts; prompts share what
/// `budget` leaves, first come first served: no gateway's prompts pass another's for ever.
pub(crate) fn plan(
    sequences: &BTreeMap<Key, Sequence>,
    budget: usize,
    may_run: impl Fn(&Sequence) -> bool,
) -> Vec<Piece> {
    let mut pieces = Vec::new();
    let mut prompts = Vec::new();
    let mut round_rows = 0;
    for (&key, sequence) in sequences.iter().filter(|(_, sequence)| may_run(sequence)) {
        match &sequence.work {
            Work::Round { rows, .. } => {
                round_rows += rows.len();
                pieces.push(Piece { key, rows: Rows::Round });
            }
            Work::Prefill if sequence.holds_pages() => prompts.push((key, sequence)),
            Work::Prefill | Work::Idle | Work::Finished => {}
        }
    }
    prompts.sort_by_key(|(_, sequence)| sequence.arrival);
    let mut left = budget.saturating_sub(round_rows).max(budget.div_ceil(PROMPT_SHARE));
    for (key, sequence) in prompts {
        let tokens = sequence.prompt_left().min(left);
        if tokens == 0 {
            break;
        }
        left -= tokens;
        let last = tokens == sequence.prompt_left();
        pieces.push(Piece { key, rows: Rows::Prompt { tokens, last } });
    }
    pieces
}

#[cfg(test)]
mod tests {
    use eyrie_model::PageAllocator;
    use eyrie_speculation::{Proposal, SamplingParams, StopRules};

    use super::super::StreamId;
    use super::super::sequence::Request;
    use super::*;

    fn sequences(prompts: &[usize]) -> BTreeMap<Key, Sequence> {
        let mut pages = PageAllocator::new(100, 16);
        let with_pages = |(i, &len): (usize, &usize)| {
            let request = Request {
                tokens: vec![1; len],
                generated: 0,
                sampling: SamplingParams::default(),
                rules: StopRules::max_tokens(9),
                features: false,
                need: len + 9,
            };
            let mut sequence = Sequence::new(request, StreamId(i as u64), i as u64);
            pages.reserve(&mut sequence.table, sequence.need).unwrap();
            (Key { boot: 1, seq: i as u64 }, sequence)
        };
        prompts.iter().enumerate().map(with_pages).collect()
    }

    fn begin(sequence: &mut Sequence, drafts: u32) {
        sequence.kv_len = sequence.tokens.len() as u32;
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
    fn prompts_are_taken_in_the_order_of_their_arrival() {
        let mut sequences = sequences(&[30, 30]);
        sequences.values_mut().next().unwrap().arrival = 7;
        assert_eq!(shape(&plan(&sequences, 16, |_| true)), [(1, Rows::Prompt { tokens: 16, last: false })]);
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
