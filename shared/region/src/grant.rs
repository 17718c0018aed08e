//! The manifest of an exported region: what lies where, and how to know that it is the right memory.

use std::collections::HashSet;

use crate::{ALIGN, Epoch, Region, RegionKind, RingGeometry, align_up};

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
    /// Where the memory lives: `cpu`, or a device's UUID.
    pub device: String,
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
    /// Checks that this grant is of `expected_epoch` and describes `region`: size, kind, and for every tensor its
    /// bounds, alignment, shape and checksum. Reads every granted byte once.
    ///
    /// # Errors
    /// The first disagreement.
    pub fn verify(&self, region: &dyn Region, expected_epoch: Epoch) -> Result<(), GrantError> {
        if self.epoch != expected_epoch {
            return Err(GrantError::StaleEpoch { expected: expected_epoch, got: self.epoch });
        }
        if self.kind != region.kind() {
            return Err(GrantError::Kind { expected: self.kind, found: region.kind() });
        }
        let found = region.bytes().len() as u64;
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
        tensor.checksum = *blake3::hash(tensor.slice(region)?).as_bytes();
        Ok(tensor)
    }

    /// The tensor's bytes within `region`.
    ///
    /// # Errors
    /// [`GrantError::OutOfBounds`] and [`GrantError::Misaligned`].
    pub fn slice<'a>(&self, region: &'a dyn Region) -> Result<&'a [u8], GrantError> {
        let all = region.bytes();
        let limit = all.len() as u64;
        let Some(end) = self.offset.checked_add(self.bytes).filter(|end| *end <= limit) else {
            let (offset, bytes) = (self.offset, self.bytes);
            return Err(GrantError::OutOfBounds { tensor: self.name.clone(), offset, bytes, limit });
        };
        if align_up(self.offset) != Some(self.offset) {
            return Err(GrantError::Misaligned { tensor: self.name.clone(), offset: self.offset });
        }
        // Both ends are at most the slice's length, which is a usize.
        Ok(&all[self.offset as usize..end as usize])
    }

    fn verify(&self, region: &dyn Region) -> Result<(), GrantError> {
        let bytes = self.slice(region)?;
        self.check_shape()?;
        if blake3::hash(bytes) != blake3::Hash::from_bytes(self.checksum) {
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
mod tests {
    use super::*;
    use crate::Local;
    use proptest::prelude::*;

    fn granted() -> (Local, Grant) {
        let region = Local::copy_of(&(0..=255).collect::<Vec<u8>>());
        let tensors = vec![
            TensorGrant::row_major(&region, "embed", "bf16", &[4, 8], 0).unwrap(),
            TensorGrant::row_major(&region, "lm_head", "F32", &[2, 3, 5], 64).unwrap(),
        ];
        let epoch = Epoch::random().unwrap();
        let kind = RegionKind::Local;
        let grant =
            Grant { epoch, export_id: 1, kind, bytes: 256, tensors, ring: None, device: "cpu".to_owned() };
        (region, grant)
    }

    fn error_of(change: impl FnOnce(&mut Grant)) -> GrantError {
        let (region, mut grant) = granted();
        let epoch = grant.epoch;
        change(&mut grant);
        grant.verify(&region, epoch).unwrap_err()
    }

    #[test]
    fn a_true_grant_verifies() {
        let (region, grant) = granted();
        grant.verify(&region, grant.epoch).unwrap();
        let lm_head = grant.tensor("lm_head").unwrap();
        assert_eq!(lm_head.strides, [15, 5, 1]);
        assert_eq!(lm_head.slice(&region).unwrap(), &region.bytes()[64..184]);
        assert!(grant.tensor("absent").is_none());
    }

    #[test]
    fn another_boot_is_stale() {
        let (region, grant) = granted();
        let expected = Epoch::random().unwrap();
        let error = grant.verify(&region, expected).unwrap_err();
        assert_eq!(error, GrantError::StaleEpoch { expected, got: grant.epoch });
        assert!(error.to_string().contains(&expected.to_string()));
    }

    #[test]
    fn one_changed_byte_fails_the_checksum_of_its_tensor_only() {
        let (mut region, grant) = granted();
        region.bytes_mut()[63] ^= 1;
        let error = grant.verify(&region, grant.epoch).unwrap_err();
        assert!(matches!(&error, GrantError::Checksum { tensor, .. } if tensor == "embed"), "{error}");
        region.bytes_mut()[63] ^= 1;
        region.bytes_mut()[183] ^= 0x80;
        let error = grant.verify(&region, grant.epoch).unwrap_err();
        assert!(matches!(&error, GrantError::Checksum { tensor, .. } if tensor == "lm_head"), "{error}");
    }

    #[test]
    fn each_false_field_has_its_own_error() {
        let e = error_of(|g| g.kind = RegionKind::Memfd);
        assert!(matches!(e, GrantError::Kind { found: RegionKind::Local, .. }), "{e}");
        let e = error_of(|g| g.bytes = 255);
        assert_eq!(e, GrantError::Length { expected: 255, found: 256 });
        let e = error_of(|g| g.tensors[1].name = "embed".to_owned());
        assert!(matches!(e, GrantError::Duplicate { .. }), "{e}");
        let e = error_of(|g| g.tensors[1].offset = 192);
        assert!(matches!(e, GrantError::OutOfBounds { offset: 192, bytes: 120, limit: 256, .. }), "{e}");
        let e = error_of(|g| g.tensors[1].offset = u64::MAX - 8);
        assert!(matches!(e, GrantError::OutOfBounds { .. }), "{e}");
        let e = error_of(|g| g.tensors[1].offset = 68);
        assert!(matches!(e, GrantError::Misaligned { offset: 68, .. }), "{e}");
        let e = error_of(|g| g.tensors[0].dtype = "int3".to_owned());
        assert!(matches!(e, GrantError::Dtype { .. }), "{e}");
        let e = error_of(|g| g.tensors[0].shape[0] = 5);
        assert!(matches!(e, GrantError::Shape { .. }), "{e}");
        let e = error_of(|g| g.tensors[0].strides.truncate(1));
        assert!(matches!(e, GrantError::Shape { .. }), "{e}");
        let e = error_of(|g| g.tensors[0].checksum[31] ^= 1);
        assert!(matches!(e, GrantError::Checksum { .. }), "{e}");
    }

    proptest! {
        #[test]
        fn no_numbers_from_a_peer_read_out_of_bounds(
            offset: u64, bytes: u64,
            shape in prop::collection::vec(any::<u64>(), 0..4),
            strides in prop::collection::vec(any::<u64>(), 0..4),
        ) {
            let (region, mut grant) = granted();
            grant.tensors.truncate(1);
            let tensor = &mut grant.tensors[0];
            (tensor.offset, tensor.bytes, tensor.shape, tensor.strides) = (offset, bytes, shape, strides);
            prop_assert!(grant.verify(&region, grant.epoch).is_err());
        }
    }
}
