//! Grants of shared memory on the wire.

use eyrie_region::{
    DeviceRingGeometry, Epoch, Grant, IpcHandle, RegionKind, RingError, RingGeometry, RingPayload,
    TensorGrant,
};

use crate::v1;

/// A grant message that does not describe a grant.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("grant: {field} must be {limit}, given {given}")]
pub struct GrantMessageError {
    field: &'static str,
    limit: &'static str,
    given: String,
}

fn refuse(field: &'static str, limit: &'static str, given: impl ToString) -> GrantMessageError {
    GrantMessageError { field, limit, given: given.to_string() }
}

/// The message for `grant`. Epoch and ring travel beside it, in `LeaseGrant`.
pub fn grant_to_wire(grant: &Grant) -> v1::Grant {
    let tensor = |tensor: &TensorGrant| v1::TensorGrant {
        name: tensor.name.clone(),
        layout: tensor.layout.clone(),
        dtype: tensor.dtype.clone(),
        shape: tensor.shape.clone(),
        strides: tensor.strides.clone(),
        offset: tensor.offset,
        bytes: tensor.bytes,
        checksum: bytes::Bytes::copy_from_slice(&tensor.checksum),
    };
    v1::Grant {
        kind: grant.kind.to_string(),
        device: grant.device.clone(),
        export_id: grant.export_id,
        bytes: grant.bytes,
        tensors: grant.tensors.iter().map(tensor).collect(),
        cuda_ipc: grant.ipc.as_ref().map(handle_to_wire),
    }
}

/// The message for the ring of `grant`, if it has one; `bytes` are 0 when the geometry is not one a ring can have.
pub fn ring_to_wire(grant: &Grant) -> Option<v1::RingGrant> {
    let ring = grant.ring?;
    let sizes = ring_sizes(ring, grant.ring_payload.as_ref());
    let (bytes, payload_bytes) = sizes.unwrap_or_default();
    let payload = grant.ring_payload.as_ref().map(|payload| v1::RingPayload {
        bytes: payload_bytes,
        value_bytes: payload.value_bytes,
        cuda_ipc: payload.ipc.as_ref().map(handle_to_wire),
    });
    let RingGeometry { slots, slot_rows, row_width } = ring;
    Some(v1::RingGrant { bytes, slots, slot_rows, row_width, payload })
}

/// Bytes of a ring's descriptor, and of its rows where they lie on a device.
fn ring_sizes(ring: RingGeometry, payload: Option<&RingPayload>) -> Result<(u64, u64), RingError> {
    match payload {
        None => Ok((ring.byte_len()?, 0)),
        Some(&RingPayload { value_bytes, .. }) => {
            let ring = DeviceRingGeometry { ring, value_bytes };
            Ok((ring.control_len()?, ring.payload_len()?))
        }
    }
}

fn handle_to_wire(handle: &IpcHandle) -> v1::CudaIpcHandle {
    v1::CudaIpcHandle { handle: bytes::Bytes::copy_from_slice(&handle.handle), offset: handle.offset }
}

/// Most slots that one `ReadFeatures` may ask of a ring: as many as hold 16 MiB when they are full, between 1 and 1,024.
pub fn slots_per_read(ring: &RingGeometry) -> usize {
    const MAX_SLOTS: u64 = 1024;
    const MAX_BYTES: u64 = 16 << 20;
    let slot = u64::from(ring.slot_rows).saturating_mul(u64::from(ring.row_width)).saturating_mul(4);
    (MAX_BYTES / slot.max(1)).clamp(1, MAX_SLOTS) as usize
}

/// The grant that a lease speaks of, ring included.
///
/// # Errors
/// Names the field that is missing, unknown or out of range, or a handle that does not go with the kind. Whether the grant
/// is true is for `Grant::verify` and the ring's reader to find out against the memory itself.
pub fn grant_from_wire(lease: &v1::LeaseGrant) -> Result<Grant, GrantMessageError> {
    let epoch = Epoch::try_from(lease.epoch).map_err(|_| refuse("epoch", "non-zero", 0))?;
    let weights = lease.weights.as_ref().ok_or_else(|| refuse("weights", "set", "none"))?;
    let kind: RegionKind = weights
        .kind
        .parse()
        .map_err(|_| refuse("weights.kind", "a known kind of region", format!("\"{}\"", weights.kind)))?;
    let tensors: Result<Vec<TensorGrant>, _> = weights.tensors.iter().map(tensor_from_wire).collect();
    let (ring, ring_payload) = match &lease.ring {
        None => (None, None),
        Some(ring) => {
            let (geometry, payload) = ring_from_wire(ring)?;
            (Some(geometry), payload)
        }
    };
    let grant = Grant {
        epoch,
        export_id: weights.export_id,
        kind,
        bytes: weights.bytes,
        tensors: tensors?,
        ring,
        ring_payload,
        device: weights.device.clone(),
        ipc: handle_from_wire("weights.cuda_ipc", weights.cuda_ipc.as_ref())?,
    };
    grant.check_means().map_err(|e| refuse("weights", "what its kind needs", e))?;
    Ok(grant)
}

