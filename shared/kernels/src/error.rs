//! What can go wrong in a kernel call: always a wrong argument or a broken worker, never arithmetic.

use eyrie_checkpoint::Layout;
use eyrie_region::RegionError;

/// Error of a kernel call or of building a kernel's weights.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// A tensor or slice does not have the shape the kernel was built for.
    #[error("{op}: {what} is {got:?}, expected {want}")]
    Shape {
        /// Kernel that was called.
        op: &'static str,
        /// Name of the argument.
        what: &'static str,
        /// Shape that was given.
        got: Vec<usize>,
        /// Shape that is needed, in words.
        want: String,
    },
    /// A number lies outside its limit.
    #[error("{op}: {what} is {got}, limit {limit}")]
    Limit {
        /// Kernel that was called.
        op: &'static str,
        /// Name of the argument.
        what: &'static str,
        /// Value that was given.
        got: String,
        /// The limit, in words.
        limit: String,
    },
    /// The weight's layout has no kernel here.
    #[error("{op}: weight layout {layout} has no kernel here (supported: {supported})")]
    Layout {
        /// Kernel that was called.
        op: &'static str,
        /// Layout that was given.
        layout: Layout,
        /// Layouts that are supported.
        supported: &'static str,
    },
    /// Weights, caches and activations that were not made for the same backend.
    #[error("{op}: operands of different backends")]
    Mixed {
        /// Kernel that was called.
        op: &'static str,
    },
    /// A NaN where an order is needed.
    #[error("{op}: value {index} is NaN")]
    NotANumber {
        /// Kernel that was called.
        op: &'static str,
        /// Index of the first NaN.
        index: usize,
    },
    /// The instruction set is not available on this machine or is not known.
    #[error("instruction set {0} is not available on this machine")]
    Isa(String),
    /// A worker thread could not be started.
    #[error("cannot start worker thread {index} of {threads}: {source}")]
    Spawn {
        /// Index of the thread.
        index: usize,
        /// Threads asked for.
        threads: usize,
        /// What the system said.
        source: std::io::Error,
    },
    /// A kernel panicked on one of the pool's threads; the pool itself stays usable.
    #[error("a kernel panicked on a worker thread")]
    Panicked,
    /// A GPU that is not there or cannot run these kernels.
    #[error("GPU {ordinal}: {reason}")]
    Gpu {
        /// Number of the GPU that was asked for.
        ordinal: usize,
        /// What is wrong with it.
        reason: String,
    },
    /// GPU memory that cannot be had.
    #[error("GPU memory: {wanted} bytes wanted for {what}, {free} of {total} bytes are free")]
    GpuMemory {
        /// What it was for.
        what: &'static str,
        /// Bytes asked for.
        wanted: usize,
        /// Bytes that were free.
        free: usize,
        /// Bytes of the GPU.
        total: usize,
    },
    /// A call of the CUDA driver failed.
    #[error("cuda: {what}: {code}")]
    Cuda {
        /// What was tried, or the kernel that was launched.
        what: &'static str,
        /// Name of the driver's error.
        code: String,
    },
    /// Memory that cannot be had.
    #[error(transparent)]
    Memory(#[from] RegionError),
    /// Error of the tensor library.
    #[error(transparent)]
    Tensor(#[from] candle_core::Error),
}

/// Result of a kernel call.
pub type Result<T> = std::result::Result<T, KernelError>;

pub(crate) fn shape(
    op: &'static str,
    what: &'static str,
    got: &[usize],
    want: impl Into<String>,
) -> KernelError {
    KernelError::Shape { op, what, got: got.to_vec(), want: want.into() }
}

pub(crate) fn limit(
    op: &'static str,
    what: &'static str,
    got: impl ToString,
    limit: impl Into<String>,
) -> KernelError {
    KernelError::Limit { op, what, got: got.to_string(), limit: limit.into() }
}
