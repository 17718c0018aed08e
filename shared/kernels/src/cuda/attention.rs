//! Attention of rows over paged keys on the device, in pieces of [`CHUNK_KEYS`] keys.

use super::{Activations, Cuda, Grid, PagedRows, Rows, THREADS};
use crate::cpu::Heads;
use crate::error::{Result, limit};

/// Keys of a tile and of a chunk, as in attention.cu.
const TILE_KEYS: usize = 32;
pub(super) const CHUNK_KEYS: usize = 256;
/// Widest value, in columns that a block's threads hold.
const MAX_VALUE: usize = 512;
/// Up to this width of a value, heads are shared out among groups of threads.
const NARROW_VALUE: usize = 128;
/// Dynamic shared memory of a block: what every GPU from sm_80 on has.
const MAX_SHARED: usize = 160 << 10;
/// Bytes of queries, chunk sums and results at a time; more rows go in several passes.
const SCRATCH: usize = 256 << 20;

/// As `AttentionArgs` in attention.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct AttentionArgs {
    queries: u64,
    cache: u64,
    rows: u64,
    tables: u64,
    tails: u64,
    sums: u64,
    stats: u64,
    first_row: u32,
    page_rows: u32,
    stride: u32,
    heads: u32,
    sharing: u32,
    key_width: u32,
    value_width: u32,
    values: u32,
    chunks: u32,
    scale: f32,
    aligned: u32,
}

/// Attention of one layer's heads over one cache.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Attend<'a> {
    pub(crate) cuda: &'a Cuda,
    pub(crate) heads: Heads,
    pub(crate) cache: &'a PagedRows,
    pub(crate) rows: &'a Rows,
}

impl Attend<'_> {
    /// Heads of a block and groups of its threads: by the layer alone.
    fn shape(&self) -> Result<(usize, usize)> {
        let Heads { sharing, value_width, .. } = self.heads;
        if value_width > MAX_VALUE {
            return Err(limit("attention", "value width", value_width, format!("{MAX_VALUE} on a GPU")));
        }
        let heads = match sharing {
            0..=4 => 4,
            5..=8 => 8,
            _ => 16,
        };
        Ok((heads, if value_width <= NARROW_VALUE { 4 } else { 1 }))
    }

    /// Bytes of shared memory for blocks of `heads` heads.
    fn shared(&self, heads: usize) -> Result<usize> {
        let Heads { key_width, value_width, values, .. } = self.heads;
        let slices = THREADS / (heads / 4 * (TILE_KEYS / 4));
        let padded = key_width.next_multiple_of(4 * slices);
        let apart = values + value_width > key_width;
        let columns = padded + if apart { value_width.next_multiple_of(8) } else { 0 };
        let bytes = heads * padded * 4 + TILE_KEYS * columns * self.cuda.numbers().size();
        if bytes > MAX_SHARED {
            let what = "bytes of a tile of keys and values";
            return Err(limit("attention", what, bytes, format!("{MAX_SHARED} on a GPU")));
        }
        Ok(bytes)
    }

    /// Whether rows, keys and values all start at multiples of 16 bytes.
    fn aligned(&self) -> bool {
        let Heads { key_width, value_width, values, .. } = self.heads;
        let widths = [self.cache.width(), key_width, value_width, values];
        widths.iter().all(|width| (width * self.cuda.numbers().size()).is_multiple_of(16))
    }

    /// Rows that one pass takes, so that what lies between stays within [`SCRATCH`].
    pub(crate) fn step(&self) -> usize {
        let Heads { heads, key_width, value_width, .. } = self.heads;
        let chunks = self.rows.chunks(0..self.rows.count());
        let row = heads * (key_width + value_width + chunks * (value_width + 2)) * 4;
        (SCRATCH / row.max(1)).max(1)
    }

    /// Attends rows `first..first + count`, whose queries `[count, heads, key_width]` lie at `queries`, into
    /// `[count, heads, value_width]` at `out`.
    pub(crate) fn launch(
        &self,
        queries: u64,
        (first, count): (usize, usize),
        out: (u64, Activations),
    ) -> Result<()> {
        let Heads { heads, sharing, key_width, value_width, values, scale } = self.heads;
        let chunks = self.rows.chunks(first..first + count);
        let sums = self.cuda.alloc::<f32>("attention", count * heads * chunks * value_width)?;
        let stats = self.cuda.alloc::<[f32; 2]>("attention", count * heads * chunks)?;
        let args = AttentionArgs {
            queries,
            cache: self.cache.pointer(),
            rows: self.rows.rows(),
            tables: self.rows.tables(),
            tails: self.rows.tails(),
            sums: sums.pointer(),
            stats: stats.pointer(),
            first_row: first as u32,
            page_rows: self.rows.page_rows() as u32,
            stride: self.cache.width() as u32,
            heads: heads as u32,
            sharing: sharing as u32,
            key_width: key_width as u32,
            value_width: value_width as u32,
            values: values as u32,
            chunks: chunks as u32,
            scale,
            aligned: u32::from(self.aligned()),
        };
        let (block, groups) = self.shape()?;
        let blocks = heads / sharing * sharing.div_ceil(block);
        let grid = Grid { shared: self.shared(block)?, ..Grid::new(blocks, count, chunks) };
        let name = format!("attention_{}_{block}_{groups}", self.cuda.numbers().name());
        // SAFETY: rows were checked against the cache, queries hold `count` rows, sums and stats all chunks of them.
        unsafe { self.cuda.launch(&name, grid, (args,)) }?;
        let name = format!("attention_combine_{}", out.1.name());
        // SAFETY: as above; `out` holds `count` rows in its numbers.
        unsafe { self.cuda.launch(&name, Grid::new(heads, count, 1), (args, out.0)) }
    }
}
