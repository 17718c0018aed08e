//! Who holds KV pages: admission, growth from step to step, and preemption when there are too few for all.
//!
//! A sequence holds pages, or waits for some because it has work, or lost them while it had none and asks for them with
//! its next Verify. What one accepted request needs at most fits the cache, and the best sequence that has work may take
//! the pages of every other: so each gets its turn, and none fails for memory.
//!
//! Pages that were filled are known by their tokens. A sequence that is admitted, for the first time or again, starts with
//! the known pages that it begins with.

use std::time::Duration;

use eyrie_model::{OutOfPages, SeqTable};
use tokio::time::Instant;

use super::Engine;
use super::scheduler::{self, Piece, Rows};
use super::sequence::{Key, Rank, Sequence};

/// How long a sequence may hold pages that others need, and compute nothing: its gateway says nothing, or takes no
/// replies. Longer than a draft takes to propose.
const IDLE_HOLD: Duration = Duration::from_secs(1);

impl Engine {
    /// Admits sequences that wait, the best first and none before it; true if there were any.
    pub(super) fn admit(&mut self, now: Instant) -> bool {
        let mut admitted = false;
        while self.best_waiting().is_some_and(|key| self.try_admit(key, now)) {
            admitted = true;
        }
        admitted
    }

    /// The best of those that could go on if they had pages.
    fn best_waiting(&self) -> Option<Key> {
        let able = |s: &Sequence| s.waits() && self.streams.is_flowing(s.route);
        let waiting = self.sequences.iter().filter(|(_, sequence)| able(sequence));
        waiting.min_by_key(|(_, sequence)| sequence.rank).map(|(&key, _)| key)
    }

    /// Gives a sequence the pages for all rows it has to compute, if need be those of sequences of a worse priority. A
    /// page for each that runs on is left: the newcomer would be the first to be preempted for it.
    fn try_admit(&mut self, key: Key, now: Instant) -> bool {
        let Some(sequence) = self.sequences.get(&key) else { return false };
        let (class, slots) = (sequence.rank.class, sequence.slots_wanted());
        let victims = self.victims(now, |other| other.class > class);
        let others = self.holders() - victims.len();
        if others >= self.max_sequences {
            return false;
        }
        let wants_rows = sequence.features && sequence.kv_len == 0;
        let mut table = self.pages.lookup(sequence.reusable());
        // Pages without feature rows are computed once more, or nobody would ever have those rows.
        if let Some(features) = self.features.as_mut().filter(|_| wants_rows) {
            let len = features.reach(&table, slots, &self.pages);
            self.pages.cut(&mut table, len);
        }
        let page_rows = self.pages.page_rows();
        let wanted =
            |table: &SeqTable| slots.div_ceil(page_rows).saturating_sub(table.pages().len()) + others;
        // A page that others read is copied; where there is no page for that, its rows are computed again.
        let inside = table.len() % page_rows as u32;
        if inside > 0 && self.pages.free_pages() <= wanted(&table) {
            let whole = table.len() - inside;
            self.pages.cut(&mut table, whole);
        }
        match self.make_room(victims, wanted(&table), self.max_sequences - 1) {
            true => self.begin(key, table, slots),
            false => {
                self.pages.free(table);
                false
            }
        }
    }

    /// Starts a sequence, or lets it go on, with the rows of `table` and pages for `slots` slots; false without enough.
    fn begin(&mut self, key: Key, mut table: SeqTable, slots: usize) -> bool {
        let Some(sequence) = self.sequences.get_mut(&key) else { return false };
        let is_new = sequence.kv_len == 0;
        if let Some(features) = self.features.as_mut().filter(|_| is_new) {
            features.adopt(key, &table, sequence.features, &self.pages);
        }
        let Ok(copy) = self.pages.reserve(&mut table, slots) else {
            self.pages.free(table);
            return false;
        };
        self.copies.extend(copy);
        if is_new && self.pages.knows_prefixes() {
            self.prefixes.lookups += sequence.reusable().len() as u64;
            self.prefixes.hits += u64::from(table.len());
            sequence.skip(table.len());
        }
        sequence.table = table;
        true
    }

