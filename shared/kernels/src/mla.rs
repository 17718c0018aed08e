//! Multi-head latent attention in absorbed form over a paged cache of latents.

use std::sync::Arc;

use candle_core::Tensor;
use eyrie_checkpoint::WeightView;

use crate::backend::Backend;
use crate::cpu;
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::error::{Result, limit, shape};
use crate::norm::{Norm, RmsNorm};
use crate::paged::{PagedRows, Pool};
use crate::rope::Rope;
use crate::rows::Rows;
use crate::tensor::row_count;

pub(crate) const OP: &str = "mla";

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

    /// Absorbed heads over a cached row, whose latent is key and value at once.
    pub(crate) fn attention(&self, scale: f32) -> cpu::Heads {
        cpu::Heads {
            heads: self.heads,
            sharing: self.heads,
            key_width: self.cache_width(),
            value_width: self.kv_lora,
            values: 0,
            scale,
        }
    }
}

/// The weights between a layer's projections.
#[derive(Debug)]
pub struct MlaWeights(Weights);

#[derive(Debug)]
enum Weights {
    Cpu(cpu::MlaWeights),
    #[cfg(feature = "cuda")]
    Cuda(cuda::MlaWeights),
}

impl MlaWeights {
    /// Splits `kv_b` `[heads * (nope + v), kv_lora]`, rows of a head `[k_nope | v]`, into the two absorbed
    /// weights of each head. The softmax scale is `rope`'s for `nope + rope` numbers.
    ///
    /// # Errors
    /// A shape that does not fit `dims`, or a layout other than F32, F16, BF16 and INT4-g32.
    pub fn new(
        backend: &Backend,
        dims: MlaDims,
        kv_norm: RmsNorm,
        kv_b: &WeightView,
        rope: Arc<Rope>,
    ) -> Result<MlaWeights> {
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
        Ok(MlaWeights(match (backend, kv_norm.0) {
            (Backend::Cpu(cpu), Norm::Cpu(norm)) => {
                Weights::Cpu(cpu::MlaWeights::new(cpu, dims, norm, kv_b, rope)?)
            }
            #[cfg(feature = "cuda")]
            (Backend::Cuda(cuda), Norm::Cuda(norm)) => {
                Weights::Cuda(cuda::MlaWeights::new(cuda, dims, norm, kv_b, rope)?)
            }
            #[cfg(feature = "cuda")]
            _ => return Err(crate::KernelError::Mixed { op: OP }),
        }))
    }

    /// The sizes.
    pub fn dims(&self) -> &MlaDims {
        match &self.0 {
            Weights::Cpu(weights) => weights.dims(),
            #[cfg(feature = "cuda")]
            Weights::Cuda(weights) => weights.dims(),
        }
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
    weights: &MlaWeights,
    q: &Tensor,
    kv: &Tensor,
    cache: &mut PagedRows,
    rows: &Rows,
) -> Result<Tensor> {
    let dims = weights.dims();
    if cache.width() != dims.cache_width() {
        return Err(limit(OP, "cache width", cache.width(), dims.cache_width().to_string()));
    }
    let count = row_count(OP, "q", q, dims.heads * (dims.nope + dims.rope))?;
    if row_count(OP, "kv", kv, dims.cache_width())? != count {
        return Err(shape(OP, "kv", kv.dims(), format!("[{count}, {}]", dims.cache_width())));
    }
    rows.ragged().check(OP, count, cache)?;
    match (&weights.0, &mut cache.pool) {
        (Weights::Cpu(weights), Pool::Cpu(cache)) => weights.attend(q, kv, cache, rows.ragged()),
        #[cfg(feature = "cuda")]
        (Weights::Cuda(weights), Pool::Cuda(cache)) => weights.attend(q, kv, cache, rows.device()?),
        #[cfg(feature = "cuda")]
        _ => Err(crate::KernelError::Mixed { op: OP }),
    }
}
