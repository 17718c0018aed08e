//! The order of stamps and copies, apart from the device that copies.

use std::fmt;

use super::super::atomic::{Ordering, fence};
use super::super::block::{Block, Cursor};
use super::super::{RingError, SlotRef};
use super::{DeviceRingGeometry, SlotPart};
use crate::{DeviceRows, RegionError};

/// Copies between the payload of a ring and other memory of its device, done some time between their begin and the end of
/// the next wait.
pub(super) trait CopyQueue: fmt::Debug {
    /// Begins to copy `bytes` bytes. `at` is an offset in the payload; `other` is, for a writer, the address of the rows and,
    /// for a reader, an offset in its room.
    fn begin(&self, at: u64, other: u64, bytes: u64) -> Result<(), RegionError>;

    /// Blocks until all that was begun is complete.
    fn wait(&self) -> Result<(), RegionError>;
}

/// The writer's stamps.
#[derive(Debug)]
pub(super) struct Publisher {
    block: Block,
    geometry: DeviceRingGeometry,
    cursor: Cursor,
}

impl Publisher {
    pub(super) fn new(block: Block, geometry: DeviceRingGeometry) -> Self {
        Self { block, geometry, cursor: Cursor::default() }
    }

    pub(super) fn geometry(&self) -> DeviceRingGeometry {
        self.geometry
    }

    /// As [`DeviceRingWriter::publish`](super::DeviceRingWriter::publish).
    pub(super) fn publish(
        &mut self,
        queue: &dyn CopyQueue,
        batch: &[DeviceRows<'_>],
    ) -> Result<Vec<SlotRef>, RingError> {
        self.check(batch)?;
        let ring = self.geometry.ring;
        let published: Vec<SlotRef> = batch.iter().map(|part| self.cursor.next(ring, part.rows())).collect();
        for slot in &published {
            self.block.stamps(slot.slot).begin(slot.generation, slot.rows);
        }
        // The device is no thread whose loads a release fence would order: the stamps must be out before it is told.
        fence(Ordering::SeqCst);
        let begun = published.iter().zip(batch).try_for_each(|(slot, part)| {
            queue.begin(self.geometry.at(slot.slot, 0), part.ptr(), part.byte_len())
        });
        // After a failure, too: a copy that was begun must not end in a later publication of its slot.
        let waited = queue.wait();
        begun?;
        waited?;
        for slot in &published {
            self.block.stamps(slot.slot).end(slot.generation);
        }
        Ok(published)
    }

    fn check(&self, batch: &[DeviceRows<'_>]) -> Result<(), RingError> {
        let (limit, slot_rows) = (self.geometry.ring.slots, self.geometry.ring.slot_rows);
        if batch.len() > limit as usize {
            return Err(RingError::Batch { limit, given: batch.len() });
        }
        let expected = self.geometry.row_bytes();
        for part in batch {
            if !(1..=slot_rows).contains(&part.rows()) {
                return Err(RingError::DeviceRows { slot_rows, rows: part.rows() });
            }
            if part.row_bytes() != expected {
                return Err(RingError::RowBytes { expected, given: part.row_bytes() });
            }
        }
        Ok(())
    }
}

/// The reader's stamps.
#[derive(Debug)]
pub(super) struct Subscriber {
    block: Block,
    geometry: DeviceRingGeometry,
    room: u64,
}

impl Subscriber {
    pub(super) fn new(block: Block, geometry: DeviceRingGeometry, room: u64) -> Self {
        Self { block, geometry, room }
    }

    pub(super) fn geometry(&self) -> DeviceRingGeometry {
        self.geometry
    }

    /// As [`DeviceRingReader::read`](super::DeviceRingReader::read).
    pub(super) fn read(
        &self,
        queue: &dyn CopyQueue,
        parts: &[SlotPart],
    ) -> Result<Vec<Result<(), RingError>>, RingError> {
        let given = parts.iter().map(|part| u64::from(part.rows)).sum();
        if given > self.room {
            return Err(RingError::Room { limit: self.room, given });
        }
        let (mut entered, mut begun, mut to) = (Vec::with_capacity(parts.len()), Ok(()), 0);
        for part in parts {
            let found = self.enter(part);
            if found.is_ok() && begun.is_ok() {
                begun = self.begin(queue, part, to);
            }
            entered.push(found);
            to += u64::from(part.rows);
        }
        let waited = queue.wait();
        begun?;
        waited?;
        let verdicts = parts.iter().zip(entered).map(|(part, entered)| self.leave(part.published, entered?));
        Ok(verdicts.collect())
    }

    /// Copies all of a slot's rows to the start of the room; returns how many they are.
    pub(super) fn read_slot(
        &self,
        queue: &dyn CopyQueue,
        slot: u32,
        generation: u64,
    ) -> Result<u32, RingError> {
        self.geometry.ring.check_slot(slot, generation)?;
        let stale = |found| RingError::Stale { slot, wanted: generation, found };
        let rows = self.block.stamps(slot).enter(generation).map_err(stale)?;
        // A number that races with the writer is judged with the stamps, and until then kept within the slot.
        let rows = rows.min(self.geometry.ring.slot_rows);
        let published = SlotRef { slot, generation, rows };
        let begun = self.begin(queue, &SlotPart { published, first: 0, rows }, 0);
        let waited = queue.wait();
        begun?;
        waited?;
        self.block.stamps(slot).leave(generation).map_err(stale)?;
        Ok(rows)
    }

    fn enter(&self, part: &SlotPart) -> Result<u32, RingError> {
        let SlotRef { slot, generation, .. } = part.published;
        self.geometry.ring.check_part(part.published, part.first, part.rows)?;
        let stale = |found| RingError::Stale { slot, wanted: generation, found };
        self.block.stamps(slot).enter(generation).map_err(stale)
    }

    fn begin(&self, queue: &dyn CopyQueue, part: &SlotPart, to: u64) -> Result<(), RegionError> {
        let row = self.geometry.row_bytes();
        let bytes = u64::from(part.rows) * row;
        if bytes == 0 {
            return Ok(());
        }
        queue.begin(self.geometry.at(part.published.slot, part.first.into()), to * row, bytes)
    }

    fn leave(&self, published: SlotRef, stored: u32) -> Result<(), RingError> {
        let left = self.block.stamps(published.slot).leave(published.generation);
        published.judge(left.map(|()| stored))
    }
}

#[cfg(test)]
mod tests;
