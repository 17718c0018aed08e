//! Three services as child processes: start, readiness, restart, orderly end.

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::ValueEnum;
use eyrie_wire::Address;
use eyrie_wire::v1::generation_client::GenerationClient;
use eyrie_wire::v1::target_client::TargetClient;
use eyrie_wire::v1::{DescribeRequest, GetModelRequest, Model};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use tokio::process::{Child, Command};
use tokio::signal::unix::{SignalKind, signal};
use tonic_health::pb::health_client::HealthClient;
use tonic_health::pb::{HealthCheckRequest, health_check_response::ServingStatus};

use crate::args::ModelArgs;
use crate::{demo, doctor, style};

/// How often readiness is asked for while something starts.
const POLL: Duration = Duration::from_millis(25);
/// A service that dies this soon after it was started again is given a pause, longer each time.
const YOUNG: Duration = Duration::from_secs(5);
const RESTART_PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// A stopping service gets this long after SIGTERM.
const STOP_GRACE: Duration = Duration::from_secs(35);

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
struct Service {
    role: Role,
    args: Vec<String>,
    child: Child,
    pid: u32,
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

/// The three processes.
#[derive(Debug)]
pub(crate) struct Fleet {
    services: Vec<Service>,
    /// Clients connect here.
    pub(crate) gateway: Address,
    pub(crate) target: Address,
    pub(crate) draft: Option<Address>,
    /// Sockets and logs; removed at the end.
    directory: tempfile::TempDir,
    ready_file: Option<PathBuf>,
}

#[derive(Debug, Serialize)]
struct Ready {
    grpc: String,
    target: String,
    draft: Option<String>,
    pids: Pids,
}

#[derive(Debug, Serialize)]
struct Pids {
    gateway: u32,
    target: u32,
    draft: Option<u32>,
}

/// What a child's end means for the rest.
#[derive(Debug)]
pub(crate) struct Exited {
    pub(crate) role: Role,
    pub(crate) status: ExitStatus,
    pub(crate) last_line: String,
}

impl Fleet {
    /// Starts the processes; `listen` with port 0 takes a free port.
    pub(crate) async fn start(
        models: &ModelArgs,
        ready_file: Option<PathBuf>,
        listen: &Address,
        links: Links,
    ) -> anyhow::Result<Self> {
        let (target_dir, draft_dir) = demo::pair_dirs(models)?;
        let directory = tempfile::Builder::new()
            .prefix("eyrie-")
            .tempdir()
            .context("creating a folder for sockets and logs")?;
        let place = |role: Role| -> anyhow::Result<Address> {
            Ok(match links {
                Links::Unix => Address::Unix(directory.path().join(format!("{}.sock", role.name()))),
                Links::Tcp => free_address(&"127.0.0.1:0".parse()?)?,
            })
        };
        let target = place(Role::Target)?;
        let draft = draft_dir.as_ref().map(|_| place(Role::Draft)).transpose()?;
        if let Some(stale) = &ready_file {
            // Left by a fleet that was killed: who waits for the file must not find its addresses.
            let _ = std::fs::remove_file(stale);
        }
        let gateway = free_address(listen)?;
        doctor::require(&target_dir, draft_dir.as_deref(), models.aux_convention)?;
        let mut fleet = Self {
            services: Vec::new(),
            gateway: gateway.clone(),
            target: target.clone(),
            draft: draft.clone(),
            directory,
            ready_file,
        };
        fleet.spawn(Role::Target, target_args(models, &target_dir, draft_dir.as_deref(), &target)?)?;
        if let (Some(dir), Some(address)) = (&draft_dir, &draft) {
            fleet.spawn(Role::Draft, draft_args(models, dir, address, &target))?;
        }
        let mut args = vec!["gateway".to_owned(), "--listen".to_owned(), gateway.to_string()];
        args.extend(["--target".to_owned(), target.to_string()]);
        if let Some(draft) = &draft {
            args.extend(["--draft".to_owned(), draft.to_string()]);
        }
        fleet.spawn(Role::Gateway, args)?;
        Ok(fleet)
    }

    fn spawn(&mut self, role: Role, args: Vec<String>) -> anyhow::Result<()> {
        let (child, pid) = self.launch(role, &args)?;
        self.services.push(Service {
            role,
            args,
            child,
            pid,
            started: Instant::now(),
            pause: Duration::ZERO,
        });
        Ok(())
    }

    fn launch(&self, role: Role, args: &[String]) -> anyhow::Result<(Child, u32)> {
        let log = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.log_path(role))
            .with_context(|| format!("opening {}", self.log_path(role).display()))?;
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
            .with_context(|| format!("starting the {} process", role.name()))?;
        let pid = child.id().with_context(|| format!("the {} process ended at once", role.name()))?;
        Ok((child, pid))
    }

