//! RMS normalisation in float32.

use candle_core::{CpuStorage, CustomOp1, Layout, Shape, Tensor};

use crate::cpu::{Cpu, Shared, reduce};
use crate::error::{Result, limit};
use crate::tensor::{operand, row_count, rows_of, wrap};

const OP: &str = "rms_norm";

/// `weight * x / sqrt(mean(x^2) + eps)`.
#[derive(Debug, Clone)]
pub struct RmsNorm {
    cpu: Cpu,
    weight: Vec<f32>,
    eps: f32,
}

impl RmsNorm {
    /// A norm over rows as wide as `weight`.
    ///
    /// # Errors
    /// An empty weight, or an `eps` that is negative or not finite.
    pub fn new(cpu: &Cpu, weight: Vec<f32>, eps: f64) -> Result<RmsNorm> {
        if weight.is_empty() {
            return Err(limit(OP, "width", 0, "at least 1"));
        }
        if !(eps.is_finite() && eps >= 0.0) {
            return Err(limit(OP, "eps", eps, "finite and not negative"));
        }
        Ok(RmsNorm { cpu: cpu.clone(), weight, eps: eps as f32 })
    }

    /// Width of a row.
    pub fn width(&self) -> usize {
        self.weight.len()
    }

    /// `[rows, width]` to the same shape.
    ///
    /// # Errors
    /// `x` is not a contiguous f32 CPU tensor of that shape.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        row_count(OP, "x", x, self.width())?;
        Ok(x.apply_op1_no_bwd(&RmsNormOp(self))?)
    }

    /// One row.
    pub(crate) fn row(&self, x: &[f32], out: &mut [f32]) {
        reduce::rms_norm(self.cpu.isa(), x, &self.weight, self.eps, out);
    }
}

struct RmsNormOp<'a>(&'a RmsNorm);

impl CustomOp1 for RmsNormOp<'_> {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let x = operand(OP, x, layout)?;
        let width = self.0.width();
        let mut y = vec![0.0; x.len()];
        let shared = Shared::new(&mut y);
        let rows = x.len() / width;
        let normalise = |range: std::ops::Range<usize>| {
            for row in range {
                let at = row * width..(row + 1) * width;
                // SAFETY: each row belongs to one thread.
                self.0.row(&x[at.clone()], unsafe { shared.slice(at) });
            }
        };
        self.0.cpu.split(rows, x.len(), normalise).map_err(wrap)?;
        Ok(rows_of(y, rows, width))
    }
}
