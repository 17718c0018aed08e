//! The gRPC service: checks who speaks, turns frames into commands for the engine, and carries its replies.

mod attach;
mod copies;
mod hello;
mod rounds;
mod unary;

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use eyrie_service::Drain;
use eyrie_wire::v1::target_server::{Target, TargetServer};
use eyrie_wire::v1::{
    DescribeRequest, DrainReply, DrainRequest, FileChunk, LeaseFrame, LeaseGrant, LoadReport, LoadRequest,
    ModelCard, ReadFeaturesReply, ReadFeaturesRequest, ReadFileRequest, ReadSharedRequest, TargetFrame,
    TargetReply,
};
use eyrie_wire::{MAX_MESSAGE, Reason, refuse};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_stream::Stream;
use tonic::{Request, Response, Status, Streaming};

pub(crate) use self::copies::Copies;
use self::copies::{MAX_FEATURE_READS, MAX_SHARED_READS};
use crate::engine::{Command, Sender, Stopped, StreamId};
use crate::files::Place;
use crate::state::State;

/// Rounds streams and unary rounds at the same time: one a gateway is usual.
const MAX_STREAMS: usize = 256;
/// Leases at the same time: one a draft is usual.
const MAX_LEASES: usize = 64;
/// Bytes of one FileChunk.
const CHUNK: usize = 1 << 20;

type Replies<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// The handlers' shared part.
#[derive(Clone)]
pub(crate) struct Service {
    state: Arc<State>,
    engine: Sender<Command>,
    drain: Drain,
    /// Milliseconds that the last Drain call granted.
    grace_ms: Arc<AtomicU32>,
    streams: Arc<AtomicU64>,
    room: Arc<Semaphore>,
    lease_room: Arc<Semaphore>,
    shared_reads: Arc<Semaphore>,
    feature_reads: Arc<Semaphore>,
}

impl Service {
    pub(crate) fn new(state: Arc<State>, engine: Sender<Command>, drain: Drain, grace: Duration) -> Self {
        let grace_ms = u32::try_from(grace.as_millis()).unwrap_or(u32::MAX);
        Self {
            state,
            engine,
            drain,
            grace_ms: Arc::new(AtomicU32::new(grace_ms)),
            streams: Arc::default(),
            room: Arc::new(Semaphore::new(MAX_STREAMS)),
            lease_room: Arc::new(Semaphore::new(MAX_LEASES)),
            shared_reads: Arc::new(Semaphore::new(MAX_SHARED_READS)),
            feature_reads: Arc::new(Semaphore::new(MAX_FEATURE_READS)),
        }
    }

    /// As a tonic service with the project's message limits.
    pub(crate) fn into_server(self) -> TargetServer<Self> {
        TargetServer::new(self).max_decoding_message_size(MAX_MESSAGE).max_encoding_message_size(MAX_MESSAGE)
    }

    /// How long running sequences may go on once the drain begins; zero = until they end.
    pub(crate) fn grace(&self) -> Duration {
        Duration::from_millis(u64::from(self.grace_ms.load(Relaxed)))
    }

    fn new_stream(&self) -> StreamId {
        StreamId(self.streams.fetch_add(1, Relaxed))
    }

    /// Refused until the model is loaded.
    fn check_loaded(&self) -> Result<(), Status> {
        match self.state.exports() {
            Some(_) => Ok(()),
            None => Err(refuse(Reason::Loading, "the model is still loading")),
        }
    }

    /// Room for one more stream, given back when dropped.
    fn take_room(&self) -> Result<OwnedSemaphorePermit, Status> {
        take(&self.room, || format!("{MAX_STREAMS} streams may be open at the same time, and as many are"))
    }

    /// Why the engine takes and gives nothing more.
    fn engine_gone(&self) -> Status {
        match self.state.failure() {
            Some(why) => refuse(Reason::Internal, format!("the engine failed: {why}")),
            None => refuse(Reason::Draining, "the target is stopping"),
        }
    }

    /// Ends the engine's thread after its step.
    pub(crate) fn stop_engine(&self) {
        let _ = self.engine.post(Command::Stop);
    }

