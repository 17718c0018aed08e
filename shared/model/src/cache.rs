//! Paged caches and the page tables that address them. A sequence's slot `s` lives in page
//! `table.pages[s / page_rows]`, so a chain's slots are contiguous by position and a cut is a length.

use eyrie_kernels::PagedRows;

use crate::error::{ModelError, Result};

/// The pages of one sequence in one cache, and how many of its slots are committed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SeqTable {
    pages: Vec<u32>,
    len: u32,
}

impl SeqTable {
    /// Page ids in slot order.
    pub fn pages(&self) -> &[u32] {
        &self.pages
    }

    /// Committed slots; rows beyond it are scratch until committed.
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Whether no slot is committed.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Slots its pages hold when a page has `page_rows`.
    pub fn capacity(&self, page_rows: usize) -> usize {
        self.pages.len() * page_rows
    }

    /// Pool slot of logical slot `slot`, if a page is reserved for it.
    pub fn pool_slot(&self, slot: u32, page_rows: usize) -> Option<u32> {
        let page = *self.pages.get(slot as usize / page_rows)?;
        Some(page * page_rows as u32 + slot % page_rows as u32)
    }

    /// Declares slots `0..len` committed; errors when they are not all reserved.
    pub fn commit(&mut self, len: u32, page_rows: usize) -> Result<()> {
        let capacity = self.capacity(page_rows);
        if len as usize > capacity {
            return Err(ModelError::Rollback(format!("length {len} is over the {capacity} reserved slots")));
        }
        self.len = len;
        Ok(())
    }
}

/// The pool has fewer free pages than a reservation needs; nothing was reserved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("out of cache pages: {needed} needed, {free} free")]
pub struct OutOfPages {
    /// Pages the reservation lacks.
    pub needed: usize,
    /// Pages free now.
    pub free: usize,
}

/// Hands the pages of one cache to sequences. Invariant: every page is free or in exactly one table.
#[derive(Debug)]
pub struct PageAllocator {
    free: Vec<u32>,
    pages: usize,
    page_rows: usize,
}

impl PageAllocator {
    /// An allocator over pages `0..pages` of `page_rows` slots.
    pub fn new(pages: usize, page_rows: usize) -> Self {
        Self { free: (0..pages as u32).rev().collect(), pages, page_rows: page_rows.max(1) }
    }

    /// Makes room for slots `0..tokens` of `table` in all; all or nothing.
    pub fn reserve(&mut self, table: &mut SeqTable, tokens: usize) -> Result<(), OutOfPages> {
        let needed = tokens.div_ceil(self.page_rows).saturating_sub(table.pages.len());
        if needed > self.free.len() {
            return Err(OutOfPages { needed, free: self.free.len() });
        }
        let rest = self.free.len() - needed;
        table.pages.extend(self.free.drain(rest..).rev());
        Ok(())
    }

    /// Cuts `table` to at most `len` committed slots and takes back the pages beyond them.
    pub fn cut(&mut self, table: &mut SeqTable, len: u32) {
        table.len = table.len.min(len);
        let keep = (table.len as usize).div_ceil(self.page_rows).min(table.pages.len());
        self.free.extend(table.pages.drain(keep..).rev());
    }

    /// Takes back every page of `table`.
    pub fn free(&mut self, table: SeqTable) {
        self.free.extend(table.pages.into_iter().rev());
    }

    /// Pages free now.
    pub fn free_pages(&self) -> usize {
        self.free.len()
    }

    /// Pages in all.
    pub fn pages(&self) -> usize {
        self.pages
    }

    /// Slots a page.
    pub fn page_rows(&self) -> usize {
        self.page_rows
    }
}

/// What of the rows just computed a sequence keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keep<'a> {
    /// Slots `0..n`: a chain or prompt cut by length.
    Len(u32),
    /// The committed `base_len` slots and this path of tree nodes, root first.
    Path {
        /// Slots committed before the tree; node `i` lies in slot `base_len + i`.
        base_len: u32,
        /// Node indices, strictly increasing, since parents come before children.
        nodes: &'a [usize],
    },
}

/// One paged row store a layer, all addressed by the same tables.
#[derive(Debug)]
struct PagedLayers {
    layers: Vec<PagedRows>,
    pages: usize,
    page_rows: usize,
}

impl PagedLayers {
    fn new(layers: usize, tokens: usize, page_rows: usize, width: usize) -> Result<Self> {
        let pages = if page_rows == 0 { 0 } else { tokens.div_ceil(page_rows) };
        let layers =
            (0..layers).map(|_| PagedRows::new(pages, page_rows, width)).collect::<Result<_, _>>()?;
        Ok(Self { layers, pages, page_rows })
    }

    fn keep(&mut self, table: &mut SeqTable, keep: Keep<'_>) -> Result<()> {
        match keep {
            Keep::Len(len) => table.commit(len, self.page_rows),
            Keep::Path { base_len, nodes } => {
                let moves = path_moves(table, self.page_rows, base_len, nodes)?;
                for rows in &mut self.layers {
                    for &(from, to) in &moves {
                        rows.copy(from, to)?;
                    }
                }
                table.commit(base_len + nodes.len() as u32, self.page_rows)
            }
        }
    }
}

