//! Plays the target: the real shared weights, ring and door behind a real socket, and nothing else.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use eyrie_checkpoint::TargetCheckpoint;
use eyrie_model::{Backing, SharedWeights};
use eyrie_region::{Epoch, FdDoor, Grant, RingGeometry, RingReader, RingWriter, Token};
use eyrie_wire::v1::target_server::{Target, TargetServer};
use eyrie_wire::v1::{self, FeatureRef, LeaseGrant, ModelCard, RingSlot, feature_ref::At};
use eyrie_wire::{Address, Listener, PROTOCOL_VERSION, grant_to_wire, ring_to_wire};
use tokio::runtime::Runtime;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use super::demo;
use super::reference::{AUX_LAYERS, ROW_WIDTH};

pub const SLOTS: u32 = 8;
pub const SLOT_ROWS: u32 = 64;

/// A target that only exports. Dropping it is its death: every connection breaks.
pub struct Exporter {
    pub address: Address,
    pub epoch: Epoch,
    /// Copies of the region, and calls for rows, that were asked for.
    pub shared_reads: Arc<AtomicUsize>,
    pub feature_reads: Arc<AtomicUsize>,
    ring: RingWriter,
    _door: FdDoor,
    shared: SharedWeights,
    runtime: Option<Runtime>,
}

impl Exporter {
    pub fn start(dir: &Path) -> Self {
        Self::start_with(dir, |_, _| {})
    }

    /// Starts with a grant and a card that `edit` has falsified.
    pub fn start_with(dir: &Path, edit: impl FnOnce(&mut LeaseGrant, &mut ModelCard)) -> Self {
        Self::start_falsified(dir, edit, |_| {})
    }

    /// Starts with copies of the region that `corrupt` has damaged.
    pub fn start_corrupt(dir: &Path, corrupt: impl FnOnce(&mut Vec<u8>)) -> Self {
        Self::start_falsified(dir, |_, _| {}, corrupt)
    }

    /// Bytes of embedding and head.
    pub fn shared_bytes(&self) -> u64 {
        self.shared.grant().bytes
    }

    fn start_falsified(
        dir: &Path,
        edit: impl FnOnce(&mut LeaseGrant, &mut ModelCard),
        corrupt: impl FnOnce(&mut Vec<u8>),
    ) -> Self {
        let epoch = Epoch::random().unwrap();
        let checkpoint = TargetCheckpoint::open(&demo("mini")).unwrap();
        let shared = SharedWeights::build(&checkpoint, Backing::Memfd, epoch).unwrap();
        let geometry = RingGeometry { slots: SLOTS, slot_rows: SLOT_ROWS, row_width: ROW_WIDTH as u32 };
        let ring = RingWriter::create(geometry, epoch).unwrap();
        let door = FdDoor::bind(dir.join("target.door")).unwrap();
        let token = Token::random().unwrap();
        let weights = shared.descriptor().unwrap().try_clone_to_owned().unwrap();
        door.offer(token, vec![weights, ring.fd().try_clone_to_owned().unwrap()]).unwrap();
        let config = checkpoint.config();
        let mut grant = LeaseGrant {
            lease_id: 1,
            epoch: epoch.get(),
            fingerprint: "demo".to_owned(),
            door: door.path().to_str().unwrap().to_owned(),
            token: token.as_bytes().to_vec().into(),
            weights: Some(grant_to_wire(shared.grant())),
            ring: ring_to_wire(&Grant { ring: Some(geometry), ..shared.grant().clone() }),
            aux_layers: AUX_LAYERS.to_vec(),
            hidden_size: config.hidden_size as u32,
            vocab_size: config.vocab_size as u32,
            context_length: 512,
            layers: config.num_hidden_layers as u32,
        };
        let mut card = ModelCard {
            protocol_version: PROTOCOL_VERSION,
            epoch: epoch.get(),
            fingerprint: "demo".to_owned(),
            ..Default::default()
        };
        edit(&mut grant, &mut card);
        let address = Address::Unix(dir.join("target.sock"));
        let (shared_reads, feature_reads) = (Arc::default(), Arc::default());
        let mut copy = shared.region().host().unwrap().to_vec();
        corrupt(&mut copy);
        let target = FakeTarget {
            grant,
            card,
            leases: Mutex::default(),
            copy: copy.into(),
            ring: RingReader::open(ring.fd().try_clone_to_owned().unwrap(), geometry, epoch).unwrap(),
            shared_reads: Arc::clone(&shared_reads),
            feature_reads: Arc::clone(&feature_reads),
        };
        let runtime = serve(&address, target);
        Self {
            address,
            epoch,
            shared_reads,
            feature_reads,
            ring,
            _door: door,
            shared,
            runtime: Some(runtime),
        }
    }

