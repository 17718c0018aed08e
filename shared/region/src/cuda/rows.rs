//! Rows in device memory, and blocks of device memory that keep some.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use super::{DeviceBuffer, Stream, StreamId};
use crate::region::within;
use crate::{RegionError, align_up};

/// Rows that lie one after the other in device memory.
#[derive(Clone, Copy, Debug)]
pub struct DeviceRows<'a> {
    ptr: u64,
    rows: u32,
    row_bytes: u64,
    order: StreamId,
    memory: PhantomData<&'a [u8]>,
}

impl<'a> DeviceRows<'a> {
    /// `rows` rows of `row_bytes` bytes from the device address `ptr` on.
    ///
    /// # Safety
    /// The rows must be device memory, and be complete, for whatever is put into the stream `order` while the value lives:
    /// they are written and freed in that stream's order, or not before it is idle.
    pub unsafe fn new(ptr: u64, rows: u32, row_bytes: u64, order: StreamId) -> Self {
        Self { ptr, rows, row_bytes, order, memory: PhantomData }
    }

    /// The stream in whose order the rows are there.
    pub fn order(&self) -> StreamId {
        self.order
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

/// A part of a [`DeviceBuffer`] that nobody else uses, written and read in the order of one stream.
#[derive(Debug)]
pub struct DeviceBlock {
    memory: Arc<DeviceBuffer>,
    stream: Arc<Stream>,
    // Invariant: `at..at + len` lies in `memory` and in no other block of it.
    at: u64,
    len: u64,
}

impl DeviceBlock {
    /// Cuts `memory` into blocks of `len` bytes, each at an aligned address. What is left over is not used.
    pub fn cut(memory: DeviceBuffer, len: u64, stream: &Arc<Stream>) -> Vec<Self> {
        let Some(step) = align_up(len.max(1)) else { return Vec::new() };
        let count = memory.span().len / step;
        let memory = Arc::new(memory);
        let block = |i| Self { memory: Arc::clone(&memory), stream: Arc::clone(stream), at: i * step, len };
        (0..count).map(block).collect()
    }

    /// Bytes of device memory for `count` blocks of `len` bytes.
    pub fn bytes_of(count: u64, len: u64) -> u64 {
        align_up(len.max(1)).map_or(u64::MAX, |step| step.saturating_mul(count))
    }

    /// Begins to copy `rows` behind the first `skip` bytes.
    ///
    /// # Errors
    /// [`RegionError::Bounds`], [`CudaError::OtherStream`](super::CudaError::OtherStream), or the driver's answer.
    pub fn begin_write(&mut self, skip: u64, rows: DeviceRows<'_>) -> Result<(), RegionError> {
        let to = within(self.len, skip, rows.byte_len())?;
        self.stream.check(&rows)?;
        // SAFETY: the range is this block's alone; whatever reads or writes it is in the order of its stream, as the rows are,
        // and the buffer is freed when the device is idle.
        unsafe { self.stream.begin_copy(self.ptr() + to.start, rows.ptr(), rows.byte_len()) }?;
        Ok(())
    }

    /// `rows` rows of `row_bytes` bytes behind the first `skip` bytes, in the order of the block's stream.
    ///
    /// # Errors
    /// [`RegionError::Bounds`].
    pub fn rows(&self, skip: u64, rows: u32, row_bytes: u64) -> Result<DeviceRows<'_>, RegionError> {
        let from = within(self.len, skip, u64::from(rows).saturating_mul(row_bytes))?;
        // SAFETY: within this block, which is written in its stream's order and freed when the device is idle.
        Ok(unsafe { DeviceRows::new(self.ptr() + from.start, rows, row_bytes, self.stream.id()) })
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
        let rows = unsafe { DeviceRows::new(1000, 5, 10, StreamId::none()) };
        let part = rows.slice(1..3);
        assert_eq!((part.ptr(), part.rows(), part.byte_len()), (1010, 2, 20));
        let past = part.slice(1..9);
        assert_eq!((past.ptr(), past.rows()), (1020, 1));
        assert_eq!(rows.slice(7..9).rows(), 0);
    }
}
