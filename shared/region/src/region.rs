//! What every kind of shared memory has in common.

use std::fmt;

/// Alignment in bytes of every tensor inside a region: a cache line, and enough for any vector load.
pub const ALIGN: usize = 64;

/// The next multiple of [`ALIGN`] at or above `offset`; `None` where it does not fit 64 bits.
pub fn align_up(offset: u64) -> Option<u64> {
    offset.checked_next_multiple_of(ALIGN as u64)
}

/// A run of bytes that is mapped for as long as the value lives and that nobody changes meanwhile.
///
/// Memory with a living writer is not a `Region`: see [`RingReader`](crate::RingReader).
pub trait Region: Send + Sync + fmt::Debug {
    /// The bytes; the first one is aligned to at least [`ALIGN`].
    fn bytes(&self) -> &[u8];

    /// How the bytes came to be in this process.
    fn kind(&self) -> RegionKind;
}

/// How a region's bytes come to be in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RegionKind {
    /// A file mapped read-only.
    FileMap,
    /// A sealed memfd, exported or imported.
    Memfd,
    /// Memory of this process alone.
    Local,
}

impl RegionKind {
    /// The name used in messages and logs; `str::parse` reads it back.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::FileMap => "file",
            Self::Memfd => "memfd",
            Self::Local => "local",
        }
    }
}

impl fmt::Display for RegionKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A region kind this build does not know.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("region kind must be file, memfd or local, given {0:?}")]
pub struct UnknownKind(pub String);

impl std::str::FromStr for RegionKind {
    type Err = UnknownKind;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        [Self::FileMap, Self::Memfd, Self::Local]
            .into_iter()
            .find(|kind| kind.as_str() == text)
            .ok_or_else(|| UnknownKind(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_read_back_what_they_print() {
        for kind in [RegionKind::FileMap, RegionKind::Memfd, RegionKind::Local] {
            assert_eq!(kind.to_string().parse(), Ok(kind));
        }
        let unknown = "cuda_ipc".parse::<RegionKind>().unwrap_err();
        assert!(unknown.to_string().contains("cuda_ipc"));
    }

    #[test]
    fn aligning_never_wraps() {
        assert_eq!(align_up(0), Some(0));
        assert_eq!(align_up(1), Some(64));
        assert_eq!(align_up(64), Some(64));
        assert_eq!(align_up(u64::MAX), None);
    }
}
