//! Services as child processes: start, readiness, restart, orderly end.

mod args;
mod ready;

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;
use eyrie_checkpoint::ModelSource;
use eyrie_wire::Address;
use tokio::process::{Child, Command};
use tokio::signal::unix::{SignalKind, signal};

use crate::args::ModelArgs;
use crate::signals::Signals;
use crate::{demo, doctor, style};

/// A service that dies this soon after it was started again is given a pause, longer each time.
const YOUNG: Duration = Duration::from_secs(5);
const RESTART_PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// A stopping service gets this long after SIGTERM.
const STOP_GRACE: Duration = Duration::from_secs(35);
/// Pause between two requests to end at once.
const URGE: Duration = Duration::from_millis(100);

/// How a service begins to tell the error that it ends with.
const ERROR: &str = "error: ";

/// One of the three.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    Target,
    Draft,
    Gateway,
}

impl Role {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Target => "target",
            Self::Draft => "draft",
            Self::Gateway => "gateway",
        }
    }
}

#[derive(Debug)]
pub(crate) struct Service {
    role: Role,
    /// For sockets, logs and messages: "target", "target-2".
    pub(crate) name: String,
    pub(crate) address: Address,
    pub(crate) pid: u32,
    args: Vec<String>,
    child: Child,
    started: Instant,
    /// Pause before the next start; zero until it dies young.
    pause: Duration,
}

/// How the services reach each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Links {
    Unix,
    Tcp,
}

/// How many of each, and how they reach each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) targets: usize,
    /// Where there is a draft at all.
    pub(crate) drafts: usize,
    pub(crate) links: Links,
}

impl Shape {
    /// One of each over unix sockets.
    pub(crate) const PAIR: Self = Self { targets: 1, drafts: 1, links: Links::Unix };
}

/// The processes of one gateway with its targets and drafts.
#[derive(Debug)]
pub(crate) struct Fleet {
    services: Vec<Service>,
    /// Clients connect here.
    pub(crate) gateway: Address,
    /// Sockets and logs; removed at the end.
    directory: tempfile::TempDir,
    ready_file: Option<PathBuf>,
}

/// What a child's end means for the rest.
#[derive(Debug)]
struct Exited {
    index: usize,
    name: String,
    status: ExitStatus,
    last_word: String,
}

impl Fleet {
    /// Starts the processes; `listen` with port 0 takes a free port.
    pub(crate) async fn start(
        models: &ModelArgs,
        ready_file: Option<PathBuf>,
        listen: &Address,
        shape: Shape,
    ) -> anyhow::Result<Self> {
        let (target, draft) = demo::pair(models)?;
        let directory = tempfile::Builder::new()
            .prefix("eyrie-")
            .tempdir()
            .context("creating a folder for sockets and logs")?;
        if let Some(stale) = &ready_file {
            // Left by a fleet that was killed: who waits for the file must not find its addresses.
            let _ = std::fs::remove_file(stale);
        }
        let gateway = args::free_address(listen)?;
        if let ModelSource::Folder(dir) = &target {
            let head = draft.as_ref().and_then(ModelSource::folder);
            doctor::require(dir, head, models.aux_convention)?;
        }
        let mut fleet = Self { services: Vec::new(), gateway: gateway.clone(), directory, ready_file };
        let targets = fleet.places(Role::Target, shape.targets, shape.links)?;
        for (name, address) in &targets {
            let args = args::target(models, &target, draft.as_ref(), address)?;
            fleet.spawn(Role::Target, name, address, args)?;
        }
        let addresses =
            |services: &[(String, Address)]| services.iter().map(|(_, a)| a.clone()).collect::<Vec<_>>();
        let mut drafts = Vec::new();
        if let Some(draft) = &draft {
            drafts = fleet.places(Role::Draft, shape.drafts, shape.links)?;
            for (name, address) in &drafts {
                let args = args::draft(models, draft, address, &addresses(&targets));
                fleet.spawn(Role::Draft, name, address, args)?;
            }
        }
        let args = args::gateway(&gateway, &addresses(&targets), &addresses(&drafts));
        fleet.spawn(Role::Gateway, Role::Gateway.name(), &gateway, args)?;
        Ok(fleet)
    }

