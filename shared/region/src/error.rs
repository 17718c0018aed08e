//! Why a region could not be made, mapped or trusted.

use std::io;
use std::path::PathBuf;

use crate::{CudaError, RegionKind};

/// A region that could not be created, mapped or accepted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegionError {
    /// A file could not be opened or mapped.
    #[error("{}: cannot {action}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What was tried, as a verb phrase.
        action: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The path names a directory, pipe or device.
    #[error("{}: not a regular file", path.display())]
    NotAFile {
        /// The path.
        path: PathBuf,
    },
    /// A region of no bytes cannot be mapped.
    #[error("{name}: a region needs at least 1 byte, given 0")]
    Empty {
        /// File or memfd.
        name: String,
    },
    /// More memory than the machine or its control group has left.
    #[error("{name}: {bytes} bytes exceed the {available} bytes of memory available")]
    OutOfMemory {
        /// What it is for.
        name: String,
        /// Bytes asked for.
        bytes: u64,
        /// Bytes that could be had.
        available: u64,
    },
    /// Memory of this process could not be had.
    #[error("{name}: cannot map {bytes} bytes: {source}")]
    Resident {
        /// What it is for.
        name: String,
        /// Bytes asked for.
        bytes: usize,
        /// The kernel's answer.
        source: io::Error,
    },
    /// A system call on a memfd failed.
    #[error("memfd {name}: cannot {action}: {source}")]
    Memfd {
        /// The memfd's name.
        name: String,
        /// What was tried, as a verb phrase.
        action: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
    /// An imported descriptor lacks seals, so its exporter could shrink, grow or rewrite it.
    #[error("imported memfd lacks the seals {missing}, it has {found}")]
    Unsealed {
        /// The seals it must have and has not.
        missing: String,
        /// The seals it has.
        found: String,
    },
    /// Imported memory is not as long as its grant says.
    #[error("imported memory has {found} bytes, the grant says {expected}")]
    Length {
        /// Bytes in the grant.
        expected: u64,
        /// Bytes behind the descriptor or handle.
        found: u64,
    },
    /// Bytes that a region does not have.
    #[error("{bytes} bytes at offset {offset} exceed the region's {limit} bytes")]
    Bounds {
        /// First byte wanted.
        offset: u64,
        /// Bytes wanted.
        bytes: u64,
        /// The region's size in bytes.
        limit: u64,
    },
    /// Bytes on a device were to be read as a slice.
    #[error("a {kind} region lies on a device, where the CPU cannot read it")]
    NotOnHost {
        /// How the bytes are shared.
        kind: RegionKind,
    },
    /// Bytes of the host were to be shared as a device's.
    #[error("a {kind} region lies on no device")]
    NotOnDevice {
        /// How the bytes are shared.
        kind: RegionKind,
    },
    /// A handle whose memory the driver would map writable, without leave to do so.
    #[error("cuda_ipc maps the target's memory writable: it needs --allow-writable-ipc")]
    WritableIpc,
    /// A descriptor from the driver could not be closed to child processes.
    #[error("descriptor of device memory: {0}")]
    Descriptor(io::Error),
    /// The GPU or its driver refused.
    #[error(transparent)]
    Cuda(#[from] CudaError),
}
