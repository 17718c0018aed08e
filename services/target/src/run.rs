//! From options to a served target, and back down.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use eyrie_checkpoint::TargetCheckpoint;
use eyrie_region::{Epoch, FdDoor};
use eyrie_service::{Drain, Health, serve};
use eyrie_wire::{Address, Listener};
use tokio::sync::oneshot;

use crate::engine::{Command, Engine, LoadRequest, Loaded, Receiver, load, mailbox};
use crate::files::Files;
use crate::importers::Importers;
use crate::plan::Plan;
use crate::rpc::{Copies, Service};
use crate::state::State;
use crate::{TargetError, TargetOptions};

/// Full name of the gRPC service, for health.
const SERVICE: &str = "eyrie.v1.Target";
/// How long the engine and the tasks of ended streams may take to end. A load cannot be interrupted.
const STOP_GRACE: Duration = Duration::from_secs(2);

/// A target that serves.
#[derive(Debug, Clone)]
pub struct Ready {
    /// Where it listens, with the port that the system chose for port 0.
    pub address: Address,
    /// This boot's number.
    pub epoch: u64,
    /// Identity of the served model, as in its card.
    pub fingerprint: String,
    /// How long loading took.
    pub load_time: Duration,
}

/// Serves a target until `drain` stops it. It listens and describes itself at once; `on_ready` is called when the
/// model is loaded and health is SERVING.
///
/// # Errors
/// A refused option, checkpoint or socket, a failed load, or a fault of the engine, in one line.
pub async fn run(
    options: TargetOptions,
    drain: Drain,
    on_ready: impl FnOnce(&Ready),
) -> Result<(), TargetError> {
    let checkpoint = Arc::new(TargetCheckpoint::from_source(&options.model)?);
    let plan = Plan::new(&options, checkpoint.config())?;
    let files = Files::of(&options.model)?;
    let epoch = Epoch::random()?;
    let listener = Listener::bind(&options.listen).await?;
    let address = listener.address().clone();
    let runtime_dir = options.runtime_dir.as_deref();
    let door = Arc::new(FdDoor::bind(door_path(&address, runtime_dir))?);
    let importers = Importers::open(ledger_path(&address, runtime_dir));
    let name = options.model.name();
    let state = Arc::new(State::new(name, &checkpoint, plan, files, epoch, importers, Arc::downgrade(&door)));
    let (sender, receiver) = mailbox();
    let service = Service::new(Arc::clone(&state), sender, drain.clone(), options.drain_grace);
    let mut engine = EngineThread::spawn(&state, checkpoint, receiver, drain.clone())?;
    let (health_sender, health) = oneshot::channel();
    let routes = tonic::service::Routes::new(service.clone().into_server());
    let serving = async {
        let served = serve(SERVICE, listener, routes, drain.clone(), |health| {
            let _ = health_sender.send(health);
        });
        let served = tokio::select! {
            served = served => served,
            () = importers_hang(&state, &drain) => Ok(()),
        };
        drain.stop();
        served
    };
    let living = async {
        let lived = Life { state: &state, service: &service, drain: &drain };
        let lived = lived.live(health, &mut engine, address, on_ready).await;
        drain.stop();
        lived
    };
    let (served, lived) = tokio::join!(serving, living);
    shut_down(&service, &drain, engine).await;
    lived?;
    Ok(served?)
}

/// The engine's thread, seen from outside.
struct EngineThread {
    loaded: oneshot::Receiver<()>,
    ended: oneshot::Receiver<Result<(), TargetError>>,
    began: Instant,
}

impl EngineThread {
    fn spawn(
        state: &Arc<State>,
        checkpoint: Arc<TargetCheckpoint>,
        mailbox: Receiver<Command>,
        drain: Drain,
    ) -> Result<Self, TargetError> {
        let (loaded_sender, loaded) = oneshot::channel();
        let (ended_sender, ended) = oneshot::channel();
        let (state, gauges) = (Arc::clone(state), Arc::clone(&state.gauges));
        let request = LoadRequest {
            checkpoint,
            config_hash: state.files.config_hash(),
            plan: state.plan.clone(),
            epoch: state.epoch,
            gauges,
            drain,
        };
        std::thread::Builder::new().name("target-engine".to_owned()).spawn(move || {
            let outcome = work(&state, request, &mailbox, loaded_sender);
            let _ = ended_sender.send(outcome);
        })?;
        Ok(Self { loaded, ended, began: Instant::now() })
    }

    /// Resolves with the fault that ended the thread.
    async fn failed(ended: &mut oneshot::Receiver<Result<(), TargetError>>) -> Result<(), TargetError> {
        match ended.await {
            Ok(Err(error)) => Err(error),
            Ok(Ok(())) | Err(_) => Err(TargetError::Engine("its thread ended".to_owned())),
        }
    }
}

/// Loads and steps.
fn work(
    state: &State,
    request: LoadRequest,
    mailbox: &Receiver<Command>,
    loaded: oneshot::Sender<()>,
) -> Result<(), TargetError> {
    state.importers.await_former();
    let outcome = guarded(|| {
        let loaded = load(request, &mut |progress| state.progress(progress))?;
        let copies = Copies::of(&loaded.exports);
        Ok((loaded, copies))
    });
    let outcome = outcome.inspect_err(|error| state.failed(error.to_string()));
    let (Loaded { engine, exports, formats, fingerprint }, copies) = outcome?;
    tracing::info!(weights = formats, "model loaded");
    state.loaded(exports, copies, formats, fingerprint);
    let _ = loaded.send(());
    step_until_stopped(state, engine, mailbox)
}