/// Pool slot moves that bring `nodes` to the front of the tree's block, in an order that never overwrites a
/// node still to be moved: node `nodes[i] >= i` goes to slot `base_len + i`.
fn path_moves(table: &SeqTable, page_rows: usize, base_len: u32, nodes: &[usize]) -> Result<Vec<(u32, u32)>> {
    if !nodes.is_sorted_by(|a, b| a < b) {
        return Err(ModelError::Rollback(format!("path {nodes:?} is not strictly increasing")));
    }
    let slot = |node: usize| {
        let slot = base_len as usize + node;
        u32::try_from(slot).ok().and_then(|slot| table.pool_slot(slot, page_rows)).ok_or_else(|| {
            ModelError::Rollback(format!(
                "node {node} is in slot {slot}, over the {} reserved slots",
                table.capacity(page_rows)
            ))
        })
    };
    let mut moves = Vec::new();
    for (front, &node) in nodes.iter().enumerate() {
        let (from, to) = (slot(node)?, slot(front)?);
        if from != to {
            moves.push((from, to));
        }
    }
    Ok(moves)
}

macro_rules! cache_type {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug)]
        pub struct $name(PagedLayers);

        impl $name {
            pub(crate) fn new(layers: usize, tokens: usize, page_rows: usize, width: usize) -> Result<Self> {
                Ok(Self(PagedLayers::new(layers, tokens, page_rows, width)?))
            }

            pub(crate) fn layer(&mut self, layer: usize) -> &mut PagedRows {
                &mut self.0.layers[layer]
            }

            /// Pages of the pool.
            pub fn pages(&self) -> usize {
                self.0.pages
            }

            /// Slots a page.
            pub fn page_rows(&self) -> usize {
                self.0.page_rows
            }

            /// An allocator over all of this cache's pages; a cache has one.
            pub fn allocator(&self) -> PageAllocator {
                PageAllocator::new(self.0.pages, self.0.page_rows)
            }

            /// Keeps part of the rows last computed for `table` and commits them; pages stay reserved.
            pub fn keep(&mut self, table: &mut SeqTable, keep: Keep<'_>) -> Result<()> {
                self.0.keep(table, keep)
            }
        }
    };
}

cache_type!(
    /// The target's cache: a row of `kv_lora_rank + rope` latent numbers a token and layer.
    LatentCache
);

impl LatentCache {
    pub(crate) fn layers(&self) -> usize {
        self.0.layers.len()
    }
}

cache_type!(
    /// The draft's cache: a row of keys and values a slot.
    DraftCache
);

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, Clone)]
    enum Op {
        Reserve(usize, usize),
        Cut(usize, u32),
        Commit(usize, u32),
        Free(usize),
    }

    fn ops() -> impl Strategy<Value = Vec<Op>> {
        let table = 0..4_usize;
        let op = prop_oneof![
            (table.clone(), 0..40_usize).prop_map(|(t, n)| Op::Reserve(t, n)),
            (table.clone(), 0..40_u32).prop_map(|(t, n)| Op::Cut(t, n)),
            (table.clone(), 0..40_u32).prop_map(|(t, n)| Op::Commit(t, n)),
            table.prop_map(Op::Free),
        ];
        proptest::collection::vec(op, 1..60)
    }

    proptest! {
        #[test]
        fn every_page_is_free_or_in_one_table(ops in ops(), pages in 1..12_usize, page_rows in 1..9_usize) {
            let mut allocator = PageAllocator::new(pages, page_rows);
            let mut tables = vec![SeqTable::default(); 4];
            for op in ops {
                match op {
                    Op::Reserve(t, tokens) => {
                        let (before, free) = (tables[t].clone(), allocator.free_pages());
                        match allocator.reserve(&mut tables[t], tokens) {
                            Ok(()) => prop_assert!(tables[t].capacity(page_rows) >= tokens),
                            Err(OutOfPages { needed, free: left }) => {
                                prop_assert!(needed > left);
                                prop_assert_eq!((&tables[t], left), (&before, free));
                            }
                        }
                        prop_assert!(tables[t].pages().starts_with(before.pages()));
                    }
                    Op::Cut(t, len) => {
                        allocator.cut(&mut tables[t], len);
                        prop_assert!(tables[t].len() <= len);
                        prop_assert!(tables[t].capacity(page_rows) < tables[t].len() as usize + page_rows);
                    }
                    Op::Commit(t, len) => {
                        let fits = len as usize <= tables[t].capacity(page_rows);
                        prop_assert_eq!(tables[t].commit(len, page_rows).is_ok(), fits);
                    }
                    Op::Free(t) => allocator.free(std::mem::take(&mut tables[t])),
                }
                let held = tables.iter().flat_map(|table| table.pages().iter().copied());
                let mut all: Vec<u32> = held.chain(allocator.free.iter().copied()).collect();
                all.sort_unstable();
                prop_assert_eq!(all, (0..pages as u32).collect::<Vec<_>>());
            }
        }

        #[test]
        fn a_path_is_moved_to_the_front_without_losing_a_row(
            picked in proptest::collection::btree_set(0..24_usize, 1..12),
            base_len in 0..9_u32,
            page_rows in 1..7_usize,
        ) {
            let nodes: Vec<usize> = picked.into_iter().collect();
            let mut allocator = PageAllocator::new(40, page_rows);
            let mut table = SeqTable::default();
            allocator.reserve(&mut table, base_len as usize + 24).unwrap();
            let slot = |logical: usize| table.pool_slot(logical as u32, page_rows).unwrap() as usize;
            let mut pool = vec![usize::MAX; 40 * page_rows];
            for logical in 0..base_len as usize + 24 {
                pool[slot(logical)] = logical;
            }
            for (from, to) in path_moves(&table, page_rows, base_len, &nodes).unwrap() {
                pool[to as usize] = pool[from as usize];
            }
            for logical in 0..base_len as usize {
                prop_assert_eq!(pool[slot(logical)], logical);
            }
            for (front, node) in nodes.iter().enumerate() {
                prop_assert_eq!(pool[slot(base_len as usize + front)], base_len as usize + node);
            }
        }
    }
}
