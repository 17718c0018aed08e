//! Every CUDA kernel against its CPU twin, and every row bit-equal to itself alone. Needs a GPU and fails without one.

#![expect(clippy::unwrap_used, clippy::panic, reason = "test code outside #[test] functions")]

mod attention;
#[expect(dead_code, reason = "the CPU's tests use more of it")]
#[path = "../kernels/common.rs"]
mod common;
mod fill;
mod gpu;
mod linear;
mod moe;
mod rows;
#[path = "../kernels/sequences.rs"]
mod sequences;
