//! When the fleet would serve a request, and who is told so.

use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use eyrie_wire::Address;
use eyrie_wire::v1::generation_client::GenerationClient;
use eyrie_wire::v1::target_client::TargetClient;
use eyrie_wire::v1::{DescribeRequest, GetModelRequest, Model, Peer, peer};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use tonic_health::pb::health_client::HealthClient;
use tonic_health::pb::{HealthCheckRequest, health_check_response::ServingStatus};

use super::{Fleet, Role, Service};

/// How often readiness is asked for while something starts.
const POLL: Duration = Duration::from_millis(25);
/// How long one answer may take.
const PATIENCE: Duration = Duration::from_millis(500);

/// What the ready file tells. `target` and `draft` are the first of each.
#[derive(Debug, Serialize)]
struct Ready {
    grpc: String,
    target: String,
    draft: Option<String>,
    targets: Vec<String>,
    drafts: Vec<String>,
    pids: Pids,
}

#[derive(Debug, Serialize)]
struct Pids {
    gateway: u32,
    target: u32,
    draft: Option<u32>,
    targets: Vec<u32>,
    drafts: Vec<u32>,
}

impl Fleet {
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
            self.show_loading(&bar).await;
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
        (ours && self.all_up(&model)).then_some(model)
    }

    /// Every target takes sequences, and every draft serves every one of them.
    fn all_up(&self, model: &Model) -> bool {
        let up = |role, service: &Service| {
            let of_it = |peer: &&Peer| peer.role() == role && peer.address == service.address.to_string();
            let mut peers = model.peers.iter().filter(of_it).peekable();
            peers.peek().is_some() && peers.all(|peer| peer.state() == peer::State::Up)
        };
        self.all(Role::Target).all(|target| up(peer::Role::Target, target))
            && self.all(Role::Draft).all(|draft| up(peer::Role::Draft, draft))
    }

    async fn show_loading(&self, bar: &ProgressBar) {
        let (mut loaded, mut total) = (0, 0);
        for target in self.all(Role::Target) {
            let Some(card) = describe(&target.address).await else { continue };
            loaded += card.loaded_bytes;
            total += card.total_bytes;
            bar.set_message(card.name);
        }
        bar.set_length(total);
        bar.set_position(loaded);
    }

    /// Replaces the ready file in one step.
    pub(super) fn write_ready_file(&self) -> anyhow::Result<()> {
        let Some(path) = &self.ready_file else { return Ok(()) };
        let addresses = |role| self.all(role).map(|service| service.address.to_string()).collect::<Vec<_>>();
        let pids = |role| self.all(role).map(|service| service.pid).collect::<Vec<_>>();
        let ready = Ready {
            grpc: self.gateway.to_string(),
            target: addresses(Role::Target).first().cloned().unwrap_or_default(),
            draft: addresses(Role::Draft).first().cloned(),
            targets: addresses(Role::Target),
            drafts: addresses(Role::Draft),
            pids: Pids {
                gateway: self.pid(Role::Gateway).unwrap_or_default(),
                target: self.pid(Role::Target).unwrap_or_default(),
                draft: self.pid(Role::Draft),
                targets: pids(Role::Target),
                drafts: pids(Role::Draft),
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
}

/// What a target says of itself, unless it stands still: others must not wait for that.
async fn describe(target: &Address) -> Option<eyrie_wire::v1::ModelCard> {
    let asked = async {
        let channel = eyrie_wire::connect(target).await.ok()?;
        Some(TargetClient::new(channel).describe(DescribeRequest {}).await.ok()?.into_inner())
    };
    tokio::time::timeout(PATIENCE, asked).await.ok()?
}

/// The gateway's word on the model, once it is serving: before that it would make the call wait.
async fn get_model(gateway: &Address) -> Option<Model> {
    let asked = async {
        let channel = eyrie_wire::connect(gateway).await.ok()?;
        let everything = HealthCheckRequest { service: String::new() };
        let health = HealthClient::new(channel.clone()).check(everything).await.ok()?.into_inner();
        if health.status() != ServingStatus::Serving {
            return None;
        }
        Some(GenerationClient::new(channel).get_model(GetModelRequest {}).await.ok()?.into_inner())
    };
    tokio::time::timeout(PATIENCE, asked).await.ok()?
}
