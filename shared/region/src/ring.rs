//! The feature ring: one writer that never waits, readers that notice when they were overtaken.

mod seqlock;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{self, AtomicU32, AtomicU64, Ordering};

use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::SealFlags;

use self::seqlock::Seqlock;
use crate::{ALIGN, Epoch, RegionError, align_up, memfd};

const MAGIC: u64 = u64::from_le_bytes(*b"eyriring");
const VERSION: u32 = 1;
const HEADER_BYTES: u64 = ALIGN as u64;

// Byte offsets within the header.
const AT_MAGIC: usize = 0;
const AT_EPOCH: usize = 8;
const AT_VERSION: usize = 16;
const AT_SLOTS: usize = 20;
const AT_SLOT_ROWS: usize = 24;
const AT_ROW_WIDTH: usize = 28;

// Byte offsets within a slot; the second stamp follows the padded payload.
const AT_GENERATION: usize = 0;
const AT_ROWS: usize = 8;
const AT_PAYLOAD: usize = ALIGN;

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
        let &Self { slots, slot_rows, row_width } = self;
        self.checked_len().ok_or(RingError::Geometry { slots, slot_rows, row_width })
    }

    fn checked_len(&self) -> Option<u64> {
        if self.slots == 0 || self.slot_rows == 0 || self.row_width == 0 {
            return None;
        }
        let payload = u64::from(self.slot_rows).checked_mul(u64::from(self.row_width))?.checked_mul(4)?;
        let slot = align_up(payload)?.checked_add(2 * ALIGN as u64)?;
        let len = slot.checked_mul(u64::from(self.slots))?.checked_add(HEADER_BYTES)?;
        isize::try_from(len).ok().map(|_| len)
    }

    /// Values in a full slot.
    fn slot_values(&self) -> usize {
        self.slot_rows as usize * self.row_width as usize
    }

    fn at_second_stamp(&self) -> usize {
        AT_PAYLOAD + (self.slot_values() * 4).next_multiple_of(ALIGN)
    }

    fn slot_bytes(&self) -> usize {
        self.at_second_stamp() + ALIGN
    }
}

/// A mapping of a ring whose words are only ever touched as atomics.
#[derive(Debug)]
struct Mapping {
    map: MmapRaw,
    // Invariant: `map` is exactly `geometry.byte_len()` bytes long.
    geometry: RingGeometry,
}

impl Mapping {
    fn u64(&self, offset: usize) -> &AtomicU64 {
        debug_assert!(offset.is_multiple_of(8) && offset + 8 <= self.map.len());
        // SAFETY: every caller's offset lies within the mapping by its invariant and is a multiple of 8 from a page
        // boundary; all accesses to ring memory, in every process, are atomic ones of the same size.
        unsafe { AtomicU64::from_ptr(self.map.as_mut_ptr().add(offset).cast()) }
    }

    fn u32s(&self, offset: usize, count: usize) -> &[AtomicU32] {
        debug_assert!(offset.is_multiple_of(4) && offset + 4 * count <= self.map.len());
        // SAFETY: as in `u64`, with multiples of 4; `AtomicU32` has the layout of `u32`, and a shared slice of atomics
        // permits writes by others.
        unsafe { std::slice::from_raw_parts(self.map.as_ptr().add(offset).cast(), count) }
    }

    fn u32(&self, offset: usize) -> &AtomicU32 {
        &self.u32s(offset, 1)[0]
    }

    /// `slot` must be below `geometry.slots`.
    fn slot(&self, slot: u32) -> Seqlock<'_> {
        let start = HEADER_BYTES as usize + slot as usize * self.geometry.slot_bytes();
        Seqlock {
            before: self.u64(start + AT_GENERATION),
            rows: self.u32(start + AT_ROWS),
            payload: self.u32s(start + AT_PAYLOAD, self.geometry.slot_values()),
            after: self.u64(start + self.geometry.at_second_stamp()),
        }
    }
}

/// The exporter's end of a ring.
#[derive(Debug)]
pub struct RingWriter {
    fd: OwnedFd,
    ring: Mapping,
    epoch: Epoch,
    published: u64,
}

impl RingWriter {
    /// Makes an empty ring in a memfd that only this writer can ever write.
    ///
    /// # Errors
    /// [`RingError::Geometry`], or why the memory could not be had.
    pub fn create(geometry: RingGeometry, epoch: Epoch) -> Result<Self, RingError> {
        const NAME: &str = "eyrie-ring";
        let failed = |action| {
            move |source| RingError::Region(RegionError::Memfd { name: NAME.to_owned(), action, source })
        };
        let fd = memfd::create(NAME, geometry.byte_len()?)?;
        let map = MmapOptions::new().populate().map_raw(&fd).map_err(failed("map it"))?;
        memfd::seal(&fd, SealFlags::FUTURE_WRITE).map_err(|e| failed("seal it")(e.into()))?;
        let ring = Mapping { map, geometry };
        ring.u64(AT_MAGIC).store(MAGIC, Ordering::Relaxed);
        ring.u64(AT_EPOCH).store(epoch.get(), Ordering::Relaxed);
        ring.u32(AT_VERSION).store(VERSION, Ordering::Relaxed);
        ring.u32(AT_SLOTS).store(geometry.slots, Ordering::Relaxed);
        ring.u32(AT_SLOT_ROWS).store(geometry.slot_rows, Ordering::Relaxed);
        ring.u32(AT_ROW_WIDTH).store(geometry.row_width, Ordering::Relaxed);
        Ok(Self { fd, ring, epoch, published: 0 })
    }

