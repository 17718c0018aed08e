//! Where kernels compute.

use candle_core::{Device, Tensor};

use crate::cpu::Cpu;
#[cfg(feature = "cuda")]
use crate::cuda::Cuda;
use crate::error::Result;

/// Where kernels compute. Weights, caches and activations are made for one backend and stay on it.
#[derive(Debug, Clone)]
pub enum Backend {
    /// The processor: float32 activations.
    Cpu(Cpu),
    /// One GPU.
    #[cfg(feature = "cuda")]
    Cuda(Cuda),
}

impl From<Cpu> for Backend {
    fn from(cpu: Cpu) -> Self {
        Self::Cpu(cpu)
    }
}

impl Backend {
    /// The device on which this backend's activations lie.
    pub fn device(&self) -> &Device {
        match self {
            Self::Cpu(_) => &Device::Cpu,
            #[cfg(feature = "cuda")]
            Self::Cuda(cuda) => cuda.device(),
        }
    }

    /// `a + b` of equal shapes.
    ///
    /// # Errors
    /// Operands of different shapes or from another backend.
    pub fn add(&self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        match self {
            Self::Cpu(_) => Ok((a + b)?),
            #[cfg(feature = "cuda")]
            Self::Cuda(cuda) => cuda.add(a, b),
        }
    }

    /// `factor * x`.
    ///
    /// # Errors
    /// `x` lies elsewhere.
    pub fn scale(&self, x: &Tensor, factor: f64) -> Result<Tensor> {
        match self {
            Self::Cpu(_) => Ok(x.affine(factor, 0.0)?),
            #[cfg(feature = "cuda")]
            Self::Cuda(cuda) => cuda.scale(x, factor as f32),
        }
    }

    /// The rows of `x` at `rows`, in that order, repeats allowed.
    ///
    /// # Errors
    /// A row outside `x`.
    pub fn select(&self, x: &Tensor, rows: &[u32]) -> Result<Tensor> {
        match self {
            Self::Cpu(_) => Ok(x.index_select(&Tensor::from_slice(rows, rows.len(), &Device::Cpu)?, 0)?),
            #[cfg(feature = "cuda")]
            Self::Cuda(cuda) => cuda.select(x, rows),
        }
    }

    /// Rows of `parts` side by side: `[rows, a]` and `[rows, b]` to `[rows, a + b]`.
    ///
    /// # Errors
    /// No parts, or parts of different numbers of rows.
    pub fn beside(&self, parts: &[&Tensor]) -> Result<Tensor> {
        match self {
            Self::Cpu(_) => Ok(Tensor::cat(parts, 1)?),
            #[cfg(feature = "cuda")]
            Self::Cuda(cuda) => cuda.beside(parts),
        }
    }

    /// Rows of `parts` one below the other.
    ///
    /// # Errors
    /// No parts, or parts of different widths.
    pub fn below(&self, parts: &[&Tensor]) -> Result<Tensor> {
        match (self, parts) {
            (_, [one]) => Ok((*one).clone()),
            (Self::Cpu(_), _) => Ok(Tensor::cat(parts, 0)?),
            #[cfg(feature = "cuda")]
            (Self::Cuda(cuda), _) => cuda.below(parts),
        }
    }

    /// Activations of this backend from float32 values, `[rows, width]`.
    ///
    /// # Errors
    /// Values that are no whole number of rows, or memory that cannot be had.
    pub fn activations(&self, values: Vec<f32>, width: usize) -> Result<Tensor> {
        let rows = values.len() / width.max(1);
        match self {
            Self::Cpu(_) => Ok(Tensor::from_vec(values, (rows, width), &Device::Cpu)?),
            #[cfg(feature = "cuda")]
            Self::Cuda(cuda) => cuda.activations(&values, [rows, width]),
        }
    }
}
