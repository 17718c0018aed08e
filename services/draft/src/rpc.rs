//! The gRPC surface: Rounds with its unary twin, Describe and Drain.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use eyrie_service::Drain;
use eyrie_wire::v1::{self, draft_server::Draft};
use eyrie_wire::{
    PROTOCOL_VERSION, Reason, check_frame, check_hello, check_items, first_frame, refuse, with_reason,
};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};

use crate::card::HeadCard;
use crate::engine::{Command, EngineHandle, Frame, Replies, StreamId};
use crate::outgoing::{Ending, Outgoing};
use crate::state::{Lease, LeaseState};

/// Replies that wait for the network. A gateway that lags this far behind has stopped reading.
const OUTGOING: usize = 256;
/// Rounds streams and unary rounds at the same time: one for each gateway and target is usual.
const MAX_STREAMS: usize = 256;

/// The handlers of service `eyrie.v1.Draft`.
#[derive(Debug)]
pub(crate) struct DraftService {
    engine: EngineHandle,
    state: Arc<LeaseState>,
    head: HeadCard,
    drain: Drain,
    streams: AtomicU64,
    room: Arc<Semaphore>,
}

impl DraftService {
    pub(crate) fn new(engine: EngineHandle, state: Arc<LeaseState>, head: HeadCard, drain: Drain) -> Self {
        let room = Arc::new(Semaphore::new(MAX_STREAMS));
        Self { engine, state, head, drain, streams: AtomicU64::new(0), room }
    }

    /// Room for one more stream, given back when dropped.
    fn take_room(&self) -> Result<OwnedSemaphorePermit, Status> {
        let full = format!("{MAX_STREAMS} streams may be open at the same time, and as many are");
        Arc::clone(&self.room).try_acquire_owned().map_err(|_| refuse(Reason::Busy, full))
    }

    /// The lease that a stream opened with `hello` runs under, and the answer to the hello.
    fn admit(&self, hello: Option<v1::Hello>) -> Result<(Arc<Lease>, v1::Hello), Status> {
        let hello = check_hello(hello)?;
        if self.drain.is_draining() {
            return Err(refuse(Reason::Draining, "the draft is draining"));
        }
        let lease = self.state.select(&hello)?;
        let answer = v1::Hello {
            protocol_version: PROTOCOL_VERSION,
            boot_id: hello.boot_id,
            epoch: lease.epoch,
            fingerprint: lease.fingerprint.clone(),
        };
        Ok((lease, answer))
    }

    fn next_stream(&self) -> StreamId {
        self.streams.fetch_add(1, Ordering::Relaxed) + 1
    }
}

#[tonic::async_trait]
impl Draft for DraftService {
    type RoundsStream = Outgoing;

    async fn describe(
        &self,
        _request: Request<v1::DescribeDraftRequest>,
    ) -> Result<Response<v1::DraftCard>, Status> {
        let (head, targets) = (self.head.clone(), self.state.all());
        // Reading the accounting of a large process takes the kernel milliseconds.
        tokio::task::spawn_blocking(move || head.card(targets))
            .await
            .map(Response::new)
            .map_err(|e| refuse(Reason::Internal, format!("describe failed: {e}")))
    }

    async fn rounds(
        &self,
        request: Request<Streaming<v1::DraftFrame>>,
    ) -> Result<Response<Outgoing>, Status> {
        let mut frames = request.into_inner();
        let room = self.take_room()?;
        let first = first_frame(&mut frames).await?.unwrap_or_default();
        let (lease, hello) = self.admit(first.hello)?;
        check_items(first.items.len())?;
        let (sender, receiver) = mpsc::channel(OUTGOING);
        // A fresh channel has room.
        let _ = sender.try_send(v1::DraftReply { hello: Some(hello.clone()), outs: Vec::new() });
        let (overrun, gone) = (CancellationToken::new(), CancellationToken::new());
        let refused = Arc::new(OnceLock::new());
        let ending = Ending {
            lease: Arc::clone(&lease),
            overrun: overrun.clone(),
            refused: Arc::clone(&refused),
            drain: self.drain.clone(),
        };
        let outgoing = Outgoing::new(receiver, ending, &gone, room);
        let reader = Reader {
            engine: self.engine.clone(),
            stream: self.next_stream(),
            boot_id: hello.boot_id,
            lease,
            replies: Replies { sender, overrun },
            gone,
            refused,
            drain: self.drain.clone(),
        };
        self.drain.spawn(reader.run(frames, first.items));
        Ok(Response::new(outgoing))
    }

