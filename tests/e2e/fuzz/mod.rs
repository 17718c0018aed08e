//! P4: whatever is sent, at any method of the three services, is answered by a proper reply or by a documented
//! refusal; nothing panics, nothing stays held, and the next request gets its tokens.

mod draft;
mod gateway;
mod target;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use eyrie_tests::{Answer, Fleet, Wild, ask, call, client, framed, goldens, root, until};
use eyrie_wire::v1::draft_client::DraftClient;
use eyrie_wire::v1::target_client::TargetClient;
use eyrie_wire::v1::{DescribeDraftRequest, ItemError, LoadRequest};
use eyrie_wire::{Address, reason_of};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tokio::task::JoinSet;
use tonic::Code;
use tonic::transport::Channel;

use crate::EYRIE;

/// Cases a service, and how many of them run beside each other.
const CASES: u64 = 400;
const WORKERS: u64 = 4;

/// One service, and what it may answer.
struct Peer {
    channel: Channel,
    /// Code of every documented reason.
    reasons: HashMap<String, Code>,
    /// A fault of the service's own is allowed.
    may_fail: bool,
}

impl Peer {
    async fn connect(address: &str, may_fail: bool) -> Arc<Self> {
        let channel = eyrie_wire::connect(&address.parse().unwrap()).await.unwrap();
        Arc::new(Self { channel, reasons: documented_reasons(), may_fail })
    }

    /// Sends `messages`, or what `wild` makes of their framing, and checks how the call ends.
    async fn ask(&self, wild: &mut Wild, path: &str, messages: &[Vec<u8>]) -> Answer {
        let mut body: Vec<u8> = messages.iter().flat_map(|message| framed(message)).collect();
        let encoding = if wild.once_in(40) { "gzip" } else { "identity" };
        if wild.once_in(12) {
            spoil_framing(wild, &mut body);
        }
        let answer = call(&self.channel, path, &[("grpc-encoding", encoding)], body).await;
        let status = &answer.status;
        if !answer.is_ok() {
            let reason = reason_of(status).unwrap_or_else(|| panic!("{path}: no reason in {status:?}"));
            self.check(path, &reason, status.code(), status.message());
        }
        answer
    }

    fn check_item(&self, error: &ItemError) {
        self.check("item", &error.reason, Code::from_i32(error.code), &error.message);
    }

    fn check(&self, what: &str, reason: &str, code: Code, message: &str) {
        assert_eq!(self.reasons.get(reason), Some(&code), "{what}: {reason}: {message}");
        assert!(message.len() <= 1024 && !message.contains('\n'), "{what}: {message}");
        assert!(self.may_fail || reason != "INTERNAL", "{what}: {message}");
        assert!(!message.contains("broken invariant"), "{what}: {message}");
    }
}

/// A wrong flag, a wrong length or an end that comes too early; what a message says stays.
fn spoil_framing(wild: &mut Wild, body: &mut Vec<u8>) {
    let at = wild.below(body.len());
    match wild.below(3) {
        0 => body.truncate(at),
        _ => body[at % 5] ^= wild.bits() as u8,
    }
}

/// The table of docs/PROTOCOL.md.
fn documented_reasons() -> HashMap<String, Code> {
    let text = std::fs::read_to_string(root().join("docs/PROTOCOL.md")).unwrap();
    let codes = (1..=16).map(Code::from_i32).map(|code| (format!("{code:?}").to_lowercase(), code));
    let codes: HashMap<String, Code> = codes.collect();
    let row = |line: &str| {
        let mut cells = line.split('|').skip(1).map(|cell| cell.trim().to_owned());
        let (reasons, code) = (cells.next()?, cells.next()?);
        let code = *codes.get(&code.replace('_', "").to_lowercase())?;
        Some(reasons.split(", ").map(|reason| (reason.to_owned(), code)).collect::<Vec<_>>())
    };
    let reasons: HashMap<_, _> = text.lines().filter_map(row).flatten().collect();
    assert!(reasons.len() > 10, "{reasons:?}");
    reasons
}

/// Runs the cases of one service; a case that fails is named by its seed.
async fn run<F: Future<Output = ()> + Send + 'static>(peer: &Arc<Peer>, case: fn(Arc<Peer>, Wild) -> F) {
    let mut workers = JoinSet::new();
    for worker in 0..WORKERS {
        let peer = Arc::clone(peer);
        workers.spawn(async move {
            for seed in (worker..CASES).step_by(WORKERS as usize) {
                let mut one = JoinSet::from_iter([case(Arc::clone(&peer), Wild::new(seed))]);
                let done = one.join_next().await;
                assert!(matches!(done, Some(Ok(()))), "case {seed}");
            }
        });
    }
    while let Some(done) = workers.join_next().await {
        done.unwrap();
    }
}

/// Noise instead of HTTP/2, and noise after its preface.
async fn babble(address: &str) {
    async fn say(mut peer: impl AsyncRead + AsyncWrite + Unpin, words: &[u8]) {
        // It may hang up in the middle.
        let _ = peer.write_all(words).await;
        let _ = peer.shutdown().await;
        let heard = tokio::time::timeout(Duration::from_secs(20), peer.read_to_end(&mut Vec::new())).await;
        assert!(heard.is_ok(), "the connection is left open");
    }
    for seed in 0..8 {
        let mut wild = Wild::new(seed);
        let mut words: Vec<u8> = (0..2000).map(|_| wild.bits() as u8).collect();
        if wild.once_in(2) {
            words.splice(0..0, *b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0");
        }
        match address.parse().unwrap() {
            Address::Unix(path) => say(UnixStream::connect(path).await.unwrap(), &words).await,
            Address::Tcp(host_port) => say(TcpStream::connect(host_port).await.unwrap(), &words).await,
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_that_is_sent_breaks_a_service() {
    let fleet = Fleet::start(EYRIE, &[]);
    let ready = fleet.ready();
    let draft_address = ready.draft.clone().unwrap();
    let target = Peer::connect(&ready.target, false).await;
    // Rows that are not numbers are a fault of the step that computes with them.
    let draft = Peer::connect(&draft_address, true).await;
    let gateway = Peer::connect(&ready.grpc, false).await;
    tokio::join!(
        run(&target, target::case),
        run(&draft, draft::case),
        run(&gateway, gateway::case),
        babble(&ready.target),
        babble(&draft_address),
        babble(&ready.grpc),
    );
    until("the services to hold nothing", async || {
        let load = TargetClient::new(target.channel.clone()).load(LoadRequest {}).await.unwrap().into_inner();
        let card = DraftClient::new(draft.channel.clone()).describe(DescribeDraftRequest {}).await.unwrap();
        let idle = (load.running, load.waiting, load.streams, load.leases) == (0, 0, 1, 1);
        (idle && load.kv_used <= load.cached_tokens && card.into_inner().sequences == 0).then_some(())
    })
    .await;
    let golden = &goldens()[0];
    let fine = ask(&golden.prompt_ids, 96).chain(3).run(&mut client(&ready.grpc).await).await.unwrap();
    assert_eq!(fine.ids, golden.greedy_ids);
    assert!(fine.usage.accepted_tokens > 0);
    let logs = fleet.service_logs();
    assert!(logs.contains("listening") && !logs.contains("panicked"), "{logs}");
    assert_eq!(fleet.stop(), Some(0));
}