    /// Makes the pages known that a sequence has filled since it had `len` rows: others with the same tokens share them.
    pub(super) fn publish(&mut self, key: Key, len: u32) {
        let Some(sequence) = self.sequences.get_mut(&key) else { return };
        let page_rows = self.pages.page_rows() as u32;
        let from = len / page_rows;
        if sequence.table.len() / page_rows == from {
            return;
        }
        self.pages.publish(&mut sequence.table, &sequence.tokens);
        if let Some(features) = &mut self.features {
            features.share(key, &sequence.table, from as usize, sequence.features, &self.pages);
        }
    }

    /// Gives every piece the pages for its rows, and drops those whose sequence has to do without.
    pub(super) fn provide(&mut self, pieces: &mut Vec<Piece>, now: Instant) {
        pieces.retain(|piece| self.try_provide(*piece, now));
    }

    /// Gives one piece its pages, if need be those of worse sequences, whose turn comes later. Without enough of those
    /// it gives up its own: they are of no use before a better one ends.
    fn try_provide(&mut self, piece: Piece, now: Instant) -> bool {
        let Some(sequence) = self.sequences.get(&piece.key).filter(|s| s.holds_pages()) else { return false };
        let rows = match piece.rows {
            Rows::Prompt { tokens, .. } => tokens,
            Rows::Round => sequence.round_rows().len(),
        };
        let (rank, slots) = (sequence.rank, sequence.table.len() as usize + rows);
        let Err(OutOfPages { needed, .. }) = self.reserve(piece.key, slots) else { return true };
        let victims = self.victims(now, |other| other > rank);
        let provided = self.make_room(victims, needed, usize::MAX) && self.reserve(piece.key, slots).is_ok();
        if !provided {
            self.preempt(piece.key);
        }
        provided
    }

    fn reserve(&mut self, key: Key, slots: usize) -> Result<(), OutOfPages> {
        let Some(sequence) = self.sequences.get_mut(&key) else { return Ok(()) };
        let copy = self.pages.reserve(&mut sequence.table, slots)?;
        self.copies.extend(copy);
        Ok(())
    }

    /// Sequences that hold pages.
    pub(super) fn holders(&self) -> usize {
        self.sequences.values().filter(|sequence| sequence.holds_pages()).count()
    }

    fn victims(&self, now: Instant, worse: impl Fn(Rank) -> bool) -> Vec<Key> {
        scheduler::victims(&self.sequences, worse, |s| !self.is_ready(s) && s.active + IDLE_HOLD <= now)
    }

    /// Preempts `victims` in their order until `pages` are free and at most `holders` sequences hold some; none of them,
    /// and false, if all together were not enough.
    fn make_room(&mut self, victims: Vec<Key>, pages: usize, holders: usize) -> bool {
        let tables = victims.iter().filter_map(|key| self.sequences.get(key)).map(|sequence| &sequence.table);
        let in_all = self.pages.free_pages() + self.pages.held_only_by(tables);
        if in_all < pages || self.holders() - victims.len() > holders {
            return false;
        }
        for key in victims {
            if self.pages.free_pages() >= pages && self.holders() <= holders {
                break;
            }
            self.preempt(key);
        }
        true
    }

    /// Takes a sequence's pages. Its rows are computed again when it gets some, those that are not known any more, from the
    /// same tokens and so to the same bits; whatever it was doing then goes on.
    pub(super) fn preempt(&mut self, key: Key) {
        let Some(sequence) = self.sequences.get_mut(&key) else { return };
        self.pages.free(sequence.preempt());
        self.preemptions += 1;
        tracing::debug!(boot = key.boot, seq = key.seq, kv_len = sequence.kv_len, "preempted");
    }

    /// When the next sequence loses its claim to pages that others wait for.
    pub(super) fn next_dormancy(&self, now: Instant) -> Option<Instant> {
        self.best_waiting()?;
        let holders = self.sequences.values().filter(|sequence| sequence.holds_pages());
        holders.map(|sequence| sequence.active + IDLE_HOLD).filter(|&at| at > now).min()
    }
}
