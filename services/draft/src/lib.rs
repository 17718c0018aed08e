//! The draft service: an EAGLE-3 head that runs on its targets' mapped or copied weights and proposes tokens.
//!
//! It is a disposable cache. It attaches to each target by a lease, serves rounds while the lease lives, and whatever
//! happens to it changes no token of any sequence.
#![forbid(unsafe_code)]

mod attach;
mod card;
mod engine;
mod error;
mod inline;
mod options;
mod outgoing;
mod rpc;
mod state;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use eyrie_checkpoint::{DraftCheckpoint, TargetCheckpoint};
use eyrie_kernels::{Backend, CpuOptions};
use eyrie_model::HeadWeights;
use eyrie_service::{Drain, Health};
use eyrie_wire::v1::draft_server::DraftServer;
use eyrie_wire::{Listener, MAX_MESSAGE};
use tokio::sync::Mutex;
use tonic::service::Routes;

pub use error::DraftError;
pub use options::{DraftOptions, Ready, SharedSource};

use attach::{Attacher, Attaching, CopyStore, Importing};
use card::HeadCard;
use engine::{Command, EngineHandle, EngineSizes};
use rpc::DraftService;
use state::LeaseState;

/// Full name of the gRPC service.
const SERVICE: &str = "eyrie.v1.Draft";
/// How long tasks may take to end once the service has stopped.
const JOIN_GRACE: Duration = Duration::from_secs(5);

/// Runs the draft service until `drain` stops it. It listens at once and attaches to each target when that is there;
/// `on_ready` is called once it listens, Describe and health tell whether it is attached.
///
/// # Errors
/// [`DraftError`] for options or a head that cannot be used, a socket that cannot be had, and an engine that died.
pub async fn run(
    options: DraftOptions,
    drain: Drain,
    on_ready: impl FnOnce(&Ready),
) -> Result<(), DraftError> {
    options.validate()?;
    let (checkpoint, head) = open(&options).await?;
    let listener = Listener::bind(&options.listen).await.map_err(DraftError::Listen)?;
    let ready = Ready { address: listener.address().clone() };
    let (engine, engine_ended) = EngineHandle::start(EngineSizes {
        max_sequences: options.max_sequences,
        max_draft_tokens: options.max_draft_tokens,
        prefix_cache_bytes: options.prefix_cache_bytes.map(|bytes| bytes / options.targets.len() as u64),
        unary_idle: options.unary_idle,
    })
    .map_err(DraftError::EngineStart)?;
    let state = Arc::new(LeaseState::new(&options.targets));
    let card = HeadCard::new(&options, &checkpoint);
    let service = DraftService::new(engine.clone(), Arc::clone(&state), card, drain.clone());
    let server = DraftServer::new(service).max_decoding_message_size(MAX_MESSAGE);
    drain.spawn(expire(engine.clone(), drain.clone(), options.unary_idle));
    let (tasks, stopping) = (drain.clone(), drain.clone());
    let handle = engine.clone();
    let serving =
        eyrie_service::serve(SERVICE, listener, Routes::new(server), drain.clone(), move |health| {
            attach_all(&tasks, options, checkpoint, head, handle, state, health);
            // Rounds streams end by themselves once draining; nothing else is worth waiting for.
            tasks.spawn(async move {
                stopping.draining().await;
                stopping.stop();
            });
            on_ready(&ready);
        });
    let outcome = tokio::select! {
        served = serving => served.map_err(DraftError::from),
        _ = engine_ended => Err(DraftError::EngineDied),
    };
    drain.stop();
    if !drain.join(JOIN_GRACE).await {
        tracing::warn!("tasks still run {} s after stop", JOIN_GRACE.as_secs());
    }
    engine.send(Command::Stop).await;
    outcome
}

/// The head's files, and its weights packed; a folder given for shared weights must be a checkpoint.
async fn open(options: &DraftOptions) -> Result<(Arc<DraftCheckpoint>, Arc<HeadWeights>), DraftError> {
    let model = options.model.clone();
    let cpu = CpuOptions { threads: options.threads, isa: options.isa };
    let processor = options.processor;
    let activations = options.activations.unwrap_or(processor.usual());
    let folder = match &options.shared {
        SharedSource::Folder(folder) => Some(folder.clone()),
        SharedSource::Map | SharedSource::Target => None,
    };
    let opened = tokio::task::spawn_blocking(move || -> Result<_, DraftError> {
        let checkpoint = DraftCheckpoint::from_source(&model)?;
        folder.map(|folder: PathBuf| TargetCheckpoint::open(&folder)).transpose()?;
        let backend = Backend::open(processor, activations, cpu)?;
        let head = HeadWeights::load(&checkpoint, &backend)?;
        Ok((Arc::new(checkpoint), Arc::new(head)))
    });
    opened.await.map_err(DraftError::Loader)?
}

/// Starts an attach loop for each target.
fn attach_all(
    tasks: &Drain,
    options: DraftOptions,
    checkpoint: Arc<DraftCheckpoint>,
    head: Arc<HeadWeights>,
    engine: EngineHandle,
    state: Arc<LeaseState>,
    health: Health,
) {
    let importing = Importing {
        head,
        source: options.shared,
        allow_writable_ipc: options.allow_writable_ipc,
        copies: CopyStore::default(),
        cache_tokens: options.cache_tokens / options.targets.len(),
    };
    let all = Arc::new(Attaching {
        checkpoint,
        convention: options.aux_convention,
        importing: Arc::new(importing),
        engine,
        state,
        health: Mutex::new(health),
    });
    for (place, target) in options.targets.into_iter().enumerate() {
        tasks.spawn(Attacher { target, place, all: Arc::clone(&all) }.run(tasks.clone()));
    }
}

/// Has the engine look for sequences that rest longer than `idle`, four times in that time.
async fn expire(engine: EngineHandle, drain: Drain, idle: Duration) {
    loop {
        tokio::select! {
            () = tokio::time::sleep(idle / 4) => {}
            () = drain.stopped() => return,
        }
        if !engine.send(Command::Expire).await {
            return;
        }
    }
}