    /// Names and addresses for `count` services.
    fn places(&self, role: Role, count: usize, links: Links) -> anyhow::Result<Vec<(String, Address)>> {
        let place = |number: usize| {
            let name = if number == 1 { role.name().to_owned() } else { format!("{}-{number}", role.name()) };
            let address = match links {
                Links::Unix => Address::Unix(self.directory.path().join(format!("{name}.sock"))),
                Links::Tcp => args::free_address(&"127.0.0.1:0".parse()?)?,
            };
            Ok((name, address))
        };
        (1..=count).map(place).collect()
    }

    fn spawn(&mut self, role: Role, name: &str, address: &Address, args: Vec<String>) -> anyhow::Result<()> {
        let (child, pid) = self.launch(name, &args)?;
        self.services.push(Service {
            role,
            name: name.to_owned(),
            address: address.clone(),
            pid,
            args,
            child,
            started: Instant::now(),
            pause: Duration::ZERO,
        });
        Ok(())
    }

    fn launch(&self, name: &str, args: &[String]) -> anyhow::Result<(Child, u32)> {
        let log = self.log_path(name);
        let log = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(&log)
            .with_context(|| format!("opening {}", log.display()))?;
        let child = Command::new(std::env::current_exe().context("finding the eyrie binary")?)
            .args(args)
            .arg("--with-parent")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(log)
            // Ctrl-C reaches this process alone, which then ends the others in order.
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("starting the {name} process"))?;
        let pid = child.id().with_context(|| format!("the {name} process ended at once"))?;
        Ok((child, pid))
    }

    /// The log of a service; `*` for the pattern of all.
    pub(crate) fn log_path(&self, name: &str) -> PathBuf {
        self.directory.path().join(format!("{name}.log"))
    }

    /// Every service of a kind.
    pub(crate) fn all(&self, role: Role) -> impl Iterator<Item = &Service> {
        self.services.iter().filter(move |service| service.role == role)
    }

    /// Process id of the first service of a kind.
    pub(crate) fn pid(&self, role: Role) -> Option<u32> {
        self.all(role).next().map(|service| service.pid)
    }

    /// Whether a draft runs.
    pub(crate) fn is_drafted(&self) -> bool {
        self.all(Role::Draft).next().is_some()
    }

    /// A service that has ended, if any.
    fn try_exited(&mut self) -> anyhow::Result<Option<Exited>> {
        for index in 0..self.services.len() {
            if let Some(status) = self.services[index].child.try_wait()? {
                let name = self.services[index].name.clone();
                let last_word = last_word(&self.log_path(&name));
                return Ok(Some(Exited { index, name, status, last_word }));
            }
        }
        Ok(None)
    }

    /// Looks after the processes until one has ended that the others cannot do without; tells why.
    pub(crate) async fn supervise(&mut self, restart: bool) -> anyhow::Error {
        loop {
            if let Err(e) = self.next_exit(restart).await {
                return e;
            }
        }
    }

    async fn next_exit(&mut self, restart: bool) -> anyhow::Result<()> {
        let mut children = signal(SignalKind::child())?;
        let exited = loop {
            match self.try_exited()? {
                Some(exited) => break exited,
                // Merged signals and signals of other children both end in another look.
                None => children.recv().await,
            };
        };
        if restart {
            style::warning(&format!("{}; starting it again", exited.line()));
            self.restart(exited.index).await?;
            return self.settle().await;
        }
        let role = self.services.remove(exited.index).role;
        let left = self.all(role).count();
        anyhow::ensure!(
            role == Role::Draft || left > 0,
            "{}; use --restart to have it started again",
            exited.line()
        );
        let without = if left > 0 { "it" } else { "a draft" };
        style::warning(&format!("{}; serving goes on without {without}", exited.line()));
        self.write_ready_file()
    }

    /// Waits until a restarted fleet serves again; a service that dies meanwhile is started again too.
    async fn settle(&mut self) -> anyhow::Result<()> {
        while let Err(e) = self.wait_ready().await {
            let Some(exited) = self.try_exited()? else { return Err(e) };
            style::warning(&format!("{}; starting it again", exited.line()));
            self.restart(exited.index).await?;
        }
        style::note(&format!("{} serving again", style::Style::stderr().good("ready")));
        Ok(())
    }

    /// Starts an ended service again, after a pause if it keeps dying young.
    async fn restart(&mut self, index: usize) -> anyhow::Result<()> {
        let pause = self.services[index].pause;
        tokio::time::sleep(pause).await;
        let Service { name, args, .. } = &self.services[index];
        let (child, pid) = self.launch(name, args)?;
        let service = &mut self.services[index];
        let died_young = service.started.elapsed() < YOUNG + pause;
        service.pause =
            if died_young { (pause * 2).clamp(RESTART_PAUSE, LONGEST_PAUSE) } else { Duration::ZERO };
        (service.child, service.pid, service.started) = (child, pid, Instant::now());
        Ok(())
    }

    /// Ends gateway, drafts and targets in this order, each after its running work, or, once one of `hurry` is heard,
    /// without waiting for that.
    pub(crate) async fn stop(mut self, mut hurry: Signals) {
        let mut hurried = false;
        for role in [Role::Gateway, Role::Draft, Role::Target] {
            let mut ending: Vec<_> = self.services.iter_mut().filter(|s| s.role == role).collect();
            // Waiting for a child closes its standard input, which says that we are gone.
            let _held: Vec<_> = ending.iter_mut().map(|service| service.child.stdin.take()).collect();
            ending.iter().for_each(|service| service.terminate());
            for service in ending {
                if tokio::time::timeout(STOP_GRACE, service.end(&mut hurry, &mut hurried)).await.is_err() {
                    style::warning(&format!("{} did not stop within {STOP_GRACE:?}: killed", service.name));
                    let _ = service.child.kill().await;
                }
            }
        }
        if let Some(path) = &self.ready_file {
            let _ = std::fs::remove_file(path);
        }
    }
}

