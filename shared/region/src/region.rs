//! What every kind of shared memory has in common.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;

use crate::{GpuUuid, RegionError};

/// Alignment in bytes of every tensor inside a region: a cache line, and enough for any vector load.
pub const ALIGN: usize = 64;

/// The next multiple of [`ALIGN`] at or above `offset`; `None` where it does not fit 64 bits.
pub fn align_up(offset: u64) -> Option<u64> {
    offset.checked_next_multiple_of(ALIGN as u64)
}

/// Where bytes lie on a device. The address means something to kernels and the driver alone, in this process, for as long
/// as the memory it was taken of lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceSpan {
    /// Device address of the first byte.
    pub ptr: u64,
    /// Bytes.
    pub len: u64,
    /// The GPU's place among those that this process sees.
    pub ordinal: usize,
    /// The GPU.
    pub uuid: GpuUuid,
}

/// Device memory that nobody else reads or writes for as long as this lives: for kernels that fill it where it lies.
#[derive(Debug)]
pub struct DeviceSpanMut<'a> {
    span: DeviceSpan,
    _borrowed: PhantomData<&'a mut ()>,
}

impl DeviceSpanMut<'_> {
    /// `span` must lie in memory that is borrowed exclusively for the lifetime.
    pub(crate) fn new(span: DeviceSpan) -> Self {
        Self { span, _borrowed: PhantomData }
    }

    /// Where it lies.
    pub fn span(&self) -> DeviceSpan {
        self.span
    }
}

/// A run of bytes that is mapped for as long as the value lives and that nobody changes meanwhile.
///
/// The bytes lie in host memory or on a device: exactly one of [`host`](Self::host) and [`device`](Self::device) tells
/// where. A region on a device implements `device` and `read` too.
///
/// Memory with a living writer is not a `Region`: see [`RingReader`](crate::RingReader).
pub trait Region: Send + Sync + fmt::Debug {
    /// The bytes where they lie in host memory; the first one is aligned to at least [`ALIGN`].
    fn host(&self) -> Option<&[u8]>;

    /// Where the bytes lie on a device.
    fn device(&self) -> Option<DeviceSpan> {
        None
    }

    /// How the bytes came to be in this process.
    fn kind(&self) -> RegionKind;

    /// Size in bytes.
    fn byte_len(&self) -> u64 {
        match self.host() {
            Some(bytes) => bytes.len() as u64,
            None => self.device().map_or(0, |span| span.len),
        }
    }

    /// Copies the bytes from `offset` on to `out`, wherever they lie. Not for whole weights: a device's bytes take the bus.
    ///
    /// # Errors
    /// [`RegionError::Bounds`], or the device's answer.
    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), RegionError> {
        let bytes = self.host_bytes()?;
        let at = within(bytes.len() as u64, offset, out.len() as u64)?;
        out.copy_from_slice(&bytes[at.start as usize..at.end as usize]);
        Ok(())
    }

    /// The bytes, for those who can use host memory only.
    ///
    /// # Errors
    /// [`RegionError::NotOnHost`].
    fn host_bytes(&self) -> Result<&[u8], RegionError> {
        self.host().ok_or_else(|| RegionError::NotOnHost { kind: self.kind() })
    }
}

/// `bytes` bytes from `offset` on of a region of `limit` bytes.
pub(crate) fn within(limit: u64, offset: u64, bytes: u64) -> Result<Range<u64>, RegionError> {
    match offset.checked_add(bytes).filter(|end| *end <= limit) {
        Some(end) => Ok(offset..end),
        None => Err(RegionError::Bounds { offset, bytes, limit }),
    }
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
    /// Device memory behind a file descriptor, which importers map read-only.
    CudaVmm,
    /// Device memory behind a handle, which importers map writable.
    CudaIpc,
}

impl RegionKind {
    const ALL: [Self; 5] = [Self::FileMap, Self::Memfd, Self::Local, Self::CudaVmm, Self::CudaIpc];

    /// The bytes lie on a device.
    pub fn is_on_device(self) -> bool {
        matches!(self, Self::CudaVmm | Self::CudaIpc)
    }

    /// The name used in messages and logs; `str::parse` reads it back.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::FileMap => "file",
            Self::Memfd => "memfd",
            Self::Local => "local",
            Self::CudaVmm => "cuda_vmm",
            Self::CudaIpc => "cuda_ipc",
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
#[error("region kind must be file, memfd, local, cuda_vmm or cuda_ipc, given {0:?}")]
pub struct UnknownKind(pub String);

impl std::str::FromStr for RegionKind {
    type Err = UnknownKind;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL.into_iter().find(|kind| kind.as_str() == text).ok_or_else(|| UnknownKind(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_read_back_what_they_print() {
        for kind in RegionKind::ALL {
            assert_eq!(kind.to_string().parse(), Ok(kind));
        }
        let unknown = "cuda_pipe".parse::<RegionKind>().unwrap_err();
        assert!(unknown.to_string().contains("cuda_pipe"));
    }

    #[test]
    fn reading_stays_within_the_region() {
        let region = crate::Local::copy_of(b"weights");
        let mut out = [0; 3];
        region.read(4, &mut out).unwrap();
        assert_eq!(&out, b"hts");
        for offset in [5, u64::MAX] {
            let error = region.read(offset, &mut out).unwrap_err();
            assert!(matches!(error, RegionError::Bounds { limit: 7, .. }), "{error}");
        }
    }

    #[test]
    fn aligning_never_wraps() {
        assert_eq!(align_up(0), Some(0));
        assert_eq!(align_up(1), Some(64));
        assert_eq!(align_up(64), Some(64));
        assert_eq!(align_up(u64::MAX), None);
    }
}
