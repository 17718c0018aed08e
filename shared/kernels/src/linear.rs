//! Products with a weight matrix, one fixed order of summation an output.

use candle_core::{CpuStorage, CustomOp1, Layout as TensorLayout, Shape, Tensor};
use eyrie_checkpoint::WeightView;

use crate::cpu::{Cpu, Shared};
use crate::error::{Result, shape};
use crate::tensor::{operand, row_count, rows_of, wrap};
use crate::tiles::{self, BLOCK_ROWS, BLOCK_TILES, Format, Inputs, Prepared, Tiles, ZERO_BLOCK, even_chunks};

const OP: &str = "linear";

/// `y = x W^T` for a weight `[out, in]` kept in the kernels' tiles.
#[derive(Debug)]
pub struct Linear {
    cpu: Cpu,
    tiles: Tiles,
}

impl Linear {
    /// Repacks a F32, F16, BF16 or INT4-g32 weight into private tiles (F16 becomes F32; no value changes).
    ///
    /// # Errors
    /// Another layout, byte lengths that do not fit the shape, or an INT4 input width that is no
    /// multiple of 32.
    pub fn pack(cpu: &Cpu, view: &WeightView) -> Result<Linear> {
        Ok(Linear { cpu: cpu.clone(), tiles: Tiles::pack(OP, view)? })
    }

    /// A float32 weight, `values` row-major `[out, in]`.
    ///
    /// # Errors
    /// The number of values is not `out * in`, or is zero.
    pub fn from_f32(cpu: &Cpu, values: &[f32], [out, width]: [usize; 2]) -> Result<Linear> {
        if values.len() != out * width || values.is_empty() {
            return Err(shape(OP, "weight values", &[values.len()], format!("{out} x {width}, not empty")));
        }
        let tiles = Tiles::pack_float(Format::F32, out, width, |o, i| values[o * width + i]);
        Ok(Linear { cpu: cpu.clone(), tiles })
    }

    /// Bytes that [`Linear::write_tiles`] fills for a BF16 weight `[out, in]`.
    pub fn tile_bytes(shape: [usize; 2]) -> usize {
        tiles::bf16_tile_bytes(shape)
    }

    /// Writes a BF16 weight in tile form (`Layout::Bf16Tile16`) into the caller's memory.
    ///
    /// # Errors
    /// The layout is not BF16 or `bytes` is not [`Linear::tile_bytes`] long.
    pub fn write_tiles(view: &WeightView, bytes: &mut [u8]) -> Result<()> {
        tiles::write_bf16_tiles(OP, view, bytes)
    }

    /// Uses tiles that lie in the view's region, without a copy; the region lives as long as this.
    ///
    /// # Errors
    /// The layout is not `Bf16Tile16` or the view is not [`Linear::tile_bytes`] long.
    pub fn from_tiles(cpu: &Cpu, view: &WeightView) -> Result<Linear> {
        Ok(Linear { cpu: cpu.clone(), tiles: Tiles::borrow(OP, view)? })
    }

    /// Width of a result row.
    pub fn out_features(&self) -> usize {
        self.tiles.outputs()
    }

    /// Width of an input row.
    pub fn in_features(&self) -> usize {
        self.tiles.inputs()
    }

    /// `[rows, in]` to `[rows, out]`.
    ///
    /// # Errors
    /// `x` is not a contiguous f32 CPU tensor of that shape.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        row_count(OP, "x", x, self.in_features())?;
        Ok(x.apply_op1_no_bwd(&LinearOp(self))?)
    }

    pub(crate) fn cpu(&self) -> &Cpu {
        &self.cpu
    }

    pub(crate) fn tiles(&self) -> &Tiles {
        &self.tiles
    }

    /// `x` is `[rows, in]`.
    pub(crate) fn compute(&self, x: &[f32]) -> Result<Vec<f32>> {
        let (width, out) = (self.in_features(), self.out_features());
        let rows = x.len() / width;
        let mut y = vec![0.0; rows * out];
        let prepared = (self.tiles.format() == Format::Int4).then(|| Prepared::new(x, width));
        let inputs = prepared.as_ref().map_or(Inputs::plain(x, width), Prepared::inputs);
        let shared = Shared::new(&mut y);
        // Many rows reuse one tile from the first-level cache; few rows keep more sums in flight.
        let chunk = if rows <= 2 { BLOCK_TILES } else { 1 };
        self.cpu.split(self.tiles.count(), rows * out * width, |range| {
            let mut block = ZERO_BLOCK;
            for part in even_chunks(range.len(), chunk) {
                let (tile, count) = (range.start + part.start, part.len());
                let columns = self.tiles.columns(tile, count);
                for piece in even_chunks(rows, BLOCK_ROWS) {
                    let (index, used) = row_indices(&piece);
                    self.tiles.block(self.cpu.isa(), inputs, &index[..used], tile, count, &mut block);
                    for (row, values) in piece.zip(&block) {
                        let at = row * out;
                        // SAFETY: each output column belongs to one tile, each tile to one thread.
                        let y = unsafe { shared.slice(at + columns.start..at + columns.end) };
                        y.copy_from_slice(&values[..columns.len()]);
                    }
                }
            }
        })?;
        Ok(y)
    }
}

/// The row numbers of a block of neighbouring rows, and how many.
pub(crate) fn row_indices(rows: &std::ops::Range<usize>) -> ([u32; BLOCK_ROWS], usize) {
    (std::array::from_fn(|i| (rows.start + i) as u32), rows.len())
}

struct LinearOp<'a>(&'a Linear);

impl CustomOp1 for LinearOp<'_> {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &TensorLayout) -> candle_core::Result<(CpuStorage, Shape)> {
        let x = operand(OP, x, layout)?;
        let y = self.0.compute(x).map_err(wrap)?;
        Ok(rows_of(y, x.len() / self.0.in_features(), self.0.out_features()))
    }
}