impl Service {
    /// Resolves when the process has ended; asks again and again for that once a signal says that it is urgent.
    async fn end(&mut self, hurry: &mut Signals, hurried: &mut bool) {
        loop {
            tokio::select! {
                _ = self.child.wait() => return,
                () = hurry.next(), if !*hurried => *hurried = true,
                // Two signals at once may arrive as one.
                () = tokio::time::sleep(URGE), if *hurried => self.terminate(),
            }
        }
    }

    fn terminate(&self) {
        if let Some(pid) = i32::try_from(self.pid).ok().and_then(rustix::process::Pid::from_raw) {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
    }
}

impl Exited {
    /// One line for people, with the error that the process ended with. Killed, it had no last word.
    fn line(&self) -> String {
        let told = self.last_word.strip_prefix(ERROR).filter(|_| self.status.signal().is_none());
        let why = told.map(|line| format!(": {line}")).unwrap_or_default();
        format!("{} ended ({}){why}", self.name, self.status)
    }
}

/// The last error that a log tells, which usage may follow, or else its last line.
fn last_word(path: &Path) -> String {
    let log = std::fs::read_to_string(path).unwrap_or_default();
    let mut lines = log.lines().rev().filter(|line| !line.trim().is_empty()).peekable();
    let last = lines.peek().copied().unwrap_or_default();
    lines.find(|line| line.starts_with(ERROR)).unwrap_or(last).trim().to_owned()
}
