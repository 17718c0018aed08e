//! Products with packed weights.

use candle_core::{CpuStorage, CustomOp1, Layout as TensorLayout, Shape, Tensor};
use eyrie_checkpoint::WeightView;

use super::tiles::{BLOCK_ROWS, BLOCK_TILES, Format, Inputs, Prepared, Tiles, ZERO_BLOCK, even_chunks};
use super::{Cpu, Shared};
use crate::error::{Result, shape};
use crate::linear::OP;
use crate::tensor::{operand, rows_of, wrap};

/// A weight `[out, in]` in tiles.
#[derive(Debug)]
pub(crate) struct Linear {
    cpu: Cpu,
    tiles: Tiles,
}

impl Linear {
    /// F16 becomes F32.
    pub(crate) fn pack(cpu: &Cpu, view: &WeightView) -> Result<Linear> {
        Ok(Linear { cpu: cpu.clone(), tiles: Tiles::pack(OP, view)? })
    }

    pub(crate) fn from_f32(cpu: &Cpu, values: &[f32], [out, width]: [usize; 2]) -> Result<Linear> {
        if values.len() != out * width || values.is_empty() {
            return Err(shape(OP, "weight values", &[values.len()], format!("{out} x {width}, not empty")));
        }
        let tiles = Tiles::pack_float(Format::F32, out, width, |o, i| values[o * width + i]);
        Ok(Linear { cpu: cpu.clone(), tiles })
    }

    pub(crate) fn from_tiles(cpu: &Cpu, view: &WeightView) -> Result<Linear> {
        Ok(Linear { cpu: cpu.clone(), tiles: Tiles::borrow(OP, view)? })
    }

    pub(crate) fn out_features(&self) -> usize {
        self.tiles.outputs()
    }

    pub(crate) fn in_features(&self) -> usize {
        self.tiles.inputs()
    }

    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
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
