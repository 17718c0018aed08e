//! The feature ring: one writer that never waits, readers that notice when they were overtaken.

mod block;
mod device;
mod seqlock;

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
// For `seqlock`, which takes them from here.
use std::sync::atomic;

use self::block::{Block, Cursor, Layout};
pub use self::device::{
    DeviceRingGeometry, DeviceRingReader, DeviceRingWriter, ImportedPayload, RingMemory, RingPayload,
    SlotPart,
};
use self::seqlock::Seqlock;
use crate::{Epoch, RegionError};

/// Size of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingGeometry {
    /// Slots, at least 1.
    pub slots: u32,
    /// Rows a slot can hold, at least 1.
    pub slot_rows: u32,
    /// Values of 32 bits in a row, at least 1.
    pub row_width: u32,
}

/// One publication: where the rows are, and the stamp that says they are still there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotRef {
    /// Index of the slot.
    pub slot: u32,
    /// Stamp of the publication: even, never zero, never repeated within an epoch.
    pub generation: u64,
    /// Rows published.
    pub rows: u32,
}

/// A ring that cannot be made, opened, written or read as asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RingError {
    /// A geometry without room or too large to address.
    #[error(
        "ring of {slots} slots of {slot_rows} rows of {row_width} values: each must be at least 1 and the whole fit in memory"
    )]
    Geometry {
        /// Slots given.
        slots: u32,
        /// Rows a slot given.
        slot_rows: u32,
        /// Values a row given.
        row_width: u32,
    },
    /// The memory could not be made, mapped or trusted.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// The ring's header is not what its grant says.
    #[error("ring header: {field} must be {expected}, found {found}")]
    Header {
        /// The field.
        field: &'static str,
        /// The value wanted.
        expected: u64,
        /// The value in memory.
        found: u64,
    },
    /// The ring belongs to another boot of the exporter.
    #[error("ring is stale: epoch must be {expected}, found {found:016x}")]
    StaleEpoch {
        /// The exporter's current epoch.
        expected: Epoch,
        /// The value in memory.
        found: u64,
    },
    /// Values of a width that no kernel writes.
    #[error("a value on a device must have 2 or 4 bytes, given {given}")]
    ValueBytes {
        /// Bytes given.
        given: u32,
    },
    /// A publication of no rows on a device, or of more than a slot holds.
    #[error("publication must be 1 to {slot_rows} rows a slot, given {rows}")]
    DeviceRows {
        /// Rows a slot holds.
        slot_rows: u32,
        /// Rows given.
        rows: u32,
    },
    /// Rows on a device of another width.
    #[error("rows of the ring have {expected} bytes, given rows of {given}")]
    RowBytes {
        /// Bytes of the ring's rows.
        expected: u64,
        /// Bytes of the rows given.
        given: u64,
    },
    /// More publications at once than there are slots: the last would overwrite the first.
    #[error("a batch must be at most {limit} publications, given {given}")]
    Batch {
        /// Slots of the ring.
        limit: u32,
        /// Publications given.
        given: usize,
    },
    /// More rows at once than the reader has room for.
    #[error("a batch must be at most {limit} rows, given {given}")]
    Room {
        /// Rows that the reader has room for.
        limit: u64,
        /// Rows wanted.
        given: u64,
    },
    /// A publication of no whole rows, or of more than a slot holds.
    #[error("publication must be 1 to {slot_rows} rows of {row_width} values, given {values} values")]
    Publication {
        /// Rows a slot holds.
        slot_rows: u32,
        /// Values a row.
        row_width: u32,
        /// Values given.
        values: usize,
    },
    /// A reference that no writer of this ring made, or rows that it does not cover.
    #[error("slot {slot}, generation {generation}: {what}, limit {limit}, given {given}")]
    Reference {
        /// The slot given.
        slot: u32,
        /// The generation given.
        generation: u64,
        /// The field at fault.
        what: &'static str,
        /// The value it must not exceed.
        limit: u64,
        /// The value given.
        given: u64,
    },
    /// The slot was written again before the copy was complete.
    #[error("slot {slot} is stale: wanted generation {wanted}, found {found}")]
    Stale {
        /// The slot.
        slot: u32,
        /// The generation asked for.
        wanted: u64,
        /// The generation in memory; odd while it is being written.
        found: u64,
    },
}

impl RingGeometry {
    /// Size in bytes of a ring of this geometry.
    ///
    /// # Errors
    /// [`RingError::Geometry`] where a field is zero or the ring exceeds the address space.
    pub fn byte_len(&self) -> Result<u64, RingError> {
        Ok(Layout::with_rows(*self)?.len)
    }

    fn refused(self) -> RingError {
        let Self { slots, slot_rows, row_width } = self;
        RingError::Geometry { slots, slot_rows, row_width }
    }

    /// Values in a full slot.
    fn slot_values(&self) -> usize {
        self.slot_rows as usize * self.row_width as usize
    }

    fn check_slot(&self, slot: u32, generation: u64) -> Result<(), RingError> {
        if slot < self.slots {
            return Ok(());
        }
        let (limit, given) = (u64::from(self.slots) - 1, slot.into());
        Err(RingError::Reference { slot, generation, what: "slot index", limit, given })
    }

    /// The rows `first..first + rows` of a publication, if it can have them.
    fn check_part(&self, published: SlotRef, first: u32, rows: u32) -> Result<Range<usize>, RingError> {
        let SlotRef { slot, generation, rows: held } = published;
        self.check_slot(slot, generation)?;
        let invalid = |what, limit, given| RingError::Reference { slot, generation, what, limit, given };
        if held > self.slot_rows {
            return Err(invalid("rows", self.slot_rows.into(), held.into()));
        }
        let end = u64::from(first) + u64::from(rows);
        if end > u64::from(held) {
            return Err(invalid("last row wanted", held.into(), end));
        }
        Ok(first as usize..end as usize)
    }
}

