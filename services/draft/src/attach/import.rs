//! From a grant to a head that runs on the target's weights.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

use eyrie_checkpoint::AuxIds;
use eyrie_kernels::{Activations, Backend, KernelError, Processor};
use eyrie_model::{CaptureSet, Eagle3Head, HeadWeights, ModelError, SharedWeights};
use eyrie_region::{
    DeviceRingReader, DoorError, FdDoor, Grant, Import, ImportedRing, RegionKind, RingError, RingReader,
    Token,
};
use eyrie_wire::v1::LeaseGrant;
use eyrie_wire::v1::target_client::TargetClient;
use eyrie_wire::{GrantMessageError, grant_from_wire};
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;

use super::copy::{CopyError, CopyStore};
use crate::SharedSource;
use crate::engine::{Attachment, DEVICE_ROOM, DeviceRing, FeatureSource};
use crate::inline::RowReader;
use crate::state::Memory;

/// How long the target's door may take to hand out the descriptors.
const DOOR_TIMEOUT: Duration = Duration::from_secs(5);

/// Slots a page of the draft's cache.
const PAGE_ROWS: usize = 32;

/// Why a grant that fits could not be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ImportError {
    #[error("grant: token must be 32 bytes, given {given}")]
    Token { given: usize },
    #[error("grant: no feature ring")]
    NoRing,
    #[error(transparent)]
    Grant(#[from] GrantMessageError),
    #[error("grant: the ring's rows lie on a GPU, and this draft computes on the CPU")]
    RowsOnDevice,
    #[error("nobody waits for it any more")]
    GivenUp,
    #[error("{0}{advice}", advice = advice(.0))]
    Door(#[from] DoorError),
    #[error("shared weights: {0}")]
    Import(#[from] eyrie_region::ImportError),
    #[error("feature ring: {0}")]
    Ring(#[from] RingError),
    #[error(transparent)]
    Copy(#[from] CopyError),
    #[error(transparent)]
    Kernel(#[from] KernelError),
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error("loading the head failed: {0}")]
    Task(#[from] tokio::task::JoinError),
}

/// What to do where there is no door at all.
fn advice(error: &DoorError) -> &'static str {
    match error {
        DoorError::Silent { .. } | DoorError::Refused { .. } => "",
        _ => {
            "; a draft that shares no memory with its target, as on another host, needs --shared-weights target or a folder"
        }
    }
}

/// What every import of this service works with.
#[derive(Debug)]
pub(crate) struct Importing {
    pub(crate) head: Arc<HeadWeights>,
    pub(crate) source: SharedSource,
    pub(crate) allow_writable_ipc: bool,
    pub(crate) copies: CopyStore,
    /// Positions of one target's cache.
    pub(crate) cache_tokens: usize,
}

/// A head over the target's weights, ready for the engine.
#[derive(Debug)]
pub(crate) struct Imported {
    pub(crate) attachment: Attachment,
    pub(crate) memory: Memory,
    pub(crate) rows: Option<RowReader>,
}

/// The target's weights, and where its features are read.
struct Obtained {
    shared: SharedWeights,
    memory: Memory,
    features: FeatureSource,
    rows: Option<RowReader>,
}

impl Importing {
    /// Obtains what `grant` describes in the way the service was told to, verifies it, and puts the head over it.
    /// When the future is dropped the work on blocking threads ends at its next step.
    pub(super) async fn import(
        self: &Arc<Self>,
        place: usize,
        channel: Channel,
        grant: LeaseGrant,
        aux: AuxIds,
    ) -> Result<Imported, ImportError> {
        let given_up = CancellationToken::new();
        let _waiting = given_up.clone().drop_guard();
        let granted = grant_from_wire(&grant)?;
        let obtained = match &self.source {
            SharedSource::Map => {
                let (grant, importing) = (grant.clone(), Arc::clone(self));
                tokio::task::spawn_blocking(move || importing.map(&grant, &granted)).await??
            }
            SharedSource::Target => {
                let shared = self.copies.read(&mut TargetClient::new(channel.clone()), &granted).await?;
                copied(shared, channel, &granted)?
            }
            SharedSource::Folder(folder) => {
                let shared = self.copies.build(folder, &granted).await?;
                copied(shared, channel, &granted)?
            }
        };
        let importing = Arc::clone(self);
        let bind = move || match given_up.is_cancelled() {
            // Mapping and checksums are behind, packing a borrowed head lies ahead: both take seconds with large tables.
            true => Err(ImportError::GivenUp),
            false => importing.bind(place, &grant, &aux, obtained),
        };
        tokio::task::spawn_blocking(bind).await?
    }

    /// Kinds of memory that this draft maps, for the lease.
    pub(super) fn kinds(&self) -> Vec<String> {
        let kinds: &[RegionKind] = match (self.head.backend().processor(), self.allow_writable_ipc) {
            (Processor::Cpu, _) => &[RegionKind::Memfd],
            (Processor::Cuda(_), false) => &[RegionKind::CudaVmm],
            (Processor::Cuda(_), true) => &[RegionKind::CudaVmm, RegionKind::CudaIpc],
        };
        kinds.iter().map(RegionKind::to_string).collect()
    }

    /// Fetches the descriptors of `grant`, maps and verifies them. Blocking.
    fn map(&self, grant: &LeaseGrant, granted: &Grant) -> Result<Obtained, ImportError> {
        let token = Token::try_from(grant.token.as_ref())
            .map_err(|_| ImportError::Token { given: grant.token.len() })?;
        let fds = FdDoor::fetch(Path::new(&grant.door), &token, DOOR_TIMEOUT)?;
        let Import { region, ring } = granted.import(fds, self.allow_writable_ipc)?;
        let features = mapped_rows(self.head.backend(), ring.ok_or(ImportError::NoRing)?, granted)?;
        let (kind, bytes) = (granted.kind, granted.bytes);
        let memory = Memory::Mapped { region: Arc::downgrade(&region), kind, bytes };
        let shared = SharedWeights::import(region, granted, granted.epoch)?;
        Ok(Obtained { shared, memory, features, rows: None })
    }

    fn bind(
        &self,
        place: usize,
        grant: &LeaseGrant,
        aux: &AuxIds,
        obtained: Obtained,
    ) -> Result<Imported, ImportError> {
        // What is named last goes first where this fails: the weights before the ring, by whose mapping the successor of the
        // target tells that they are let go.
        let Obtained { rows, features, memory, shared } = obtained;
        let capture = CaptureSet::new(&aux.canonical, grant.layers as usize)?;
        let head = Eagle3Head::over(Arc::clone(&self.head), &capture, &shared)?;
        let cache = head.new_cache(self.cache_tokens, PAGE_ROWS)?;
        let attachment = Attachment {
            place,
            epoch: grant.epoch,
            head,
            cache,
            features,
            context: grant.context_length as usize,
            vocab: grant.vocab_size as usize,
            sequences: Arc::new(AtomicU32::new(0)),
        };
        Ok(Imported { attachment, memory, rows })
    }
}

/// Where rows of `ring` are read: on the GPU that `backend` computes on, if they lie on one.
fn mapped_rows(backend: &Backend, ring: ImportedRing, granted: &Grant) -> Result<FeatureSource, ImportError> {
    let ImportedRing { fd, payload } = ring;
    let Some((geometry, payload)) = payload else {
        let geometry = granted.ring.ok_or(ImportError::NoRing)?;
        return Ok(FeatureSource::Ring(RingReader::open(fd, geometry, granted.epoch)?));
    };
    let stream = backend.stream()?.ok_or(ImportError::RowsOnDevice)?;
    let numbers = match geometry.value_bytes {
        2 => Activations::Bf16,
        _ => Activations::F32,
    };
    let reader = DeviceRingReader::open(fd, payload, geometry, granted.epoch, DEVICE_ROOM, stream)?;
    Ok(FeatureSource::Device(Box::new(DeviceRing { reader, numbers })))
}

fn copied(shared: SharedWeights, channel: Channel, granted: &Grant) -> Result<Obtained, ImportError> {
    let geometry = granted.ring.ok_or(ImportError::NoRing)?;
    let memory = Memory::Copied { bytes: shared.grant().bytes };
    let rows = Some(RowReader::new(channel, granted.epoch.get(), &geometry));
    Ok(Obtained { shared, memory, features: FeatureSource::Inline(geometry), rows })
}
