//! The host memory of a ring: header, stamps and, unless they lie on a device, the rows.

use std::os::fd::OwnedFd;

use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::SealFlags;

use super::atomic::{AtomicU32, AtomicU64, Ordering};
use super::seqlock::Stamps;
use super::{RingError, RingGeometry, SlotRef};
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
const AT_VALUE_BYTES: usize = 32;

// Byte offsets within a slot; the second stamp follows the padded payload.
const AT_GENERATION: usize = 0;
const AT_ROWS: usize = 8;
const AT_PAYLOAD: usize = ALIGN;

/// What lies where in a block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    geometry: RingGeometry,
    /// Bytes of a value on the device that the rows lie on; 0 where they lie between the stamps.
    value_bytes: u32,
    /// From a slot's start to its second stamp.
    second_stamp: usize,
    /// Bytes of the whole block.
    pub(super) len: u64,
}

impl Layout {
    /// Of a ring with float32 rows in it.
    pub(super) fn with_rows(geometry: RingGeometry) -> Result<Self, RingError> {
        let row_bytes = u64::from(geometry.row_width).checked_mul(size_of::<f32>() as u64);
        let payload = row_bytes.and_then(|row| row.checked_mul(geometry.slot_rows.into()));
        payload.and_then(|bytes| Self::new(geometry, 0, bytes)).ok_or_else(|| geometry.refused())
    }

    /// Of a ring whose rows lie on a device.
    pub(super) fn of_stamps(geometry: RingGeometry, value_bytes: u32) -> Result<Self, RingError> {
        Self::new(geometry, value_bytes, 0).ok_or_else(|| geometry.refused())
    }

    fn new(geometry: RingGeometry, value_bytes: u32, payload: u64) -> Option<Self> {
        let RingGeometry { slots, slot_rows, row_width } = geometry;
        if slots == 0 || slot_rows == 0 || row_width == 0 {
            return None;
        }
        let second_stamp = align_up(payload)?.checked_add(AT_PAYLOAD as u64)?;
        let slot = second_stamp.checked_add(ALIGN as u64)?;
        let len = slot.checked_mul(u64::from(slots))?.checked_add(HEADER_BYTES)?;
        isize::try_from(len).ok()?;
        Some(Self { geometry, value_bytes, second_stamp: second_stamp as usize, len })
    }

    pub(super) fn slot_bytes(&self) -> usize {
        self.second_stamp + ALIGN
    }

    /// The header's words of 32 bits.
    fn header(&self) -> [(&'static str, usize, u32); 5] {
        let RingGeometry { slots, slot_rows, row_width } = self.geometry;
        [
            ("version", AT_VERSION, VERSION),
            ("slots", AT_SLOTS, slots),
            ("slot_rows", AT_SLOT_ROWS, slot_rows),
            ("row_width", AT_ROW_WIDTH, row_width),
            ("value_bytes", AT_VALUE_BYTES, self.value_bytes),
        ]
    }
}

/// A mapping of a ring whose words are only ever touched as atomics.
#[derive(Debug)]
pub(super) struct Block {
    map: MmapRaw,
    // Invariant: `map` is exactly `layout.len` bytes long.
    layout: Layout,
}

impl Block {
    /// A memfd that only this mapping can ever write, with its header.
    pub(super) fn create(name: &str, layout: Layout, epoch: Epoch) -> Result<(OwnedFd, Self), RingError> {
        let failed = |action| {
            move |source| RingError::Region(RegionError::Memfd { name: name.to_owned(), action, source })
        };
        let fd = memfd::create(name, layout.len)?;
        let map = MmapOptions::new().populate().map_raw(&fd).map_err(failed("map it"))?;
        memfd::seal(&fd, SealFlags::FUTURE_WRITE).map_err(|e| failed("seal it")(e.into()))?;
        let block = Self { map, layout };
        block.u64(AT_MAGIC).store(MAGIC, Ordering::Relaxed);
        block.u64(AT_EPOCH).store(epoch.get(), Ordering::Relaxed);
        for (_, at, value) in layout.header() {
            block.u32(at).store(value, Ordering::Relaxed);
        }
        Ok((fd, block))
    }

    /// Maps the ring behind `fd` read-only and checks seals, length and header. The descriptor is closed.
    pub(super) fn open(fd: OwnedFd, layout: Layout, epoch: Epoch) -> Result<Self, RingError> {
        // Its writer goes on writing; nobody else may begin to.
        memfd::check_import(&fd, layout.len, SealFlags::FUTURE_WRITE)?;
        let map = MmapOptions::new().populate().map_raw_read_only(&fd).map_err(|source| {
            RingError::Region(RegionError::Memfd { name: "ring".to_owned(), action: "map it", source })
        })?;
        let block = Self { map, layout };
        let equal = |field, expected: u64, found: u64| {
            if expected == found { Ok(()) } else { Err(RingError::Header { field, expected, found }) }
        };
        equal("magic", MAGIC, block.u64(AT_MAGIC).load(Ordering::Relaxed))?;
        for (field, at, expected) in layout.header() {
            equal(field, expected.into(), block.u32(at).load(Ordering::Relaxed).into())?;
        }
        let found = block.u64(AT_EPOCH).load(Ordering::Relaxed);
        if found != epoch.get() {
            return Err(RingError::StaleEpoch { expected: epoch, found });
        }
        Ok(block)
    }

    pub(super) fn geometry(&self) -> RingGeometry {
        self.layout.geometry
    }

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

    fn slot(&self, slot: u32) -> usize {
        HEADER_BYTES as usize + slot as usize * self.layout.slot_bytes()
    }

    /// `slot` must be below the geometry's.
    pub(super) fn stamps(&self, slot: u32) -> Stamps<'_> {
        let start = self.slot(slot);
        Stamps {
            before: self.u64(start + AT_GENERATION),
            rows: self.u32(start + AT_ROWS),
            after: self.u64(start + self.layout.second_stamp),
        }
    }

    /// The rows between a slot's stamps; none where they lie on a device. `slot` must be below the geometry's.
    pub(super) fn payload(&self, slot: u32) -> &[AtomicU32] {
        let values = if self.layout.value_bytes == 0 { self.layout.geometry.slot_values() } else { 0 };
        self.u32s(self.slot(slot) + AT_PAYLOAD, values)
    }
}

/// Which slot is written next.
#[derive(Debug, Default)]
pub(super) struct Cursor {
    published: u64,
}

impl Cursor {
    /// The oldest slot, under a stamp that it never had.
    pub(super) fn next(&mut self, geometry: RingGeometry, rows: u32) -> SlotRef {
        let slot = (self.published % u64::from(geometry.slots)) as u32;
        self.published += 1;
        SlotRef { slot, generation: 2 * self.published, rows }
    }
}
