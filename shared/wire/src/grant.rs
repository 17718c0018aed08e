//! Grants of shared memory as they travel.

use eyrie_region::{Epoch, Grant, RingError, RingGeometry, TensorGrant, UnknownKind};

use crate::v1;

/// A grant message that no exporter makes.
#[derive(Debug, thiserror::Error)]
pub enum GrantWireError {
    /// The region's kind.
    #[error(transparent)]
    Kind(#[from] UnknownKind),
    /// A checksum of another length.
    #[error("tensor {tensor}: checksum must be 32 bytes, given {given}")]
    Checksum {
        /// The tensor.
        tensor: String,
        /// Bytes given.
        given: usize,
    },
    /// A ring that cannot be.
    #[error(transparent)]
    Ring(#[from] RingError),
    /// A ring whose size and geometry disagree.
    #[error("ring: its geometry takes {wanted} bytes, the grant says {given}")]
    RingBytes {
        /// Bytes of that geometry.
        wanted: u64,
        /// Bytes given.
        given: u64,
    },
}

/// The message for `grant`; its epoch and ring travel beside it, in `LeaseGrant`.
pub fn grant_to_wire(grant: &Grant) -> v1::Grant {
    v1::Grant {
        kind: grant.kind.to_string(),
        device: grant.device.clone(),
        export_id: grant.export_id,
        bytes: grant.bytes,
        tensors: grant.tensors.iter().map(tensor_to_wire).collect(),
    }
}

/// The grant in `message`, of boot `epoch` and without a ring.
///
/// # Errors
/// An unknown kind, or a checksum that is not 32 bytes. Whether it describes the memory is `Grant::verify`'s to say.
pub fn grant_from_wire(message: &v1::Grant, epoch: Epoch) -> Result<Grant, GrantWireError> {
    Ok(Grant {
        epoch,
        export_id: message.export_id,
        kind: message.kind.parse()?,
        bytes: message.bytes,
        tensors: message.tensors.iter().map(tensor_from_wire).collect::<Result<_, _>>()?,
        ring: None,
        device: message.device.clone(),
    })
}

/// The message for a ring of `geometry`.
///
/// # Errors
/// A geometry that has no size.
pub fn ring_to_wire(geometry: RingGeometry) -> Result<v1::RingGrant, GrantWireError> {
    let RingGeometry { slots, slot_rows, row_width } = geometry;
    Ok(v1::RingGrant { bytes: geometry.byte_len()?, slots, slot_rows, row_width })
}

/// The geometry in `message`.
///
/// # Errors
/// A geometry that has no size, or another size than the message says.
pub fn ring_from_wire(message: &v1::RingGrant) -> Result<RingGeometry, GrantWireError> {
    let &v1::RingGrant { bytes, slots, slot_rows, row_width } = message;
    let geometry = RingGeometry { slots, slot_rows, row_width };
    match geometry.byte_len()? {
        wanted if wanted == bytes => Ok(geometry),
        wanted => Err(GrantWireError::RingBytes { wanted, given: bytes }),
    }
}

fn tensor_to_wire(tensor: &TensorGrant) -> v1::TensorGrant {
    v1::TensorGrant {
        name: tensor.name.clone(),
        layout: tensor.layout.clone(),
        dtype: tensor.dtype.clone(),
        shape: tensor.shape.clone(),
        strides: tensor.strides.clone(),
        offset: tensor.offset,
        bytes: tensor.bytes,
        checksum: tensor.checksum.to_vec().into(),
    }
}

fn tensor_from_wire(message: &v1::TensorGrant) -> Result<TensorGrant, GrantWireError> {
    let checksum = message.checksum.as_ref().try_into().map_err(|_| GrantWireError::Checksum {
        tensor: message.name.clone(),
        given: message.checksum.len(),
    })?;
    Ok(TensorGrant {
        name: message.name.clone(),
        layout: message.layout.clone(),
        dtype: message.dtype.clone(),
        shape: message.shape.clone(),
        strides: message.strides.clone(),
        offset: message.offset,
        bytes: message.bytes,
        checksum,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use eyrie_region::RegionKind;

    fn grant() -> Grant {
        let tensor = TensorGrant {
            name: "embed_tokens".to_owned(),
            layout: "bf16".to_owned(),
            dtype: "bf16".to_owned(),
            shape: vec![4, 2],
            strides: vec![2, 1],
            offset: 64,
            bytes: 16,
            checksum: [7; 32],
        };
        Grant {
            epoch: Epoch::random().unwrap(),
            export_id: 3,
            kind: RegionKind::Memfd,
            bytes: 128,
            tensors: vec![tensor],
            ring: None,
            device: "cpu".to_owned(),
        }
    }

    #[test]
    fn a_grant_comes_back_as_it_went() {
        let grant = grant();
        assert_eq!(grant_from_wire(&grant_to_wire(&grant), grant.epoch).unwrap(), grant);
        let geometry = RingGeometry { slots: 3, slot_rows: 5, row_width: 7 };
        assert_eq!(ring_from_wire(&ring_to_wire(geometry).unwrap()).unwrap(), geometry);
    }

    #[test]
    fn malformed_messages_are_refused_by_name() {
        let good = grant();
        let mut wire = grant_to_wire(&good);
        wire.tensors[0].checksum = vec![0; 31].into();
        let error = grant_from_wire(&wire, good.epoch).unwrap_err();
        assert_eq!(error.to_string(), "tensor embed_tokens: checksum must be 32 bytes, given 31");
        wire.kind = "tape".to_owned();
        assert!(grant_from_wire(&wire, good.epoch).unwrap_err().to_string().contains("\"tape\""));
        let mut ring = ring_to_wire(RingGeometry { slots: 3, slot_rows: 5, row_width: 7 }).unwrap();
        ring.slots = 0;
        assert!(ring_from_wire(&ring).is_err());
        ring.slots = 4;
        assert!(ring_from_wire(&ring).unwrap_err().to_string().contains("the grant says"));
    }
}