fn tensor_from_wire(tensor: &v1::TensorGrant) -> Result<TensorGrant, GrantMessageError> {
    let checksum: [u8; 32] = tensor
        .checksum
        .as_ref()
        .try_into()
        .map_err(|_| refuse("tensor checksum", "32 bytes", format!("{} bytes", tensor.checksum.len())))?;
    Ok(TensorGrant {
        name: tensor.name.clone(),
        layout: tensor.layout.clone(),
        dtype: tensor.dtype.clone(),
        shape: tensor.shape.clone(),
        strides: tensor.strides.clone(),
        offset: tensor.offset,
        bytes: tensor.bytes,
        checksum,
    })
}

fn ring_from_wire(ring: &v1::RingGrant) -> Result<(RingGeometry, Option<RingPayload>), GrantMessageError> {
    let geometry = RingGeometry { slots: ring.slots, slot_rows: ring.slot_rows, row_width: ring.row_width };
    let payload = match &ring.payload {
        None => None,
        Some(payload) => {
            let ipc = handle_from_wire("ring.payload.cuda_ipc", payload.cuda_ipc.as_ref())?;
            Some(RingPayload { value_bytes: payload.value_bytes, ipc })
        }
    };
    let told = (ring.bytes, ring.payload.as_ref().map_or(0, |payload| payload.bytes));
    match ring_sizes(geometry, payload.as_ref()) {
        Ok(sizes) if sizes == told => Ok((geometry, payload)),
        Ok((bytes, _)) if bytes != told.0 => {
            Err(refuse("ring.bytes", "the size of its geometry", ring.bytes))
        }
        Ok(_) => Err(refuse("ring.payload.bytes", "the size of its geometry", told.1)),
        Err(error @ RingError::ValueBytes { .. }) => {
            Err(refuse("ring.payload", "values of 2 or 4 bytes", error))
        }
        Err(_) => Err(refuse("ring", "at least one slot, row and value", format!("{geometry:?}"))),
    }
}

