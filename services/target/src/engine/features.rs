//! Auxiliary hidden states on their way to the draft: the shared ring, and the rows kept for a draft that lost them.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::OwnedFd;

use eyrie_region::{Epoch, RingError, RingGeometry, RingWriter};
use eyrie_wire::v1::{FeatureRef, RingSlot, feature_ref::At};

use super::sequence::Key;

/// Rows a ring slot holds. A round of up to seven drafts fits one slot, and a slot is the unit that is overwritten.
pub(crate) const SLOT_ROWS: u32 = 8;
/// Rows of a kept block: what is let go at once.
const BLOCK_ROWS: usize = 32;

/// The feature ring and the rows kept behind it.
#[derive(Debug)]
pub(crate) struct Features {
    ring: RingWriter,
    kept: Kept,
}

impl Features {
    /// A ring of `slots` slots for rows of `width` values, keeping rows of live sequences in up to `limit` bytes.
    pub(crate) fn create(slots: u32, width: u32, limit: u64, epoch: Epoch) -> Result<Self, RingError> {
        let geometry = RingGeometry { slots, slot_rows: SLOT_ROWS, row_width: width };
        Ok(Self { ring: RingWriter::create(geometry, epoch)?, kept: Kept::new(width as usize, limit) })
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
        self.kept.width
    }

    /// Bytes of the rows kept.
    pub(crate) fn kept_bytes(&self) -> u64 {
        self.kept.bytes
    }

    /// Rows that were let go since boot because the memory for them was full.
    pub(crate) fn rows_let_go(&self) -> u64 {
        self.kept.rows_let_go
    }

