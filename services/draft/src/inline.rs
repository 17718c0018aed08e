//! Rows of a target whose ring cannot be mapped: read from the target itself before the engine sees a frame.

use std::sync::Arc;
use std::time::Duration;

use eyrie_region::RingGeometry;
use eyrie_wire::v1::draft_item::Op;
use eyrie_wire::v1::feature_ref::At;
use eyrie_wire::v1::target_client::TargetClient;
use eyrie_wire::v1::{DraftItem, FeatureRef, ReadFeaturesRequest, RingSlot, SlotRows};
use eyrie_wire::{MAX_MESSAGE, slots_per_read};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tonic::Status;
use tonic::transport::Channel;

/// How long the rows of one frame may take. What is not here by then is missing, and asked for again by NEED.
const READ_LIMIT: Duration = Duration::from_secs(1);
/// Bytes of rows that wait for the engine at the same time.
const HELD_BYTES: u64 = 256 << 20;

/// Room for rows, given back when the last item of their frame is answered.
pub(crate) type HeldRoom = Option<Arc<OwnedSemaphorePermit>>;

/// Reads ring slots of one boot of a target over its gRPC connection.
#[derive(Debug)]
pub(crate) struct RowReader {
    client: TargetClient<Channel>,
    epoch: u64,
    slots: u32,
    /// Slots of one call, and of one frame.
    per_read: usize,
    per_frame: usize,
    /// A permit a slot.
    room: Arc<Semaphore>,
}

impl RowReader {
    pub(crate) fn new(channel: Channel, epoch: u64, ring: &RingGeometry) -> Self {
        let slot_bytes = 4 * u64::from(ring.slot_rows) * u64::from(ring.row_width);
        // No more slots than the ring has can hold live rows.
        let per_frame = (HELD_BYTES / slot_bytes.max(1)).clamp(1, u64::from(ring.slots)) as usize;
        Self {
            client: TargetClient::new(channel).max_decoding_message_size(MAX_MESSAGE),
            epoch,
            slots: ring.slots,
            per_read: slots_per_read(ring),
            per_frame,
            room: Arc::new(Semaphore::new(per_frame)),
        }
    }

    /// Puts rows in the place of the ring references in `items`. References whose rows are gone, or could not be had in
    /// time, stay as they are: to the engine they are missing rows.
    pub(crate) async fn inline(&self, items: &mut [DraftItem]) -> HeldRoom {
        let mut refs: Vec<&mut FeatureRef> = items.iter_mut().flat_map(ring_refs).collect();
        refs.retain(|part| ring_slot(part).is_some_and(|at| at.slot < self.slots));
        refs.truncate(self.per_frame);
        if refs.is_empty() {
            return None;
        }
        let mut held = None;
        let read = tokio::time::timeout(READ_LIMIT, self.read(&mut refs, &mut held)).await;
        let failed = match &read {
            Ok(Ok(())) => None,
            Ok(Err(status)) => Some(status.message()),
            Err(_) => Some("out of time"),
        };
        if let Some(why) = failed {
            tracing::debug!(slots = refs.len(), "features could not be read from the target: {why}");
        }
        held
    }

    async fn read(&self, refs: &mut [&mut FeatureRef], held: &mut HeldRoom) -> Result<(), Status> {
        // As many permits as the semaphore has, at most.
        let room = Arc::clone(&self.room).acquire_many_owned(refs.len() as u32).await;
        *held = Some(Arc::new(room.map_err(|closed| Status::internal(closed.to_string()))?));
        let mut client = self.client.clone();
        for part in refs.chunks_mut(self.per_read) {
            let slots = part.iter().filter_map(|part| ring_slot(part)).collect();
            let request = ReadFeaturesRequest { epoch: self.epoch, slots };
            let rows = client.read_features(request).await?.into_inner().slots;
            for (part, SlotRows { rows }) in part.iter_mut().zip(rows) {
                if !rows.is_empty() {
                    part.at = Some(At::Inline(rows));
                }
            }
        }
        Ok(())
    }
}

fn ring_refs(item: &mut DraftItem) -> impl Iterator<Item = &mut FeatureRef> {
    let features = match &mut item.op {
        Some(Op::Propose(propose)) => propose.features.as_mut_slice(),
        Some(Op::Close(_)) | None => &mut [],
    };
    features.iter_mut()
}

fn ring_slot(part: &FeatureRef) -> Option<RingSlot> {
    match &part.at {
        Some(At::Ring(slot)) => Some(*slot),
        Some(At::Inline(_)) | None => None,
    }
}
