//! Why the draft service could not start or had to end.

use eyrie_checkpoint::CheckpointError;
use eyrie_kernels::KernelError;
use eyrie_model::ModelError;
use eyrie_service::ServeError;

/// Errors that end the service. A target that is absent or does not match is not one of them: the service then
/// stays unattached and says why.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DraftError {
    /// An option is out of its range.
    #[error("option {option} must be {limit}, given {given}")]
    Option {
        /// The option's name on the command line, where it has one.
        option: &'static str,
        /// What it may be.
        limit: String,
        /// What was given.
        given: String,
    },
    /// The head's folder cannot be used.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The task that opens the head's folder did not end.
    #[error("opening the head's folder: {0}")]
    Loader(tokio::task::JoinError),
    /// The compute backend cannot start.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The head's weights cannot be used.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The listening socket cannot be had.
    #[error(transparent)]
    Listen(std::io::Error),
    /// Serving failed.
    #[error(transparent)]
    Serve(#[from] ServeError),
    /// The engine's thread cannot start.
    #[error("the draft engine cannot start: {0}")]
    EngineStart(std::io::Error),
    /// The engine's thread ended by itself.
    #[error("the draft engine's thread died; its panic message is above")]
    EngineDied,
}
