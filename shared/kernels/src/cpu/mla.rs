//! Absorbed latent attention on the CPU.

use std::cell::RefCell;
use std::sync::Arc;

use candle_core::{CpuStorage, CustomOp2, Layout, Shape, Tensor};
use eyrie_checkpoint::WeightView;

use super::attention::attention;
use super::linear::row_indices;
use super::paged::PagedRows;
use super::tiles::{BLOCK_ROWS, BLOCK_TILES, Dense, Inputs, Tiles, ZERO_BLOCK, even_chunks};
use super::{Cpu, RmsNorm, Shared};
use crate::error::Result;
use crate::mla::{MlaDims, OP};
use crate::rope::Rope;
use crate::rows::Ragged;
use crate::tensor::{operand, rows_of, wrap};

#[derive(Debug)]
pub(crate) struct MlaWeights {
    cpu: Cpu,
    dims: MlaDims,
    kv_norm: RmsNorm,
    /// Of each head: `[kv_lora, nope]`.
    w_uk: Vec<Tiles>,
    /// Of each head: `[v, kv_lora]`.
    w_uv: Vec<Tiles>,
    rope: Arc<Rope>,
    scale: f32,
}

impl MlaWeights {
    /// The shapes have been checked.
    pub(crate) fn new(
        cpu: &Cpu,
        dims: MlaDims,
        kv_norm: RmsNorm,
        kv_b: &WeightView,
        rope: Arc<Rope>,
    ) -> Result<MlaWeights> {
        let MlaDims { heads, kv_lora, nope, rope: rope_dim, v } = dims;
        let dense = Dense::new(OP, kv_b)?;
        let format = dense.float_format();
        let (mut w_uk, mut w_uv) = (Vec::with_capacity(heads), Vec::with_capacity(heads));
        for head in 0..heads {
            let first = head * (nope + v);
            w_uk.push(Tiles::pack_float(format, kv_lora, nope, |o, i| dense.get(first + i, o)));
            w_uv.push(Tiles::pack_float(format, v, kv_lora, |o, i| dense.get(first + nope + o, i)));
        }
        let scale = rope.softmax_scale(nope + rope_dim) as f32;
        Ok(MlaWeights { cpu: cpu.clone(), dims, kv_norm, w_uk, w_uv, rope, scale })
    }

    pub(crate) fn dims(&self) -> &MlaDims {
        &self.dims
    }

    /// Everything has been checked against everything.
    pub(crate) fn attend(
        &self,
        q: &Tensor,
        kv: &Tensor,
        cache: &mut PagedRows,
        rows: &Ragged,
    ) -> Result<Tensor> {
        Ok(q.apply_op2_no_bwd(kv, &MlaOp { weights: self, cache: RefCell::new(cache), rows })?)
    }
}

struct MlaOp<'a> {
    weights: &'a MlaWeights,
    cache: RefCell<&'a mut PagedRows>,
    rows: &'a Ragged,
}

impl MlaOp<'_> {
    fn run(&self, q: &[f32], kv: &[f32]) -> Result<Vec<f32>> {
        let angles = self.weights.rope.gather(self.rows.rows.iter().map(|row| row.position));
        let mut cache = self.cache.borrow_mut();
        self.append(kv, &angles, &mut cache);
        let queries = self.absorb(q, &angles)?;
        let spec = self.weights.dims.attention(self.weights.scale);
        let latents = attention(&self.weights.cpu, spec, &queries, &cache, self.rows)?;
        self.expand(&latents)
    }

    fn append(&self, kv: &[f32], angles: &[f32], cache: &mut PagedRows) {
        let MlaDims { kv_lora, rope, .. } = self.weights.dims;
        let rows = kv.chunks_exact(kv_lora + rope).zip(angles.chunks_exact(rope));
        for (row, (kv, angles)) in self.rows.rows.iter().zip(rows) {
            let (latent, key) = cache.row_mut(row.slot).split_at_mut(kv_lora);
            self.weights.kv_norm.row(&kv[..kv_lora], latent);
            key.copy_from_slice(&kv[kv_lora..]);
            self.weights.rope.rotate(angles, key);
        }
    }

    /// `[rows, heads, kv_lora + rope]`: `q_nope W_UK`, then the rotated `q_pe`.
    fn absorb(&self, q: &[f32], angles: &[f32]) -> Result<Vec<f32>> {
        let MlaDims { heads, kv_lora, nope, rope, .. } = self.weights.dims;
        let (from, to) = (nope + rope, kv_lora + rope);
        let mut queries = vec![0.0; self.rows.rows.len() * heads * to];
        for (index, (q, query)) in q.chunks_exact(from).zip(queries.chunks_exact_mut(to)).enumerate() {
            query[kv_lora..].copy_from_slice(&q[nope..]);
            self.weights.rope.rotate(&angles[index / heads * rope..][..rope], &mut query[kv_lora..]);
        }
        let inputs = Inputs { width: nope, stride: heads * from, values: q, corrections: &[] };
        self.by_head(&self.weights.w_uk, inputs, from, &mut queries, to)?;
        Ok(queries)
    }

    /// `[rows, heads, kv_lora]` to `[rows, heads * v]`.
    fn expand(&self, latents: &[f32]) -> Result<Vec<f32>> {
        let MlaDims { heads, kv_lora, v, .. } = self.weights.dims;
        let mut out = vec![0.0; self.rows.rows.len() * heads * v];
        let inputs = Inputs { width: kv_lora, stride: heads * kv_lora, values: latents, corrections: &[] };
        self.by_head(&self.weights.w_uv, inputs, kv_lora, &mut out, v)?;
        Ok(out)
    }

    /// Multiplies each head's part of the rows (from column `head * from`) with the head's own weight
    /// into `[rows, heads, to]`.
    fn by_head(
        &self,
        weights: &[Tiles],
        inputs: Inputs<'_>,
        from: usize,
        out: &mut [f32],
        to: usize,
    ) -> Result<()> {
        let rows = self.rows.rows.len();
        let heads = weights.len();
        let pieces: Vec<_> = even_chunks(rows, BLOCK_ROWS).collect();
        let work = weights.iter().map(|w| w.inputs() * w.outputs()).sum::<usize>() * rows;
        let shared = Shared::new(out);
        self.weights.cpu.split(heads * pieces.len(), work, |range| {
            let mut block = ZERO_BLOCK;
            for item in range {
                let (head, piece) = (item / pieces.len(), &pieces[item % pieces.len()]);
                let tiles = &weights[head];
                let inputs = Inputs { values: &inputs.values[head * from..], ..inputs };
                let (index, used) = row_indices(piece);
                for part in even_chunks(tiles.count(), BLOCK_TILES) {
                    let columns = tiles.columns(part.start, part.len());
                    tiles.block(
                        self.weights.cpu.isa(),
                        inputs,
                        &index[..used],
                        part.start,
                        part.len(),
                        &mut block,
                    );
                    for (row, values) in piece.clone().zip(&block) {
                        let at = (row * heads + head) * to;
                        // SAFETY: a head and a piece of rows belong to one thread.
                        let out = unsafe { shared.slice(at + columns.start..at + columns.end) };
                        out.copy_from_slice(&values[..columns.len()]);
                    }
                }
            }
        })
    }
}

impl CustomOp2 for MlaOp<'_> {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        kv: &CpuStorage,
        kv_layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let (q, kv) = (operand(OP, q, q_layout)?, operand(OP, kv, kv_layout)?);
        let out = self.run(q, kv).map_err(wrap)?;
        Ok(rows_of(out, self.rows.rows.len(), self.weights.dims.heads * self.weights.dims.v))
    }
}
