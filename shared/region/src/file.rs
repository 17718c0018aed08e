//! Weight files mapped read-only.

use std::fs::File;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use crate::{Region, RegionError, RegionKind};

/// A whole file, mapped read-only and shared with the page cache.
///
/// The file must not be truncated while it is mapped: the kernel answers a read beyond its new end with SIGBUS.
/// Replacing it by rename is harmless, the mapping keeps the old file.
#[derive(Debug)]
pub struct FileMap {
    path: PathBuf,
    map: Mmap,
}

impl FileMap {
    /// Maps the file at `path`.
    ///
    /// # Errors
    /// Names the path where it cannot be opened or mapped, is no regular file, or is empty.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, RegionError> {
        let path = path.as_ref();
        let fail = |action| {
            let path = path.to_owned();
            move |source| RegionError::File { path, action, source }
        };
        // Looked at before it is opened: opening a pipe without a writer would block for ever.
        let meta = std::fs::metadata(path).map_err(fail("read its metadata"))?;
        if !meta.is_file() {
            return Err(RegionError::NotAFile { path: path.to_owned() });
        }
        let file = File::open(path).map_err(fail("open it"))?;
        if meta.len() == 0 {
            return Err(RegionError::Empty { name: path.display().to_string() });
        }
        // SAFETY: the mapping is read-only and this process never writes the file; that no other process rewrites
        // published weights in place is the documented condition of this type.
        let map = unsafe { Mmap::map(&file) }.map_err(fail("map it"))?;
        Ok(Self { path: path.to_owned(), map })
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// The path it was opened by.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Region for FileMap {
    fn host(&self) -> Option<&[u8]> {
        Some(&self.map)
    }

    fn kind(&self) -> RegionKind {
        RegionKind::FileMap
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_reads_as_it_was_written() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("weights");
        std::fs::write(&path, b"weights").unwrap();
        let map = FileMap::open(&path).unwrap();
        assert_eq!(map.bytes(), b"weights");
        assert_eq!(map.kind(), RegionKind::FileMap);
        assert_eq!(map.path(), path);
    }

    #[test]
    fn errors_name_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let empty = dir.path().join("empty.safetensors");
        std::fs::write(&empty, b"").unwrap();
        for path in [dir.path().join("absent.safetensors"), empty, dir.path().to_owned()] {
            let message = FileMap::open(&path).unwrap_err().to_string();
            assert!(message.starts_with(&path.display().to_string()), "{message}");
        }
    }
}
