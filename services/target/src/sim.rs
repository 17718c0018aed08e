//! The target as a task: for simulations of the protocol, which have no network, no threads and a clock of their own.

use std::fmt;
use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::Duration;

use eyrie_checkpoint::TargetCheckpoint;
use eyrie_kernels::{Backend, Cpu, CpuOptions, Isa};
use eyrie_model::TargetModel;
use eyrie_region::{Epoch, RingError, RingReader};
use eyrie_service::Drain;
use eyrie_wire::{PeerChannel, in_process};

use crate::engine::{Command, Engine, Pass, Receiver, assemble, mailbox};
use crate::files::Files;
use crate::importers::Importers;
use crate::plan::Plan;
use crate::rpc::{Copies, Service};
use crate::state::State;
use crate::{TargetError, TargetOptions};

/// What a boot needs.
#[derive(Debug)]
pub struct Boot<'a> {
    /// Names and sizes come from here.
    pub checkpoint: &'a TargetCheckpoint,
    /// Sizes of the engine.
    pub options: &'a TargetOptions,
    /// What computes.
    pub model: Box<dyn TargetModel>,
    /// Of this boot.
    pub epoch: Epoch,
    /// Identity of the model.
    pub fingerprint: &'a str,
}

/// One boot of a target: its engine, which [`Target::run`] turns, and its service.
pub struct Target {
    engine: Engine,
    mailbox: Receiver<Command>,
}

impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Target").finish_non_exhaustive()
    }
}

/// The service of a [`Target`].
#[derive(Clone)]
pub struct Front {
    state: Arc<State>,
    service: Service,
    drain: Drain,
}

impl fmt::Debug for Front {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Front").field("epoch", &self.state.epoch).finish_non_exhaustive()
    }
}

/// Boots a target that is loaded at once.
///
/// # Errors
/// Sizes that do not fit the model.
pub fn boot(boot: Boot<'_>) -> Result<(Target, Front), TargetError> {
    let Boot { checkpoint, options, model, epoch, fingerprint } = boot;
    let plan = Plan::new(options, checkpoint.config())?;
    // No files: a gateway of a simulation speaks token ids.
    let files = Files::scan(Path::new("/nowhere"))?;
    let name = options.model.name();
    let none = Importers::none();
    let state = Arc::new(State::new(name, checkpoint, plan.clone(), files, epoch, none, Weak::new()));
    let (sender, mailbox) = mailbox();
    let drain = Drain::new();
    let backend = Backend::from(Cpu::new(CpuOptions { threads: 1, isa: Isa::best() })?);
    let gauges = Arc::clone(&state.gauges);
    let (engine, exports) = assemble(model, &backend, &plan, epoch, gauges, drain.clone())?;
    let copies = Copies::of(&exports);
    state.loaded(exports, copies, String::new(), fingerprint.to_owned());
    let service = Service::new(Arc::clone(&state), sender, drain.clone(), Duration::ZERO);
    Ok((Target { engine, mailbox }, Front { state, service, drain }))
}

impl Target {
    /// Turns until it is stopped; each step takes what `step_time` says.
    ///
    /// # Errors
    /// A fault of the engine.
    pub async fn run(mut self, mut step_time: impl FnMut() -> Duration) -> Result<(), TargetError> {
        loop {
            match self.engine.pass(&self.mailbox)? {
                Pass::Stepped => tokio::time::sleep(step_time()).await,
                Pass::Idle(deadline) => self.mailbox.filled(deadline).await,
                Pass::Stopped => return Ok(()),
            }
        }
    }
}

impl Front {
    /// A connection to the service.
    pub fn channel(&self) -> PeerChannel {
        in_process(self.service.clone().into_server())
    }

    /// Reads the feature ring as a draft that has mapped it; `None` without features.
    ///
    /// # Errors
    /// A ring that cannot be mapped.
    pub fn ring(&self) -> Option<Result<RingReader, RingError>> {
        let exports = self.state.exports()?;
        let (fd, geometry) = (exports.fds.last()?, exports.grant.ring?);
        let fd = fd.try_clone().ok()?;
        Some(RingReader::open(fd, geometry, self.state.epoch))
    }

    /// Which boot this is.
    pub fn epoch(&self) -> Epoch {
        self.state.epoch
    }

    /// Refuses new sequences from now on.
    pub fn drain(&self) {
        self.drain.start();
        self.service.wake_engine();
    }

    /// Ends every task of the service.
    pub fn stop(&self) {
        self.drain.stop();
        self.service.stop_engine();
    }
}
