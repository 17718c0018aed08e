//! A draft service under test, an exporter that plays the target, and the true features of the demo model.
#![allow(dead_code, unreachable_pub, reason = "each test binary uses a part")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a helper that fails fails its test")]

pub mod exporter;
pub mod reference;

use std::path::{Path, PathBuf};
use std::time::Duration;

use eyrie_draft::{DraftError, DraftOptions};
use eyrie_service::Drain;
use eyrie_wire::v1::draft_client::DraftClient;
use eyrie_wire::v1::draft_out::Body;
use eyrie_wire::v1::{
    DescribeDraftRequest, DraftCard, DraftFrame, DraftItem, DraftOut, DraftReply, Hello, Proposal, Propose,
    TargetLease, draft_item,
};
use eyrie_wire::{Address, PROTOCOL_VERSION, connect};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Status, Streaming};
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};

/// Nothing here takes this long unless it hangs.
const PATIENCE: Duration = Duration::from_secs(20);

pub fn demo(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/demo").join(name)
}

pub async fn patient<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(PATIENCE, future).await {
        Ok(value) => value,
        Err(_) => panic!("{what}: nothing happened within {} s", PATIENCE.as_secs()),
    }
}

/// The service in this process.
pub struct Draft {
    pub address: Address,
    pub drain: Drain,
    pub running: JoinHandle<Result<(), DraftError>>,
}

impl Draft {
    pub async fn start(dir: &Path, target: &Address) -> Self {
        Self::start_with(dir, target, |_| {}).await
    }

    pub async fn start_with(dir: &Path, target: &Address, edit: impl FnOnce(&mut DraftOptions)) -> Self {
        let listen = Address::Unix(dir.join("draft.sock"));
        let mut options = DraftOptions::new(demo("mini-eagle3"), listen, vec![target.clone()]);
        options.cache_tokens = 4096;
        edit(&mut options);
        let drain = Drain::new();
        let (told, ready) = oneshot::channel();
        let service = drain.clone();
        // On a drain of its own: the service's would wait for the task that runs it.
        let running = Drain::new().spawn(eyrie_draft::run(options, service, move |ready| {
            let _ = told.send(ready.address.clone());
        }));
        let address = patient("listening", ready).await.unwrap();
        Self { address, drain, running }
    }

    pub async fn client(&self) -> DraftClient<Channel> {
        DraftClient::new(connect(&self.address).await.unwrap())
    }

    pub async fn card(&self) -> DraftCard {
        self.client().await.describe(DescribeDraftRequest {}).await.unwrap().into_inner()
    }

    /// What is held of the first target.
    pub async fn lease(&self) -> TargetLease {
        self.card().await.targets.swap_remove(0)
    }

    pub async fn health(&self) -> Streaming<HealthCheckResponse> {
        let mut client = HealthClient::new(connect(&self.address).await.unwrap());
        client.watch(HealthCheckRequest { service: String::new() }).await.unwrap().into_inner()
    }

    /// Waits until the service says that it is attached (or not any more); what is held of the first target.
    pub async fn until_attached(&self, wanted: bool) -> TargetLease {
        let wanted = if wanted { ServingStatus::Serving } else { ServingStatus::NotServing };
        let mut health = self.health().await;
        patient("health", async { while health.message().await.unwrap().unwrap().status() != wanted {} })
            .await;
        self.lease().await
    }

    /// Asks again and again until the card says why the first target is not attached, in words that hold `part`.
    pub async fn until_refused(&self, part: &str) -> TargetLease {
        self.until(part, |targets| targets[0].because.contains(part)).await.swap_remove(0)
    }

    /// Asks again and again until `wanted` holds of what the card says of the targets.
    pub async fn until(&self, what: &str, wanted: impl Fn(&[TargetLease]) -> bool) -> Vec<TargetLease> {
        patient(what, async {
            loop {
                let targets = self.card().await.targets;
                if wanted(&targets) {
                    return targets;
                }
                tokio::task::yield_now().await;
            }
        })
        .await
    }

    pub async fn rounds(&self, boot_id: u64) -> Rounds {
        self.rounds_as(hello(boot_id)).await.unwrap()
    }

    pub async fn rounds_as(&self, hello: Hello) -> Result<Rounds, Status> {
        let (sender, frames) = mpsc::channel(16);
        sender.try_send(DraftFrame { hello: Some(hello), items: Vec::new() }).unwrap();
        let mut client = self.client().await;
        let mut replies = client.rounds(ReceiverStream::new(frames)).await?.into_inner();
        let first = patient("hello", replies.message()).await?.unwrap();
        Ok(Rounds { sender, replies, hello: first.hello.unwrap() })
    }

    pub async fn stop(self) {
        self.drain.start();
        patient("stopping", self.running).await.unwrap().unwrap();
    }
}

pub fn hello(boot_id: u64) -> Hello {
    Hello { protocol_version: PROTOCOL_VERSION, boot_id, ..Default::default() }
}

pub fn item(seq: u64, propose: Propose) -> DraftItem {
    DraftItem { seq, op: Some(draft_item::Op::Propose(propose)) }
}

/// A Rounds stream as a gateway holds it.
pub struct Rounds {
    pub sender: mpsc::Sender<DraftFrame>,
    pub replies: Streaming<DraftReply>,
    pub hello: Hello,
}

impl Rounds {
    pub async fn send(&self, items: Vec<DraftItem>) {
        self.sender.send(DraftFrame { hello: None, items }).await.unwrap();
    }

    /// The next `count` answers, in the order of their sequences.
    pub async fn receive(&mut self, count: usize) -> Vec<DraftOut> {
        let mut outs = Vec::new();
        while outs.len() < count {
            outs.extend(patient("a reply", self.replies.message()).await.unwrap().unwrap().outs);
        }
        assert_eq!(outs.len(), count);
        outs.sort_by_key(|out| out.seq);
        outs
    }

    pub async fn ask(&mut self, seq: u64, propose: Propose) -> Body {
        self.send(vec![item(seq, propose)]).await;
        self.receive(1).await.remove(0).body.unwrap()
    }

    pub async fn proposal(&mut self, seq: u64, propose: Propose) -> Proposal {
        proposal(self.ask(seq, propose).await)
    }

    pub async fn need(&mut self, seq: u64, propose: Propose) -> u32 {
        match self.ask(seq, propose).await {
            Body::Need(need) => need.from,
            other => panic!("wanted Need, got {other:?}"),
        }
    }

    pub async fn refusal(&mut self, seq: u64, propose: Propose) -> (String, String) {
        match self.ask(seq, propose).await {
            Body::Error(error) => (error.reason, error.message),
            other => panic!("wanted an error, got {other:?}"),
        }
    }
}

pub fn proposal(body: Body) -> Proposal {
    match body {
        Body::Proposal(proposal) => proposal,
        other => panic!("wanted a proposal, got {other:?}"),
    }
}
