//! Grouped-query attention over paged keys and values, as Llama-style drafts use it.

use std::sync::Arc;

use candle_core::Tensor;

use crate::backend::Backend;
use crate::cpu;
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::error::{Result, limit, shape};
use crate::paged::{PagedRows, Pool};
use crate::rope::Rope;
use crate::rows::Rows;
use crate::tensor::row_count;

pub(crate) const OP: &str = "gqa";

/// Geometry of a grouped-query attention.
#[derive(Debug, Clone)]
pub struct GqaSpec {
    /// Query heads, a multiple of `kv_heads`.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Numbers of one head.
    pub head_dim: usize,
    /// Rotation of the whole head (`dim = head_dim`).
    pub rope: Arc<Rope>,
}

impl GqaSpec {
    /// Width of a cached row: the keys of all key heads, then their values.
    pub fn cache_width(&self) -> usize {
        2 * self.kv_heads * self.head_dim
    }

    /// Heads over a cached row of keys, then values.
    pub(crate) fn attention(&self) -> cpu::Heads {
        cpu::Heads {
            heads: self.heads,
            sharing: self.heads / self.kv_heads,
            key_width: self.head_dim,
            value_width: self.head_dim,
            values: self.kv_heads * self.head_dim,
            scale: (self.head_dim as f64).powf(-0.5) as f32,
        }
    }

    fn check(&self, cache: &PagedRows) -> Result<()> {
        if self.kv_heads == 0 || self.heads == 0 || !self.heads.is_multiple_of(self.kv_heads) {
            return Err(limit(OP, "heads", self.heads, format!("a multiple of {} kv heads", self.kv_heads)));
        }
        if self.rope.spec().dim != self.head_dim {
            return Err(limit(OP, "rope dim", self.rope.spec().dim, format!("head_dim {}", self.head_dim)));
        }
        if cache.width() != self.cache_width() {
            return Err(limit(OP, "cache width", cache.width(), self.cache_width().to_string()));
        }
        Ok(())
    }
}

/// Rotates `q` `[rows, heads * d]` and `k` `[rows, kv_heads * d]`, writes each row's key and value (`v` as
/// `k`) at its slot of `cache` (width `2 * kv_heads * d`), then attends with scale `d^-0.5`:
/// `[rows, heads * d]`.
///
/// # Errors
/// Shapes that do not fit the spec, the rows or the cache; nothing is written then.
pub fn gqa(
    backend: &Backend,
    spec: &GqaSpec,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    cache: &mut PagedRows,
    rows: &Rows,
) -> Result<Tensor> {
    spec.check(cache)?;
    let count = row_count(OP, "q", q, spec.heads * spec.head_dim)?;
    let kv_width = spec.kv_heads * spec.head_dim;
    for (what, tensor) in [("k", k), ("v", v)] {
        if row_count(OP, what, tensor, kv_width)? != count {
            return Err(shape(OP, what, tensor.dims(), format!("[{count}, {kv_width}]")));
        }
    }
    rows.ragged().check(OP, count, cache)?;
    match (backend, &mut cache.pool) {
        (Backend::Cpu(cpu), Pool::Cpu(cache)) => cpu::gqa(cpu, spec, [q, k, v], cache, rows.ragged()),
        #[cfg(feature = "cuda")]
        (Backend::Cuda(cuda), Pool::Cuda(cache)) => cuda::gqa(cuda, spec, [q, k, v], cache, rows.device()?),
        #[cfg(feature = "cuda")]
        _ => Err(crate::KernelError::Mixed { op: OP }),
    }
}
