//! Paged rows of cached keys, and which of them each row of a forward pass attends to.

use std::ops::Range;

use eyrie_region::Resident;

use crate::error::{Result, limit, shape};

const OP: &str = "paged rows";

/// A pool of pages of float32 rows; `slot = page * page_rows + offset`.
#[derive(Debug)]
pub struct PagedRows {
    page_rows: usize,
    width: usize,
    slots: usize,
    values: Resident,
}

impl PagedRows {
    /// A pool of `pages * page_rows` zero rows of `width` numbers.
    ///
    /// # Errors
    /// A zero size, more slots or bytes than can be addressed, or more memory than there is.
    pub fn new(pages: usize, page_rows: usize, width: usize) -> Result<PagedRows> {
        for (name, value) in [("pages", pages), ("page_rows", page_rows), ("width", width)] {
            if value == 0 {
                return Err(limit(OP, name, value, "at least 1"));
            }
        }
        let slots = pages.checked_mul(page_rows).filter(|&slots| slots <= u32::MAX as usize);
        let values = slots.and_then(|s| s.checked_mul(width)).filter(|&v| v <= isize::MAX as usize / 4);
        let (Some(slots), Some(values)) = (slots, values) else {
            let got = format!("{pages} x {page_rows} x {width}");
            return Err(limit(OP, "pages x page_rows x width", got, "2^32 slots, addressable bytes"));
        };
        Ok(PagedRows { page_rows, width, slots, values: Resident::zeroed("cache", values)? })
    }

    /// Rows of one page.
    pub fn page_rows(&self) -> usize {
        self.page_rows
    }

    /// Numbers of one row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Rows of the pool.
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// The row at `slot`.
    ///
    /// # Errors
    /// The slot is outside the pool.
    pub fn row(&self, slot: u32) -> Result<&[f32]> {
        Ok(&self.values[self.range(slot)?])
    }

    /// Replaces the row at `slot`.
    ///
    /// # Errors
    /// The slot is outside the pool or `row` has another width.
    pub fn write(&mut self, slot: u32, row: &[f32]) -> Result<()> {
        if row.len() != self.width {
            return Err(shape(OP, "row", &[row.len()], format!("[{}]", self.width)));
        }
        self.row_mut(slot)?.copy_from_slice(row);
        Ok(())
    }

    /// Copies the row at `from` over the row at `to` (moving an accepted path together).
    ///
    /// # Errors
    /// A slot is outside the pool.
    pub fn copy(&mut self, from: u32, to: u32) -> Result<()> {
        let (from, to) = (self.range(from)?, self.range(to)?);
        self.values.copy_within(from, to.start);
        Ok(())
    }

    pub(crate) fn row_mut(&mut self, slot: u32) -> Result<&mut [f32]> {
        let range = self.range(slot)?;
        Ok(&mut self.values[range])
    }

    pub(crate) fn values(&self) -> &[f32] {
        &self.values
    }

    fn range(&self, slot: u32) -> Result<Range<usize>> {
        let slot = slot as usize;
        if slot >= self.slots {
            return Err(limit(OP, "slot", slot, format!("below {} slots", self.slots)));
        }
        Ok(slot * self.width..(slot + 1) * self.width)
    }
}

/// One row of a forward pass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowRef {
    /// Position of its token.
    pub position: u32,
    /// Slot where its own key is written before attention.
    pub slot: u32,
    /// Its sequence's pages: a range of [`Ragged::tables`].
    pub table: Range<u32>,
    /// Keys 0..prefix are read through the pages.
    pub prefix: u32,
    /// Further keys: a range of [`Ragged::tails`].
    pub tail: Range<u32>,
}

/// The keys of each row of a forward pass over several sequences.
///
/// A row attends to logical positions `0..prefix` of its pages, then to its tail slots (its ancestors by
/// depth, itself last). A row of a prompt or chain has `prefix = position + 1` and an empty tail. Both
/// spellings of one key sequence give bit-equal results.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ragged {
    /// The rows, in the order of the tensors' rows.
    pub rows: Vec<RowRef>,
    /// Page ids, sequence by sequence.
    pub tables: Vec<u32>,
    /// Slots of tails, row by row.
    pub tails: Vec<u32>,
    /// Rows of one page.
    pub page_rows: usize,
}

impl Ragged {
    /// Checks every range and slot against the cache, so that nothing is written before all is known good.
    pub(crate) fn check(&self, op: &'static str, rows: usize, cache: &PagedRows) -> Result<()> {
        if self.rows.len() != rows {
            return Err(shape(op, "rows", &[self.rows.len()], format!("{rows} rows as in the tensors")));
        }
        if self.page_rows != cache.page_rows {
            let want = format!("the cache's {}", cache.page_rows);
            return Err(limit(op, "page_rows", self.page_rows, want));
        }
        self.rows.iter().try_for_each(|row| self.check_row(op, row, cache))
    }

    fn check_row(&self, op: &'static str, row: &RowRef, cache: &PagedRows) -> Result<()> {
        let (Some(table), Some(tail)) = (self.table(row), self.tail(row)) else {
            let got = format!("table {:?} tail {:?}", row.table, row.tail);
            let want = format!("{} table and {} tail entries", self.tables.len(), self.tails.len());
            return Err(limit(op, "row range", got, want));
        };
        let room = table.len() * self.page_rows;
        if row.prefix as usize > room {
            return Err(limit(op, "prefix", row.prefix, format!("{room} rows of its pages")));
        }
        if row.prefix == 0 && tail.is_empty() {
            return Err(limit(op, "number of keys", 0, "at least 1"));
        }
        let pages = cache.slots / cache.page_rows;
        if let Some(page) = table.iter().find(|&&page| page as usize >= pages) {
            return Err(limit(op, "page", page, format!("below {pages} pages")));
        }
        if let Some(slot) = tail.iter().chain([&row.slot]).find(|&&slot| slot as usize >= cache.slots) {
            return Err(limit(op, "slot", slot, format!("below {} slots", cache.slots)));
        }
        Ok(())
    }

    /// Number of keys of a row.
    pub(crate) fn keys(&self, row: usize) -> usize {
        let row = &self.rows[row];
        row.prefix as usize + row.tail.len()
    }

    /// The slots of a row's keys in logical order.
    pub(crate) fn slots(&self, row: usize, out: &mut Vec<u32>) {
        let row = &self.rows[row];
        out.clear();
        let mut left = row.prefix as usize;
        for &page in self.table(row).unwrap_or_default() {
            let first = page * self.page_rows as u32;
            let count = left.min(self.page_rows);
            out.extend(first..first + count as u32);
            left -= count;
        }
        out.extend_from_slice(self.tail(row).unwrap_or_default());
    }

    fn table(&self, row: &RowRef) -> Option<&[u32]> {
        self.tables.get(row.table.start as usize..row.table.end as usize)
    }

    fn tail(&self, row: &RowRef) -> Option<&[u32]> {
        self.tails.get(row.tail.start as usize..row.tail.end as usize)
    }
}
