//! A target and a draft that answer by arithmetic, over real unix sockets, with switches for every fault.

mod draft;
mod events;
mod target;

use std::path::PathBuf;
use std::time::Duration;

pub(crate) use draft::{FakeDraft, Mood, Rule};
pub(crate) use events::Events;
pub(crate) use target::{FakeTarget, Seen};

use eyrie_gateway::GatewayOptions;
use eyrie_service::Drain;
use eyrie_wire::v1::generate_request::Prompt;
use eyrie_wire::v1::generation_client::GenerationClient;
use eyrie_wire::v1::peer::{Role, State};
use eyrie_wire::v1::{
    GenerateChunk, GenerateReply, GenerateRequest, GetModelRequest, Peer, Speculation, TokenIds,
};
use eyrie_wire::{Address, Listener};
use tokio_stream::StreamExt;
use tonic::Status;
use tonic::service::Routes;
use tonic::transport::Channel;

pub(crate) const VOCAB: u32 = 1000;
pub(crate) const CONTEXT: u32 = 400;
/// Longest wait for anything that has to happen.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// The "model": the token after `tokens` is a hash of the last three and of the seed.
pub(crate) fn next_token(tokens: &[u32], seed: u64) -> u32 {
    let mut hash = 0x9e37_79b9_7f4a_7c15 ^ seed;
    for &token in &tokens[tokens.len().saturating_sub(3)..] {
        hash = (hash ^ u64::from(token)).wrapping_mul(0x0100_0000_01b3).rotate_left(23);
    }
    // The first ids are special tokens.
    10 + (hash >> 20) as u32 % (VOCAB - 10)
}

/// What plain decoding of `prompt` gives.
pub(crate) fn plain(prompt: &[u32], seed: u64, count: usize) -> Vec<u32> {
    let mut tokens = prompt.to_vec();
    for _ in 0..count {
        tokens.push(next_token(&tokens, seed));
    }
    tokens.split_off(prompt.len())
}

/// Gateway and sockets of one test; everything stops when it is dropped.
pub(crate) struct World {
    pub(crate) dir: tempfile::TempDir,
    pub(crate) client: GenerationClient<Channel>,
    pub(crate) gateway: Drain,
    pub(crate) address: Address,
    pub(crate) running: tokio::task::JoinHandle<()>,
}

impl World {
    pub(crate) async fn start(dir: tempfile::TempDir, adjust: impl FnOnce(&mut GatewayOptions)) -> Self {
        let mut options =
            GatewayOptions::new(socket(&dir, "gateway"), [socket(&dir, "target")], [socket(&dir, "draft")]);
        options.draft_deadline = PATIENCE;
        adjust(&mut options);
        let (ready, listening) = tokio::sync::oneshot::channel();
        let gateway = Drain::new();
        let drain = gateway.clone();
        // Not on the gateway's own drain: it waits for its own tasks.
        let running = Drain::new().spawn(async move {
            let told = |r: &eyrie_gateway::Ready| ready.send(r.address.clone()).unwrap();
            eyrie_gateway::run(options, drain, told).await.unwrap();
        });
        let address = listening.await.unwrap();
        let client = GenerationClient::new(eyrie_wire::connect(&address).await.unwrap());
        Self { dir, client, gateway, address, running }
    }

    pub(crate) async fn generate(&self, request: GenerateRequest) -> Result<GenerateReply, Status> {
        Ok(self.client.clone().generate(request).await?.into_inner())
    }

    pub(crate) async fn stream(&self, request: GenerateRequest) -> tonic::Streaming<GenerateChunk> {
        self.client.clone().generate_stream(request).await.unwrap().into_inner()
    }

    /// Another connection, for a client that leaves with everything it has.
    pub(crate) async fn connect(&self) -> GenerationClient<Channel> {
        GenerationClient::new(eyrie_wire::connect(&self.address).await.unwrap())
    }

    /// Every peer as GetModel tells it.
    pub(crate) async fn peers(&self) -> Vec<Peer> {
        self.client.clone().get_model(GetModelRequest {}).await.unwrap().into_inner().peers
    }

    /// Waits until as many peers stand so, pairs of a target and a draft counted each.
    pub(crate) async fn until_peers(&self, count: usize, role: Role, state: State) {
        within(async {
            let stands = |peer: &Peer| (peer.role(), peer.state()) == (role, state);
            while self.peers().await.iter().filter(|peer| stands(peer)).count() != count {
                tokio::task::yield_now().await;
            }
        })
        .await;
    }

    /// Waits until GetModel says whether it speculates.
    pub(crate) async fn speculating(&self, want: bool) {
        within(async {
            loop {
                let model = self.client.clone().get_model(GetModelRequest {}).await;
                if model.is_ok_and(|model| model.into_inner().speculating == want) {
                    return;
                }
                tokio::task::yield_now().await;
            }
        })
        .await;
    }
}

/// A gateway that speculates between a target and a draft of epoch 7.
pub(crate) async fn world_with(
    rule: Rule,
    adjust: impl FnOnce(&mut GatewayOptions),
) -> (World, FakeTarget, FakeDraft) {
    let dir = tempfile::tempdir().unwrap();
    let target = FakeTarget::start(&socket(&dir, "target"), 7).await;
    let draft = FakeDraft::start(&socket(&dir, "draft"), 7, rule).await;
    let world = World::start(dir, adjust).await;
    world.speculating(true).await;
    (world, target, draft)
}

/// Serves a fake at `address` until the drain stops.
async fn serve(address: &Address, routes: Routes) -> Drain {
    let drain = Drain::new();
    let listener = Listener::bind(address).await.unwrap();
    let stop = drain.clone();
    drain.spawn(async move {
        let serving = eyrie_wire::server().add_routes(routes);
        tokio::select! {
            served = serving.serve_with_incoming(listener.incoming()) => served.unwrap(),
            () = stop.stopped() => {}
        }
    });
    drain
}

impl Drop for World {
    fn drop(&mut self) {
        self.gateway.stop();
    }
}

pub(crate) fn socket(dir: &tempfile::TempDir, name: &str) -> Address {
    Address::Unix(dir.path().join(format!("{name}.sock")))
}

pub(crate) async fn within<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, what).await.expect("it did not happen")
}

/// All chunks of a stream that ends well.
pub(crate) async fn drained(mut stream: tonic::Streaming<GenerateChunk>) -> Vec<GenerateChunk> {
    let mut chunks = Vec::new();
    while let Some(chunk) = within(stream.next()).await {
        chunks.push(chunk.unwrap());
    }
    chunks
}

pub(crate) fn ids(prompt: &[u32], max_tokens: u32) -> GenerateRequest {
    GenerateRequest {
        prompt: Some(Prompt::Ids(TokenIds { ids: prompt.to_vec() })),
        max_tokens: Some(max_tokens),
        temperature: Some(0.0),
        seed: Some(5),
        ..Default::default()
    }
}

pub(crate) fn traced(prompt: &[u32], max_tokens: u32, k: u32) -> GenerateRequest {
    let speculation = Speculation { max_draft_tokens: Some(k), trace: true, ..Default::default() };
    GenerateRequest { speculation: Some(speculation), ..ids(prompt, max_tokens) }
}

pub(crate) fn demo_file(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../deploy/demo/mini").join(name)
}
