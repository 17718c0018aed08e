//! Grouped-query attention on the CPU.

use std::cell::RefCell;

use candle_core::{CpuStorage, CustomOp3, Layout, Shape, Tensor};

use super::Cpu;
use super::attention::attention;
use super::paged::PagedRows;
use crate::error::Result;
use crate::gqa::{GqaSpec, OP};
use crate::rows::Ragged;
use crate::tensor::{operand, rows_of, wrap};

/// Everything has been checked against everything.
pub(crate) fn gqa(
    cpu: &Cpu,
    spec: &GqaSpec,
    [q, k, v]: [&Tensor; 3],
    cache: &mut PagedRows,
    rows: &Ragged,
) -> Result<Tensor> {
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
            let (keys, values) = cache.row_mut(row.slot).split_at_mut(kv_width);
            keys.copy_from_slice(&k[index * kv_width..][..kv_width]);
            values.copy_from_slice(&v[index * kv_width..][..kv_width]);
            for head in keys.chunks_exact_mut(head_dim) {
                rope.rotate(angles, head);
            }
        }
        attention(self.cpu, self.spec.attention(), &queries, &cache, self.rows)
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
