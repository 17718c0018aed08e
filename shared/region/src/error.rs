//! Why a region could not be made, mapped or trusted.

use std::io;
use std::path::PathBuf;

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
    /// An imported descriptor is not as long as its grant says.
    #[error("imported memfd has {found} bytes, the grant says {expected}")]
    Length {
        /// Bytes in the grant.
        expected: u64,
        /// Bytes in the descriptor.
        found: u64,
    },
}
