//! Copies of shared memory for drafts that cannot map it. Read past the engine, so that no copy waits for it or is waited
//! for by it: of weights that nobody changes any more, and of the ring in a mapping of the service's own.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use eyrie_region::{Region, RingError};
use eyrie_service::until_sent;
use eyrie_wire::v1::{
    FileChunk, ReadFeaturesReply, ReadFeaturesRequest, ReadSharedRequest, RingSlot, SlotRows,
};
use eyrie_wire::{Reason, refuse, slots_per_read};
use tokio::sync::mpsc;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Response, Status};

use super::{CHUNK, Replies, Service, take};
use crate::engine::{Exports, RingCopy};

/// Streams of the shared region at the same time: a draft reads it once.
pub(super) const MAX_SHARED_READS: usize = 8;
/// Reads of features that are copied or on their way at the same time; more wait.
pub(super) const MAX_FEATURE_READS: usize = 8;
/// How long a chunk of the shared region may wait for the network, and for how long a reply with features counts as being
/// on its way: a reader that is slower than that holds up nobody else.
const SEND_LIMIT: Duration = Duration::from_secs(10);

/// The exported memory.
#[derive(Debug)]
pub(crate) struct Copies {
    shared: Arc<dyn Region>,
    ring: Option<Arc<RingCopy>>,
}

impl Copies {
    pub(crate) fn of(exports: &Exports) -> Self {
        Self { shared: Arc::clone(&exports.region), ring: exports.ring.clone() }
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
        let (chunks, receiver) = mpsc::channel(1);
        let late = Arc::new(OnceLock::new());
        let (told, stop) = (Arc::clone(&late), self.drain.clone());
        self.drain.spawn(async move {
            let _reading = room;
            let sent = tokio::select! {
                sent = send_chunks(&shared, &chunks) => sent,
                () = stop.stopped() => Err(refuse(Reason::Draining, "the target is stopping")),
            };
            let _ = sent.map_err(|status| told.set(status));
        });
        let end = std::iter::once_with(move || late.get().cloned()).flatten();
        Ok(Box::pin(ReceiverStream::new(receiver).map(Ok).chain(tokio_stream::iter(end.map(Err)))))
    }

    /// The rows of ring slots, empty for those that were overwritten.
    pub(super) async fn feature_rows(
        &self,
        request: ReadFeaturesRequest,
    ) -> Result<Response<ReadFeaturesReply>, Status> {
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
            let slots: Result<_, Status> = request.slots.iter().map(|slot| read_slot(&ring, slot)).collect();
            Ok::<_, Status>((ReadFeaturesReply { slots: slots? }, reading))
        });
        let (reply, reading) = read.await.map_err(|e| internal(&e))??;
        let (mark, sent) = until_sent();
        let stop = self.drain.clone();
        self.drain.spawn(async move {
            let _reading = reading;
            tokio::select! {
                () = sent => {}
                () = tokio::time::sleep(SEND_LIMIT) => {}
                () = stop.stopped() => {}
            }
        });
        let mut response = Response::new(reply);
        response.extensions_mut().insert(mark);
        Ok(response)
    }
}

/// Copies `region`, each chunk when there is room for it.
async fn send_chunks(region: &Arc<dyn Region>, chunks: &mpsc::Sender<FileChunk>) -> Result<(), Status> {
    let length = region.byte_len();
    for at in (0..length).step_by(CHUNK) {
        let Ok(room) = tokio::time::timeout(SEND_LIMIT, chunks.reserve()).await else {
            let limit = SEND_LIMIT.as_secs();
            return Err(refuse(Reason::Busy, format!("a chunk must be read within {limit} s")));
        };
        let Ok(room) = room else { return Ok(()) };
        let source = Arc::clone(region);
        let read = move || {
            let mut chunk = vec![0; (length - at).min(CHUNK as u64) as usize];
            source.read(at, &mut chunk).map(|()| chunk).map_err(|e| e.to_string())
        };
        // A device is waited for.
        let chunk = match region.host() {
            Some(_) => read(),
            None => tokio::task::spawn_blocking(read).await.unwrap_or_else(|e| Err(e.to_string())),
        };
        match chunk {
            Ok(chunk) => room.send(FileChunk { data: Bytes::from(chunk) }),
            Err(e) => return Err(refuse(Reason::Internal, format!("reading shared weights: {e}"))),
        }
    }
    Ok(())
}

fn read_slot(ring: &RingCopy, at: &RingSlot) -> Result<SlotRows, Status> {
    match ring.read_slot(at) {
        Ok(rows) => Ok(SlotRows { rows: rows.into() }),
        Err(RingError::Stale { .. }) => Ok(SlotRows::default()),
        Err(RingError::Region(error)) => Err(refuse(Reason::Internal, format!("reading features: {error}"))),
        Err(other) => Err(refuse(Reason::InvalidArgument, other.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use eyrie_region::Local;
    use eyrie_wire::reason_of;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_region_is_copied_as_it_is_read_and_for_no_longer_than_it_is() {
        let mut region = Local::zeroed(2 * CHUNK + 9);
        region.bytes_mut()[CHUNK] = 7;
        let (sender, mut chunks) = mpsc::channel::<FileChunk>(1);
        let read = async {
            let mut data = Vec::new();
            while let Some(chunk) = chunks.recv().await {
                data.extend_from_slice(&chunk.data);
                tokio::time::sleep(SEND_LIMIT - Duration::from_secs(1)).await;
            }
            data
        };
        let region: Arc<dyn Region> = Arc::new(region);
        let send = async move { send_chunks(&region, &sender).await.map(|()| region) };
        let (data, sent) = tokio::join!(read, send);
        assert!(sent.is_ok_and(|region| region.host().is_some_and(|bytes| bytes == data)));

        let (sender, _unread) = mpsc::channel(1);
        let refused =
            send_chunks(&(Arc::new(Local::zeroed(2 * CHUNK)) as Arc<dyn Region>), &sender).await.unwrap_err();
        assert_eq!(reason_of(&refused).as_deref(), Some("BUSY"));
    }
}