    /// The log of a service.
    pub(crate) fn log_path(&self, role: Role) -> PathBuf {
        self.directory.path().join(format!("{}.log", role.name()))
    }

    /// Process id of a service.
    pub(crate) fn pid(&self, role: Role) -> Option<u32> {
        self.services.iter().find(|s| s.role == role).map(|s| s.pid)
    }

    /// Waits until a request would succeed, with a bar while weights load; writes the ready file.
    ///
    /// # Errors
    /// When a service ends before that, with its last line.
    pub(crate) async fn wait_ready(&mut self) -> anyhow::Result<Model> {
        let bar = ProgressBar::new_spinner();
        bar.set_style(ProgressStyle::with_template(
            "{spinner} {prefix:10} {wide_bar:.cyan/dim} {bytes:>10}/{total_bytes:10} {msg}",
        )?);
        bar.set_prefix("loading");
        let model = loop {
            if let Some(exited) = self.try_exited()? {
                bar.finish_and_clear();
                anyhow::bail!("{}", exited.line());
            }
            if let Some(card) = describe(&self.target).await {
                bar.set_length(card.total_bytes);
                bar.set_position(card.loaded_bytes);
                bar.set_message(card.name);
            }
            if let Some(model) = self.ready_model().await {
                break model;
            }
            bar.tick();
            tokio::time::sleep(POLL).await;
        };
        bar.finish_and_clear();
        self.write_ready_file()?;
        Ok(model)
    }

    /// The model, when our own gateway and not a stranger on its port says that a request would succeed.
    async fn ready_model(&self) -> Option<Model> {
        let model = get_model(&self.gateway).await?;
        let ours = self.pid(Role::Gateway) == Some(model.pid);
        (ours && (self.draft.is_none() || model.speculating)).then_some(model)
    }

    /// Replaces the ready file in one step.
    fn write_ready_file(&self) -> anyhow::Result<()> {
        let Some(path) = &self.ready_file else { return Ok(()) };
        let pid = |role| self.pid(role);
        let ready = Ready {
            grpc: self.gateway.to_string(),
            target: self.target.to_string(),
            draft: self.draft.as_ref().map(ToString::to_string),
            pids: Pids {
                gateway: pid(Role::Gateway).unwrap_or_default(),
                target: pid(Role::Target).unwrap_or_default(),
                draft: pid(Role::Draft),
            },
        };
        let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let write = || -> anyhow::Result<()> {
            let mut file = tempfile::NamedTempFile::new_in(folder)?;
            serde_json::to_writer(&mut file, &ready)?;
            file.persist(path)?;
            Ok(())
        };
        write().with_context(|| format!("writing the ready file {}", path.display()))
    }

