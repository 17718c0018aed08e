use std::path::PathBuf;

use eyrie_checkpoint::CheckpointError;
use eyrie_kernels::KernelError;
use eyrie_model::ModelError;
use eyrie_region::{CudaError, DoorError, RegionError, RingError};
use eyrie_service::ServeError;

use crate::plan::Need;

/// Why the target could not start or had to end; one line that names what, limit and given value.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TargetError {
    /// The checkpoint is refused.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The model could not be loaded or run.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A kernel could not be set up.
    #[error(transparent)]
    Kernel(#[from] eyrie_kernels::KernelError),
    /// A rows tensor could not be read.
    #[error("reading logits: {0}")]
    Tensor(#[from] candle_core::Error),
    /// The feature ring could not be made or written.
    #[error(transparent)]
    Ring(#[from] RingError),
    /// The door that hands out descriptors could not be opened.
    #[error("door for shared memory: {0}")]
    Door(#[from] DoorError),
    /// The socket could not be bound, or the system refused something small.
    #[error("{0}")]
    Io(#[from] std::io::Error),
    /// The transport failed.
    #[error(transparent)]
    Serve(#[from] ServeError),
    /// An option is out of its range.
    #[error("option {option} must be {limit}, given {given}")]
    Option {
        /// The option's name on the command line.
        option: &'static str,
        /// What it may be.
        limit: String,
        /// What it was.
        given: String,
    },
    /// More memory than there is.
    #[error("memory of {place}: {need}, {available} are free")]
    Memory {
        /// The processor.
        place: String,
        /// What serving takes, part by part.
        need: Need,
        /// Bytes that were free.
        available: u64,
    },
    /// GPU memory that ran out all the same.
    #[error("{error}; by the plan {need}, {available} were free at the start")]
    OutOfMemory {
        /// What could not be had.
        error: Box<TargetError>,
        /// What serving was thought to take, part by part.
        need: Need,
        /// Bytes that were free.
        available: u64,
    },
    /// A file of the model folder could not be read.
    #[error("{}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// What is exported cannot be mapped once more for copies.
    #[error("shared memory: {0}")]
    Region(#[from] RegionError),
    /// A fault of ours on the engine's thread.
    #[error("the engine stopped: {0}")]
    Engine(String),
}

impl TargetError {
    /// The same beside the plan, where it says that a GPU has no memory left.
    pub(crate) fn beside(self, need: Need, available: u64) -> Self {
        match &self {
            Self::Kernel(KernelError::GpuMemory { .. })
            | Self::Model(
                ModelError::Kernel(KernelError::GpuMemory { .. })
                | ModelError::Region(RegionError::Cuda(CudaError::OutOfMemory { .. })),
            ) => Self::OutOfMemory { error: Box::new(self), need, available },
            _ => self,
        }
    }
}