fn handle_from_wire(
    field: &'static str,
    message: Option<&v1::CudaIpcHandle>,
) -> Result<Option<IpcHandle>, GrantMessageError> {
    let Some(message) = message else { return Ok(None) };
    let handle: Result<[u8; 64], _> = message.handle.as_ref().try_into();
    let handle = handle.map_err(|_| refuse(field, "64 bytes", format!("{} bytes", message.handle.len())))?;
    Ok(Some(IpcHandle { handle, offset: message.offset }))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn grant() -> Grant {
        let tensor = TensorGrant {
            name: "embed_tokens".to_owned(),
            layout: "bf16".to_owned(),
            dtype: "bf16".to_owned(),
            shape: vec![4, 8],
            strides: vec![8, 1],
            offset: 64,
            bytes: 64,
            checksum: [7; 32],
        };
        Grant {
            epoch: Epoch::try_from(9).unwrap(),
            export_id: 3,
            kind: RegionKind::Memfd,
            bytes: 128,
            tensors: vec![tensor],
            ring: Some(RingGeometry { slots: 4, slot_rows: 8, row_width: 12 }),
            ring_payload: None,
            device: "cpu".to_owned(),
            ipc: None,
        }
    }

    fn on_device(kind: RegionKind) -> Grant {
        let ipc = (kind == RegionKind::CudaIpc).then_some(IpcHandle { handle: [9; 64], offset: 512 });
        let device = "GPU-5fd4f087-86f3-7a43-b711-4771313afc50".to_owned();
        Grant { kind, device, ipc, ring_payload: Some(RingPayload { value_bytes: 2, ipc }), ..grant() }
    }

    fn lease(grant: &Grant) -> v1::LeaseGrant {
        v1::LeaseGrant {
            epoch: grant.epoch.get(),
            weights: Some(grant_to_wire(grant)),
            ring: ring_to_wire(grant),
            ..Default::default()
        }
    }

    #[test]
    fn a_grant_survives_the_wire() {
        assert_eq!(grant_from_wire(&lease(&grant())), Ok(grant()));
        let without_ring = Grant { ring: None, ..grant() };
        assert_eq!(grant_from_wire(&lease(&without_ring)), Ok(without_ring));
        for kind in [RegionKind::CudaVmm, RegionKind::CudaIpc] {
            let granted = on_device(kind);
            let message = lease(&granted);
            assert_eq!(message.ring.as_ref().unwrap().payload.as_ref().unwrap().bytes, 4 * 192);
            assert_eq!(grant_from_wire(&message), Ok(granted));
        }
    }

    fn any_tensor() -> impl Strategy<Value = v1::TensorGrant> {
        let sizes = prop::collection::vec(any::<u64>(), 0..4);
        let checksum = prop_oneof![4 => Just(32_usize), 1 => 0..40_usize];
        (any::<String>(), sizes.clone(), sizes, any::<(u64, u64)>(), checksum).prop_map(
            |(name, shape, strides, (offset, bytes), checksum)| v1::TensorGrant {
                layout: name.clone(),
                dtype: name.clone(),
                name,
                shape,
                strides,
                offset,
                bytes,
                checksum: vec![9; checksum].into(),
            },
        )
    }

    fn any_handle() -> impl Strategy<Value = Option<v1::CudaIpcHandle>> {
        let length = prop_oneof![4 => Just(64_usize), 1 => 0..80_usize];
        let handle = (length, any::<u64>())
            .prop_map(|(length, offset)| v1::CudaIpcHandle { handle: vec![9; length].into(), offset });
        prop::option::of(handle)
    }

    fn any_lease() -> impl Strategy<Value = v1::LeaseGrant> {
        let edge = prop_oneof![1..5_u32, any::<u32>()];
        let payload = prop::option::of((0..5_u32, any_handle()));
        let ring = (any::<u64>(), [edge.clone(), edge.clone(), edge], payload, any::<bool>());
        let ring = ring.prop_map(|(bytes, [slots, slot_rows, row_width], payload, is_true)| {
            let ipc = |handle: &Option<v1::CudaIpcHandle>| {
                handle_from_wire("handle", handle.as_ref()).ok().flatten()
            };
            let told = ring_to_wire(&Grant {
                ring: Some(RingGeometry { slots, slot_rows, row_width }),
                ring_payload: payload
                    .map(|(value_bytes, handle)| RingPayload { value_bytes, ipc: ipc(&handle) }),
                ..grant()
            });
            let told = told.unwrap_or_default();
            if is_true { told } else { v1::RingGrant { bytes, ..told } }
        });
        let kind = prop_oneof![
            3 => Just("memfd".to_owned()),
            2 => Just("cuda_vmm".to_owned()),
            2 => Just("cuda_ipc".to_owned()),
            1 => any::<String>(),
        ];
        let weights = (kind, any::<(u64, u64)>(), prop::collection::vec(any_tensor(), 0..3), any_handle());
        let weights = weights.prop_map(|(kind, (export_id, bytes), tensors, cuda_ipc)| v1::Grant {
            kind,
            device: "cpu".to_owned(),
            export_id,
            bytes,
            tensors,
            cuda_ipc,
        });
        (0..4_u64, prop::option::weighted(0.9, weights), prop::option::of(ring))
            .prop_map(|(epoch, weights, ring)| v1::LeaseGrant { epoch, weights, ring, ..Default::default() })
    }

    proptest! {
        /// Whatever a peer says is refused in one line or taken as it was said.
        #[test]
        fn any_message_is_refused_or_kept_whole(message in any_lease()) {
            match grant_from_wire(&message) {
                Ok(grant) => prop_assert_eq!(lease(&grant), message),
                Err(error) => prop_assert!(error.to_string().starts_with("grant: ")),
            }
        }
    }

    #[test]
    fn a_read_of_features_fits_a_message() {
        let slots = |row_width| slots_per_read(&RingGeometry { slots: 9, slot_rows: 8, row_width });
        assert_eq!([slots(12), slots(3 * 7168), slots(u32::MAX)], [1024, 24, 1]);
        assert!(slots(3 * 7168) * 8 * 3 * 7168 * 4 < crate::MAX_MESSAGE);
    }

    #[test]
    fn false_messages_name_the_field() {
        let line = |change: fn(&mut v1::LeaseGrant)| {
            let mut lease = lease(&grant());
            change(&mut lease);
            grant_from_wire(&lease).unwrap_err().to_string()
        };
        assert_eq!(line(|l| l.epoch = 0), "grant: epoch must be non-zero, given 0");
        assert!(line(|l| l.weights = None).contains("weights"));
        assert!(line(|l| l.weights.as_mut().unwrap().kind = "cuda".into()).contains("\"cuda\""));
        assert!(line(|l| l.ring.as_mut().unwrap().bytes += 1).contains("ring.bytes"));
        assert!(line(|l| l.ring.as_mut().unwrap().slots = 0).contains("slots: 0"));
        let short = |l: &mut v1::LeaseGrant| l.weights.as_mut().unwrap().tensors[0].checksum = vec![1].into();
        assert!(line(short).contains("given 1 bytes"));
        assert!(line(|l| l.weights.as_mut().unwrap().kind = "cuda_ipc".into()).contains("it needs a handle"));
        let line = |change: fn(&mut v1::RingPayload, &mut v1::Grant)| {
            let mut lease = lease(&on_device(RegionKind::CudaIpc));
            let (ring, weights) = (lease.ring.as_mut().unwrap(), lease.weights.as_mut().unwrap());
            change(ring.payload.as_mut().unwrap(), weights);
            grant_from_wire(&lease).unwrap_err().to_string()
        };
        assert!(line(|ring, _| ring.bytes += 1).contains("ring.payload.bytes"));
        assert!(line(|ring, _| ring.value_bytes = 3).contains("2 or 4 bytes"));
        assert!(line(|ring, _| ring.cuda_ipc = None).contains("the ring payload needs a handle"));
        let short = |_: &mut v1::RingPayload, weights: &mut v1::Grant| {
            weights.cuda_ipc.as_mut().unwrap().handle = vec![1; 63].into();
        };
        assert_eq!(line(short), "grant: weights.cuda_ipc must be 64 bytes, given 63 bytes");
    }
}
