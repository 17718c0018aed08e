//! The sequences that are at rest, and the pages of the one cache they share.
//!
//! Whole pages of slots are known by their tokens, and a new sequence that begins alike starts with them. Slot `j` holds
//! token `j + 1`, so a prefix of `m` equal tokens gives `m - 1` slots.

use std::collections::HashMap;
use std::time::Instant;

use eyrie_model::{OutOfPages, PageAllocator, PageCopy};

use super::mailbox::StreamId;
use super::sequence::{SeqKey, Sequence};

/// Sequences by name. One that takes part in a step is taken out, so that it is never evicted for another.
#[derive(Debug)]
pub(super) struct Store {
    at_rest: HashMap<SeqKey, Sequence>,
    pages: PageAllocator,
    max_sequences: usize,
    clock: u64,
}

impl Store {
    pub(super) fn new(pages: PageAllocator, max_sequences: usize) -> Self {
        Self { at_rest: HashMap::new(), pages, max_sequences, clock: 0 }
    }

    /// Sequences at rest.
    pub(super) fn len(&self) -> usize {
        self.at_rest.len()
    }

    /// Slots of the whole cache.
    pub(super) fn slots(&self) -> usize {
        self.pages.pages() * self.pages.page_rows()
    }

    pub(super) fn page_rows(&self) -> usize {
        self.pages.page_rows()
    }

    pub(super) fn take(&mut self, key: SeqKey) -> Option<Sequence> {
        self.at_rest.remove(&key)
    }

    /// Lets a sequence without slots start with those that are known of its tokens before `base_len`, if they reach
    /// beyond its origin.
    pub(super) fn find(&mut self, sequence: &mut Sequence, base_len: u32) {
        let Some(tokens) = sequence.prefix(base_len + 1).filter(|_| sequence.table.is_empty()) else {
            return;
        };
        let known = self.pages.lookup(tokens);
        if known.len() > sequence.origin() {
            self.pages.free(std::mem::take(&mut sequence.table));
            sequence.adopt(known);
        } else {
            self.pages.free(known);
        }
    }

    /// Lays a sequence to rest as the most recently used one.
    pub(super) fn put(&mut self, key: SeqKey, mut sequence: Sequence) {
        // Its last slot may be run again in place, so the page that holds it is not made known yet.
        let end = sequence.built();
        self.publish(&mut sequence, end);
        self.clock += 1;
        sequence.last_used = self.clock;
        sequence.rests_since = Some(Instant::now());
        self.at_rest.insert(key, sequence);
        while self.at_rest.len() > self.max_sequences && self.evict() {}
    }

    /// Frees the pages of a sequence that was taken out and whose slots are not to be trusted: no other starts with them.
    pub(super) fn discard(&mut self, sequence: Sequence) {
        self.pages.discard(sequence.table);
    }

    /// Ends a sequence that was taken out; others with the same tokens can start with its slots.
    pub(super) fn release(&mut self, mut sequence: Sequence) {
        let end = sequence.built() + 1;
        self.publish(&mut sequence, end);
        self.pages.free(sequence.table);
    }

    /// Makes the slots that the tokens before `end` determine known.
    fn publish(&mut self, sequence: &mut Sequence, end: u32) {
        let mut table = std::mem::take(&mut sequence.table);
        if let Some(tokens) = sequence.prefix(end).filter(|_| sequence.origin() == 0) {
            self.pages.publish(&mut table, tokens);
        }
        sequence.table = table;
    }

    /// Ends a sequence at rest, if there is one of that name.
    pub(super) fn close(&mut self, key: SeqKey) {
        if let Some(sequence) = self.take(key) {
            self.release(sequence);
        }
    }

    /// Ends the sequences that `stream` spoke of last.
    pub(super) fn close_stream(&mut self, stream: StreamId) {
        self.close_all(|sequence| sequence.owner == stream);
    }

    /// Ends the sequences of unary calls that have rested since before `oldest`.
    pub(super) fn expire(&mut self, oldest: Instant) {
        self.close_all(|sequence| sequence.unary && sequence.rests_since.is_some_and(|t| t < oldest));
    }

    fn close_all(&mut self, is_over: impl Fn(&Sequence) -> bool) {
        let over: Vec<_> = self.at_rest.extract_if(|_, sequence| is_over(sequence)).collect();
        for (key, sequence) in over {
            tracing::debug!(boot_id = key.boot_id, seq = key.seq, "sequence ended without a close");
            self.release(sequence);
        }
    }

