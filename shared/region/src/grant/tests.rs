use super::*;
use crate::{DeviceSpan, Local, RegionError};
use proptest::prelude::*;

fn granted() -> (Local, Grant) {
    let region = Local::copy_of(&(0..=255).collect::<Vec<u8>>());
    let tensors = vec![
        TensorGrant::row_major(&region, "embed", "bf16", &[4, 8], 0).unwrap(),
        TensorGrant::row_major(&region, "lm_head", "F32", &[2, 3, 5], 64).unwrap(),
    ];
    let epoch = Epoch::random().unwrap();
    let kind = RegionKind::Local;
    let grant = Grant {
        epoch,
        export_id: 1,
        kind,
        bytes: 256,
        tensors,
        ring: None,
        ring_payload: None,
        device: CPU.to_owned(),
        ipc: None,
    };
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
    assert_eq!(lm_head.checksum, *blake3::hash(&region.bytes()[64..184]).as_bytes());
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
    let e = error_of(|g| g.device = GPU.to_owned());
    assert_eq!(e.to_string(), format!("region lies on cpu, the grant says {GPU}"));
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

const GPU: &str = "GPU-5fd4f087-86f3-7a43-b711-4771313afc50";

/// Bytes that no slice can be had of, as on a device.
#[derive(Debug)]
struct Remote {
    kind: RegionKind,
    bytes: Vec<u8>,
    fails: bool,
}

impl Region for Remote {
    fn host(&self) -> Option<&[u8]> {
        None
    }

    fn device(&self) -> Option<DeviceSpan> {
        let len = self.bytes.len() as u64;
        Some(DeviceSpan { ptr: 1 << 40, len, ordinal: 0, uuid: GPU.parse().unwrap() })
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), RegionError> {
        if self.fails {
            return Err(RegionError::WritableIpc);
        }
        let at = within(self.bytes.len() as u64, offset, out.len() as u64)?;
        out.copy_from_slice(&self.bytes[at.start as usize..at.end as usize]);
        Ok(())
    }

    fn kind(&self) -> RegionKind {
        self.kind
    }
}

/// A region of more than one piece, with a grant that is true of it.
fn on_device(kind: RegionKind) -> (Remote, Grant) {
    let bytes: Vec<u8> = (0..PIECE + 192).map(|i| (i % 251) as u8).collect();
    let region = Remote { kind, bytes, fails: false };
    let shape = [(PIECE + 128) / 2];
    let tensors = vec![TensorGrant::row_major(&region, "embed", "bf16", &shape, 64).unwrap()];
    assert_eq!(tensors[0].checksum, *blake3::hash(&region.bytes[64..]).as_bytes());
    let by_handle = kind == RegionKind::CudaIpc;
    let ipc = by_handle.then_some(IpcHandle { handle: [7; 64], offset: 512 });
    let (_, host) = granted();
    let ring = Some(RingGeometry { slots: 2, slot_rows: 8, row_width: 16 });
    let ring_payload = Some(RingPayload { value_bytes: 2, ipc });
    let bytes = PIECE + 192;
    let grant = Grant { kind, bytes, tensors, ring, ring_payload, device: GPU.to_owned(), ipc, ..host };
    (region, grant)
}

#[test]
fn a_grant_of_device_memory_is_verified_through_copies() {
    for (kind, descriptors) in [(RegionKind::CudaVmm, 3), (RegionKind::CudaIpc, 1)] {
        let (mut region, grant) = on_device(kind);
        grant.verify(&region, grant.epoch).unwrap();
        assert_eq!((grant.descriptors(), grant.gpu().unwrap().to_string()), (descriptors, GPU.to_owned()));
        let other = Grant { device: GPU.replace('5', "6"), ..grant.clone() };
        let error = other.verify(&region, grant.epoch).unwrap_err();
        assert!(matches!(&error, GrantError::Device { found, .. } if found == GPU), "{error}");
        let error = grant.verify(&region, Epoch::random().unwrap()).unwrap_err();
        assert!(matches!(error, GrantError::StaleEpoch { .. }), "{error}");
        let last = region.bytes.len() - 1;
        region.bytes[last] ^= 1;
        let error = grant.verify(&region, grant.epoch).unwrap_err();
        assert!(matches!(&error, GrantError::Checksum { tensor, .. } if tensor == "embed"), "{error}");
        region.fails = true;
        let error = grant.verify(&region, grant.epoch).unwrap_err();
        assert!(matches!(error, GrantError::Unreadable { .. }), "{error}");
    }
}

#[test]
fn handles_go_with_the_kind() {
    let refused = |kind, change: fn(&mut Grant), wanted: &str| {
        let (_, mut grant) = on_device(kind);
        grant.check_means().unwrap();
        change(&mut grant);
        let error = grant.check_means().unwrap_err().to_string();
        assert_eq!(error, format!("grant of kind {}: {wanted}", grant.kind));
    };
    let handle = |g: &mut Grant| g.ring_payload.as_mut().unwrap().ipc = None;
    refused(RegionKind::CudaIpc, |g| g.ipc = None, "it needs a handle");
    refused(RegionKind::CudaIpc, handle, "the ring payload needs a handle");
    refused(RegionKind::CudaIpc, |g| g.kind = RegionKind::CudaVmm, "it has no use for a handle");
    refused(RegionKind::CudaVmm, |g| g.ring = None, "it has no use for a ring payload");
    refused(RegionKind::CudaVmm, |g| g.kind = RegionKind::Memfd, "it has no use for a ring payload");
    assert!(granted().1.gpu().is_err());
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
