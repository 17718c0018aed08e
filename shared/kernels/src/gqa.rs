//! Grouped-query attention over paged keys and values, as Llama-style drafts use it.

use std::cell::RefCell;
use std::sync::Arc;

use candle_core::{CpuStorage, CustomOp3, Layout, Shape, Tensor};

use crate::attention::{Heads, attention};
use crate::cpu::Cpu;
use crate::error::{Result, limit, shape};
use crate::paged::{PagedRows, Ragged};
use crate::rope::Rope;
use crate::tensor::{operand, row_count, rows_of, wrap};

const OP: &str = "gqa";

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
    cpu: &Cpu,
    spec: &GqaSpec,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    cache: &mut PagedRows,
    rows: &Ragged,
) -> Result<Tensor> {
    spec.check(cache)?;
    let count = row_count(OP, "q", q, spec.heads * spec.head_dim)?;
    let kv_width = spec.kv_heads * spec.head_dim;
    for (what, tensor) in [("k", k), ("v", v)] {
        if row_count(OP, what, tensor, kv_width)? != count {
            return Err(shape(OP, what, tensor.dims(), format!("[{count}, {kv_width}]")));
        }
    }
    rows.check(OP, count, cache)?;
    Ok(q.apply_op3_no_bwd(k, v, &GqaOp { cpu, spec, cache: RefCell::new(cache), rows })?)
}

struct GqaOp<'a> {
    cpu: &'a Cpu,
    spec: &'a GqaSpec,
    cache: RefCell<&'a mut PagedRows>,
    rows: &'a Ragged,
}

impl GqaOp<'_> {
    fn run(&self, q: &[f32], k: &[f32], v: &[f32]) -> Result<Vec<f32>> {
        let GqaSpec { heads, kv_heads, head_dim, ref rope } = *self.spec;
        let (q_width, kv_width) = (heads * head_dim, kv_heads * head_dim);
        let angles = rope.gather(self.rows.rows.iter().map(|row| row.position));
        let mut queries = q.to_vec();
        let mut cache = self.cache.borrow_mut();
        for (index, row) in self.rows.rows.iter().enumerate() {
            let angles = &angles[index * head_dim..][..head_dim];
            for head in queries[index * q_width..][..q_width].chunks_exact_mut(head_dim) {
                rope.rotate(angles, head);
            }
            let (keys, values) = cache.row_mut(row.slot)?.split_at_mut(kv_width);
            keys.copy_from_slice(&k[index * kv_width..][..kv_width]);
            values.copy_from_slice(&v[index * kv_width..][..kv_width]);
            for head in keys.chunks_exact_mut(head_dim) {
                rope.rotate(angles, head);
            }
        }
        let heads = Heads {
            heads,
            sharing: heads / kv_heads,
            key_width: head_dim,
            value_width: head_dim,
            values: kv_width,
            scale: (head_dim as f64).powf(-0.5) as f32,
        };
        attention(self.cpu, heads, &queries, &cache, self.rows)
    }
}

impl CustomOp3 for GqaOp<'_> {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        k: &CpuStorage,
        k_layout: &Layout,
        v: &CpuStorage,
        v_layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let (q, k, v) = (operand(OP, q, q_layout)?, operand(OP, k, k_layout)?, operand(OP, v, v_layout)?);
        let out = self.run(q, k, v).map_err(wrap)?;
        Ok(rows_of(out, self.rows.rows.len(), self.spec.heads * self.spec.head_dim))
    }
}