    /// A service that has ended, if any.
    pub(crate) fn try_exited(&mut self) -> anyhow::Result<Option<Exited>> {
        for i in 0..self.services.len() {
            if let Some(status) = self.services[i].child.try_wait()? {
                let role = self.services[i].role;
                return Ok(Some(Exited { role, status, last_line: last_line(&self.log_path(role)) }));
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
            self.restart(exited.role).await?;
            return self.settle().await;
        }
        anyhow::ensure!(
            exited.role == Role::Draft,
            "{}; use --restart to have it started again",
            exited.line()
        );
        style::warning(&format!("{}; serving goes on without a draft", exited.line()));
        self.services.retain(|s| s.role != Role::Draft);
        self.draft = None;
        self.write_ready_file()
    }

    /// Waits until a restarted fleet serves again; a service that dies meanwhile is started again too.
    async fn settle(&mut self) -> anyhow::Result<()> {
        while let Err(e) = self.wait_ready().await {
            let Some(exited) = self.try_exited()? else { return Err(e) };
            style::warning(&format!("{}; starting it again", exited.line()));
            self.restart(exited.role).await?;
        }
        style::note(&format!("{} serving again", style::Style::stderr().good("ready")));
        Ok(())
    }

    /// Starts an ended service again, after a pause if it keeps dying young.
    async fn restart(&mut self, role: Role) -> anyhow::Result<()> {
        let index = self.services.iter().position(|s| s.role == role).context("no such service")?;
        let pause = self.services[index].pause;
        tokio::time::sleep(pause).await;
        let args = self.services[index].args.clone();
        let (child, pid) = self.launch(role, &args)?;
        let service = &mut self.services[index];
        let died_young = service.started.elapsed() < YOUNG + pause;
        service.pause =
            if died_young { (pause * 2).clamp(RESTART_PAUSE, LONGEST_PAUSE) } else { Duration::ZERO };
        (service.child, service.pid, service.started) = (child, pid, Instant::now());
        Ok(())
    }

    /// Ends gateway, draft and target in this order, each after its running work.
    pub(crate) async fn stop(mut self) {
        for role in [Role::Gateway, Role::Draft, Role::Target] {
            let Some(service) = self.services.iter_mut().find(|s| s.role == role) else { continue };
            // Waiting for a child closes its standard input, which says that we are gone.
            let _held = service.child.stdin.take();
            if let Some(pid) = i32::try_from(service.pid).ok().and_then(rustix::process::Pid::from_raw) {
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
            }
            if tokio::time::timeout(STOP_GRACE, service.child.wait()).await.is_err() {
                style::warning(&format!("{} did not stop within {STOP_GRACE:?}: killed", role.name()));
                let _ = service.child.kill().await;
            }
        }
        if let Some(path) = &self.ready_file {
            let _ = std::fs::remove_file(path);
        }
    }
}

impl Exited {
    /// One line for people, with the error that the process ended with. Killed, it had no last word.
    pub(crate) fn line(&self) -> String {
        let told = self.last_line.strip_prefix("error: ").filter(|_| self.status.signal().is_none());
        let why = told.map(|line| format!(": {line}")).unwrap_or_default();
        format!("{} ended ({}){why}", self.role.name(), self.status)
    }
}

fn target_args(
    models: &ModelArgs,
    dir: &Path,
    draft: Option<&Path>,
    listen: &Address,
) -> anyhow::Result<Vec<String>> {
    let mut args = vec!["target".to_owned(), "--model".to_owned(), path_arg(dir)];
    args.extend(["--listen".to_owned(), listen.to_string()]);
    if let Some(draft) = draft {
        let ids = doctor::capture_set(dir, draft, models.aux_convention)?;
        args.extend([
            "--aux-layers".to_owned(),
            ids.iter().map(ToString::to_string).collect::<Vec<_>>().join(","),
        ]);
    }
    let numbers = [
        ("--threads", models.threads.map(u64::from)),
        ("--kv-tokens", models.kv_tokens.map(u64::from)),
        ("--prefill-chunk", models.prefill_chunk.map(u64::from)),
        ("--prefix-cache-bytes", models.prefix_cache_bytes),
    ];
    for (name, value) in numbers {
        if let Some(value) = value {
            args.extend([name.to_owned(), value.to_string()]);
        }
    }
    Ok(args)
}

fn draft_args(models: &ModelArgs, dir: &Path, listen: &Address, target: &Address) -> Vec<String> {
    let mut args = vec!["draft".to_owned(), "--model".to_owned(), path_arg(dir)];
    args.extend(["--listen".to_owned(), listen.to_string(), "--target".to_owned(), target.to_string()]);
    if let Some(threads) = models.threads {
        args.extend(["--threads".to_owned(), threads.to_string()]);
    }
    if let Some(bytes) = models.prefix_cache_bytes {
        args.extend(["--prefix-cache-bytes".to_owned(), bytes.to_string()]);
    }
    if let Some(meaning) = models.aux_convention.and_then(|m| m.to_possible_value()) {
        args.extend(["--aux-convention".to_owned(), meaning.get_name().to_owned()]);
    }
    args
}

/// An address to listen on: as given if nobody is there, with a port that was free a moment ago for port 0.
fn free_address(listen: &Address) -> anyhow::Result<Address> {
    let Address::Tcp(host_port) = listen else { return Ok(listen.clone()) };
    let socket =
        std::net::TcpListener::bind(host_port).with_context(|| format!("cannot listen on {listen}"))?;
    let (host, _) = host_port.rsplit_once(':').context("an address without a port")?;
    Ok(Address::Tcp(format!("{host}:{}", socket.local_addr()?.port())))
}

fn path_arg(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

async fn describe(target: &Address) -> Option<eyrie_wire::v1::ModelCard> {
    let channel = eyrie_wire::connect(target).await.ok()?;
    Some(TargetClient::new(channel).describe(DescribeRequest {}).await.ok()?.into_inner())
}

/// The gateway's word on the model, once it is serving: before that it would make the call wait.
async fn get_model(gateway: &Address) -> Option<Model> {
    let channel = eyrie_wire::connect(gateway).await.ok()?;
    let everything = HealthCheckRequest { service: String::new() };
    let health = HealthClient::new(channel.clone()).check(everything).await.ok()?.into_inner();
    if health.status() != ServingStatus::Serving {
        return None;
    }
    Some(GenerationClient::new(channel).get_model(GetModelRequest {}).await.ok()?.into_inner())
}

/// Last non-empty line of a log, without colours.
fn last_line(path: &Path) -> String {
    let log = std::fs::read_to_string(path).unwrap_or_default();
    log.lines().rev().find(|l| !l.trim().is_empty()).unwrap_or_default().trim().to_owned()
}
