//! The manifest of an exported region: what lies where, and how to know that it is the right memory.

use std::collections::HashSet;
use std::ops::Range;

use crate::region::within;
use crate::{ALIGN, Epoch, GpuUuid, IpcHandle, Region, RegionKind, RingGeometry, RingPayload, align_up};

/// [`Grant::device`] of host memory.
pub const CPU: &str = "cpu";

/// Bytes that are hashed at a time where they must be copied from a device for it.
const PIECE: u64 = 16 << 20;

/// What an exporter says about one region. It travels beside the descriptors and is checked against them.
#[derive(Clone, Debug, PartialEq)]
pub struct Grant {
    /// The exporter's boot.
    pub epoch: Epoch,
    /// Number of this export within the epoch.
    pub export_id: u64,
    /// How the region is shared.
    pub kind: RegionKind,
    /// Exact size of the region.
    pub bytes: u64,
    /// The tensors in it.
    pub tensors: Vec<TensorGrant>,
    /// The feature ring that is exported beside the region, as a descriptor of its own.
    pub ring: Option<RingGeometry>,
    /// Where the ring's rows lie, if not in the ring itself: on the region's device, shared by the same means.
    pub ring_payload: Option<RingPayload>,
    /// Where the memory lives: [`CPU`], or a device's UUID.
    pub device: String,
    /// What opens memory of the kind `cuda_ipc`.
    pub ipc: Option<IpcHandle>,
}

/// One tensor of a granted region.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorGrant {
    /// Name in the checkpoint.
    pub name: String,
    /// Name of the order of its elements, `plain` for row-major.
    pub layout: String,
    /// Element type as safetensors spells it, in either case: `bf16`, `f32`, `i32`…
    pub dtype: String,
    /// Elements per dimension, outermost first.
    pub shape: Vec<u64>,
    /// Elements between neighbours per dimension, outermost first.
    pub strides: Vec<u64>,
    /// Bytes from the region's start, a multiple of [`ALIGN`].
    pub offset: u64,
    /// Bytes from `offset` that belong to the tensor.
    pub bytes: u64,
    /// BLAKE3 of those bytes.
    pub checksum: [u8; 32],
}

/// A grant that does not describe the region at hand.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GrantError {
    /// The grant is of another boot of the exporter.
    #[error("grant is stale: epoch must be {expected}, given {got}")]
    StaleEpoch {
        /// The exporter's current epoch.
        expected: Epoch,
        /// The grant's epoch.
        got: Epoch,
    },
    /// The region was shared by other means than the grant says.
    #[error("region kind is {found}, the grant says {expected}")]
    Kind {
        /// Kind in the grant.
        expected: RegionKind,
        /// Kind of the region.
        found: RegionKind,
    },
    /// The region lies elsewhere than the grant says.
    #[error("region lies on {found}, the grant says {expected}")]
    Device {
        /// Device in the grant.
        expected: String,
        /// Device of the region.
        found: String,
    },
    /// Memory that was to lie on a GPU lies on none.
    #[error("grant of kind {kind}: device must be the UUID of a GPU, given {device:?}")]
    NotAGpu {
        /// Kind in the grant.
        kind: RegionKind,
        /// Device in the grant.
        device: String,
    },
    /// What the grant carries does not go with its kind.
    #[error("grant of kind {kind}: {what}")]
    Means {
        /// Kind in the grant.
        kind: RegionKind,
        /// What is missing or too much.
        what: &'static str,
    },
    /// The bytes could not be read to be compared.
    #[error("tensor {tensor}: {reason}")]
    Unreadable {
        /// The tensor.
        tensor: String,
        /// The device's answer.
        reason: String,
    },
    /// The region is of another size than the grant says.
    #[error("region has {found} bytes, the grant says {expected}")]
    Length {
        /// Bytes in the grant.
        expected: u64,
        /// Bytes of the region.
        found: u64,
    },
    /// Two tensors share a name.
    #[error("tensor {tensor}: granted twice")]
    Duplicate {
        /// The name.
        tensor: String,
    },
    /// A tensor reaches beyond the region.
    #[error("tensor {tensor}: {bytes} bytes at offset {offset} exceed the region's {limit} bytes")]
    OutOfBounds {
        /// The tensor.
        tensor: String,
        /// Its offset in bytes.
        offset: u64,
        /// Its size in bytes.
        bytes: u64,
        /// The region's size in bytes.
        limit: u64,
    },
    /// A tensor starts between two aligned offsets.
    #[error("tensor {tensor}: offset must be a multiple of {ALIGN}, given {offset}")]
    Misaligned {
        /// The tensor.
        tensor: String,
        /// Its offset in bytes.
        offset: u64,
    },
    /// An element type this build does not know.
    #[error("tensor {tensor}: dtype {dtype} is not known")]
    Dtype {
        /// The tensor.
        tensor: String,
        /// The type as given.
        dtype: String,
    },
    /// Shape and strides disagree, or address elements beyond the tensor's bytes.
    #[error("tensor {tensor}: shape {shape:?} with strides {strides:?} does not fit its {bytes} bytes")]
    Shape {
        /// The tensor.
        tensor: String,
        /// Its shape in elements.
        shape: Vec<u64>,
        /// Its strides in elements.
        strides: Vec<u64>,
        /// Its size in bytes.
        bytes: u64,
    },
    /// The memory does not hold the bytes that were granted.
    #[error("tensor {tensor}: checksum does not match its {bytes} bytes at offset {offset}")]
    Checksum {
        /// The tensor.
        tensor: String,
        /// Its offset in bytes.
        offset: u64,
        /// Its size in bytes.
        bytes: u64,
    },
}

