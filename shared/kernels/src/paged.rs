//! Paged rows of cached keys.

use crate::backend::Backend;
use crate::cpu;
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::error::{Result, limit, shape};

const OP: &str = "paged rows";

/// A pool of pages of rows in the backend's activation type; `slot = page * page_rows + offset`.
#[derive(Debug)]
pub struct PagedRows {
    page_rows: usize,
    width: usize,
    slots: usize,
    pub(crate) pool: Pool,
}

#[derive(Debug)]
pub(crate) enum Pool {
    Cpu(cpu::PagedRows),
    #[cfg(feature = "cuda")]
    Cuda(cuda::PagedRows),
}

impl PagedRows {
    /// A pool of `pages * page_rows` zero rows of `width` numbers.
    ///
    /// # Errors
    /// A zero size, more slots or bytes than can be addressed, or more memory than there is.
    pub fn new(backend: &Backend, pages: usize, page_rows: usize, width: usize) -> Result<PagedRows> {
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
        let pool = match backend {
            Backend::Cpu(_) => Pool::Cpu(cpu::PagedRows::zeroed(values, width)?),
            #[cfg(feature = "cuda")]
            Backend::Cuda(cuda) => Pool::Cuda(cuda::PagedRows::zeroed(cuda, values, width)?),
        };
        Ok(PagedRows { page_rows, width, slots, pool })
    }

    /// Rows of one page.
    pub fn page_rows(&self) -> usize {
        self.page_rows
    }

    /// Numbers of one row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Bytes of one row.
    pub fn row_bytes(&self) -> usize {
        match &self.pool {
            Pool::Cpu(pool) => pool.row_bytes(),
            #[cfg(feature = "cuda")]
            Pool::Cuda(pool) => pool.row_bytes(),
        }
    }

    /// Rows of the pool.
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// A copy of the row at `slot`.
    ///
    /// # Errors
    /// The slot is outside the pool.
    pub fn row(&self, slot: u32) -> Result<Vec<f32>> {
        self.check(slot)?;
        match &self.pool {
            Pool::Cpu(pool) => Ok(pool.row(slot).to_vec()),
            #[cfg(feature = "cuda")]
            Pool::Cuda(pool) => pool.row(slot),
        }
    }

    /// Replaces the row at `slot`.
    ///
    /// # Errors
    /// The slot is outside the pool or `row` has another width.
    pub fn write(&mut self, slot: u32, row: &[f32]) -> Result<()> {
        self.check(slot)?;
        if row.len() != self.width {
            return Err(shape(OP, "row", &[row.len()], format!("[{}]", self.width)));
        }
        match &mut self.pool {
            Pool::Cpu(pool) => pool.row_mut(slot).copy_from_slice(row),
            #[cfg(feature = "cuda")]
            Pool::Cuda(pool) => pool.write(slot, row)?,
        }
        Ok(())
    }

    /// Copies rows from slot to slot, one after the other in the order of `moves` (from, to): moving an accepted path
    /// together, or a page to be written on.
    ///
    /// # Errors
    /// A slot is outside the pool; nothing is copied then.
    pub fn copy(&mut self, moves: &[(u32, u32)]) -> Result<()> {
        moves.iter().try_for_each(|&(from, to)| self.check(from).and_then(|()| self.check(to)))?;
        match &mut self.pool {
            Pool::Cpu(pool) => moves.iter().for_each(|&(from, to)| pool.copy(from, to)),
            #[cfg(feature = "cuda")]
            Pool::Cuda(pool) => pool.copy(moves)?,
        }
        Ok(())
    }

    fn check(&self, slot: u32) -> Result<()> {
        match (slot as usize) < self.slots {
            true => Ok(()),
            false => Err(limit(OP, "slot", slot, format!("below {} slots", self.slots))),
        }
    }
}
