//! Paged caches. A sequence's slot `s` lives in page `table.pages[s / page_rows]`, so a chain's slots are contiguous by
//! position and a cut is a length.

use eyrie_checkpoint::TargetConfig;
use eyrie_kernels::{Activations, Backend, PagedRows};
use eyrie_region::check_memory;

use crate::error::{ModelError, Result};
use crate::pages::{PageAllocator, PageCopy, SeqTable};

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
    fn new(backend: &Backend, layers: usize, tokens: usize, page_rows: usize, width: usize) -> Result<Self> {
        let pages = if page_rows == 0 { 0 } else { tokens.div_ceil(page_rows) };
        // Each layer by itself may fit where all together do not.
        let values =
            [page_rows, width, layers, size_of::<f32>()].iter().try_fold(pages, |n, &m| n.checked_mul(m));
        if let (Backend::Cpu(_), Some(bytes)) = (backend, values) {
            check_memory("cache", bytes as u64)?;
        }
        let layers = (0..layers)
            .map(|_| PagedRows::new(backend, pages, page_rows, width))
            .collect::<Result<_, _>>()?;
        Ok(Self { layers, pages, page_rows })
    }

    fn page_bytes(&self) -> u64 {
        self.layers.iter().map(|rows| (self.page_rows * rows.row_bytes()) as u64).sum()
    }

    fn pages_in(&self, bytes: Option<u64>) -> usize {
        bytes.map_or(self.pages, |bytes| (bytes / self.page_bytes().max(1)).min(self.pages as u64) as usize)
    }

    fn copy(&mut self, PageCopy { from, to, rows }: PageCopy) -> Result<()> {
        let first = |page| page * self.page_rows as u32;
        let (from, to) = (first(from), first(to));
        let moves: Vec<_> = (0..rows).map(|row| (from + row, to + row)).collect();
        self.layers.iter_mut().try_for_each(|layer| Ok(layer.copy(&moves)?))
    }

    fn keep(&mut self, table: &mut SeqTable, keep: Keep<'_>) -> Result<()> {
        match keep {
            Keep::Len(len) => table.commit(len, self.page_rows),
            Keep::Path { base_len, nodes } => {
                let moves = path_moves(table, self.page_rows, base_len, nodes)?;
                self.layers.iter_mut().try_for_each(|layer| layer.copy(&moves))?;
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
    ($(#[$doc:meta])* $name:ident, $lookahead:literal) => {
        $(#[$doc])*
        #[derive(Debug)]
        pub struct $name(PagedLayers);

        impl $name {
            /// Tokens beyond its own that a row depends on.
            pub const LOOKAHEAD: usize = $lookahead;

            pub(crate) fn new(
                backend: &Backend,
                layers: usize,
                tokens: usize,
                page_rows: usize,
                width: usize,
            ) -> Result<Self> {
                Ok(Self(PagedLayers::new(backend, layers, tokens, page_rows, width)?))
            }

            /// The rows of a layer, for the model that computes them.
            pub fn layer(&mut self, layer: usize) -> &mut PagedRows {
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

            /// Bytes of a page over all layers.
            pub fn page_bytes(&self) -> u64 {
                self.0.page_bytes()
            }

            /// An allocator over all of this cache's pages; a cache has one.
            pub fn allocator(&self) -> PageAllocator {
                PageAllocator::new(self.0.pages, self.0.page_rows)
            }

            /// The same with a prefix cache that keeps up to `bytes` bytes of idle pages: 0 turns it off, `None` is no
            /// limit below the whole cache.
            pub fn allocator_with_prefixes(&self, bytes: Option<u64>) -> PageAllocator {
                match bytes {
                    Some(0) => self.allocator(),
                    bytes => self.allocator().with_prefixes(Self::LOOKAHEAD, self.0.pages_in(bytes)),
                }
            }

            /// Makes the copy that a reservation asks for.
            pub fn copy(&mut self, copy: PageCopy) -> Result<()> {
                self.0.copy(copy)
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
    LatentCache,
    0
);

impl LatentCache {
    /// Numbers a token and layer in a model of `config`.
    pub(crate) fn width(config: &TargetConfig) -> usize {
        config.kv_lora_rank + config.qk_rope_head_dim
    }

    /// Bytes a token in a model of `config`.
    pub fn token_bytes(config: &TargetConfig, numbers: Activations) -> u64 {
        (config.num_hidden_layers * Self::width(config) * numbers.size()) as u64
    }

    pub(crate) fn layers(&self) -> usize {
        self.0.layers.len()
    }
}

cache_type!(
    /// The draft's cache: a row of keys and values a slot. Slot `j` is built from token `j + 1`.
    DraftCache,
    1
);

#[cfg(test)]
mod tests {
    use eyrie_kernels::{Cpu, CpuOptions, Isa};
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn layers_are_refused_for_what_they_need_together() {
        let cpu = CpuOptions { threads: 1, isa: Isa::best() };
        let backend = Cpu::new(cpu).unwrap().into();
        let layer = eyrie_region::available_memory() as usize / 2;
        let error = PagedLayers::new(&backend, 1000, layer / (64 * 4), 1, 64).unwrap_err().to_string();
        assert!(error.starts_with("cache: ") && error.contains("memory available"), "{error}");
        let bytes: usize = error.split(' ').nth(1).unwrap().parse().unwrap();
        assert_eq!(bytes, layer / (64 * 4) * 64 * 4 * 1000, "all layers at once");
    }

    proptest! {
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