    async fn round(&self, request: Request<v1::DraftFrame>) -> Result<Response<v1::DraftReply>, Status> {
        let v1::DraftFrame { hello, mut items } = request.into_inner();
        let _room = self.take_room()?;
        let (lease, hello) = self.admit(hello)?;
        check_items(items.len())?;
        let (sender, mut receiver) = mpsc::channel(items.len().max(1));
        let held = lease.take_in(&mut items).await;
        let frame = Frame {
            stream: self.next_stream(),
            unary: true,
            boot_id: hello.boot_id,
            epoch: lease.epoch,
            items,
            held,
            replies: Replies { sender, overrun: CancellationToken::new() },
        };
        if !self.engine.send(Command::Frame(frame)).await {
            return Err(refuse(Reason::Internal, "the draft engine has ended"));
        }
        let mut reply = v1::DraftReply { hello: Some(hello), outs: Vec::new() };
        // Ends when the engine has answered every item and dropped its way back.
        while let Some(part) = receiver.recv().await {
            reply.outs.extend(part.outs);
        }
        Ok(Response::new(reply))
    }

    async fn drain(&self, _request: Request<v1::DrainRequest>) -> Result<Response<v1::DrainReply>, Status> {
        // A round is milliseconds and no sequence depends on the draft: there is nothing to be graceful about
        // beyond the rounds that are under way, so `grace_ms` has nothing to bound.
        let sequences = self.state.sequences();
        self.drain.start();
        Ok(Response::new(v1::DrainReply { sequences }))
    }
}

/// The reading half of a Rounds stream.
struct Reader {
    engine: EngineHandle,
    stream: StreamId,
    boot_id: u64,
    lease: Arc<Lease>,
    replies: Replies,
    gone: CancellationToken,
    refused: Arc<OnceLock<Status>>,
    drain: Drain,
}

impl Reader {
    async fn run(self, mut frames: Streaming<v1::DraftFrame>, first: Vec<v1::DraftItem>) {
        let mut items = first;
        loop {
            if !items.is_empty() && !self.pass_on(items).await {
                break;
            }
            let frame = tokio::select! {
                frame = frames.message() => frame,
                () = self.gone.cancelled() => break,
                () = self.lease.lost.cancelled() => break,
                () = self.replies.overrun.cancelled() => break,
                () = self.drain.draining() => break,
            };
            items = match frame {
                Ok(Some(frame)) => match check_frame(frame.hello.as_ref(), frame.items.len()) {
                    Ok(()) => frame.items,
                    Err(status) => {
                        let _ = self.refused.set(status);
                        break;
                    }
                },
                Ok(None) => break,
                Err(status) => {
                    tracing::debug!(stream = self.stream, "rounds stream broke: {}", status.message());
                    let _ = self.refused.set(with_reason(status));
                    break;
                }
            };
        }
        self.engine.send(Command::Close(self.stream)).await;
    }

    async fn pass_on(&self, mut items: Vec<v1::DraftItem>) -> bool {
        let held = self.lease.take_in(&mut items).await;
        let frame = Frame {
            stream: self.stream,
            unary: false,
            boot_id: self.boot_id,
            epoch: self.lease.epoch,
            items,
            held,
            replies: self.replies.clone(),
        };
        self.engine.send(Command::Frame(frame)).await
    }
}
