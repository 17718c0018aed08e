use eyrie_checkpoint::CheckpointError;

use crate::pages::OutOfPages;

/// What can go wrong while loading or running a model; each text names what, the limit and the given value.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The checkpoint is missing something or says something the model cannot run.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A kernel refused its input.
    #[error(transparent)]
    Kernel(#[from] eyrie_kernels::KernelError),
    /// The tensor library refused an operation.
    #[error(transparent)]
    Tensor(#[from] candle_core::Error),
    /// Memory to be shared could not be created, sealed or verified.
    #[error(transparent)]
    Region(#[from] eyrie_region::RegionError),
    /// A grant does not describe the region it came with.
    #[error(transparent)]
    Grant(#[from] eyrie_region::GrantError),
    /// The page pool is exhausted.
    #[error(transparent)]
    OutOfPages(#[from] OutOfPages),
    /// The rows of a batch contradict themselves, their table or the model.
    #[error("rows of sequence {sequence}: {reason}")]
    Rows {
        /// Index of the sequence in the batch.
        sequence: usize,
        /// What is wrong, with limit and given value.
        reason: String,
    },
    /// Capture ids are not a strictly increasing set within `0..=layers`.
    #[error("capture ids {ids:?}: {reason}")]
    Capture {
        /// The ids given.
        ids: Vec<usize>,
        /// What is wrong with them.
        reason: String,
    },
    /// Two parts of a pair disagree in a size.
    #[error("{what}: expected {expected}, got {got}")]
    Mismatch {
        /// The size compared.
        what: &'static str,
        /// What this model needs.
        expected: usize,
        /// What was given.
        got: usize,
    },
    /// A draft id that the head's vocabulary does not have.
    #[error("draft id must be below the draft vocabulary of {vocab}, got {id}")]
    DraftId {
        /// Draft vocabulary `Vd`.
        vocab: usize,
        /// The id given.
        id: u32,
    },
    /// A rollback asks for rows the sequence does not have.
    #[error("rollback: {0}")]
    Rollback(String),
    /// The model or draft uses something this build does not run.
    #[error("{what}: not supported: {value}")]
    Unsupported {
        /// The config field or tensor.
        what: &'static str,
        /// Its value.
        value: String,
    },
    /// A grant lacks a tensor the importer needs.
    #[error("grant {export_id}: no tensor {name}")]
    NotGranted {
        /// The grant.
        export_id: u64,
        /// The tensor looked for.
        name: &'static str,
    },
}

/// Result of model operations.
pub type Result<T, E = ModelError> = std::result::Result<T, E>;