    /// The descriptor, to be passed to readers.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Its size.
    pub fn geometry(&self) -> RingGeometry {
        self.ring.geometry
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
        let RingGeometry { slots, slot_rows, row_width } = self.ring.geometry;
        let count = rows.len() / row_width as usize;
        let whole = rows.len().is_multiple_of(row_width as usize);
        let Some(count) = u32::try_from(count).ok().filter(|n| whole && (1..=slot_rows).contains(n)) else {
            return Err(RingError::Publication { slot_rows, row_width, values: rows.len() });
        };
        let slot = (self.published % u64::from(slots)) as u32;
        self.published += 1;
        let generation = 2 * self.published;
        self.ring.slot(slot).write(generation, count, rows);
        Ok(SlotRef { slot, generation, rows: count })
    }
}

/// An importer's end of a ring.
///
/// Ring memory has a living writer, so it is no [`Region`](crate::Region): nothing here forms a slice of it, and
/// every read is a copy that is checked afterwards.
#[derive(Debug)]
pub struct RingReader {
    ring: Mapping,
}

impl RingReader {
    /// Maps the ring behind `fd` read-only and checks its seals, length and header. The descriptor is closed.
    ///
    /// # Errors
    /// [`RingError::Region`] for a descriptor that is not a sealed ring of that size, [`RingError::Header`] for
    /// another geometry, [`RingError::StaleEpoch`] for another boot.
    pub fn open(fd: OwnedFd, geometry: RingGeometry, epoch: Epoch) -> Result<Self, RingError> {
        // Its writer goes on writing; nobody else may begin to.
        memfd::check_import(&fd, geometry.byte_len()?, SealFlags::FUTURE_WRITE)?;
        let map = MmapOptions::new().populate().map_raw_read_only(&fd).map_err(|source| {
            RingError::Region(RegionError::Memfd { name: "ring".to_owned(), action: "map it", source })
        })?;
        let ring = Mapping { map, geometry };
        let header = |field, expected: u64, found: u64| {
            if expected == found { Ok(()) } else { Err(RingError::Header { field, expected, found }) }
        };
        let word = |offset| u64::from(ring.u32(offset).load(Ordering::Relaxed));
        header("magic", MAGIC, ring.u64(AT_MAGIC).load(Ordering::Relaxed))?;
        header("version", VERSION.into(), word(AT_VERSION))?;
        header("slots", geometry.slots.into(), word(AT_SLOTS))?;
        header("slot_rows", geometry.slot_rows.into(), word(AT_SLOT_ROWS))?;
        header("row_width", geometry.row_width.into(), word(AT_ROW_WIDTH))?;
        let found = ring.u64(AT_EPOCH).load(Ordering::Relaxed);
        if found != epoch.get() {
            return Err(RingError::StaleEpoch { expected: epoch, found });
        }
        Ok(Self { ring })
    }

    /// Its size.
    pub fn geometry(&self) -> RingGeometry {
        self.ring.geometry
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
        let RingGeometry { slots, row_width, .. } = self.ring.geometry;
        if slot >= slots {
            let (limit, given) = (u64::from(slots) - 1, slot.into());
            return Err(RingError::Reference { slot, generation, what: "slot index", limit, given });
        }
        match self.ring.slot(slot).read(generation, 0..self.ring.geometry.slot_values(), out) {
            Ok(rows) => {
                out.truncate(rows as usize * row_width as usize);
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
        let RingGeometry { slots, slot_rows, row_width } = self.ring.geometry;
        let SlotRef { slot, generation, rows: held } = published;
        let invalid = |what, limit, given| RingError::Reference { slot, generation, what, limit, given };
        if slot >= slots {
            return Err(invalid("slot index", u64::from(slots) - 1, slot.into()));
        }
        if held > slot_rows {
            return Err(invalid("rows", slot_rows.into(), held.into()));
        }
        let end = u64::from(first) + u64::from(rows);
        if end > u64::from(held) {
            return Err(invalid("last row wanted", held.into(), end));
        }
        let width = row_width as usize;
        let values = first as usize * width..end as usize * width;
        let found = self.ring.slot(slot).read(generation, values, out);
        match found {
            Ok(stored) if stored == held => Ok(()),
            Ok(stored) => {
                out.clear();
                Err(invalid("rows", stored.into(), held.into()))
            }
            Err(found) => {
                out.clear();
                Err(RingError::Stale { slot, wanted: generation, found })
            }
        }
    }
}

#[cfg(test)]
mod tests;
