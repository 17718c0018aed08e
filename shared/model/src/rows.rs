//! Ragged rows of many sequences, laid out once for every layer: which slot a row writes, which keys it sees.

use std::ops::Range;

use candle_core::Tensor;
use eyrie_kernels::{Backend, Ragged, RowRef, Rows};

use crate::error::{ModelError, Result};
use crate::pages::SeqTable;

/// Which rows of a sequence get logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogitRows {
    /// None: a prompt chunk that is not the last.
    None,
    /// The last row only: the end of a prompt.
    Last,
    /// Every row: verification.
    All,
}

/// The rows of one sequence in a target forward.
#[derive(Debug, Clone, Copy)]
pub struct SeqRows<'a> {
    /// The sequence's pages, reserved up to `base_len + tokens.len()`.
    pub table: &'a SeqTable,
    /// Slots that hold the committed prefix; row `i` writes slot `base_len + i`.
    pub base_len: u32,
    /// A token a row, at least one.
    pub tokens: &'a [u32],
    /// `None`: a chain or prompt, row `i` at position `base_len + i`. Otherwise a tree whose node 0 is the first
    /// row: `parents[i]` is the node of row `i + 1`'s parent, smaller than `i + 1`; a row at depth `d` has position
    /// `base_len + d` and sees the prefix, its ancestors and itself.
    pub parents: Option<&'a [u16]>,
    /// Which rows get logits.
    pub logits: LogitRows,
}

/// One sequence's rows, reduced to what laying them out needs.
pub(crate) struct Block<'a> {
    pub(crate) table: &'a SeqTable,
    /// Committed slots every row sees.
    pub(crate) committed: u32,
    /// Slot of the first row; between `committed` and it lie earlier nodes of the same tree.
    pub(crate) first_slot: u32,
    pub(crate) rows: usize,
    /// Absolute position of slot 0.
    pub(crate) origin: u32,
    pub(crate) shape: Shape<'a>,
    pub(crate) logits: LogitRows,
}

/// How the rows of a block hang together.
pub(crate) enum Shape<'a> {
    /// Every row sees all slots before it.
    Chain,
    /// Slot `committed + i` holds tree entry `i`; its parent is an earlier entry or, `None`, the committed prefix.
    Tree(&'a dyn Fn(usize) -> Option<usize>),
}

/// The layout of a batch: one set of [`Rows`] for every layer, and where logits and rows of each sequence lie.
pub(crate) struct RowPlan {
    pub(crate) layout: Rows,
    pub(crate) rows: Vec<Range<usize>>,
    pub(crate) logit_rows: Vec<Range<usize>>,
    /// Indices of the rows that get logits, or `None` when all do.
    selected: Option<Vec<u32>>,
}

