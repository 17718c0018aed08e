//! Cached rows in memory of this process.

use std::ops::Range;

use eyrie_region::Resident;

use crate::error::Result;

/// Rows of float32; slots have been checked against the pool's size.
#[derive(Debug)]
pub(crate) struct PagedRows {
    width: usize,
    values: Resident,
}

impl PagedRows {
    pub(crate) fn zeroed(values: usize, width: usize) -> Result<PagedRows> {
        Ok(PagedRows { width, values: Resident::zeroed("cache", values)? })
    }

    pub(crate) fn width(&self) -> usize {
        self.width
    }

    pub(crate) fn row_bytes(&self) -> usize {
        self.width * size_of::<f32>()
    }

    pub(crate) fn values(&self) -> &[f32] {
        &self.values
    }

    pub(crate) fn row(&self, slot: u32) -> &[f32] {
        &self.values[self.range(slot)]
    }

    pub(crate) fn row_mut(&mut self, slot: u32) -> &mut [f32] {
        let range = self.range(slot);
        &mut self.values[range]
    }

    pub(crate) fn copy(&mut self, from: u32, to: u32) {
        let (from, to) = (self.range(from), self.range(to));
        self.values.copy_within(from, to.start);
    }

    fn range(&self, slot: u32) -> Range<usize> {
        slot as usize * self.width..(slot as usize + 1) * self.width
    }
}
