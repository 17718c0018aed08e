//! Rows in device memory, and blocks of device memory that keep some.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use super::{DeviceBuffer, Stream};
use crate::region::within;
use crate::{RegionError, align_up};

/// Rows that lie one after the other in device memory.
#[derive(Clone, Copy, Debug)]
pub struct DeviceRows<'a> {
    ptr: u64,
    rows: u32,
    row_bytes: u64,
    memory: PhantomData<&'a [u8]>,
}

impl<'a> DeviceRows<'a> {
    /// `rows` rows of `row_bytes` bytes from the device address `ptr` on.
    ///
    /// # Safety
    /// For as long as the value lives the rows must be readable device memory that nobody writes. What is put into a stream
    /// with them sees them as they are when the stream gets there: they must be complete by then, and be freed or written
    /// again in that stream's order only.
    pub unsafe fn new(ptr: u64, rows: u32, row_bytes: u64) -> Self {
        Self { ptr, rows, row_bytes, memory: PhantomData }
    }

    /// Address of the first row.
    pub fn ptr(&self) -> u64 {
        self.ptr
    }

    /// Number of rows.
    pub fn rows(&self) -> u32 {
        self.rows
    }

    /// Bytes of a row.
    pub fn row_bytes(&self) -> u64 {
        self.row_bytes
    }

    /// Bytes of all rows.
    pub fn byte_len(&self) -> u64 {
        u64::from(self.rows) * self.row_bytes
    }

    /// The rows `range`, as far as there are any.
    pub fn slice(&self, range: Range<u32>) -> DeviceRows<'a> {
        let start = range.start.min(self.rows);
        let rows = range.end.min(self.rows).saturating_sub(start);
        DeviceRows { ptr: self.ptr + u64::from(start) * self.row_bytes, rows, ..*self }
    }
}

/// A part of a [`DeviceBuffer`] that nobody else uses.
#[derive(Debug)]
pub struct DeviceBlock {
    memory: Arc<DeviceBuffer>,
    // Invariant: `at..at + len` lies in `memory` and in no other block of it.
    at: u64,
    len: u64,
}

impl DeviceBlock {
    /// Cuts `memory` into blocks of `len` bytes, each at an aligned address. What is left over is not used.
    pub fn cut(memory: DeviceBuffer, len: u64) -> Vec<Self> {
        let Some(step) = align_up(len.max(1)) else { return Vec::new() };
        let count = memory.span().len / step;
        let memory = Arc::new(memory);
        (0..count).map(|i| Self { memory: Arc::clone(&memory), at: i * step, len }).collect()
    }

    /// Bytes of device memory for `count` blocks of `len` bytes.
    pub fn bytes_of(count: u64, len: u64) -> u64 {
        align_up(len.max(1)).map_or(u64::MAX, |step| step.saturating_mul(count))
    }

    /// Begins to copy `rows` behind the first `skip` bytes, in the order of `stream`.
    ///
    /// # Errors
    /// [`RegionError::Bounds`], or the driver's answer.
    pub fn begin_write(
        &mut self,
        skip: u64,
        rows: DeviceRows<'_>,
        stream: &Stream,
    ) -> Result<(), RegionError> {
        let to = within(self.len, skip, rows.byte_len())?;
        // SAFETY: the range is this block's alone and borrowed exclusively; the rows keep the promise of `DeviceRows`.
        unsafe { stream.begin_copy(self.ptr() + to.start, rows.ptr(), rows.byte_len()) }?;
        Ok(())
    }

    /// `rows` rows of `row_bytes` bytes behind the first `skip` bytes. What was begun to be written is there once the stream
    /// that it was put into gets to what reads it.
    ///
    /// # Errors
    /// [`RegionError::Bounds`].
    pub fn rows(&self, skip: u64, rows: u32, row_bytes: u64) -> Result<DeviceRows<'_>, RegionError> {
        let from = within(self.len, skip, u64::from(rows).saturating_mul(row_bytes))?;
        // SAFETY: within this block, which is written through `&mut self` alone and freed after all work of the device.
        Ok(unsafe { DeviceRows::new(self.ptr() + from.start, rows, row_bytes) })
    }

    fn ptr(&self) -> u64 {
        self.memory.span().ptr + self.at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slice_never_leaves_its_rows() {
        // SAFETY: nothing reads them.
        let rows = unsafe { DeviceRows::new(1000, 5, 10) };
        let part = rows.slice(1..3);
        assert_eq!((part.ptr(), part.rows(), part.byte_len()), (1010, 2, 20));
        let past = part.slice(1..9);
        assert_eq!((past.ptr(), past.rows()), (1020, 1));
        assert_eq!(rows.slice(7..9).rows(), 0);
    }
}
