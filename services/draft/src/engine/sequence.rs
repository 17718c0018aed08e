//! What the draft knows of one sequence: its tokens, and how many slots hold real features.

use std::time::Instant;

use eyrie_model::{Feature, SeqTable};

use super::mailbox::StreamId;

/// Name of a sequence: the gateway's boot id, and its number within that boot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct SeqKey {
    pub(crate) boot_id: u64,
    pub(crate) seq: u64,
}

/// One sequence. Slot `j` of its cache stands for position `j` and needs token `j + 1` and the feature of `j`.
///
/// Invariant: the table's committed slots are the positions `origin..built`.
#[derive(Debug)]
pub(crate) struct Sequence {
    pub(crate) table: SeqTable,
    /// Fused feature of position `built - 1`, kept so that the last slot can be run again for its logits.
    pub(crate) tip: Option<Feature>,
    /// The stream or unary call that spoke of it last.
    pub(crate) owner: StreamId,
    /// That was a unary call, which leaves it behind.
    pub(crate) unary: bool,
    pub(crate) last_used: u64,
    /// When it was laid to rest.
    pub(crate) rests_since: Option<Instant>,
    tokens: Tokens,
    origin: u32,
    built: u32,
}

impl Sequence {
    /// An empty sequence whose first slot is position `origin`.
    pub(crate) fn new(origin: u32) -> Self {
        Self {
            table: SeqTable::default(),
            tip: None,
            owner: 0,
            unary: false,
            last_used: 0,
            rests_since: None,
            tokens: Tokens::default(),
            origin,
            built: origin,
        }
    }

    /// Its tokens up to position `end`, from the first on; `None` where they are not all known.
    pub(crate) fn prefix(&self, end: u32) -> Option<&[u32]> {
        self.tokens.range(0, end)
    }

    /// Starts from slots that others with the same tokens built: `table` holds them, from position 0 on.
    pub(crate) fn adopt(&mut self, table: SeqTable) {
        (self.origin, self.built, self.tip) = (0, table.len(), None);
        self.table = table;
    }

    /// Position of slot 0.
    pub(crate) fn origin(&self) -> u32 {
        self.origin
    }

    /// End of the positions whose slots were built from real features.
    pub(crate) fn built(&self) -> u32 {
        self.built
    }

    /// Cache slot of `position`.
    pub(crate) fn slot(&self, position: u32) -> u32 {
        position - self.origin
    }

    /// Takes tokens of positions `from..`, up to and including `base_len`, and returns how many positions stay
    /// built: fewer than before when a token that a slot was built from has changed, or when `base_len` is lower.
    pub(crate) fn take_tokens(&mut self, from: u32, given: &[u32], base_len: u32) -> u32 {
        let keep = self.built.min(base_len);
        match self.tokens.splice(from, given) {
            Some(changed) => keep.min(changed.saturating_sub(1)).max(self.origin),
            None => keep,
        }
    }

    /// Forgets slots from position `end` on; the table is the caller's to cut.
    pub(crate) fn cut(&mut self, end: u32) {
        if end < self.built {
            self.built = end.max(self.origin);
            self.tip = None;
        }
    }

    /// Declares the positions below `end` built, with `tip` the feature of the last one.
    pub(crate) fn advance(&mut self, end: u32, tip: Feature) {
        self.built = end;
        self.tip = Some(tip);
    }

    /// The tokens for the slots of positions `first..end`; `None` where they are not all known.
    pub(crate) fn slot_tokens(&self, first: u32, end: u32) -> Option<&[u32]> {
        self.tokens.range(first + 1, end + 1)
    }
}

/// A run of known tokens: `ids[i]` stands at position `first + i`.
#[derive(Debug, Default)]
struct Tokens {
    first: u32,
    ids: Vec<u32>,
}

impl Tokens {
    fn end(&self) -> u32 {
        self.first + self.ids.len() as u32
    }

    /// Puts `given` at `from` and forgets what stood behind it. Returns the first position whose known token
    /// changed. Tokens behind a gap are left out, they are given again with those before: slots were built from the known
    /// ones, which must not go while the slots stay.
    fn splice(&mut self, from: u32, given: &[u32]) -> Option<u32> {
        let changed = self.first_difference(from, given);
        if self.ids.is_empty() || from < self.first {
            *self = Self { first: from, ids: given.to_vec() };
        } else if from <= self.end() {
            self.ids.truncate((from - self.first) as usize);
            self.ids.extend_from_slice(given);
        }
        changed
    }

