//! RMS normalisation on the CPU.

use candle_core::{CpuStorage, CustomOp1, Layout, Shape, Tensor};

use super::{Cpu, Shared, reduce};
use crate::error::Result;
use crate::norm::OP;
use crate::tensor::{operand, rows_of, wrap};

#[derive(Debug)]
pub(crate) struct RmsNorm {
    cpu: Cpu,
    weight: Vec<f32>,
    eps: f32,
}

impl RmsNorm {
    pub(crate) fn new(cpu: &Cpu, weight: Vec<f32>, eps: f32) -> RmsNorm {
        RmsNorm { cpu: cpu.clone(), weight, eps }
    }

    pub(crate) fn width(&self) -> usize {
        self.weight.len()
    }

    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
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
