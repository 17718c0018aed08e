//! `eyrie up` and single services as child processes.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde::Deserialize;

pub use rustix::process::Signal;

/// Longest wait for any condition.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// What `--ready-file` holds.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Ready {
    /// Where clients connect.
    pub grpc: String,
    /// Address of the first target.
    pub target: String,
    /// Address of the first draft.
    pub draft: Option<String>,
    /// Addresses of all targets.
    pub targets: Vec<String>,
    /// Addresses of all drafts.
    pub drafts: Vec<String>,
    /// Process ids.
    pub pids: Pids,
}

/// Process ids of a fleet.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Pids {
    /// Of the gateway.
    pub gateway: u32,
    /// Of the first target.
    pub target: u32,
    /// Of the first draft.
    pub draft: Option<u32>,
    /// Of all targets.
    pub targets: Vec<u32>,
    /// Of all drafts.
    pub drafts: Vec<u32>,
}

/// A running `eyrie up`; ended by SIGTERM when dropped.
#[derive(Debug)]
pub struct Fleet {
    child: Child,
    directory: tempfile::TempDir,
}

impl Fleet {
    /// Starts `eyrie up` with the bundled pair and `extra` arguments and waits until it is ready.
    pub fn start(eyrie: &str, extra: &[&str]) -> Self {
        let directory = tempfile::tempdir().expect("a temporary folder");
        let child = Command::new(eyrie)
            .args(["up", "--listen", "127.0.0.1:0", "--ready-file"])
            .arg(directory.path().join("ready.json"))
            .args(extra)
            .current_dir(crate::root())
            .stdin(Stdio::null())
            .stderr(std::fs::File::create(directory.path().join("log")).expect("a log file"))
            .spawn()
            .expect("eyrie starts");
        let mut fleet = Self { child, directory };
        let started = Instant::now();
        while fleet.try_ready().is_none() {
            if let Some(status) = fleet.child.try_wait().expect("a child to wait for") {
                panic!("eyrie up ended ({status}): {}", fleet.log());
            }
            assert!(started.elapsed() < PATIENCE, "not ready: {}", fleet.log());
            std::thread::sleep(Duration::from_millis(10));
        }
        fleet
    }

    /// The ready file as it is now.
    pub fn ready(&self) -> Ready {
        self.try_ready().expect("the ready file stays once it is written")
    }

    fn try_ready(&self) -> Option<Ready> {
        let text = std::fs::read_to_string(self.directory.path().join("ready.json")).ok()?;
        Some(serde_json::from_str(&text).unwrap_or_else(|e| panic!("ready file {text}: {e}")))
    }

    /// Process id of `eyrie up`.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What `eyrie up` said.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.directory.path().join("log")).unwrap_or_default()
    }

    /// What the services said, each in its own log.
    pub fn service_logs(&self) -> String {
        let ready = self.ready();
        let socket = ready.target.strip_prefix("unix:").expect("a fleet on unix sockets");
        let folder = Path::new(socket).parent().expect("a socket in a folder");
        let read = |name| std::fs::read_to_string(folder.join(name)).expect("a service's log");
        ["target.log", "draft.log", "gateway.log"].map(read).concat()
    }

    /// Sends SIGTERM and waits for the exit code.
    pub fn stop(mut self) -> Option<i32> {
        self.end()
    }

    fn end(&mut self) -> Option<i32> {
        if let Ok(Some(status)) = self.child.try_wait() {
            return status.code();
        }
        signal(self.child.id(), Signal::TERM);
        let started = Instant::now();
        while started.elapsed() < PATIENCE {
            if let Ok(Some(status)) = self.child.try_wait() {
                return status.code();
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let _ = self.child.kill();
        None
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        self.end();
        if std::thread::panicking() {
            eprint_log("eyrie up", &self.log());
        }
    }
}

/// One service process; killed when dropped.
#[derive(Debug)]
pub struct Service {
    child: Child,
    log: PathBuf,
}

/// Services started by this process, for the names of their logs.
static STARTED: AtomicUsize = AtomicUsize::new(0);

impl Service {
    /// Starts `eyrie ARGS`; the log goes to `directory`.
    pub fn start(eyrie: &str, args: &[&str], directory: &Path) -> Self {
        Self::start_with(eyrie, args, directory, Stdio::null())
    }

    /// The same with a standard input that stays open, as a supervisor holds it.
    pub fn start_supervised(eyrie: &str, args: &[&str], directory: &Path) -> Self {
        Self::start_with(eyrie, args, directory, Stdio::piped())
    }

    fn start_with(eyrie: &str, args: &[&str], directory: &Path, stdin: Stdio) -> Self {
        let number = STARTED.fetch_add(1, Ordering::Relaxed);
        let log = directory.join(format!("{}-{number}.log", args.first().unwrap_or(&"eyrie")));
        let child = Command::new(eyrie)
            .args(args)
            .stdin(stdin)
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(&log).expect("a log file"))
            .spawn()
            .expect("eyrie starts");
        Self { child, log }
    }

    /// Process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// It has not ended.
    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().expect("a child to wait for").is_none()
    }

    /// What it said.
    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Waits for its end.
    pub fn wait(&mut self) -> Option<i32> {
        let started = Instant::now();
        while started.elapsed() < PATIENCE {
            if let Ok(Some(status)) = self.child.try_wait() {
                return status.code();
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("process {} did not end: {}", self.child.id(), self.log());
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprint_log("service", &self.log());
        }
    }
}

#[expect(clippy::print_stderr, reason = "shown with a failed test")]
fn eprint_log(name: &str, log: &str) {
    eprintln!("--- log of {name}\n{log}");
}

/// Sends a signal to one process.
pub fn signal(pid: u32, signal: Signal) {
    let pid = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw).expect("a process id");
    // The process may have ended already.
    let _ = rustix::process::kill_process(pid, signal);
}

/// Waits until `check` gives a value; panics with `what` after a minute.
pub async fn until<T>(what: &str, mut check: impl AsyncFnMut() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(value) = check().await {
            return value;
        }
        assert!(started.elapsed() < PATIENCE, "waited {PATIENCE:?} for {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