    /// Has the engine look at the drain state.
    pub(crate) fn wake_engine(&self) {
        let _ = self.engine.post(Command::Wake);
    }

    async fn tell(&self, command: Command) -> Result<(), Status> {
        self.engine.send(command).await.map_err(|Stopped| self.engine_gone())
    }
}

/// One permit of `room`, or BUSY with the text of `full`.
fn take(room: &Arc<Semaphore>, full: impl FnOnce() -> String) -> Result<OwnedSemaphorePermit, Status> {
    Arc::clone(room).try_acquire_owned().map_err(|_| refuse(Reason::Busy, full()))
}

#[tonic::async_trait]
impl Target for Service {
    type AttachStream = Replies<LeaseGrant>;
    type RoundsStream = Replies<TargetReply>;
    type ReadFileStream = Replies<FileChunk>;
    type ReadSharedStream = Replies<FileChunk>;

    async fn describe(&self, _: Request<DescribeRequest>) -> Result<Response<ModelCard>, Status> {
        Ok(Response::new(self.state.card(self.drain.is_draining())))
    }

    async fn attach(
        &self,
        request: Request<Streaming<LeaseFrame>>,
    ) -> Result<Response<Self::AttachStream>, Status> {
        self.check_loaded()?;
        let room = take(&self.lease_room, || {
            format!("{MAX_LEASES} leases may be held at the same time, and as many are")
        })?;
        Ok(Response::new(self.clone().lease(request.into_inner(), room)))
    }

    async fn rounds(
        &self,
        request: Request<Streaming<TargetFrame>>,
    ) -> Result<Response<Self::RoundsStream>, Status> {
        self.check_loaded()?;
        let room = self.take_room()?;
        Ok(Response::new(self.clone().converse(request.into_inner(), room)))
    }

    async fn round(&self, request: Request<TargetFrame>) -> Result<Response<TargetReply>, Status> {
        self.check_loaded()?;
        let _room = self.take_room()?;
        self.answer(request.into_inner()).await.map(Response::new)
    }

    async fn load(&self, _: Request<LoadRequest>) -> Result<Response<LoadReport>, Status> {
        Ok(Response::new(self.state.load_report()))
    }

    async fn drain(&self, request: Request<DrainRequest>) -> Result<Response<DrainReply>, Status> {
        let sequences = *self.state.gauges.active().borrow() as u32;
        self.grace_ms.store(request.into_inner().grace_ms, Relaxed);
        self.drain.start();
        Ok(Response::new(DrainReply { sequences }))
    }

    async fn read_file(
        &self,
        request: Request<ReadFileRequest>,
    ) -> Result<Response<Self::ReadFileStream>, Status> {
        let name = request.into_inner().name;
        let Some(place) = self.state.files.find(&name) else {
            let served: Vec<&str> = self.state.files.infos().iter().map(|info| info.name.as_str()).collect();
            let message = format!("name must be one of {}, given \"{name}\"", served.join(", "));
            return Err(refuse(Reason::InvalidArgument, message));
        };
        let data = match place {
            Place::Text(text) => text,
            Place::At(path) => tokio::fs::read(&path)
                .await
                .map_err(|e| refuse(Reason::Internal, format!("{}: {e}", path.display())))?
                .into(),
        };
        let chunks: Vec<_> = (0..data.len())
            .step_by(CHUNK)
            .map(|at| Ok(FileChunk { data: data.slice(at..data.len().min(at + CHUNK)) }))
            .collect();
        Ok(Response::new(Box::pin(tokio_stream::iter(chunks))))
    }

    async fn read_shared(
        &self,
        request: Request<ReadSharedRequest>,
    ) -> Result<Response<Self::ReadSharedStream>, Status> {
        self.shared_bytes(request.into_inner()).map(Response::new)
    }

    async fn read_features(
        &self,
        request: Request<ReadFeaturesRequest>,
    ) -> Result<Response<ReadFeaturesReply>, Status> {
        self.feature_rows(request.into_inner()).await
    }
}
