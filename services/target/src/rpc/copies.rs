//! Copies of shared memory for drafts that cannot map it. Read from mappings of the service's own, so that no copy waits
//! for the engine or is waited for by it.

use std::sync::Arc;

use bytes::Bytes;
use eyrie_region::{ImportedMemfd, Region, RingError, RingReader};
use eyrie_wire::v1::{
    FileChunk, ReadFeaturesReply, ReadFeaturesRequest, ReadSharedRequest, RingSlot, SlotRows,
};
use eyrie_wire::{Reason, refuse, slots_per_read};
use tonic::Status;

use super::{CHUNK, Replies, Service, take};
use crate::TargetError;
use crate::engine::Exports;

/// Streams of the shared region at the same time: a draft reads it once.
pub(super) const MAX_SHARED_READS: usize = 8;
/// Reads of features that copy at the same time; more wait.
pub(super) const MAX_FEATURE_READS: usize = 8;

/// The exported memory, mapped once more.
#[derive(Debug)]
pub(crate) struct Copies {
    shared: Arc<ImportedMemfd>,
    ring: Option<Arc<RingReader>>,
}

impl Copies {
    /// Maps what `exports` describe.
    pub(crate) fn of(exports: &Exports) -> Result<Self, TargetError> {
        let Exports { grant, fds } = exports;
        let (weights, ring) = match (fds.as_slice(), grant.ring) {
            ([weights], None) => (weights, None),
            ([weights, ring], Some(geometry)) => (weights, Some((ring, geometry))),
            _ => return Err(TargetError::Engine(format!("{} exports do not fit their grant", fds.len()))),
        };
        let shared = Arc::new(ImportedMemfd::import(weights.try_clone()?, grant.bytes)?);
        let ring = match ring {
            Some((fd, geometry)) => Some(Arc::new(RingReader::open(fd.try_clone()?, geometry, grant.epoch)?)),
            None => None,
        };
        Ok(Self { shared, ring })
    }
}

impl Service {
    fn copies(&self, epoch: u64) -> Result<&Copies, Status> {
        let own = self.state.epoch.get();
        if epoch != own {
            let message = format!("epoch must be {own:016x}, this boot's, given {epoch:016x}");
            return Err(refuse(Reason::StaleEpoch, message));
        }
        self.state.copies().ok_or_else(|| refuse(Reason::Loading, "the model is still loading"))
    }

    /// The shared region in chunks, each copied when the network takes it.
    pub(super) fn shared_bytes(&self, request: ReadSharedRequest) -> Result<Replies<FileChunk>, Status> {
        let shared = Arc::clone(&self.copies(request.epoch)?.shared);
        let room = take(&self.shared_reads, || {
            format!("{MAX_SHARED_READS} copies may be read at the same time, and as many are")
        })?;
        let length = shared.bytes().len();
        let chunks = (0..length).step_by(CHUNK).map(move |at| {
            let _reading = &room;
            let chunk = &shared.bytes()[at..length.min(at + CHUNK)];
            Ok(FileChunk { data: Bytes::copy_from_slice(chunk) })
        });
        Ok(Box::pin(tokio_stream::iter(chunks)))
    }

    /// The rows of ring slots, empty for those that were overwritten.
    pub(super) async fn feature_rows(
        &self,
        request: ReadFeaturesRequest,
    ) -> Result<ReadFeaturesReply, Status> {
        let ring = self.copies(request.epoch)?.ring.clone();
        let ring = ring.ok_or_else(|| refuse(Reason::Unsupported, "the target captures no features"))?;
        let (given, most) = (request.slots.len(), slots_per_read(&ring.geometry()));
        if given > most {
            let message = format!("slots must be at most {most} for this ring, given {given}");
            return Err(refuse(Reason::InvalidArgument, message));
        }
        let internal = |e: &dyn std::fmt::Display| refuse(Reason::Internal, format!("reading features: {e}"));
        let reading = Arc::clone(&self.feature_reads).acquire_owned().await.map_err(|e| internal(&e))?;
        let read = tokio::task::spawn_blocking(move || {
            let _reading = reading;
            let slots: Result<_, Status> = request.slots.iter().map(|slot| read_slot(&ring, slot)).collect();
            Ok(ReadFeaturesReply { slots: slots? })
        });
        read.await.map_err(|e| internal(&e))?
    }
}

fn read_slot(ring: &RingReader, at: &RingSlot) -> Result<SlotRows, Status> {
    let mut values = Vec::new();
    match ring.read_slot(at.slot, at.generation, &mut values) {
        Ok(()) | Err(RingError::Stale { .. }) => {}
        Err(other) => return Err(refuse(Reason::InvalidArgument, other.to_string())),
    }
    let mut rows = Vec::with_capacity(values.len() * size_of::<f32>());
    rows.extend(values.iter().flat_map(|value| value.to_le_bytes()));
    Ok(SlotRows { rows: rows.into() })
}
