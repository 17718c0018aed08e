//! The lease on a target's memory: taken, held for as long as the Attach stream lives, and taken anew.

mod checks;
mod copy;
mod import;

use std::sync::Arc;
use std::time::{Duration, Instant};

use eyrie_checkpoint::{AuxConvention, AuxIds, DraftCheckpoint};
use eyrie_model::ModelError;
use eyrie_service::{Drain, Health};
use eyrie_wire::v1::target_client::TargetClient;
use eyrie_wire::v1::{DescribeRequest, LeaseFrame, LeaseGrant};
use eyrie_wire::{Address, MAX_MESSAGE, PROTOCOL_VERSION, connect};
use tokio::sync::{Mutex, mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;
use tonic::{Status, Streaming};

use self::checks::Mismatch;
use self::copy::CopyError;
pub(crate) use self::copy::CopyStore;
use self::import::ImportError;
pub(crate) use self::import::Importing;
use crate::SharedSource;
use crate::engine::{Attachment, Command, EngineError, EngineHandle};
use crate::state::{Lease, LeaseState};

const FIRST_BACKOFF: Duration = Duration::from_millis(50);
const LAST_BACKOFF: Duration = Duration::from_secs(1);
/// A pair that does not match stays so until one side is started anew.
const REFUSED_RETRY: Duration = Duration::from_secs(2);
/// A copy that arrived spoilt is not read again at once: it is the whole of the shared weights each time.
const SPOILT_RETRY: Duration = Duration::from_secs(30);
/// How long the target may take to answer one call.
const CALL_TIMEOUT: Duration = Duration::from_secs(5);
/// `LeaseFrame.holder`.
const HOLDER: &str = "draft";

/// Why there is no lease.
#[derive(Debug, thiserror::Error)]
enum NoLease {
    #[error("{}", .0.message())]
    Call(Status),
    #[error("the target did not answer within {} s", CALL_TIMEOUT.as_secs())]
    Silent,
    #[error("the target ended the lease before granting it")]
    NoGrant,
    #[error("head and target do not match: {0}")]
    Mismatch(#[from] Mismatch),
    #[error("the grant cannot be used: {0}")]
    Import(#[from] ImportError),
    #[error("the lease was lost while the head was loading")]
    LostEarly,
    #[error("its epoch {epoch:016x} is attached already, by {by}")]
    Twice { epoch: u64, by: Address },
    #[error("the head does not compute: {0}")]
    Engine(#[from] EngineError),
    #[error("the engine has ended")]
    EngineGone,
    #[error("the lease was lost: {0}")]
    Lost(String),
    #[error("the service is stopping")]
    Stopping,
}

impl NoLease {
    /// The least pause before the next attempt, where it differs from that of a call that failed.
    fn pause(&self) -> Option<Duration> {
        match self {
            Self::Import(ImportError::Copy(CopyError::Model(ModelError::Grant(_)))) => Some(SPOILT_RETRY),
            Self::Mismatch(_) | Self::Import(_) | Self::Engine(_) | Self::Twice { .. } => Some(REFUSED_RETRY),
            _ => None,
        }
    }
}

impl From<Status> for NoLease {
    fn from(status: Status) -> Self {
        Self::Call(status)
    }
}

/// What the attach loops of all targets share.
#[derive(Debug)]
pub(crate) struct Attaching {
    pub(crate) checkpoint: Arc<DraftCheckpoint>,
    pub(crate) convention: Option<AuxConvention>,
    pub(crate) importing: Arc<Importing>,
    pub(crate) engine: EngineHandle,
    pub(crate) state: Arc<LeaseState>,
    /// Locked while a lease enters or leaves the state, so that health is told of the last change last.
    pub(crate) health: Mutex<Health>,
}

/// Keeps the service attached to one target for as long as it runs.
#[derive(Debug)]
pub(crate) struct Attacher {
    pub(crate) target: Address,
    /// Its place among the options' targets.
    pub(crate) place: usize,
    pub(crate) all: Arc<Attaching>,
}

impl Attacher {
    pub(crate) async fn run(self, drain: Drain) {
        let mut backoff = FIRST_BACKOFF;
        loop {
            let taken = tokio::select! {
                taken = self.attach() => taken,
                () = drain.stopped() => Err(NoLease::Stopping),
            };
            let (ended, stream) = match taken {
                Ok(mut stream) => {
                    backoff = FIRST_BACKOFF;
                    let ended = tokio::select! {
                        ended = wait_for_end(&mut stream.grants) => ended,
                        () = drain.stopped() => NoLease::Stopping,
                    };
                    (ended, Some(stream))
                }
                Err(no_lease) => (no_lease, None),
            };
            self.let_go(&ended).await;
            // Given back only now: nothing is mapped any more.
            drop(stream);
            if matches!(ended, NoLease::Stopping) {
                return;
            }
            let pause = ended.pause().unwrap_or(backoff);
            backoff = (backoff * 2).min(LAST_BACKOFF);
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = drain.stopped() => return,
            }
        }
    }

    async fn attach(&self) -> Result<LeaseStream, NoLease> {
        let channel = connect(&self.target).await?;
        let mut client = TargetClient::new(channel.clone()).max_decoding_message_size(MAX_MESSAGE);
        let card = timely(client.describe(DescribeRequest {})).await?.into_inner();
        let (frames, outgoing) = mpsc::channel(1);
        let frame = LeaseFrame {
            protocol_version: PROTOCOL_VERSION,
            holder: HOLDER.to_owned(),
            pid: std::process::id(),
            remote: self.all.importing.source != SharedSource::Map,
            kinds: self.all.importing.kinds(),
        };
        // A fresh channel of one place takes one frame.
        let _ = frames.try_send(frame);
        let mut grants = timely(client.attach(ReceiverStream::new(outgoing))).await?.into_inner();
        let grant = timely(grants.message()).await?.ok_or(NoLease::NoGrant)?;
        let granted = Instant::now();
        let aux = checks::check(&grant, &card, self.all.checkpoint.config(), self.all.convention)?;
        // Before the import, which maps and checksums all of the shared weights.
        if let Some(twice) = self.held_twice(grant.epoch) {
            return Err(twice);
        }
        let (lease, attachment) = self.load(&mut grants, channel, grant, aux).await?;
        self.enter(lease, attachment, granted).await?;
        Ok(LeaseStream { _frames: frames, grants })
    }

    /// Imports while watching the lease.
    async fn load(
        &self,
        grants: &mut Streaming<LeaseGrant>,
        channel: Channel,
        grant: LeaseGrant,
        aux: AuxIds,
    ) -> Result<(Lease, Box<Attachment>), NoLease> {
        let (epoch, fingerprint) = (grant.epoch, grant.fingerprint.clone());
        let aux_rule = format!("{:?} ({})", aux.canonical, aux.rule);
        let imported = tokio::select! {
            imported = self.all.importing.import(self.place, channel, grant, aux) => imported?,
            _ = wait_for_end(grants) => return Err(NoLease::LostEarly),
        };
        let lease = Lease {
            epoch,
            fingerprint,
            memory: imported.memory,
            rows: imported.rows,
            aux_rule,
            sequences: Arc::clone(&imported.attachment.sequences),
            lost: CancellationToken::new(),
        };
        Ok((lease, Box::new(imported.attachment)))
    }

    /// Why not, where a lease on the target of `epoch` is held under another name.
    fn held_twice(&self, epoch: u64) -> Option<NoLease> {
        self.all.state.address_of(epoch).map(|by| NoLease::Twice { epoch, by })
    }

    async fn enter(
        &self,
        lease: Lease,
        attachment: Box<Attachment>,
        granted: Instant,
    ) -> Result<(), NoLease> {
        let Attaching { engine, state, health, .. } = self.all.as_ref();
        let health = health.lock().await;
        // Another attacher may have been as far as this one.
        if let Some(twice) = self.held_twice(lease.epoch) {
            return Err(twice);
        }
        let (done, told) = oneshot::channel();
        if !engine.send(Command::Attach(attachment, done)).await {
            return Err(NoLease::EngineGone);
        }
        told.await.map_err(|_| NoLease::EngineGone)??;
        tracing::info!(
            peer = %self.target,
            epoch = %format_args!("{:016x}", lease.epoch),
            weights = %lease.memory,
            aux = %lease.aux_rule,
            after_ms = granted.elapsed().as_millis(),
            "attached"
        );
        state.attached(self.place, Arc::new(lease));
        health.set(true).await;
        Ok(())
    }

    async fn let_go(&self, ended: &NoLease) {
        let Attaching { engine, state, health, .. } = self.all.as_ref();
        let because = ended.to_string();
        let health = health.lock().await;
        if state.detached(self.place, &because) && !matches!(ended, NoLease::Stopping) {
            tracing::warn!(peer = %self.target, "not attached: {because}");
        }
        engine.detach(self.place).await;
        // Whoever hears that it is not serving finds nothing mapped any more.
        health.set(state.is_attached()).await;
    }
}

/// An Attach call: the lease lives as long as both directions.
struct LeaseStream {
    _frames: mpsc::Sender<LeaseFrame>,
    grants: Streaming<LeaseGrant>,
}

async fn wait_for_end(grants: &mut Streaming<LeaseGrant>) -> NoLease {
    loop {
        match grants.message().await {
            Ok(Some(_)) => tracing::debug!("a second grant on one lease is ignored"),
            Ok(None) => return NoLease::Lost("the target ended it".to_owned()),
            Err(status) => return NoLease::Lost(status.message().to_owned()),
        }
    }
}

async fn timely<T>(call: impl Future<Output = Result<T, Status>>) -> Result<T, NoLease> {
    match tokio::time::timeout(CALL_TIMEOUT, call).await {
        Ok(answer) => Ok(answer?),
        Err(_) => Err(NoLease::Silent),
    }
}
