//! The draft service: an EAGLE-3 head that runs on the target's mapped weights and proposes tokens.
//!
//! It is a disposable cache. It attaches to a target by a lease, serves rounds while the lease lives, and whatever
//! happens to it changes no token of any sequence.
#![forbid(unsafe_code)]

mod attach;
mod card;
mod engine;
mod error;
mod options;
mod outgoing;
mod rpc;
mod state;

use std::sync::Arc;
use std::time::Duration;

use eyrie_checkpoint::DraftCheckpoint;
use eyrie_kernels::{Cpu, CpuOptions};
use eyrie_service::Drain;
use eyrie_wire::v1::draft_server::DraftServer;
use eyrie_wire::{Listener, MAX_MESSAGE};
use tonic::service::Routes;

pub use error::DraftError;
pub use options::{DraftOptions, Ready};

use attach::Attacher;
use card::HeadCard;
use engine::{Command, EngineHandle, EngineSizes};
use rpc::DraftService;
use state::LeaseState;

/// Full name of the gRPC service.
const SERVICE: &str = "eyrie.v1.Draft";
/// How long tasks may take to end once the service has stopped.
const JOIN_GRACE: Duration = Duration::from_secs(5);

/// Runs the draft service until `drain` stops it. It listens at once and attaches to the target when that is there;
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
    let options = Arc::new(options);
    let dir = options.model_dir.clone();
    let opened = tokio::task::spawn_blocking(move || DraftCheckpoint::open(&dir)).await;
    let checkpoint = Arc::new(opened.map_err(DraftError::Loader)??);
    let cpu = Cpu::new(CpuOptions { threads: options.threads, isa: options.isa })?;
    let listener = Listener::bind(&options.listen).await.map_err(DraftError::Listen)?;
    let ready = Ready { address: listener.address().clone() };
    let (engine, engine_ended) = EngineHandle::start(EngineSizes {
        max_sequences: options.max_sequences,
        max_draft_tokens: options.max_draft_tokens,
        prefix_cache_bytes: options.prefix_cache_bytes,
        unary_idle: options.unary_idle,
    })
    .map_err(DraftError::EngineStart)?;
    let state = Arc::new(LeaseState::new());
    let head = HeadCard::new(&options, &checkpoint);
    let service = DraftService::new(engine.clone(), Arc::clone(&state), head, drain.clone());
    let server = DraftServer::new(service).max_decoding_message_size(MAX_MESSAGE);
    drain.spawn(expire(engine.clone(), drain.clone(), options.unary_idle));
    let (tasks, stopping) = (drain.clone(), drain.clone());
    let handle = engine.clone();
    let serving =
        eyrie_service::serve(SERVICE, listener, Routes::new(server), drain.clone(), move |health| {
            let attacher = Attacher { options, checkpoint, cpu, engine: handle, state, health };
            tasks.spawn(attacher.run(tasks.clone()));
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