    /// Publishes and keeps `rows` (row-major), the first of which belongs to position `first` of `key`.
    pub(crate) fn publish(
        &mut self,
        key: Key,
        first: u32,
        rows: &[f32],
    ) -> Result<Vec<FeatureRef>, RingError> {
        self.kept.append(key, first, rows);
        publish(&mut self.ring, first, rows)
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

    /// Lets go of all rows of `key`.
    pub(crate) fn forget(&mut self, key: Key) {
        self.kept.forget(key);
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

/// Rows of live sequences under a byte limit; the oldest rows of the longest sequence go first.
#[derive(Debug)]
struct Kept {
    width: usize,
    limit: u64,
    bytes: u64,
    sequences: BTreeMap<Key, Rows>,
    rows_let_go: u64,
}

#[derive(Debug, Default)]
struct Rows {
    first: u32,
    blocks: VecDeque<Vec<f32>>,
}

impl Kept {
    fn new(width: usize, limit: u64) -> Self {
        Self { width, limit, bytes: 0, sequences: BTreeMap::new(), rows_let_go: 0 }
    }

    fn block_bytes(&self) -> u64 {
        (BLOCK_ROWS * self.width * size_of::<f32>()) as u64
    }

    fn append(&mut self, key: Key, first: u32, rows: &[f32]) {
        let block_values = BLOCK_ROWS * self.width;
        let sequence = self.sequences.entry(key).or_insert_with(|| Rows { first, blocks: VecDeque::new() });
        if sequence.blocks.is_empty() {
            sequence.first = first;
        }
        let mut added = 0;
        let mut rest = rows;
        while !rest.is_empty() {
            let room = sequence.blocks.back().map_or(0, |block| block_values - block.len());
            if room == 0 {
                sequence.blocks.push_back(Vec::with_capacity(block_values));
                added += 1;
                continue;
            }
            let (now, later) = rest.split_at(room.min(rest.len()));
            if let Some(block) = sequence.blocks.back_mut() {
                block.extend_from_slice(now);
            }
            rest = later;
        }
        self.bytes += added * self.block_bytes();
        self.trim();
    }

    fn trim(&mut self) {
        while self.bytes > self.limit {
            let longest = self.sequences.values_mut().max_by_key(|rows| rows.blocks.len());
            let Some((rows, block)) =
                longest.and_then(|rows| rows.blocks.pop_front().map(|block| (rows, block)))
            else {
                return;
            };
            let gone = (block.len() / self.width) as u32;
            rows.first += gone;
            self.bytes -= self.block_bytes();
            if self.rows_let_go == 0 {
                tracing::warn!(
                    limit_bytes = self.limit,
                    "feature cache is full: oldest rows are let go, a restarted draft will start later in long sequences"
                );
            }
            self.rows_let_go += u64::from(gone);
        }
    }

    /// The first position kept (`None` without any), where the copy starts, and up to `most` rows of `from..to`.
    fn read(&self, key: Key, from: u32, to: u32, most: u32) -> (Option<u32>, u32, Vec<f32>) {
        let Some(rows) = self.sequences.get(&key).filter(|rows| !rows.blocks.is_empty()) else {
            return (None, to, Vec::new());
        };
        let start = from.max(rows.first);
        let wanted = to.saturating_sub(start).min(most) as usize * self.width;
        let mut skip = (start - rows.first) as usize * self.width;
        let mut values = Vec::with_capacity(wanted);
        for block in &rows.blocks {
            let part = &block[skip.min(block.len())..];
            skip = skip.saturating_sub(block.len());
            values.extend_from_slice(&part[..part.len().min(wanted - values.len())]);
        }
        (Some(rows.first), start, values)
    }

    fn forget(&mut self, key: Key) {
        if let Some(rows) = self.sequences.remove(&key) {
            self.bytes -= rows.blocks.len() as u64 * self.block_bytes();
        }
    }
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
    fn rows_are_read_back_from_any_position() {
        let mut kept = Kept::new(WIDTH, u64::MAX);
        kept.append(key(1), 0, &rows(0..50));
        kept.append(key(1), 50, &rows(50..51));
        kept.append(key(2), 0, &rows(0..1));
        assert_eq!(kept.read(key(1), 0, 51, 1000), (Some(0), 0, rows(0..51)));
        assert_eq!(kept.read(key(1), 31, 40, 1000), (Some(0), 31, rows(31..40)));
        assert_eq!(kept.read(key(1), 40, 51, 3), (Some(0), 40, rows(40..43)));
        assert_eq!(kept.read(key(3), 0, 9, 3), (None, 9, vec![]));
        kept.forget(key(1));
        kept.forget(key(2));
        assert_eq!(kept.bytes, 0);
    }

    #[test]
    fn over_the_limit_the_longest_sequence_loses_its_oldest_rows() {
        let block = (BLOCK_ROWS * WIDTH * 4) as u64;
        let mut kept = Kept::new(WIDTH, 4 * block);
        kept.append(key(1), 0, &rows(0..20));
        kept.append(key(2), 0, &rows(0..96));
        assert_eq!(kept.rows_let_go, 0);
        kept.append(key(2), 96, &rows(96..100));
        assert_eq!((kept.bytes, kept.rows_let_go), (4 * block, BLOCK_ROWS as u64));
        assert_eq!(kept.read(key(2), 0, 100, 1000), (Some(32), 32, rows(32..100)));
        assert_eq!(kept.read(key(1), 0, 20, 1000), (Some(0), 0, rows(0..20)));
    }

    #[test]
    fn a_sequence_that_lost_all_rows_starts_again_where_it_is() {
        let mut kept = Kept::new(WIDTH, 0);
        kept.append(key(1), 0, &rows(0..10));
        assert_eq!(kept.read(key(1), 0, 10, 9), (None, 10, vec![]));
        kept.limit = u64::MAX;
        kept.append(key(1), 10, &rows(10..12));
        assert_eq!(kept.read(key(1), 0, 12, 9), (Some(10), 10, rows(10..12)));
    }

    #[test]
    fn a_publication_fills_slots_with_consecutive_positions() {
        let epoch = Epoch::random().unwrap();
        let mut features = Features::create(4, WIDTH as u32, u64::MAX, epoch).unwrap();
        let refs = features.publish(key(1), 5, &rows(5..23)).unwrap();
        let spans: Vec<(u32, u32)> = refs.iter().map(|r| (r.first, r.rows)).collect();
        assert_eq!(spans, [(5, 8), (13, 8), (21, 2)]);
        let (again, first_held) = features.publish_again(key(1), 0, 23).unwrap();
        assert_eq!(first_held, 5);
        let rows: u32 = again.iter().map(|r| r.rows).sum();
        assert_eq!(rows, 16, "half of four slots of eight rows");
    }
}