impl Grant {
    /// Checks that this grant is of `expected_epoch` and describes `region`: kind, device, size, and for every tensor its
    /// bounds, alignment, shape and checksum. Reads every granted byte once, a device's through the host.
    ///
    /// # Errors
    /// The first disagreement.
    pub fn verify(&self, region: &dyn Region, expected_epoch: Epoch) -> Result<(), GrantError> {
        self.check_epoch(expected_epoch)?;
        if self.kind != region.kind() {
            return Err(GrantError::Kind { expected: self.kind, found: region.kind() });
        }
        let found = region.device().map_or_else(|| CPU.to_owned(), |span| span.uuid.to_string());
        if self.device != found {
            return Err(GrantError::Device { expected: self.device.clone(), found });
        }
        self.check_means()?;
        let found = region.byte_len();
        if self.bytes != found {
            return Err(GrantError::Length { expected: self.bytes, found });
        }
        let mut names = HashSet::new();
        for tensor in &self.tensors {
            if !names.insert(tensor.name.as_str()) {
                return Err(GrantError::Duplicate { tensor: tensor.name.clone() });
            }
            tensor.verify(region)?;
        }
        Ok(())
    }

    /// Checks the boot alone, which needs no memory.
    ///
    /// # Errors
    /// [`GrantError::StaleEpoch`].
    pub fn check_epoch(&self, expected: Epoch) -> Result<(), GrantError> {
        if self.epoch == expected {
            return Ok(());
        }
        Err(GrantError::StaleEpoch { expected, got: self.epoch })
    }

    /// Checks that the grant carries the handles that its kind needs and no others, which needs no memory. Rows of a ring may
    /// lie in host memory whatever the kind.
    ///
    /// # Errors
    /// [`GrantError::Means`].
    pub fn check_means(&self) -> Result<(), GrantError> {
        let (on_device, by_handle) = (self.kind.is_on_device(), self.kind == RegionKind::CudaIpc);
        let payload = self.ring_payload.as_ref();
        let what = if self.ipc.is_some() != by_handle {
            if by_handle { "it needs a handle" } else { "it has no use for a handle" }
        } else if payload.is_some() && !(on_device && self.ring.is_some()) {
            "it has no use for a ring payload"
        } else if payload.is_some_and(|payload| payload.ipc.is_some() != by_handle) {
            if by_handle {
                "the ring payload needs a handle"
            } else {
                "the ring payload has no use for a handle"
            }
        } else {
            return Ok(());
        };
        Err(GrantError::Means { kind: self.kind, what })
    }

    /// The GPU that the memory lies on.
    ///
    /// # Errors
    /// [`GrantError::NotAGpu`].
    pub fn gpu(&self) -> Result<GpuUuid, GrantError> {
        let device = &self.device;
        device.parse().map_err(|_| GrantError::NotAGpu { kind: self.kind, device: device.clone() })
    }

    /// Descriptors that travel beside the grant: the region's unless a handle opens it, the ring's, and that of the ring's
    /// rows where they lie elsewhere and have one.
    pub fn descriptors(&self) -> usize {
        let region = usize::from(self.kind != RegionKind::CudaIpc);
        let payload = usize::from(self.kind == RegionKind::CudaVmm && self.ring_payload.is_some());
        region + usize::from(self.ring.is_some()) + payload
    }

    /// The tensor of that name.
    pub fn tensor(&self, name: &str) -> Option<&TensorGrant> {
        self.tensors.iter().find(|tensor| tensor.name == name)
    }
}

