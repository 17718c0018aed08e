//! RMS normalisation, computed in float32.

use candle_core::Tensor;

use crate::backend::Backend;
use crate::cpu;
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::error::{Result, limit};
use crate::tensor::row_count;

pub(crate) const OP: &str = "rms_norm";

/// `weight * x / sqrt(mean(x^2) + eps)`.
#[derive(Debug)]
pub struct RmsNorm(pub(crate) Norm);

#[derive(Debug)]
pub(crate) enum Norm {
    Cpu(cpu::RmsNorm),
    #[cfg(feature = "cuda")]
    Cuda(cuda::RmsNorm),
}

impl RmsNorm {
    /// A norm over rows as wide as `weight`.
    ///
    /// # Errors
    /// An empty weight, or an `eps` that is negative or not finite.
    pub fn new(backend: &Backend, weight: Vec<f32>, eps: f64) -> Result<RmsNorm> {
        if weight.is_empty() {
            return Err(limit(OP, "width", 0, "at least 1"));
        }
        if !(eps.is_finite() && eps >= 0.0) {
            return Err(limit(OP, "eps", eps, "finite and not negative"));
        }
        Ok(RmsNorm(match backend {
            Backend::Cpu(cpu) => Norm::Cpu(cpu::RmsNorm::new(cpu, weight, eps as f32)),
            #[cfg(feature = "cuda")]
            Backend::Cuda(cuda) => Norm::Cuda(cuda::RmsNorm::new(cuda, &weight, eps as f32)?),
        }))
    }

    /// Width of a row.
    pub fn width(&self) -> usize {
        match &self.0 {
            Norm::Cpu(norm) => norm.width(),
            #[cfg(feature = "cuda")]
            Norm::Cuda(norm) => norm.width(),
        }
    }

    /// `[rows, width]` to the same shape.
    ///
    /// # Errors
    /// `x` is not contiguous, has another shape or lies elsewhere.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        row_count(OP, "x", x, self.width())?;
        match &self.0 {
            Norm::Cpu(norm) => norm.forward(x),
            #[cfg(feature = "cuda")]
            Norm::Cuda(norm) => norm.forward(x),
        }
    }
}