    /// Cuts a sequence that was taken out to the positions below `end`.
    pub(super) fn cut(&mut self, sequence: &mut Sequence, end: u32) {
        sequence.cut(end);
        let slots = sequence.slot(sequence.built());
        self.pages.cut(&mut sequence.table, slots);
    }

    /// Makes room for `slots` slots of a sequence that was taken out, at the cost of the sequences used longest ago. A copy
    /// that is returned has to be made before rows are written.
    ///
    /// # Errors
    /// Where even an otherwise empty store has too few pages beside the sequences of this step.
    pub(super) fn reserve(
        &mut self,
        sequence: &mut Sequence,
        slots: usize,
    ) -> Result<Option<PageCopy>, OutOfPages> {
        loop {
            match self.pages.reserve(&mut sequence.table, slots) {
                Err(_) if self.evict() => {}
                reserved => return reserved,
            }
        }
    }

    fn evict(&mut self) -> bool {
        let oldest = self.at_rest.iter().min_by_key(|(_, sequence)| sequence.last_used).map(|(key, _)| *key);
        if let Some(key) = oldest {
            tracing::debug!(boot_id = key.boot_id, seq = key.seq, "sequence dropped for another");
            self.close(key);
        }
        oldest.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(seq: u64) -> SeqKey {
        SeqKey { boot_id: 1, seq }
    }

    fn store(pages: usize, max_sequences: usize) -> Store {
        Store::new(PageAllocator::new(pages, 4), max_sequences)
    }

    fn sequence(store: &mut Store, slots: usize, owner: StreamId) -> Sequence {
        let mut sequence = Sequence::new(0);
        sequence.owner = owner;
        store.reserve(&mut sequence, slots).unwrap();
        sequence
    }

    #[test]
    fn the_least_recently_used_sequence_makes_room() {
        let mut store = store(4, 8);
        for seq in [1, 2] {
            let new = sequence(&mut store, 8, 0);
            store.put(key(seq), new);
        }
        let first = store.take(key(1)).unwrap();
        store.put(key(1), first);
        let third = sequence(&mut store, 5, 0);
        assert!(store.take(key(2)).is_none(), "2 was used longest ago");
        assert!(store.take(key(1)).is_some());
        store.discard(third);
    }

    #[test]
    fn sequences_of_the_step_are_never_evicted() {
        let mut store = store(2, 8);
        let mut working = sequence(&mut store, 4, 0);
        let mut other = Sequence::new(0);
        assert_eq!(store.reserve(&mut other, 8).unwrap_err(), OutOfPages { needed: 2, free: 1 });
        store.reserve(&mut working, 8).unwrap();
        store.discard(working);
        store.reserve(&mut other, 8).unwrap();
    }

    #[test]
    fn the_number_of_sequences_is_bounded() {
        let mut store = store(8, 2);
        for seq in 1..=3 {
            let new = sequence(&mut store, 1, 0);
            store.put(key(seq), new);
        }
        assert_eq!(store.len(), 2);
        assert!(store.take(key(1)).is_none());
    }

    #[test]
    fn closing_a_stream_frees_what_it_spoke_of_last() {
        let mut store = store(8, 8);
        for (seq, owner) in [(1, 7), (2, 7), (3, 9)] {
            let new = sequence(&mut store, 4, owner);
            store.put(key(seq), new);
        }
        let mut moved = store.take(key(2)).unwrap();
        moved.owner = 9;
        store.put(key(2), moved);
        store.close_stream(7);
        assert_eq!((store.len(), store.pages.free_pages()), (2, 6));
    }

    #[test]
    fn only_what_unary_calls_left_behind_expires() {
        let mut store = store(8, 8);
        for (seq, unary) in [(1, true), (2, false), (3, true)] {
            let mut new = sequence(&mut store, 4, seq);
            new.unary = unary;
            store.put(key(seq), new);
        }
        let before = store.at_rest[&key(1)].rests_since.unwrap();
        store.expire(before);
        assert_eq!(store.len(), 3, "none rests since before the first one did");
        let third = store.take(key(3)).unwrap();
        store.expire(Instant::now() + std::time::Duration::from_secs(1));
        assert_eq!((store.len(), store.pages.free_pages()), (1, 6), "what takes part in a step stays");
        assert!(store.take(key(2)).is_some());
        store.discard(third);
    }
}