impl TensorGrant {
    /// Describes the row-major tensor that `region` holds at `offset`, with the checksum of its bytes.
    ///
    /// # Errors
    /// As [`Grant::verify`] has them for one tensor; a shape whose size overflows counts as out of bounds.
    pub fn row_major(
        region: &dyn Region,
        name: &str,
        dtype: &str,
        shape: &[u64],
        offset: u64,
    ) -> Result<Self, GrantError> {
        let Some(size) = element_bytes(dtype) else {
            return Err(GrantError::Dtype { tensor: name.to_owned(), dtype: dtype.to_owned() });
        };
        let mut strides = vec![0; shape.len()];
        let mut elements = 1_u64;
        for (stride, extent) in strides.iter_mut().zip(shape).rev() {
            *stride = elements;
            elements = elements.saturating_mul(*extent);
        }
        let mut tensor = Self {
            name: name.to_owned(),
            layout: "plain".to_owned(),
            dtype: dtype.to_owned(),
            shape: shape.to_vec(),
            strides,
            offset,
            bytes: elements.saturating_mul(size),
            checksum: [0; 32],
        };
        tensor.check_shape()?;
        tensor.checksum = tensor.hash(region)?;
        Ok(tensor)
    }

    /// BLAKE3 of the tensor's bytes in `region`.
    ///
    /// # Errors
    /// [`GrantError::OutOfBounds`], [`GrantError::Misaligned`] and [`GrantError::Unreadable`].
    pub fn hash(&self, region: &dyn Region) -> Result<[u8; 32], GrantError> {
        let range = self.range(region)?;
        if let Some(bytes) = region.host() {
            // Both ends are at most the slice's length, which is a usize.
            return Ok(blake3::hash(&bytes[range.start as usize..range.end as usize]).into());
        }
        let mut hasher = blake3::Hasher::new();
        let mut piece = vec![0; PIECE.min(self.bytes) as usize];
        for at in range.clone().step_by(PIECE as usize) {
            let part = &mut piece[..PIECE.min(range.end - at) as usize];
            region
                .read(at, part)
                .map_err(|e| GrantError::Unreadable { tensor: self.name.clone(), reason: e.to_string() })?;
            hasher.update(part);
        }
        Ok(hasher.finalize().into())
    }

    /// The tensor's bytes within `region`.
    fn range(&self, region: &dyn Region) -> Result<Range<u64>, GrantError> {
        let (limit, offset, bytes) = (region.byte_len(), self.offset, self.bytes);
        let Ok(range) = within(limit, offset, bytes) else {
            return Err(GrantError::OutOfBounds { tensor: self.name.clone(), offset, bytes, limit });
        };
        if align_up(offset) != Some(offset) {
            return Err(GrantError::Misaligned { tensor: self.name.clone(), offset });
        }
        Ok(range)
    }

    fn verify(&self, region: &dyn Region) -> Result<(), GrantError> {
        self.range(region)?;
        self.check_shape()?;
        if self.hash(region)? != self.checksum {
            let (offset, bytes) = (self.offset, self.bytes);
            return Err(GrantError::Checksum { tensor: self.name.clone(), offset, bytes });
        }
        Ok(())
    }

    fn check_shape(&self) -> Result<(), GrantError> {
        let Some(size) = element_bytes(&self.dtype) else {
            return Err(GrantError::Dtype { tensor: self.name.clone(), dtype: self.dtype.clone() });
        };
        let fits = self.span().and_then(|span| span.checked_mul(size)).is_some_and(|span| span <= self.bytes);
        if self.shape.len() == self.strides.len() && fits {
            return Ok(());
        }
        let (shape, strides) = (self.shape.clone(), self.strides.clone());
        Err(GrantError::Shape { tensor: self.name.clone(), shape, strides, bytes: self.bytes })
    }

    /// Elements from the first to behind the last one that shape and strides address.
    fn span(&self) -> Option<u64> {
        if self.shape.contains(&0) {
            return Some(0);
        }
        self.shape
            .iter()
            .zip(&self.strides)
            .try_fold(1_u64, |span, (extent, stride)| span.checked_add((extent - 1).checked_mul(*stride)?))
    }
}

fn element_bytes(dtype: &str) -> Option<u64> {
    Some(match dtype.to_ascii_lowercase().as_str() {
        "bool" | "u8" | "i8" | "f8_e4m3" | "f8_e5m2" | "f8_e8m0" => 1,
        "u16" | "i16" | "f16" | "bf16" => 2,
        "u32" | "i32" | "f32" => 4,
        "u64" | "i64" | "f64" => 8,
        _ => return None,
    })
}

#[cfg(test)]
mod tests;
