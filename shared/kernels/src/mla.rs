//! Multi-head latent attention in absorbed form over a paged cache of latents.

use std::cell::RefCell;
use std::sync::Arc;

use candle_core::{CpuStorage, CustomOp2, Layout, Shape, Tensor};
use eyrie_checkpoint::WeightView;

use crate::attention::{Heads, attention};
use crate::cpu::{Cpu, Shared};
use crate::error::{Result, limit, shape};
use crate::linear::row_indices;
use crate::norm::RmsNorm;
use crate::paged::{PagedRows, Ragged};
use crate::rope::Rope;
use crate::tensor::{operand, row_count, rows_of, wrap};
use crate::tiles::{BLOCK_ROWS, BLOCK_TILES, Dense, Inputs, Tiles, ZERO_BLOCK, even_chunks};

const OP: &str = "mla";

/// Sizes of a latent attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MlaDims {
    /// Query heads.
    pub heads: usize,
    /// Width of the latent.
    pub kv_lora: usize,
    /// Query and key numbers of a head without position.
    pub nope: usize,
    /// Query and key numbers of a head with position; the key's are shared by all heads.
    pub rope: usize,
    /// Value numbers of a head.
    pub v: usize,
}

impl MlaDims {
    /// Width of a cached row: the normalised latent, then the rotated key.
    pub fn cache_width(&self) -> usize {
        self.kv_lora + self.rope
    }
}

/// The weights between a layer's projections.
#[derive(Debug)]
pub struct MlaWeights {
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
    /// Splits `kv_b` `[heads * (nope + v), kv_lora]`, rows of a head `[k_nope | v]`, into the two absorbed
    /// weights of each head. The softmax scale is `rope`'s for `nope + rope` numbers.
    ///
    /// # Errors
    /// A shape that does not fit `dims`, or a layout other than F32, F16, BF16 and INT4-g32.
    pub fn new(dims: MlaDims, kv_norm: RmsNorm, kv_b: &WeightView, rope: Arc<Rope>) -> Result<MlaWeights> {
        let MlaDims { heads, kv_lora, nope, rope: rope_dim, v } = dims;
        let want = [heads * (nope + v), kv_lora];
        if kv_b.shape != want || nope == 0 || v == 0 {
            return Err(shape(OP, "kv_b_proj", &kv_b.shape, format!("{want:?} for {dims:?}")));
        }
        if kv_norm.width() != kv_lora {
            return Err(shape(OP, "kv_norm", &[kv_norm.width()], format!("[{kv_lora}]")));
        }
        if rope.spec().dim != rope_dim {
            return Err(limit(OP, "rope dim", rope.spec().dim, format!("qk_rope_head_dim {rope_dim}")));
        }
        let dense = Dense::new(OP, kv_b)?;
        let format = dense.float_format();
        let (mut w_uk, mut w_uv) = (Vec::with_capacity(heads), Vec::with_capacity(heads));
        for head in 0..heads {
            let first = head * (nope + v);
            w_uk.push(Tiles::pack_float(format, kv_lora, nope, |o, i| dense.get(first + i, o)));
            w_uv.push(Tiles::pack_float(format, v, kv_lora, |o, i| dense.get(first + nope + o, i)));
        }
        let scale = rope.softmax_scale(nope + rope_dim) as f32;
        Ok(MlaWeights { dims, kv_norm, w_uk, w_uv, rope, scale })
    }

    /// The sizes.
    pub fn dims(&self) -> &MlaDims {
        &self.dims
    }
}

/// Attends `q` `[rows, heads * (nope + rope)]` (before rotation) with the raw latents `kv`
/// `[rows, kv_lora + rope]` of the same rows: `[rows, heads * v]`.
///
/// Each row's latent is normalised, its key part rotated, and both are written at the row's slot of
/// `cache` (width `kv_lora + rope`) before any row attends.
///
/// # Errors
/// Shapes that do not fit the weights, the rows or the cache; nothing is written then.
pub fn mla(
    cpu: &Cpu,
    weights: &MlaWeights,
    q: &Tensor,
    kv: &Tensor,
    cache: &mut PagedRows,
    rows: &Ragged,
) -> Result<Tensor> {
    let dims = &weights.dims;
    if cache.width() != dims.cache_width() {
        return Err(limit(OP, "cache width", cache.width(), dims.cache_width().to_string()));
    }
    let count = row_count(OP, "q", q, dims.heads * (dims.nope + dims.rope))?;
    if row_count(OP, "kv", kv, dims.cache_width())? != count {
        return Err(shape(OP, "kv", kv.dims(), format!("[{count}, {}]", dims.cache_width())));
    }
    rows.check(OP, count, cache)?;
    Ok(q.apply_op2_no_bwd(kv, &MlaOp { cpu, weights, cache: RefCell::new(cache), rows })?)
}

struct MlaOp<'a> {
    cpu: &'a Cpu,
    weights: &'a MlaWeights,
    cache: RefCell<&'a mut PagedRows>,
    rows: &'a Ragged,
}

impl MlaOp<'_> {
    fn run(&self, q: &[f32], kv: &[f32]) -> Result<Vec<f32>> {
        let MlaDims { heads, kv_lora, .. } = self.weights.dims;
        let angles = self.weights.rope.gather(self.rows.rows.iter().map(|row| row.position));
        let mut cache = self.cache.borrow_mut();
        self.append(kv, &angles, &mut cache)?;
        let queries = self.absorb(q, &angles)?;
        let spec = Heads {
            heads,
            sharing: heads,
            key_width: self.weights.dims.cache_width(),
            value_width: kv_lora,
            values: 0,
            scale: self.weights.scale,
        };
        let latents = attention(self.cpu, spec, &queries, &cache, self.rows)?;
        self.expand(&latents)
    }

    fn append(&self, kv: &[f32], angles: &[f32], cache: &mut PagedRows) -> Result<()> {
        let MlaDims { kv_lora, rope, .. } = self.weights.dims;
        let rows = kv.chunks_exact(kv_lora + rope).zip(angles.chunks_exact(rope));
        for (row, (kv, angles)) in self.rows.rows.iter().zip(rows) {
            let (latent, key) = cache.row_mut(row.slot)?.split_at_mut(kv_lora);
            self.weights.kv_norm.row(&kv[..kv_lora], latent);
            key.copy_from_slice(&kv[kv_lora..]);
            self.weights.rope.rotate(angles, key);
        }
        Ok(())
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
        self.cpu.split(heads * pieces.len(), work, |range| {
            let mut block = ZERO_BLOCK;
            for item in range {
                let (head, piece) = (item / pieces.len(), &pieces[item % pieces.len()]);
                let tiles = &weights[head];
                let inputs = Inputs { values: &inputs.values[head * from..], ..inputs };
                let (index, used) = row_indices(piece);
                for part in even_chunks(tiles.count(), BLOCK_TILES) {
                    let columns = tiles.columns(part.start, part.len());
                    tiles.block(self.cpu.isa(), inputs, &index[..used], part.start, part.len(), &mut block);
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
