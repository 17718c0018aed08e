//! From a grant and its descriptors to mapped memory, whatever its kind.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::{
    DeviceRingGeometry, Gpu, Grant, GrantError, ImportedIpc, ImportedMemfd, ImportedPayload, ImportedVmm,
    Region, RegionError, RegionKind, RingError,
};

/// Granted memory, mapped and not yet verified: see [`Grant::verify`].
///
/// An importer lets go of the region before the ring: by the ring's mapping an exporter that starts anew tells whether this
/// process still holds device memory (see [`Ledger`](crate::Ledger)).
#[derive(Debug)]
pub struct Import {
    /// The weights.
    pub region: Arc<dyn Region>,
    /// The ring, if one was granted, for its reader to open.
    pub ring: Option<ImportedRing>,
}

/// What a ring's reader is opened with.
#[derive(Debug)]
pub struct ImportedRing {
    /// The ring, or its stamps alone where the rows lie on a device.
    pub fd: OwnedFd,
    /// The rows, where they lie on a device.
    pub payload: Option<(DeviceRingGeometry, ImportedPayload)>,
}

/// A grant that could not be mapped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImportError {
    /// The grant contradicts itself.
    #[error(transparent)]
    Grant(#[from] GrantError),
    /// The memory could not be mapped or trusted.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// The ring cannot be as the grant says.
    #[error(transparent)]
    Ring(#[from] RingError),
    /// Too few or too many descriptors came with it.
    #[error("a grant of kind {kind} comes with {needed} descriptors, given {given}")]
    Descriptors {
        /// Kind in the grant.
        kind: RegionKind,
        /// Descriptors that it takes.
        needed: usize,
        /// Descriptors given.
        given: usize,
    },
    /// Memory of a kind that no process exports.
    #[error("memory of kind {kind} cannot be imported")]
    Kind {
        /// Kind in the grant.
        kind: RegionKind,
    },
}

impl Grant {
    /// Maps what this grant describes, with the descriptors that came beside it. Device memory is mapped on the GPU that the
    /// grant names and no other. Memory of the kind `cuda_ipc` needs `allow_writable_ipc`.
    ///
    /// # Errors
    /// The first thing that does not fit; what was mapped until then is let go.
    pub fn import(&self, fds: Vec<OwnedFd>, allow_writable_ipc: bool) -> Result<Import, ImportError> {
        self.check_means()?;
        let (kind, needed, given) = (self.kind, self.descriptors(), fds.len());
        let mut fds = fds.into_iter();
        let mut next = || fds.next().ok_or(ImportError::Descriptors { kind, needed, given });
        if given != needed {
            return Err(ImportError::Descriptors { kind, needed, given });
        }
        if kind == RegionKind::CudaIpc && !allow_writable_ipc {
            return Err(RegionError::WritableIpc.into());
        }
        let gpu = if kind.is_on_device() {
            Some(Gpu::by_uuid(self.gpu()?).map_err(RegionError::from)?)
        } else {
            None
        };
        let region: Arc<dyn Region> = match (kind, &gpu, &self.ipc) {
            (RegionKind::Memfd, ..) => Arc::new(ImportedMemfd::import(next()?, self.bytes)?),
            (RegionKind::CudaVmm, Some(gpu), _) => Arc::new(ImportedVmm::import(gpu, next()?, self.bytes)?),
            (RegionKind::CudaIpc, Some(gpu), Some(handle)) => {
                Arc::new(ImportedIpc::open(gpu, handle, self.bytes, allow_writable_ipc)?)
            }
            _ => return Err(ImportError::Kind { kind }),
        };
        let Some(ring) = self.ring else { return Ok(Import { region, ring: None }) };
        let fd = next()?;
        let payload = match (&self.ring_payload, &gpu) {
            (Some(payload), Some(gpu)) => {
                let geometry = DeviceRingGeometry { ring, value_bytes: payload.value_bytes };
                let len = geometry.payload_len()?;
                let memory: ImportedPayload = match &payload.ipc {
                    Some(handle) => ImportedIpc::open(gpu, handle, len, allow_writable_ipc)?.into(),
                    None => ImportedVmm::import(gpu, next()?, len)?.into(),
                };
                Some((geometry, memory))
            }
            _ => None,
        };
        Ok(Import { region, ring: Some(ImportedRing { fd, payload }) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        CPU, CudaError, Epoch, IpcHandle, MemfdBuilder, RingGeometry, RingPayload, RingReader, RingWriter,
    };

    fn granted() -> (Grant, Vec<OwnedFd>) {
        let memfd = MemfdBuilder::new("import", 4096).unwrap().seal().unwrap();
        let geometry = RingGeometry { slots: 2, slot_rows: 2, row_width: 3 };
        let epoch = Epoch::random().unwrap();
        let ring = RingWriter::create(geometry, epoch).unwrap();
        let grant = Grant {
            epoch,
            export_id: 1,
            kind: RegionKind::Memfd,
            bytes: 4096,
            tensors: Vec::new(),
            ring: Some(geometry),
            ring_payload: None,
            device: CPU.to_owned(),
            ipc: None,
        };
        let fds = [memfd.fd(), ring.fd()].map(|fd| fd.try_clone_to_owned().unwrap());
        (grant, fds.into())
    }

    #[test]
    fn host_memory_comes_with_its_ring() {
        let (grant, fds) = granted();
        let import = grant.import(fds, false).unwrap();
        grant.verify(import.region.as_ref(), grant.epoch).unwrap();
        let ring = import.ring.unwrap();
        assert!(ring.payload.is_none());
        RingReader::open(ring.fd, grant.ring.unwrap(), grant.epoch).unwrap();
    }

    #[test]
    fn descriptors_are_counted_by_kind() {
        let count = |change: fn(&mut Grant)| {
            let (mut grant, fds) = granted();
            change(&mut grant);
            let error = grant.import(fds.into_iter().skip(1).collect(), false).unwrap_err();
            assert!(matches!(error, ImportError::Descriptors { given: 1, .. }), "{error}");
            grant.descriptors()
        };
        assert_eq!(count(|_| {}), 2);
        assert_eq!(count(|g| g.kind = RegionKind::CudaVmm), 2);
        let payload = |g: &mut Grant| {
            g.kind = RegionKind::CudaVmm;
            g.ring_payload = Some(RingPayload { value_bytes: 2, ipc: None });
        };
        assert_eq!(count(payload), 3);
    }

    /// Before the driver is asked for anything, which this machine may not have.
    #[test]
    fn what_cannot_be_had_is_named() {
        let error_of = |change: fn(&mut Grant), allow| {
            let (mut grant, mut fds) = granted();
            change(&mut grant);
            fds.truncate(grant.descriptors());
            grant.import(fds, allow).unwrap_err().to_string()
        };
        let by_handle = |g: &mut Grant| {
            g.kind = RegionKind::CudaIpc;
            g.ipc = Some(IpcHandle { handle: [1; 64], offset: 0 });
        };
        assert!(error_of(by_handle, false).contains("--allow-writable-ipc"));
        assert!(error_of(by_handle, true).contains("device must be the UUID of a GPU, given \"cpu\""));
        assert_eq!(
            error_of(|g| g.kind = RegionKind::Local, false),
            "memory of kind local cannot be imported"
        );
        let elsewhere = |g: &mut Grant| {
            g.kind = RegionKind::CudaVmm;
            g.device = "GPU-5fd4f087-86f3-7a43-b711-4771313afc50".to_owned();
        };
        // With no driver, one that cannot work, or one that shows other GPUs.
        let (mut grant, fds) = granted();
        elsewhere(&mut grant);
        let error = grant.import(fds, false).unwrap_err();
        assert!(
            matches!(
                error,
                ImportError::Region(RegionError::Cuda(
                    CudaError::NoDriver | CudaError::Driver { .. } | CudaError::NotVisible { .. }
                ))
            ),
            "{error}"
        );
    }
}
