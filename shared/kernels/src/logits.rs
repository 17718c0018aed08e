//! SwiGLU's product, and what a drafter or a greedy sampler reads off logits.

use std::cmp::Ordering;

use candle_core::{CpuStorage, CustomOp2, Layout, Shape, Tensor};

use crate::cpu::{Cpu, Isa, Shared, exp};
use crate::error::{KernelError, Result, limit, shape};
use crate::tensor::{operand, row_count, rows_of, wrap};

const SILU_MUL: &str = "silu_mul";

/// `silu(gate) * up` for two `[rows, width]` tensors.
///
/// # Errors
/// The shapes differ, or a tensor is not contiguous f32 on the CPU.
pub fn silu_mul(cpu: &Cpu, gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    let [_, width] = gate.dims() else { return Err(shape(SILU_MUL, "gate", gate.dims(), "[rows, width]")) };
    row_count(SILU_MUL, "up", up, *width)?;
    if gate.dims() != up.dims() {
        return Err(shape(SILU_MUL, "up", up.dims(), format!("gate's {:?}", gate.dims())));
    }
    Ok(gate.apply_op2_no_bwd(up, &SiluMulOp(cpu))?)
}

struct SiluMulOp<'a>(&'a Cpu);

impl CustomOp2 for SiluMulOp<'_> {
    fn name(&self) -> &'static str {
        SILU_MUL
    }

    fn cpu_fwd(
        &self,
        gate: &CpuStorage,
        gate_layout: &Layout,
        up: &CpuStorage,
        up_layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let gate = operand(SILU_MUL, gate, gate_layout)?;
        let up = operand(SILU_MUL, up, up_layout)?;
        let mut out = vec![0.0; gate.len()];
        let shared = Shared::new(&mut out);
        let split = self.0.split(gate.len(), gate.len(), |range| {
            // SAFETY: `split` hands out disjoint ranges.
            let out = unsafe { shared.slice(range.clone()) };
            exp::silu_mul(self.0.isa(), &gate[range.clone()], &up[range], out);
        });
        split.map_err(wrap)?;
        let width = gate_layout.shape().dims().last().copied().unwrap_or(1).max(1);
        let rows = out.len() / width;
        Ok(rows_of(out, rows, width))
    }
}

fn first_nan(op: &'static str, logits: &[f32]) -> Result<()> {
    match logits.iter().position(|x| x.is_nan()) {
        Some(index) => Err(KernelError::NotANumber { op, index }),
        None if logits.is_empty() => Err(limit(op, "number of logits", 0, "at least 1")),
        None => Ok(()),
    }
}

/// Index of the largest value, the lowest one among equals.
///
/// # Errors
/// A NaN, or no values.
pub fn argmax(logits: &[f32]) -> Result<u32> {
    first_nan("argmax", logits)?;
    let mut best = 0;
    for (index, &value) in logits.iter().enumerate() {
        if value > logits[best] {
            best = index;
        }
    }
    Ok(best as u32)
}

/// The `k` most probable ids of one row of logits with their float32 softmax probabilities over the
/// whole row, most probable first, the lower id first among equals; fewer when the row is shorter.
///
/// # Errors
/// A NaN, or no values.
pub fn top_k_softmax(logits: &[f32], k: usize) -> Result<Vec<(u32, f32)>> {
    first_nan("top_k_softmax", logits)?;
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    // Ordered by logits: different logits can round to equal probabilities.
    let by_logit = |a: &u32, b: &u32| {
        let order = logits[*b as usize].partial_cmp(&logits[*a as usize]);
        order.unwrap_or(Ordering::Equal).then(a.cmp(b))
    };
    let k = k.min(order.len());
    if k > 0 && k < order.len() {
        order.select_nth_unstable_by(k - 1, by_logit);
    }
    order.truncate(k);
    order.sort_unstable_by(by_logit);
    let mut probabilities = logits.to_vec();
    exp::softmax_in_place(Isa::best(), &mut probabilities);
    Ok(order.into_iter().map(|id| (id, probabilities[id as usize])).collect())
}