    /// Publishes the rows of consecutive positions from `first` on.
    pub fn publish(&mut self, first: u32, rows: &[f32]) -> Vec<FeatureRef> {
        let mut at = first;
        let mut refs = Vec::new();
        for chunk in rows.chunks(SLOT_ROWS as usize * ROW_WIDTH) {
            let slot = self.ring.publish(chunk).unwrap();
            let ring = RingSlot { slot: slot.slot, generation: slot.generation };
            refs.push(FeatureRef { first: at, rows: slot.rows, at: Some(At::Ring(ring)) });
            at += slot.rows;
        }
        refs
    }
}

impl Drop for Exporter {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// On a runtime of its own, so that its death takes every connection with it.
fn serve(address: &Address, target: FakeTarget) -> Runtime {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let (bound, listening) = std::sync::mpsc::sync_channel(1);
    let address = address.clone();
    runtime.spawn(async move {
        let listener = Listener::bind(&address).await.unwrap();
        bound.send(()).unwrap();
        let server = eyrie_wire::server().add_service(TargetServer::new(target));
        server.serve_with_incoming(listener.incoming()).await.unwrap();
    });
    listening.recv().unwrap();
    runtime
}

type Granting = mpsc::Sender<Result<LeaseGrant, Status>>;

struct FakeTarget {
    grant: LeaseGrant,
    card: ModelCard,
    /// The granting halves of open leases.
    leases: Mutex<Vec<Granting>>,
    copy: Bytes,
    ring: RingReader,
    shared_reads: Arc<AtomicUsize>,
    feature_reads: Arc<AtomicUsize>,
}

#[tonic::async_trait]
impl Target for FakeTarget {
    type AttachStream = ReceiverStream<Result<LeaseGrant, Status>>;
    type RoundsStream = ReceiverStream<Result<v1::TargetReply, Status>>;
    type ReadFileStream = ReceiverStream<Result<v1::FileChunk, Status>>;
    type ReadSharedStream = ReceiverStream<Result<v1::FileChunk, Status>>;

    async fn describe(&self, _: Request<v1::DescribeRequest>) -> Result<Response<ModelCard>, Status> {
        Ok(Response::new(self.card.clone()))
    }

    async fn attach(
        &self,
        request: Request<Streaming<v1::LeaseFrame>>,
    ) -> Result<Response<Self::AttachStream>, Status> {
        let frame = request.into_inner().message().await?.unwrap();
        assert_eq!((frame.protocol_version, frame.holder.as_str()), (PROTOCOL_VERSION, "draft"));
        assert_eq!(frame.pid, std::process::id());
        let (sender, grants) = mpsc::channel(1);
        let mut grant = self.grant.clone();
        if frame.remote {
            (grant.door, grant.token) = (String::new(), Bytes::new());
        }
        sender.try_send(Ok(grant)).unwrap();
        self.leases.lock().unwrap().push(sender);
        Ok(Response::new(ReceiverStream::new(grants)))
    }

    async fn rounds(
        &self,
        _: Request<Streaming<v1::TargetFrame>>,
    ) -> Result<Response<Self::RoundsStream>, Status> {
        Err(Status::unimplemented("the exporter has no rounds"))
    }

    async fn round(&self, _: Request<v1::TargetFrame>) -> Result<Response<v1::TargetReply>, Status> {
        Err(Status::unimplemented("the exporter has no rounds"))
    }

    async fn load(&self, _: Request<v1::LoadRequest>) -> Result<Response<v1::LoadReport>, Status> {
        Err(Status::unimplemented("the exporter has no load"))
    }

    async fn drain(&self, _: Request<v1::DrainRequest>) -> Result<Response<v1::DrainReply>, Status> {
        Err(Status::unimplemented("the exporter has no drain"))
    }

    async fn read_file(
        &self,
        _: Request<v1::ReadFileRequest>,
    ) -> Result<Response<Self::ReadFileStream>, Status> {
        Err(Status::unimplemented("the exporter has no files"))
    }

    async fn read_shared(
        &self,
        request: Request<v1::ReadSharedRequest>,
    ) -> Result<Response<Self::ReadSharedStream>, Status> {
        assert_eq!(request.into_inner().epoch, self.card.epoch);
        self.shared_reads.fetch_add(1, Relaxed);
        let chunks = self.copy.chunks(1 << 20);
        let chunks: Vec<_> =
            chunks.map(|chunk| Ok(v1::FileChunk { data: Bytes::copy_from_slice(chunk) })).collect();
        let (sender, receiver) = mpsc::channel(chunks.len());
        chunks.into_iter().for_each(|chunk| sender.try_send(chunk).unwrap());
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    async fn read_features(
        &self,
        request: Request<v1::ReadFeaturesRequest>,
    ) -> Result<Response<v1::ReadFeaturesReply>, Status> {
        let request = request.into_inner();
        assert_eq!(request.epoch, self.card.epoch);
        self.feature_reads.fetch_add(1, Relaxed);
        let read = |slot: &RingSlot| {
            let mut values = Vec::new();
            // An overwritten slot leaves none.
            let _ = self.ring.read_slot(slot.slot, slot.generation, &mut values);
            let rows: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            v1::SlotRows { rows: rows.into() }
        };
        Ok(Response::new(v1::ReadFeaturesReply { slots: request.slots.iter().map(read).collect() }))
    }
}
