//! Numeric kernels, once per backend, as candle custom ops.
//!
//! Every result row is bit-equal whatever rows run beside it, however many threads compute and however
//! a prompt is cut: each output is one reduction in one fixed order. Activations are contiguous rows,
//! float32 on the CPU; weights keep their published precision.

mod backend;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod device;
mod embedding;
mod error;
mod gqa;
mod linear;
mod logits;
mod mla;
mod moe;
mod norm;
mod paged;
mod rope;
mod router;
mod rows;
mod tensor;

pub use backend::Backend;
pub use cpu::{Cpu, CpuOptions, Isa};
#[cfg(feature = "cuda")]
pub use cuda::{Cuda, CudaOptions};
pub use device::{Activations, Processor};
pub use embedding::Embedding;
pub use error::{KernelError, Result};
pub use gqa::{GqaSpec, gqa};
pub use linear::Linear;
pub use logits::{argmax, top_k_softmax};
pub use mla::{MlaDims, MlaWeights, mla};
pub use moe::{ExpertViews, Experts, Mlp, moe};
pub use norm::RmsNorm;
pub use paged::PagedRows;
pub use rope::{Rope, RopeSpec, RopeStyle};
pub use router::{Router, RouterSpec, Routes, Routing};
pub use rows::{Ragged, RowRef, Rows};
