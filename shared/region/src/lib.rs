//! Memory shared between processes: memfd, leases, epochs and the feature ring.

use std::fs::File;
use std::path::{Path, PathBuf};

/// What backs a region's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RegionKind {
    /// A read-only mapping of a file.
    FileMap,
    /// A sealed memfd.
    Memfd,
    /// Heap memory of this process.
    Local,
}

/// Bytes that stay in place for as long as the region lives.
pub trait Region: Send + Sync + std::fmt::Debug {
    /// The whole region.
    fn bytes(&self) -> &[u8];
    /// What backs it.
    fn kind(&self) -> RegionKind;
}

/// Why a region could not be made.
#[derive(Debug, thiserror::Error)]
pub enum RegionError {
    /// A file that could not be opened or mapped.
    #[error("{}: cannot map: {source}", path.display())]
    Map {
        /// The file.
        path: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
}

/// A file mapped read-only.
#[derive(Debug)]
pub struct FileMap(memmap2::Mmap);

impl FileMap {
    /// Maps the whole file; fails if it cannot be opened, or is empty.
    pub fn open(path: &Path) -> Result<Self, RegionError> {
        let map = |source| RegionError::Map { path: path.to_owned(), source };
        let file = File::open(path).map_err(map)?;
        // SAFETY: the mapping is read-only; checkpoint files are not truncated while served.
        unsafe { memmap2::Mmap::map(&file) }.map(Self).map_err(map)
    }
}

impl Region for FileMap {
    fn bytes(&self) -> &[u8] {
        &self.0
    }
    fn kind(&self) -> RegionKind {
        RegionKind::FileMap
    }
}

/// Heap memory behind the same interface.
#[derive(Debug)]
pub struct Local(Vec<u8>);

impl Local {
    /// Takes the bytes over.
    pub fn new(bytes: Vec<u8>) -> Self {
        Self(bytes)
    }
}

impl Region for Local {
    fn bytes(&self) -> &[u8] {
        &self.0
    }
    fn kind(&self) -> RegionKind {
        RegionKind::Local
    }
}
