//! Where kernels compute.

use candle_core::{Device, Tensor};
use eyrie_checkpoint::Fill;
use eyrie_region::{DeviceRows, DeviceSpanMut, Stream};

use crate::cpu::{Cpu, CpuOptions};
#[cfg(feature = "cuda")]
use crate::cuda::{Cuda, CudaOptions};
use crate::device::{Activations, Processor};
use crate::error::{KernelError, Result, limit};
use crate::tensor::first_not_finite;

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
    /// Takes `processor` into use; `cpu` says how, where it is the CPU.
    ///
    /// # Errors
    /// Activations that the processor does not have, a GPU that is not there or that this build has no kernels for, or
    /// as [`Cpu::new`].
    pub fn open(processor: Processor, activations: Activations, cpu: CpuOptions) -> Result<Self> {
        match (processor, activations) {
            (Processor::Cpu, Activations::F32) => Ok(Cpu::new(cpu)?.into()),
            (Processor::Cpu, other) => Err(limit("cpu", "activations", other.name(), "f32")),
            #[cfg(feature = "cuda")]
            (Processor::Cuda(ordinal), activations) => {
                Ok(Self::Cuda(Cuda::open(CudaOptions { ordinal, activations })?))
            }
            #[cfg(not(feature = "cuda"))]
            (Processor::Cuda(ordinal), _) => Err(KernelError::Gpu {
                ordinal,
                reason: "this build has no CUDA kernels, see docs/GPU.md (--features cuda)".to_owned(),
            }),
        }
    }

    /// Whether it is a GPU.
    pub fn is_gpu(&self) -> bool {
        !matches!(self, Self::Cpu(_))
    }

    /// The device on which this backend's activations lie.
    pub fn device(&self) -> &Device {
        match self {
            Self::Cpu(_) => &Device::Cpu,
            #[cfg(feature = "cuda")]
            Self::Cuda(cuda) => cuda.device(),
        }
    }

    /// Where this backend computes.
    pub fn processor(&self) -> Processor {
        match self {
            Self::Cpu(_) => Processor::Cpu,
            #[cfg(feature = "cuda")]
            Self::Cuda(cuda) => Processor::Cuda(cuda.ordinal()),
        }
    }

    /// What may make other numbers of the same weights: the kind of processor and its activations.
    pub fn arithmetic(&self) -> String {
        let numbers = self.numbers().name();
        match self {
            Self::Cpu(_) => format!("cpu {numbers}"),
            #[cfg(feature = "cuda")]
            Self::Cuda(cuda) => format!("cuda {} {numbers}", cuda.capability()),
        }
    }

    /// Numbers of this backend's activations.
    pub fn numbers(&self) -> Activations {
        match self {
            Self::Cpu(_) => Activations::F32,
            #[cfg(feature = "cuda")]
            Self::Cuda(cuda) => cuda.numbers(),
        }
    }

    /// The queue that this backend computes on, for copies that are to come in its order; none on the CPU.
    ///
    /// # Errors
    /// The driver's answer.
    pub fn stream(&self) -> Result<Option<Stream>> {
        match self {
            Self::Cpu(_) => Ok(None),
            #[cfg(feature = "cuda")]
            Self::Cuda(cuda) => cuda.queue().map(Some),
        }
    }

    /// `x` where it lies, for copies within the device in the order of [`stream`](Self::stream).
    ///
    /// # Errors
    /// A tensor that does not lie on this backend's GPU.
    pub fn device_rows<'a>(&self, x: &'a Tensor) -> Result<DeviceRows<'a>> {
        match self {
            Self::Cpu(_) => {
                let _ = x;
                Err(KernelError::Mixed { op: "device_rows" })
            }
            #[cfg(feature = "cuda")]
            Self::Cuda(cuda) => cuda.device_rows(x),
        }
    }

    /// A copy of device memory in this backend's activations, `[rows, width]`, made in the order of
    /// [`stream`](Self::stream). `stored` are the numbers that the rows consist of.
    ///
    /// # Errors
    /// A backend without a GPU, or memory that cannot be had.
    pub fn take_in(&self, rows: DeviceRows<'_>, stored: Activations) -> Result<Tensor> {
        match self {
            Self::Cpu(_) => {
                let _ = (rows, stored);
                Err(KernelError::Mixed { op: "take_in" })
            }
            #[cfg(feature = "cuda")]
            Self::Cuda(cuda) => cuda.take_in(rows, stored),
        }
    }

    /// The first row of `x` `[rows, width]` that has a value which is no finite number.
    ///
    /// # Errors
    /// A tensor that lies elsewhere.
    pub fn first_not_finite(&self, x: &Tensor) -> Result<Option<usize>> {
        match self {
            Self::Cpu(_) => first_not_finite(x),
            #[cfg(feature = "cuda")]
            Self::Cuda(cuda) => cuda.first_not_finite(x),
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

    /// Makes the elements of `fill` in device memory, from `offset` on, and waits.
    ///
    /// # Errors
    /// Memory of another device or with too little room, or a kernel that failed.
    pub fn fill(&self, fill: &Fill, memory: &mut DeviceSpanMut<'_>, offset: u64) -> Result<()> {
        match self {
            Self::Cpu(_) => {
                let given = format!("{} bytes of GPU {} at {offset}", fill.byte_len(), memory.span().ordinal);
                Err(limit("fill", "memory", given, "the CPU's"))
            }
            #[cfg(feature = "cuda")]
            Self::Cuda(cuda) => cuda.fill_memory(fill, memory, offset),
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
