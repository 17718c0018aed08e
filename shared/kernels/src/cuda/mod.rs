//! Kernels on NVIDIA GPUs.
