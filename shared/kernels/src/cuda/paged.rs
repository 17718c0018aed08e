//! Cached rows on the device, and which of them the rows of a forward pass see.

use std::collections::HashSet;

use half::bf16;

use super::attention::CHUNK_KEYS;
use super::{Activations, Buffer, Cuda, Grid, THREADS};
use crate::error::Result;
use crate::rows::Ragged;

/// Rows of the backend's activation type; slots have been checked against the pool's size.
#[derive(Debug)]
pub(crate) struct PagedRows {
    cuda: Cuda,
    width: usize,
    memory: Buffer<u8>,
}

impl PagedRows {
    pub(crate) fn zeroed(cuda: &Cuda, values: usize, width: usize) -> Result<PagedRows> {
        let memory = cuda.zeros("cache", values * cuda.numbers().size())?;
        Ok(PagedRows { cuda: cuda.clone(), width, memory })
    }

    /// Numbers of a row.
    pub(super) fn width(&self) -> usize {
        self.width
    }

    pub(super) fn pointer(&self) -> u64 {
        self.memory.pointer()
    }

    pub(crate) fn row_bytes(&self) -> usize {
        self.width * self.cuda.numbers().size()
    }

    fn address(&self, slot: u32) -> u64 {
        self.pointer() + (slot as usize * self.row_bytes()) as u64
    }

    pub(crate) fn row(&self, slot: u32) -> Result<Vec<f32>> {
        let from = self.address(slot);
        match self.cuda.numbers() {
            Activations::F32 => self.cuda.read_at("cache", from, self.width),
            Activations::Bf16 => {
                let row: Vec<bf16> = self.cuda.read_at("cache", from, self.width)?;
                Ok(row.into_iter().map(bf16::to_f32).collect())
            }
        }
    }

    /// `row` has been checked to be as wide.
    pub(crate) fn write(&mut self, slot: u32, row: &[f32]) -> Result<()> {
        let to = self.address(slot);
        match self.cuda.numbers() {
            Activations::F32 => self.cuda.write_at("cache", row, to),
            Activations::Bf16 => {
                let row: Vec<bf16> = row.iter().copied().map(bf16::from_f32).collect();
                self.cuda.write_at("cache", &row, to)
            }
        }
    }

    /// Makes the moves as if one after the other, in one launch.
    pub(crate) fn copy(&mut self, moves: &[(u32, u32)]) -> Result<()> {
        if moves.is_empty() {
            return Ok(());
        }
        let runs: Vec<u32> = match independent(moves) {
            true => (0..=moves.len() as u32).collect(),
            false => vec![0, moves.len() as u32],
        };
        let (name, words) = match self.row_bytes() % 4 {
            0 => ("move_rows_4", self.row_bytes() / 4),
            _ => ("move_rows_2", self.row_bytes() / 2),
        };
        let grid = Grid::new(runs.len() - 1, words.div_ceil(THREADS), 1);
        let moves: Vec<[u32; 2]> = moves.iter().map(|&(from, to)| [from, to]).collect();
        let (moves, runs) = (self.cuda.upload("moves", &moves)?, self.cuda.upload("moves", &runs)?);
        // SAFETY: every move is between rows of the cache; runs do not touch each other's rows.
        unsafe {
            self.cuda.launch(name, grid, (self.pointer(), moves.pointer(), runs.pointer(), words as u32))
        }
    }
}

/// Whether the order of the moves does not matter: no row is written twice, or both read and written.
fn independent(moves: &[(u32, u32)]) -> bool {
    let mut written = HashSet::with_capacity(moves.len());
    moves.iter().all(|&(_, to)| written.insert(to)) && !moves.iter().any(|(from, _)| written.contains(from))
}

/// The rows of a forward pass and what they see, on the device.
#[derive(Debug)]
pub(crate) struct Rows {
    /// As `RowRef` in paged.cuh.
    rows: Buffer<[u32; 6]>,
    tables: Buffer<u32>,
    tails: Buffer<u32>,
    /// Keys of each row.
    keys: Vec<usize>,
    page_rows: usize,
    /// Highest position.
    last: u32,
}

impl Rows {
    /// `ragged` has not been checked against a cache yet: only launches that come after the check read it.
    pub(crate) fn new(cuda: &Cuda, ragged: &Ragged) -> Result<Rows> {
        let rows: Vec<[u32; 6]> = ragged
            .rows
            .iter()
            .map(|r| [r.position, r.slot, r.table.start, r.prefix, r.tail.start, r.tail.len() as u32])
            .collect();
        Ok(Rows {
            rows: cuda.upload("rows", &rows)?,
            tables: cuda.upload("page tables", &ragged.tables)?,
            tails: cuda.upload("tails", &ragged.tails)?,
            keys: (0..rows.len()).map(|row| ragged.keys(row)).collect(),
            page_rows: ragged.page_rows,
            last: rows.iter().map(|row| row[0]).max().unwrap_or(0),
        })
    }

    pub(super) fn count(&self) -> usize {
        self.keys.len()
    }

    pub(super) fn rows(&self) -> u64 {
        self.rows.pointer()
    }

    pub(super) fn tables(&self) -> u64 {
        self.tables.pointer()
    }

    pub(super) fn tails(&self) -> u64 {
        self.tails.pointer()
    }

    pub(super) fn page_rows(&self) -> usize {
        self.page_rows
    }

    /// Highest position.
    pub(super) fn last(&self) -> u32 {
        self.last
    }

    /// Chunks of the row with the most keys among `rows`.
    pub(super) fn chunks(&self, rows: std::ops::Range<usize>) -> usize {
        self.keys[rows].iter().max().map_or(0, |keys| keys.div_ceil(CHUNK_KEYS))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moves_that_read_what_others_write_keep_their_order() {
        assert!(independent(&[(5, 1), (6, 2), (7, 3)]));
        assert!(independent(&[(5, 1), (5, 2)]));
        assert!(!independent(&[(5, 1), (6, 5)]));
        assert!(!independent(&[(5, 1), (6, 1)]));
        assert!(!independent(&[(1, 1)]));
    }
}
