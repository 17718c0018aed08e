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
    /// Memory that ran out all the same.
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
    /// Memory, or the GPU that it is to lie on, could not be had.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// A fault of ours on the engine's thread.
    #[error("the engine stopped: {0}")]
    Engine(String),
}

impl TargetError {
    /// The same beside the plan, where it says that there is no memory left.
    pub(crate) fn beside(self, need: Need, available: u64) -> Self {
        match self.is_out_of_memory() {
            true => Self::OutOfMemory { error: Box::new(self), need, available },
            false => self,
        }
    }

    /// Whether memory of the host or of a GPU ran out, whoever asked for it.
    pub(crate) fn is_out_of_memory(&self) -> bool {
        let region = match self {
            Self::OutOfMemory { .. }
            | Self::Kernel(KernelError::GpuMemory { .. })
            | Self::Model(ModelError::Kernel(KernelError::GpuMemory { .. })) => return true,
            Self::Region(region)
            | Self::Ring(RingError::Region(region))
            | Self::Kernel(KernelError::Memory(region))
            | Self::Model(ModelError::Region(region) | ModelError::Kernel(KernelError::Memory(region))) => {
                region
            }
            _ => return false,
        };
        matches!(region, RegionError::OutOfMemory { .. } | RegionError::Cuda(CudaError::OutOfMemory { .. }))
    }
}

#[cfg(test)]
mod tests {
    use eyrie_region::GpuUuid;

    use super::*;

    /// An error of a region in every place that it can come from.
    fn places(region: impl Fn() -> RegionError) -> [TargetError; 5] {
        [
            region().into(),
            RingError::from(region()).into(),
            KernelError::from(region()).into(),
            ModelError::from(region()).into(),
            ModelError::from(KernelError::from(region())).into(),
        ]
    }

    #[test]
    fn memory_that_ran_out_is_told_from_other_errors_wherever_it_was_asked_for() {
        let host = || RegionError::OutOfMemory { name: "ring".to_owned(), bytes: 9, available: 5 };
        let cuda = || CudaError::OutOfMemory {
            name: "ring".to_owned(),
            gpu: GpuUuid::from([1; 16]),
            bytes: 9,
            free: 5,
        };
        let gpu = || KernelError::GpuMemory { what: "linear", wanted: 9, free: 5, total: 7 };
        let ran_out = [gpu().into(), ModelError::from(gpu()).into()];
        let ran_out = ran_out.into_iter().chain(places(host)).chain(places(|| cuda().into()));
        for error in ran_out {
            assert!(error.is_out_of_memory(), "{error:?}");
        }
        let other = [KernelError::Panicked.into(), ModelError::Rollback(String::new()).into()];
        for error in other.into_iter().chain(places(|| CudaError::NoDriver.into())) {
            assert!(!error.is_out_of_memory(), "{error:?}");
        }
    }
}