impl SlotRef {
    /// Judges what a read of this publication found: the rows stored with it, or a stamp in its place.
    fn judge(&self, found: Result<u32, u64>) -> Result<(), RingError> {
        let &Self { slot, generation, rows } = self;
        match found {
            Ok(stored) if stored == rows => Ok(()),
            Ok(stored) => {
                let (limit, given) = (stored.into(), rows.into());
                Err(RingError::Reference { slot, generation, what: "rows", limit, given })
            }
            Err(found) => Err(RingError::Stale { slot, wanted: generation, found }),
        }
    }
}

impl Block {
    /// The slot with its rows beside the stamps; `slot` must be below the geometry's.
    fn seqlock(&self, slot: u32) -> Seqlock<'_> {
        Seqlock { stamps: self.stamps(slot), payload: self.payload(slot) }
    }
}

/// The exporter's end of a ring.
#[derive(Debug)]
pub struct RingWriter {
    fd: OwnedFd,
    ring: Block,
    epoch: Epoch,
    cursor: Cursor,
}

impl RingWriter {
    /// Makes an empty ring in a memfd that only this writer can ever write.
    ///
    /// # Errors
    /// [`RingError::Geometry`], or why the memory could not be had.
    pub fn create(geometry: RingGeometry, epoch: Epoch) -> Result<Self, RingError> {
        let (fd, ring) = Block::create("eyrie-ring", Layout::with_rows(geometry)?, epoch)?;
        Ok(Self { fd, ring, epoch, cursor: Cursor::default() })
    }

    /// The descriptor, to be passed to readers.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Its size.
    pub fn geometry(&self) -> RingGeometry {
        self.ring.geometry()
    }

    /// The boot it belongs to.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Writes `rows` (whole rows of `row_width` values) over the oldest publication. Never waits for a reader.
    ///
    /// # Errors
    /// [`RingError::Publication`] where `rows` is empty, no whole number of rows, or more than a slot holds.
    pub fn publish(&mut self, rows: &[f32]) -> Result<SlotRef, RingError> {
        let geometry @ RingGeometry { slot_rows, row_width, .. } = self.ring.geometry();
        let count = rows.len() / row_width as usize;
        let whole = rows.len().is_multiple_of(row_width as usize);
        let Some(count) = u32::try_from(count).ok().filter(|n| whole && (1..=slot_rows).contains(n)) else {
            return Err(RingError::Publication { slot_rows, row_width, values: rows.len() });
        };
        let published = self.cursor.next(geometry, count);
        self.ring.seqlock(published.slot).write(published.generation, count, rows);
        Ok(published)
    }
}

/// An importer's end of a ring.
///
/// Ring memory has a living writer, so it is no [`Region`](crate::Region): nothing here forms a slice of it, and
/// every read is a copy that is checked afterwards.
#[derive(Debug)]
pub struct RingReader {
    ring: Block,
}

impl RingReader {
    /// Maps the ring behind `fd` read-only and checks its seals, length and header. The descriptor is closed.
    ///
    /// # Errors
    /// [`RingError::Region`] for a descriptor that is not a sealed ring of that size, [`RingError::Header`] for
    /// another geometry, [`RingError::StaleEpoch`] for another boot.
    pub fn open(fd: OwnedFd, geometry: RingGeometry, epoch: Epoch) -> Result<Self, RingError> {
        Ok(Self { ring: Block::open(fd, Layout::with_rows(geometry)?, epoch)? })
    }

    /// Its size.
    pub fn geometry(&self) -> RingGeometry {
        self.ring.geometry()
    }

    /// Replaces `out` by all rows of a publication, `rows × row_width` values.
    ///
    /// # Errors
    /// As [`read_rows`](Self::read_rows).
    pub fn read_into(&self, published: SlotRef, out: &mut Vec<f32>) -> Result<(), RingError> {
        self.read_rows(published, 0, published.rows, out)
    }

    /// Replaces `out` by all rows that `slot` holds under the stamp `generation`, however many these are.
    ///
    /// # Errors
    /// [`RingError::Reference`] for a slot this ring does not have, [`RingError::Stale`] where it no longer, or not yet,
    /// carries that stamp. `out` is empty then.
    pub fn read_slot(&self, slot: u32, generation: u64, out: &mut Vec<f32>) -> Result<(), RingError> {
        out.clear();
        let geometry = self.ring.geometry();
        geometry.check_slot(slot, generation)?;
        match self.ring.seqlock(slot).read(generation, 0..geometry.slot_values(), out) {
            Ok(rows) => {
                out.truncate(rows as usize * geometry.row_width as usize);
                Ok(())
            }
            Err(found) => {
                out.clear();
                Err(RingError::Stale { slot, wanted: generation, found })
            }
        }
    }

    /// Replaces `out` by `rows` rows of a publication from row `first` on, `rows × row_width` values.
    ///
    /// # Errors
    /// [`RingError::Stale`] where the writer has overtaken the reader, [`RingError::Reference`] for a reference this
    /// ring never gave out or rows outside of it. `out` is empty then.
    pub fn read_rows(
        &self,
        published: SlotRef,
        first: u32,
        rows: u32,
        out: &mut Vec<f32>,
    ) -> Result<(), RingError> {
        out.clear();
        let geometry = self.ring.geometry();
        let part = geometry.check_part(published, first, rows)?;
        let width = geometry.row_width as usize;
        let values = part.start * width..part.end * width;
        let found = self.ring.seqlock(published.slot).read(published.generation, values, out);
        published.judge(found).inspect_err(|_| out.clear())
    }
}

#[cfg(test)]
mod tests;
