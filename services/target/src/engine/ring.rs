//! The target's end of the feature ring, in host memory or on its GPU.

use std::os::fd::OwnedFd;

use eyrie_kernels::Backend;
use eyrie_region::{
    DeviceRingGeometry, DeviceRingReader, DeviceRingWriter, DeviceRows, Epoch, RegionError, RegionKind,
    RingError, RingGeometry, RingMemory, RingPayload, RingReader, RingWriter, SlotRef, Stream,
};
use eyrie_wire::v1::{FeatureRef, RingSlot, feature_ref::At};
use parking_lot::Mutex;

use super::rows::RowSlice;
use crate::TargetError;

/// The one writer.
#[derive(Debug)]
pub(crate) enum Ring {
    Host(RingWriter),
    Device(DeviceRingWriter),
}

impl Ring {
    /// Beside what `backend` computes; `sharing` says how a GPU's memory is shared.
    pub(crate) fn create(
        backend: &Backend,
        ring: RingGeometry,
        sharing: RegionKind,
        epoch: Epoch,
    ) -> Result<Self, TargetError> {
        let Some(stream) = backend.stream()? else {
            return Ok(Self::Host(RingWriter::create(ring, epoch)?));
        };
        let geometry = DeviceRingGeometry { ring, value_bytes: backend.numbers().size() as u32 };
        let memory = RingMemory::new(stream.gpu(), sharing, geometry)?;
        Ok(Self::Device(DeviceRingWriter::create(memory, geometry, epoch, stream)?))
    }

    pub(crate) fn geometry(&self) -> RingGeometry {
        match self {
            Self::Host(ring) => ring.geometry(),
            Self::Device(ring) => ring.geometry().ring,
        }
    }

    pub(crate) fn payload(&self) -> Option<RingPayload> {
        match self {
            Self::Host(_) => None,
            Self::Device(ring) => Some(ring.payload()),
        }
    }

    /// In the order in which a grant counts them.
    pub(crate) fn fds(&self) -> std::io::Result<Vec<OwnedFd>> {
        let fds = match self {
            Self::Host(ring) => vec![ring.fd()],
            Self::Device(ring) => std::iter::once(ring.fd()).chain(ring.memory().fd()).collect(),
        };
        fds.into_iter().map(|fd| fd.try_clone_to_owned()).collect()
    }

    pub(crate) fn copy(&self) -> Result<RingCopy, TargetError> {
        Ok(match self {
            Self::Host(ring) => {
                let fd = ring.fd().try_clone_to_owned()?;
                RingCopy::Host(RingReader::open(fd, ring.geometry(), ring.epoch())?)
            }
            Self::Device(ring) => {
                // Past the engine, so that a copy waits for none of its steps.
                let stream = Stream::new(ring.stream().gpu()).map_err(RegionError::from)?;
                RingCopy::Device { geometry: ring.geometry(), reader: Mutex::new(ring.reader(0, stream)?) }
            }
        })
    }

    /// Publishes `runs` of rows, each from its position on; on a GPU all copies of as many slots as the ring has are waited
    /// for together. Returns where each run lies.
    pub(crate) fn publish(
        &mut self,
        runs: &[(u32, RowSlice<'_>)],
    ) -> Result<Vec<Vec<FeatureRef>>, RingError> {
        let slot_rows = self.geometry().slot_rows as usize;
        let mut parts = Vec::new();
        for (run, &(first, rows)) in runs.iter().enumerate() {
            for start in (0..rows.rows()).step_by(slot_rows) {
                let part = rows.slice(start..rows.rows().min(start + slot_rows));
                parts.push((run, first + start as u32, part));
            }
        }
        let slots = self.write(parts.iter().map(|&(_, _, part)| part))?;
        let mut refs = vec![Vec::new(); runs.len()];
        for ((run, first, _), slot) in parts.into_iter().zip(slots) {
            let at = At::Ring(RingSlot { slot: slot.slot, generation: slot.generation });
            refs[run].push(FeatureRef { first, rows: slot.rows, at: Some(at) });
        }
        Ok(refs)
    }

    fn write<'a>(&mut self, parts: impl Iterator<Item = RowSlice<'a>>) -> Result<Vec<SlotRef>, RingError> {
        let elsewhere = |kind| RingError::from(RegionError::NotOnDevice { kind });
        match self {
            Self::Host(ring) => parts
                .map(|part| match part {
                    RowSlice::Host { values, .. } => ring.publish(values),
                    RowSlice::Device(_) => Err(elsewhere(RegionKind::Memfd)),
                })
                .collect(),
            Self::Device(ring) => {
                let rows: Result<Vec<DeviceRows<'_>>, RingError> = parts
                    .map(|part| match part {
                        RowSlice::Device(rows) => Ok(rows),
                        RowSlice::Host { .. } => Err(elsewhere(RegionKind::Local)),
                    })
                    .collect();
                let mut slots = Vec::new();
                for batch in rows?.chunks(ring.geometry().ring.slots as usize) {
                    slots.extend(ring.publish(batch)?);
                }
                Ok(slots)
            }
        }
    }
}

/// A reader of the ring in the target's own process.
#[derive(Debug)]
pub(crate) enum RingCopy {
    Host(RingReader),
    /// Its size can be told while a read waits for the GPU.
    Device {
        geometry: DeviceRingGeometry,
        reader: Mutex<DeviceRingReader>,
    },
}

impl RingCopy {
    pub(crate) fn geometry(&self) -> RingGeometry {
        match self {
            Self::Host(ring) => ring.geometry(),
            Self::Device { geometry, .. } => geometry.ring,
        }
    }

    /// The rows of a slot as the wire carries them: little-endian float32.
    ///
    /// # Errors
    /// As [`RingReader::read_slot`], or the driver's answer.
    pub(crate) fn read_slot(&self, at: &RingSlot) -> Result<Vec<u8>, RingError> {
        match self {
            Self::Host(ring) => {
                let mut values = Vec::new();
                ring.read_slot(at.slot, at.generation, &mut values)?;
                Ok(values.iter().flat_map(|value| value.to_le_bytes()).collect())
            }
            Self::Device { geometry, reader } => {
                let mut bytes = Vec::new();
                reader.lock().read_slot(at.slot, at.generation, &mut bytes)?;
                Ok(match geometry.value_bytes {
                    2 => bytes.chunks_exact(2).flat_map(|b| [0, 0, b[0], b[1]]).collect(),
                    _ => bytes,
                })
            }
        }
    }
}
