//! Auxiliary hidden states on their way to the draft: the shared ring, and the rows kept for a draft that lost them.

use std::os::fd::OwnedFd;

use eyrie_model::{PageAllocator, SeqTable};
use eyrie_region::{Epoch, RingError, RingGeometry, RingWriter};
use eyrie_wire::v1::{FeatureRef, RingSlot, feature_ref::At};

use super::kept::{Kept, KeptSizes};
use super::sequence::Key;
use crate::TargetError;

/// Rows a ring slot holds. A round of up to seven drafts fits one slot, and a slot is the unit that is overwritten.
pub(crate) const SLOT_ROWS: u32 = 8;

/// The feature ring and the rows kept behind it.
#[derive(Debug)]
pub(crate) struct Features {
    ring: RingWriter,
    kept: Kept,
}

impl Features {
    /// A ring of `slots` slots. Rows of live sequences and of known pages are kept as `sizes` says.
    pub(crate) fn create(slots: u32, sizes: KeptSizes, epoch: Epoch) -> Result<Self, TargetError> {
        let geometry = RingGeometry { slots, slot_rows: SLOT_ROWS, row_width: sizes.width as u32 };
        Ok(Self { ring: RingWriter::create(geometry, epoch)?, kept: Kept::new(sizes)? })
    }

    pub(crate) fn geometry(&self) -> RingGeometry {
        self.ring.geometry()
    }

    /// The ring's descriptor, for importers.
    pub(crate) fn fd(&self) -> std::io::Result<OwnedFd> {
        self.ring.fd().try_clone_to_owned()
    }

    /// Values a row.
    pub(crate) fn width(&self) -> usize {
        self.kept.width()
    }

    /// Bytes of the rows kept for sequences, and of those kept for known pages alone.
    pub(crate) fn kept_bytes(&self) -> (u64, u64) {
        let unused = self.kept.unused_bytes();
        (self.kept.bytes() - unused, unused)
    }

    /// Rows of live sequences that were let go since boot because the memory for them was full.
    pub(crate) fn rows_let_go(&self) -> u64 {
        self.kept.rows_let_go()
    }

    /// Keeps `rows` (row-major), the first of which belongs to position `first` of `key`; publishes them if they are
    /// `wanted`.
    pub(crate) fn take(
        &mut self,
        key: Key,
        first: u32,
        rows: &[f32],
        wanted: bool,
    ) -> Result<Vec<FeatureRef>, RingError> {
        self.kept.append(key, first, rows);
        if wanted { publish(&mut self.ring, first, rows) } else { Ok(Vec::new()) }
    }

    /// Publishes rows `from..to` of `key` again, at most half a ring of them; also tells the first position kept.
    pub(crate) fn publish_again(
        &mut self,
        key: Key,
        from: u32,
        to: u32,
    ) -> Result<(Vec<FeatureRef>, u32), RingError> {
        let most = (self.ring.geometry().slots / 2).max(1) * SLOT_ROWS;
        let (first_held, start, rows) = self.kept.read(key, from, to, most);
        Ok((publish(&mut self.ring, start, &rows)?, first_held.unwrap_or(to)))
    }

    /// Lets go of all rows of `key` that no other sequence or known page has too.
    pub(crate) fn forget(&mut self, key: Key) {
        self.kept.forget(key);
    }

    /// How far into `table` a sequence of `slots` slots that wants all rows may begin, as [`Kept::reach`] says.
    pub(crate) fn reach(&mut self, table: &SeqTable, slots: usize, pages: &PageAllocator) -> u32 {
        self.kept.reach(table, slots, pages)
    }

    /// Gives `key` the rows that are kept of the known pages it begins with, as [`Kept::adopt`] says.
    pub(crate) fn adopt(&mut self, key: Key, table: &SeqTable, all: bool, pages: &PageAllocator) {
        self.kept.adopt(key, table, all, pages);
    }

    /// Keeps the rows of `key` for its known pages, from page number `from` on, as [`Kept::share`] says.
    pub(crate) fn share(
        &mut self,
        key: Key,
        table: &SeqTable,
        from: usize,
        all: bool,
        pages: &PageAllocator,
    ) {
        self.kept.share(key, table, from, all, pages);
    }

    /// Lets go of the rows of pages that are not known any more.
    pub(crate) fn sweep(&mut self, pages: &PageAllocator) {
        self.kept.sweep(pages);
    }
}

fn publish(ring: &mut RingWriter, first: u32, rows: &[f32]) -> Result<Vec<FeatureRef>, RingError> {
    let geometry = ring.geometry();
    let mut position = first;
    let mut refs = Vec::new();
    for part in rows.chunks(geometry.slot_rows as usize * geometry.row_width as usize) {
        let slot = ring.publish(part)?;
        let at = At::Ring(RingSlot { slot: slot.slot, generation: slot.generation });
        refs.push(FeatureRef { first: position, rows: slot.rows, at: Some(at) });
        position += slot.rows;
    }
    Ok(refs)
}

#[cfg(test)]
mod tests {
    use super::*;

    const WIDTH: usize = 3;

    fn key(seq: u64) -> Key {
        Key { boot: 1, seq }
    }

    fn rows(positions: std::ops::Range<u32>) -> Vec<f32> {
        positions.flat_map(|p| [p as f32, 0.5, -(p as f32)]).collect()
    }

    #[test]
    fn a_publication_fills_slots_with_consecutive_positions() {
        let epoch = Epoch::random().unwrap();
        let sizes = KeptSizes { width: WIDTH, page_rows: 16, pages: 2, sequences: 1, limit: u64::MAX };
        let mut features = Features::create(4, sizes, epoch).unwrap();
        let refs = features.take(key(1), 5, &rows(5..23), true).unwrap();
        let spans: Vec<(u32, u32)> = refs.iter().map(|r| (r.first, r.rows)).collect();
        assert_eq!(spans, [(5, 8), (13, 8), (21, 2)]);
        let (again, first_held) = features.publish_again(key(1), 0, 23).unwrap();
        assert_eq!(first_held, 5);
        let rows: u32 = again.iter().map(|r| r.rows).sum();
        assert_eq!(rows, 16, "half of four slots of eight rows");
    }
}