impl RowPlan {
    pub(crate) fn build(backend: &Backend, blocks: &[Block<'_>], page_rows: usize) -> Result<Self> {
        let mut ragged = Ragged { page_rows, ..Ragged::default() };
        let (mut rows, mut logit_rows, mut selected) = (Vec::new(), Vec::new(), Vec::new());
        for (sequence, block) in blocks.iter().enumerate() {
            let refuse = |reason: String| ModelError::Rows { sequence, reason };
            let first = ragged.rows.len();
            block.lay_out(&mut ragged, page_rows).map_err(refuse)?;
            rows.push(first..ragged.rows.len());
            let wanted = match block.logits {
                LogitRows::None => ragged.rows.len()..ragged.rows.len(),
                LogitRows::Last => ragged.rows.len() - 1..ragged.rows.len(),
                LogitRows::All => first..ragged.rows.len(),
            };
            let start = selected.len();
            selected.extend(wanted.map(|row| row as u32));
            logit_rows.push(start..selected.len());
        }
        let selected = (selected.len() < ragged.rows.len()).then_some(selected);
        Ok(Self { layout: Rows::new(backend, ragged)?, rows, logit_rows, selected })
    }

    /// Whether any row gets logits.
    pub(crate) fn wants_logits(&self) -> bool {
        self.selected.as_ref().is_none_or(|ids| !ids.is_empty())
    }

    /// The rows of `hidden` that get logits; at least one must want them.
    pub(crate) fn select(&self, backend: &Backend, hidden: &Tensor) -> Result<Tensor> {
        match &self.selected {
            None => Ok(hidden.clone()),
            Some(rows) => Ok(backend.select(hidden, rows)?),
        }
    }
}

impl Block<'_> {
    fn lay_out(&self, ragged: &mut Ragged, page_rows: usize) -> Result<(), String> {
        self.check(page_rows)?;
        let tables = ragged.tables.len() as u32..(ragged.tables.len() + self.table.pages().len()) as u32;
        ragged.tables.extend_from_slice(self.table.pages());
        for row in 0..self.rows {
            let logical = self.first_slot + row as u32;
            let slot = self.pool_slot(logical, page_rows)?;
            let table = tables.clone();
            let tail_start = ragged.tails.len() as u32;
            let (position, prefix) = match &self.shape {
                Shape::Chain => (self.origin + logical, logical + 1),
                Shape::Tree(parent) => {
                    let entry = (logical - self.committed) as usize;
                    let depth = self.push_ancestors(ragged, entry, parent, page_rows)?;
                    (self.origin + self.committed + depth - 1, self.committed)
                }
            };
            let tail = tail_start..ragged.tails.len() as u32;
            ragged.rows.push(RowRef { position, slot, table, prefix, tail });
        }
        Ok(())
    }

    /// Appends the slots from the oldest ancestor down to `entry` itself; returns how many.
    fn push_ancestors(
        &self,
        ragged: &mut Ragged,
        entry: usize,
        parent: &dyn Fn(usize) -> Option<usize>,
        page_rows: usize,
    ) -> Result<u32, String> {
        let start = ragged.tails.len();
        let mut next = Some(entry);
        while let Some(node) = next {
            ragged.tails.push(self.pool_slot(self.committed + node as u32, page_rows)?);
            next = parent(node);
            if let Some(parent) = next.filter(|&parent| parent >= node) {
                return Err(format!("parent of node {node} must come before it, got {parent}"));
            }
        }
        ragged.tails[start..].reverse();
        Ok((ragged.tails.len() - start) as u32)
    }

    fn pool_slot(&self, slot: u32, page_rows: usize) -> Result<u32, String> {
        self.table.pool_slot(slot, page_rows).ok_or_else(|| format!("slot {slot} is not reserved"))
    }

    fn check(&self, page_rows: usize) -> Result<(), String> {
        if self.rows == 0 {
            return Err("at least one token is needed, got 0".to_owned());
        }
        let end = self.first_slot as usize + self.rows;
        let capacity = self.table.capacity(page_rows);
        if end > capacity {
            return Err(format!("{end} slots needed, {capacity} reserved"));
        }
        if u32::try_from(end).ok().and_then(|end| self.origin.checked_add(end)).is_none() {
            return Err(format!(
                "positions must stay below {}, got origin {} and {end} slots",
                u32::MAX,
                self.origin
            ));
        }
        if self.first_slot < self.committed {
            return Err(format!("first slot {} lies in the {} committed", self.first_slot, self.committed));
        }
        Ok(())
    }
}

/// Checks that `parents` names a parent for each of `rows - 1` later rows.
pub(crate) fn check_parents(sequence: usize, parents: &[u16], rows: usize) -> Result<()> {
    let refuse = |reason: String| Err(ModelError::Rows { sequence, reason });
    if parents.len() + 1 != rows {
        let wanted = rows.saturating_sub(1);
        return refuse(format!("{rows} rows need {wanted} parents, got {}", parents.len()));
    }
    match parents.iter().enumerate().find(|&(i, &parent)| usize::from(parent) > i) {
        Some((i, parent)) => refuse(format!("parent of row {} must be at most {i}, got {parent}", i + 1)),
        None => Ok(()),
    }
}
