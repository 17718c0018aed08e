//! Numeric kernels, once per backend, as candle custom ops.
//!
//! Every result row is bit-equal whatever rows run beside it, however many threads compute and however
//! a prompt is cut: each output is one reduction in one fixed order. Activations are contiguous float32
//! rows; weights keep their published precision.

mod activation;
mod attention;
mod cpu;
mod embedding;
mod error;
mod gqa;
mod linear;
mod mla;
mod moe;
mod norm;
mod paged;
mod rope;
mod router;
mod tensor;
mod tiles;

pub use activation::{argmax, silu_mul, top_k_softmax};
pub use cpu::{Cpu, CpuOptions, Isa};
pub use embedding::Embedding;
pub use error::{KernelError, Result};
pub use gqa::{GqaSpec, gqa};
pub use linear::Linear;
pub use mla::{MlaDims, MlaWeights, mla};
pub use moe::{ExpertViews, Experts, Mlp, moe};
pub use norm::RmsNorm;
pub use paged::{PagedRows, Ragged, RowRef};
pub use rope::{Rope, RopeSpec, RopeStyle, YarnSpec};
pub use router::{RouteMethod, Router, RouterSpec, Routes, Scoring};
