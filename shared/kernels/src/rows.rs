//! Which keys each row of a forward pass attends to.

use std::ops::Range;

use crate::backend::Backend;
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::error::{Result, limit, shape};
use crate::paged::PagedRows;

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
        if self.page_rows != cache.page_rows() {
            let want = format!("the cache's {}", cache.page_rows());
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
        let pages = cache.slots() / cache.page_rows();
        if let Some(page) = table.iter().find(|&&page| page as usize >= pages) {
            return Err(limit(op, "page", page, format!("below {pages} pages")));
        }
        if let Some(slot) = tail.iter().chain([&row.slot]).find(|&&slot| slot as usize >= cache.slots()) {
            return Err(limit(op, "slot", slot, format!("below {} slots", cache.slots())));
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

/// [`Ragged`] rows laid out for a backend, once for all layers of a forward pass.
#[derive(Debug)]
pub struct Rows {
    ragged: Ragged,
    #[cfg(feature = "cuda")]
    device: Option<cuda::Rows>,
}

impl Rows {
    /// Brings `ragged` to where `backend` computes.
    ///
    /// # Errors
    /// Memory that cannot be had.
    #[cfg_attr(
        not(feature = "cuda"),
        expect(unused_variables, reason = "the CPU reads the rows where they are")
    )]
    pub fn new(backend: &Backend, ragged: Ragged) -> Result<Rows> {
        #[cfg(feature = "cuda")]
        let device = match backend {
            Backend::Cpu(_) => None,
            Backend::Cuda(cuda) => Some(cuda::Rows::new(cuda, &ragged)?),
        };
        Ok(Rows {
            ragged,
            #[cfg(feature = "cuda")]
            device,
        })
    }

    /// The rows as they were given.
    pub fn ragged(&self) -> &Ragged {
        &self.ragged
    }

    /// The rows on the GPU.
    #[cfg(feature = "cuda")]
    pub(crate) fn device(&self) -> Result<&cuda::Rows> {
        self.device.as_ref().ok_or(crate::KernelError::Mixed { op: "rows" })
    }
}
