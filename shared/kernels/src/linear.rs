//! Products with a weight matrix, one fixed order of summation an output.

use candle_core::Tensor;
use eyrie_checkpoint::WeightView;

use crate::backend::Backend;
use crate::cpu;
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::error::Result;
use crate::tensor::row_count;

pub(crate) const OP: &str = "linear";

/// `y = x W^T` for a weight `[out, in]`.
#[derive(Debug)]
pub struct Linear(pub(crate) Weight);

#[derive(Debug)]
pub(crate) enum Weight {
    Cpu(cpu::Linear),
    #[cfg(feature = "cuda")]
    Cuda(cuda::Linear),
}

impl Linear {
    /// Takes a F32, F16, BF16 or INT4-g32 weight into private memory of the backend; no value changes.
    ///
    /// # Errors
    /// Another layout, byte lengths that do not fit the shape, or an INT4 input width that is no
    /// multiple of 32.
    pub fn pack(backend: &Backend, view: &WeightView) -> Result<Linear> {
        Ok(Linear(match backend {
            Backend::Cpu(cpu) => Weight::Cpu(cpu::Linear::pack(cpu, view)?),
            #[cfg(feature = "cuda")]
            Backend::Cuda(cuda) => Weight::Cuda(cuda::Linear::pack(cuda, view)?),
        }))
    }

    /// A float32 weight, `values` row-major `[out, in]`.
    ///
    /// # Errors
    /// The number of values is not `out * in`, or is zero.
    pub fn from_f32(backend: &Backend, values: &[f32], shape: [usize; 2]) -> Result<Linear> {
        Ok(Linear(match backend {
            Backend::Cpu(cpu) => Weight::Cpu(cpu::Linear::from_f32(cpu, values, shape)?),
            #[cfg(feature = "cuda")]
            Backend::Cuda(cuda) => Weight::Cuda(cuda::Linear::from_f32(cuda, values, shape)?),
        }))
    }

    /// Uses a weight that lies in the view's region, without a copy; the region lives as long as this. On the CPU the
    /// region holds tiles (`Layout::Bf16Tile16`, see [`Linear::write_tiles`]), on a GPU the weight as published.
    ///
    /// # Errors
    /// A layout that cannot be used in place, or a length that does not fit the shape.
    pub fn borrow(backend: &Backend, view: &WeightView) -> Result<Linear> {
        Ok(Linear(match backend {
            Backend::Cpu(cpu) => Weight::Cpu(cpu::Linear::from_tiles(cpu, view)?),
            #[cfg(feature = "cuda")]
            Backend::Cuda(cuda) => Weight::Cuda(cuda::Linear::borrow(cuda, view)?),
        }))
    }

    /// Bytes that [`Linear::write_tiles`] fills for a BF16 weight `[out, in]`.
    pub fn tile_bytes(shape: [usize; 2]) -> usize {
        cpu::tiles::bf16_tile_bytes(shape)
    }

    /// Writes a BF16 weight in tile form (`Layout::Bf16Tile16`) into the caller's memory.
    ///
    /// # Errors
    /// The layout is not BF16 or `bytes` is not [`Linear::tile_bytes`] long.
    pub fn write_tiles(view: &WeightView, bytes: &mut [u8]) -> Result<()> {
        cpu::tiles::write_bf16_tiles(OP, view, bytes)
    }

    /// Width of a result row.
    pub fn out_features(&self) -> usize {
        match &self.0 {
            Weight::Cpu(weight) => weight.out_features(),
            #[cfg(feature = "cuda")]
            Weight::Cuda(weight) => weight.out_features(),
        }
    }

    /// Width of an input row.
    pub fn in_features(&self) -> usize {
        match &self.0 {
            Weight::Cpu(weight) => weight.in_features(),
            #[cfg(feature = "cuda")]
            Weight::Cuda(weight) => weight.in_features(),
        }
    }

    /// `[rows, in]` to `[rows, out]`, both activations of the weight's backend.
    ///
    /// # Errors
    /// `x` is not contiguous, has another shape or lies elsewhere.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        row_count(OP, "x", x, self.in_features())?;
        match &self.0 {
            Weight::Cpu(weight) => weight.forward(x),
            #[cfg(feature = "cuda")]
            Weight::Cuda(weight) => weight.forward(x),
        }
    }

    /// As [`Linear::forward`] with float32 results whatever the activations are: for logits.
    ///
    /// # Errors
    /// As [`Linear::forward`].
    pub fn forward_f32(&self, x: &Tensor) -> Result<Tensor> {
        row_count(OP, "x", x, self.in_features())?;
        match &self.0 {
            Weight::Cpu(weight) => weight.forward(x),
            #[cfg(feature = "cuda")]
            Weight::Cuda(weight) => weight.forward_f32(x),
        }
    }
}
