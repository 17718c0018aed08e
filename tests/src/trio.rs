//! Target, draft and gateway as processes of their own, each started, killed and started again by the test.

use std::path::{Path, PathBuf};

use crate::fleet::{Service, Signal, signal, until};
use crate::rest::at_rest;
use crate::{mini, mini_eagle3};

/// A folder of sockets and the processes behind them; all are killed when it is dropped.
#[derive(Debug)]
pub struct Trio {
    eyrie: &'static str,
    services: Vec<(&'static str, Service)>,
    // Dropped last: the services' logs lie in it.
    folder: tempfile::TempDir,
}

impl Trio {
    /// No process yet.
    pub fn new(eyrie: &'static str) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        Self { eyrie, folder, services: Vec::new() }
    }

    /// All three, connected with each other, with `flags` for the target.
    pub fn start(eyrie: &'static str, flags: &[&str]) -> Self {
        let mut trio = Self::new(eyrie);
        trio.start_target("target", flags);
        trio.start_draft("target");
        trio.start_gateway("target", "draft", &[]);
        trio
    }

    /// Path of the socket of this name.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Address of the socket of this name.
    pub fn at(&self, name: &str) -> String {
        format!("unix:{}", self.path(name).display())
    }

    /// Starts the bundled target on socket `name`.
    pub fn start_target(&mut self, name: &'static str, flags: &[&str]) {
        let mini = mini();
        self.launch(name, &[], "target", &[&["--model", text(&mini)], flags].concat());
    }

    /// Starts the bundled draft on socket `draft`, for the target on socket `target`.
    pub fn start_draft(&mut self, target: &str) {
        let (mini, target) = (mini_eagle3(), self.at(target));
        self.launch("draft", &[], "draft", &["--model", text(&mini), "--target", &target]);
    }

    /// Starts a gateway on socket `gateway` between the sockets `target` and `draft`.
    pub fn start_gateway(&mut self, target: &str, draft: &str, flags: &[&str]) {
        let (target, draft) = (self.at(target), self.at(draft));
        let args = [&["--target", &target, "--draft", &draft], flags].concat();
        self.launch("gateway", &[], "gateway", &args);
    }

    /// Starts `eyrie SERVICE --listen … ARGS` on socket `name`, as the last arguments of the command `through` if there
    /// is one.
    pub fn launch(&mut self, name: &'static str, through: &[&str], service: &str, args: &[&str]) {
        let listen = self.at(name);
        let all = [through, &[self.eyrie, service, "--listen", &listen], args].concat();
        let service = Service::start(all[0], &all[1..], self.folder.path());
        self.services.push((name, service));
    }

    fn index(&self, name: &str) -> usize {
        let found = self.services.iter().position(|(known, _)| *known == name);
        found.unwrap_or_else(|| panic!("no service {name}"))
    }

    /// Process id of the service on socket `name`.
    pub fn pid(&self, name: &str) -> u32 {
        self.services[self.index(name)].1.pid()
    }

    /// The service on socket `name` has not ended.
    pub fn is_running(&mut self, name: &str) -> bool {
        let index = self.index(name);
        self.services[index].1.is_running()
    }

    /// What the service on socket `name` said.
    pub fn log(&self, name: &str) -> String {
        self.services[self.index(name)].1.log()
    }

    /// Sends a signal to the service on socket `name`.
    pub fn signal(&self, name: &str, with: Signal) {
        signal(self.pid(name), with);
    }

    /// Ends the service on socket `name` as a crash would, and waits until it is gone.
    pub fn kill(&mut self, name: &str) {
        let index = self.index(name);
        drop(self.services.remove(index));
    }

    /// Waits until the gateway speculates.
    pub async fn speculating(&self) {
        speculating(&self.at("gateway")).await;
    }

    /// Waits until nothing of any request is left; see [`at_rest`].
    pub async fn at_rest(&self) {
        let draft = self.services.iter().any(|(name, _)| *name == "draft");
        let draft = draft.then(|| self.at("draft"));
        at_rest(&self.at("gateway"), &self.at("target"), draft.as_deref()).await;
    }
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a path in UTF-8")
}

/// Waits until the gateway at `endpoint` speculates.
pub async fn speculating(endpoint: &str) {
    until("the gateway to speculate", async || {
        let channel = eyrie_wire::connect(&endpoint.parse().expect("an address")).await.ok()?;
        let mut client = eyrie_wire::v1::generation_client::GenerationClient::new(channel);
        let model = client.get_model(eyrie_wire::v1::GetModelRequest {}).await.ok()?.into_inner();
        model.speculating.then_some(())
    })
    .await;
}