/// Steps. A failure is noted before the engine, and with it every stream's sender, is dropped.
pub(crate) fn step_until_stopped(
    state: &State,
    mut engine: Engine,
    mailbox: &Receiver<Command>,
) -> Result<(), TargetError> {
    guarded(|| engine.run(mailbox)).inspect_err(|error| state.failed(error.to_string()))
}

/// Turns a panic into an error, so that nobody waits for a thread that is gone.
fn guarded<T>(work: impl FnOnce() -> Result<T, TargetError>) -> Result<T, TargetError> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("unknown panic");
        Err(TargetError::Engine(text.to_owned()))
    })
}

/// One boot, from listening to the moment streams have to end.
struct Life<'a> {
    state: &'a State,
    service: &'a Service,
    drain: &'a Drain,
}

impl Life<'_> {
    /// Ends when the drain is over; errors when the engine failed before.
    async fn live(
        self,
        health: oneshot::Receiver<Health>,
        engine: &mut EngineThread,
        address: Address,
        on_ready: impl FnOnce(&Ready),
    ) -> Result<(), TargetError> {
        let EngineThread { loaded, ended, began } = engine;
        let course = async {
            // The server failed before it served: its own error is the one to tell.
            let Ok(health) = health.await else { return };
            tokio::select! {
                Ok(()) = loaded => {
                    health.set(true).await;
                    on_ready(&Ready {
                        address,
                        epoch: self.state.epoch.get(),
                        fingerprint: self.state.fingerprint().to_owned(),
                        load_time: began.elapsed(),
                    });
                    self.drain.draining().await;
                }
                () = self.drain.draining() => {}
            }
            health.set(false).await;
            self.drained().await;
        };
        tokio::select! {
            biased;
            failed = EngineThread::failed(ended) => failed,
            () = course => Ok(()),
            () = self.drain.stopped() => Ok(()),
        }
    }

    /// Resolves when no sequence runs or the grace is over.
    async fn drained(&self) {
        let mut active = self.state.gauges.active();
        self.service.wake_engine();
        let idle = async {
            let _ = active.wait_for(|&active| active == 0).await;
        };
        let grace = self.service.grace();
        if grace.is_zero() {
            idle.await;
        } else if tokio::time::timeout(grace, idle).await.is_err() {
            let sequences = *self.state.gauges.active().borrow();
            tracing::warn!(sequences, "drain: still running after {} ms, ended", grace.as_millis());
        }
    }
}

/// Resolves when importers still hold on some time after streams had to end. A connection to a process that does not
/// even end its lease is not worth waiting for.
async fn importers_hang(state: &Arc<State>, drain: &Drain) {
    drain.stopped().await;
    let leases = Arc::clone(state);
    let released = tokio::task::spawn_blocking(move || Importers::await_leases(&leases.leases)).await;
    if !matches!(released, Ok(false)) {
        std::future::pending::<()>().await;
    }
}

/// Ends the engine and the tasks.
async fn shut_down(service: &Service, drain: &Drain, thread: EngineThread) {
    service.stop_engine();
    let alive = !thread.ended.is_terminated();
    if alive && tokio::time::timeout(STOP_GRACE, thread.ended).await.is_err() {
        tracing::warn!("the engine did not end in {} s", STOP_GRACE.as_secs());
    }
    drain.join(STOP_GRACE).await;
}

/// Where descriptors are handed out. As with the ledger, every boot that listens on `address` takes the same place and
/// clears away what a killed one left.
fn door_path(address: &Address, runtime_dir: Option<&Path>) -> PathBuf {
    belonging(address, runtime_dir, "door")
}

/// Where importers are recorded.
fn ledger_path(address: &Address, runtime_dir: Option<&Path>) -> PathBuf {
    belonging(address, runtime_dir, "importers")
}

/// A file of whoever listens on `address`: beside a unix socket, else in the runtime folder.
fn belonging(address: &Address, runtime_dir: Option<&Path>, what: &str) -> PathBuf {
    match address {
        Address::Unix(path) => beside(path, &format!(".{what}")),
        Address::Tcp(at) => runtime_folder(runtime_dir).join(format!("eyrie-{at}.{what}")),
    }
}

fn beside(socket: &Path, suffix: &str) -> PathBuf {
    let mut path = socket.as_os_str().to_owned();
    path.push(suffix);
    PathBuf::from(path)
}

fn runtime_folder(given: Option<&Path>) -> PathBuf {
    match (given, std::env::var_os("XDG_RUNTIME_DIR")) {
        (Some(dir), _) => dir.to_owned(),
        (None, Some(dir)) => PathBuf::from(dir),
        (None, None) => std::env::temp_dir(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_door_stands_beside_a_unix_socket_or_in_the_runtime_folder() {
        let unix = Address::Unix("/run/t.sock".into());
        assert_eq!(door_path(&unix, Some(Path::new("/x"))), Path::new("/run/t.sock.door"));
        let tcp = Address::Tcp("127.0.0.1:1".to_owned());
        assert_eq!(door_path(&tcp, Some(Path::new("/x"))), Path::new("/x/eyrie-127.0.0.1:1.door"));
        assert_eq!(ledger_path(&unix, None), Path::new("/run/t.sock.importers"));
        assert_eq!(ledger_path(&tcp, Some(Path::new("/x"))), Path::new("/x/eyrie-127.0.0.1:1.importers"));
    }

    #[test]
    fn a_panic_is_an_error_with_its_text() {
        let error = guarded::<()>(|| panic!("page {} lost", 7)).unwrap_err();
        assert_eq!(error.to_string(), "the engine stopped: page 7 lost");
    }
}