    fn first_difference(&self, from: u32, given: &[u32]) -> Option<u32> {
        let start = from.max(self.first);
        let end = self.end().min(from + given.len() as u32);
        (start..end).find(|&at| self.ids[(at - self.first) as usize] != given[(at - from) as usize])
    }

    fn range(&self, from: u32, end: u32) -> Option<&[u32]> {
        let start = from.checked_sub(self.first)? as usize;
        self.ids.get(start..end.checked_sub(self.first)? as usize)
    }
}

#[cfg(test)]
mod tests {
    use eyrie_kernels::{Cpu, CpuOptions, Isa};

    use super::*;

    fn feature() -> Feature {
        let cpu = CpuOptions { threads: 1, isa: Isa::best() };
        Feature::from_rows(&Cpu::new(cpu).unwrap().into(), vec![0.0; 4], 4).unwrap()
    }

    #[test]
    fn tokens_join_on_and_slots_read_one_ahead() {
        let mut sequence = Sequence::new(0);
        assert_eq!(sequence.take_tokens(0, &[10, 11, 12], 2), 0);
        assert_eq!(sequence.slot_tokens(0, 2), Some(&[11, 12][..]));
        assert_eq!(sequence.slot_tokens(0, 3), None, "slot 2 needs token 3");
        sequence.advance(2, feature());
        assert_eq!(sequence.take_tokens(3, &[13, 14], 4), 2);
        assert_eq!(sequence.slot_tokens(2, 4), Some(&[13, 14][..]));
    }

    #[test]
    fn a_gap_in_tokens_shows_as_unknown() {
        let mut sequence = Sequence::new(0);
        sequence.take_tokens(0, &[10, 11], 1);
        sequence.advance(1, feature());
        assert_eq!(sequence.take_tokens(4, &[14, 15], 5), 1);
        assert_eq!(sequence.slot_tokens(1, 5), None);
        assert_eq!(sequence.take_tokens(1, &[11, 12, 13, 14, 15], 5), 1);
        assert_eq!(sequence.slot_tokens(1, 5), Some(&[12, 13, 14, 15][..]));
    }

    #[test]
    fn tokens_behind_a_gap_do_not_hide_a_change_before_it() {
        let mut sequence = Sequence::new(0);
        sequence.take_tokens(0, &[10, 11, 12, 13], 3);
        sequence.advance(3, feature());
        assert_eq!(sequence.take_tokens(6, &[16, 17], 7), 3);
        assert_eq!(sequence.prefix(4), Some(&[10, 11, 12, 13][..]), "what the slots were built from");
        assert_eq!(sequence.take_tokens(0, &[10, 11, 99, 13, 14, 15, 16, 17], 7), 1);
    }

    #[test]
    fn a_changed_token_unbuilds_the_slot_that_held_it() {
        let mut sequence = Sequence::new(0);
        sequence.take_tokens(0, &[10, 11, 12, 13, 14], 4);
        sequence.advance(4, feature());
        assert_eq!(sequence.take_tokens(2, &[12, 13, 14], 4), 4, "the same tokens change nothing");
        assert_eq!(sequence.take_tokens(2, &[12, 99, 14], 4), 2, "slot 2 was built from token 3");
        sequence.cut(2);
        assert!(sequence.tip.is_none());
        assert_eq!(sequence.slot_tokens(2, 4), Some(&[99, 14][..]));
    }

    #[test]
    fn a_prefix_is_known_only_from_the_first_token_on() {
        let mut sequence = Sequence::new(4);
        sequence.take_tokens(0, &[10, 11, 12], 2);
        assert_eq!(sequence.prefix(3), Some(&[10, 11, 12][..]));
        assert_eq!(sequence.prefix(4), None);
        sequence.take_tokens(4, &[14], 4);
        assert_eq!(sequence.prefix(3), Some(&[10, 11, 12][..]), "what lies behind a gap is left out");
        let mut late = Sequence::new(4);
        late.take_tokens(4, &[14], 4);
        assert_eq!(late.prefix(1), None);
    }

    #[test]
    fn a_lower_base_length_cuts_and_a_late_start_keeps_absolute_positions() {
        let mut sequence = Sequence::new(100);
        assert_eq!(sequence.take_tokens(101, &[1, 2, 3], 103), 100);
        assert_eq!(sequence.slot_tokens(100, 103), Some(&[1, 2, 3][..]));
        assert_eq!(sequence.slot(102), 2);
        sequence.advance(103, feature());
        assert_eq!(sequence.take_tokens(102, &[2], 102), 102);
    }
}
