//! Feature rows through shared memory, as a draft reads them.

use std::time::Duration;

use eyrie_region::{FdDoor, ImportedMemfd, RingReader, SlotRef, Token};
use eyrie_wire::v1::feature_ref::At;
use eyrie_wire::v1::{FeatureRef, LeaseFrame, LeaseGrant, Open, Verify, target_item::Op, target_out::Body};
use eyrie_wire::{PROTOCOL_VERSION, grant_from_wire, reason_of};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

use crate::harness::{Golden, LIMIT, Server, fetch, goldens, greedy, verify_after};

/// A draft's lease: it lasts as long as this lives.
pub(crate) struct Lease {
    pub(crate) grant: LeaseGrant,
    ring: RingReader,
    pub(crate) weights: ImportedMemfd,
    _frames: mpsc::Sender<LeaseFrame>,
    _grants: Streaming<LeaseGrant>,
}

/// An Attach stream: its sending half, its receiving half and the grant.
pub(crate) type Attached = (mpsc::Sender<LeaseFrame>, Streaming<LeaseGrant>, LeaseGrant);

async fn ask(server: &Server, holder: &str) -> Result<Attached, Status> {
    ask_as(server, holder, false).await
}

pub(crate) async fn ask_as(server: &Server, holder: &str, remote: bool) -> Result<Attached, Status> {
    let holder = holder.to_owned();
    ask_with(server, LeaseFrame { protocol_version: PROTOCOL_VERSION, holder, pid: 7, remote, kinds: vec![] })
        .await
}

pub(crate) async fn ask_with(server: &Server, frame: LeaseFrame) -> Result<Attached, Status> {
    let (frames, receiver) = mpsc::channel(1);
    frames.send(frame).await.unwrap();
    let mut grants = server.client.clone().attach(ReceiverStream::new(receiver)).await?.into_inner();
    let grant = grants.message().await?.unwrap();
    Ok((frames, grants, grant))
}

pub(crate) async fn attach(server: &Server) -> Lease {
    let (frames, grants, wire) = ask(server, "draft").await.unwrap();
    let grant = grant_from_wire(&wire).unwrap();
    let token = Token::try_from(wire.token.as_ref()).unwrap();
    let mut fds = FdDoor::fetch(&wire.door, &token, Duration::from_secs(5)).unwrap().into_iter();
    let weights = ImportedMemfd::import(fds.next().unwrap(), grant.bytes).unwrap();
    grant.verify(&weights, grant.epoch).unwrap();
    let ring = RingReader::open(fds.next().unwrap(), grant.ring.unwrap(), grant.epoch).unwrap();
    Lease { grant: wire, ring, weights, _frames: frames, _grants: grants }
}

impl Lease {
    /// Reads the rows of `refs`, which must follow each other from `first` on.
    pub(crate) fn rows(&self, refs: &[FeatureRef], first: u32) -> Vec<f32> {
        let mut out = Vec::new();
        let mut position = first;
        for at in refs {
            assert_eq!(at.first, position);
            position += at.rows;
            let Some(At::Ring(slot)) = &at.at else { panic!("{at:?} is not in the ring") };
            let slot = SlotRef { slot: slot.slot, generation: slot.generation, rows: at.rows };
            let mut rows = Vec::new();
            self.ring.read_into(slot, &mut rows).unwrap();
            out.extend(rows);
        }
        out
    }

    pub(crate) fn width(&self) -> usize {
        self.grant.aux_layers.len() * self.grant.hidden_size as usize
    }
}

pub(crate) fn with_features(open: Open) -> Open {
    Open { features: true, ..open }
}

#[tokio::test(flavor = "multi_thread")]
async fn memory_of_a_kind_that_the_holder_does_not_map_is_not_lent() {
    let server = Server::start().await;
    let frame = |kinds: &[&str], remote| LeaseFrame {
        protocol_version: PROTOCOL_VERSION,
        holder: "draft".to_owned(),
        pid: 7,
        remote,
        kinds: kinds.iter().map(|&kind| kind.to_owned()).collect(),
    };
    ask_with(&server, frame(&["cuda_vmm", "memfd"], false)).await.unwrap();
    ask_with(&server, frame(&["cuda_vmm"], true)).await.unwrap();
    let refused = ask_with(&server, frame(&["cuda_vmm", "cuda_ipc", "two\nlines"], false)).await.unwrap_err();
    assert_eq!(reason_of(&refused).as_deref(), Some("UNSUPPORTED"));
    let line = "memory is shared by memfd, the holder maps cuda_vmm, cuda_ipc: run target and draft on the same device";
    assert!(refused.message().starts_with(line), "{}", refused.message());
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_fetched_again_are_the_rows_first_published() {
    let server = Server::start_with(|options| options.prefill_chunk = 10).await;
    let lease = attach(&server).await;
    let mut rounds = server.rounds(1).await;
    let Golden { prompt, tokens } = &goldens(1)[0];
    rounds.send(1, Op::Open(with_features(greedy(prompt, 60)))).await;
    let mut first = Vec::new();
    let mut state = loop {
        match rounds.body().await {
            Body::Features(chunk) => {
                assert!(!chunk.fetched);
                let rows = lease.rows(&chunk.refs, (first.len() / lease.width()) as u32);
                first.extend(rows);
            }
            Body::Committed(state) => break state,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(first.len(), prompt.len() * lease.width());
    // A right draft, a draft wrong at its second token, a tree, and plain rounds: only kept rows are published.
    let at = |i: usize| tokens[i];
    for (drafts, parents) in [
        (vec![at(1), at(2), at(3)], vec![]),
        (vec![at(5), at(6) + 1], vec![]),
        (vec![at(7) + 1, at(7), at(8)], vec![0, 0, 2]),
        (vec![], vec![]),
    ] {
        let verify = Verify { parents, ..verify_after(&state, drafts) };
        rounds.send(1, Op::Verify(verify)).await;
        let before = state.kv_len;
        state = rounds.committed().await;
        first.extend(lease.rows(&state.features, before));
        assert_eq!(first.len(), state.kv_len as usize * lease.width());
    }
    for from in [0, 13, state.kv_len - 1, state.kv_len] {
        rounds.send(1, fetch(from)).await;
        let again = rounds.features().await;
        assert_eq!((again.first_held, again.fetched), (0, true));
        assert!(lease.rows(&again.refs, from) == first[from as usize * lease.width()..], "from {from}");
    }
    rounds.send(1, fetch(state.kv_len + 1)).await;
    assert_eq!(rounds.error().await.reason, "INVALID_ARGUMENT");

    // The rows of accepted drafts are those of plain decoding.
    rounds.send(2, Op::Open(with_features(greedy(prompt, 60)))).await;
    let mut plain = loop {
        if let Body::Committed(state) = rounds.body().await {
            break state;
        }
    };
    while plain.kv_len < state.kv_len {
        rounds.send(2, Op::Verify(verify_after(&plain, vec![]))).await;
        plain = rounds.committed().await;
    }
    rounds.send(2, fetch(0)).await;
    assert!(lease.rows(&rounds.features().await.refs, 0) == first);
    drop(lease);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_cache_lets_the_oldest_rows_go_and_says_where_it_starts() {
    let row = 3 * 384 * 4;
    let server = Server::start_with(|options| options.aux_cache_bytes = 128 * row).await;
    let lease = attach(&server).await;
    let mut rounds = server.rounds(1).await;
    let long: Vec<u32> = goldens(5).into_iter().flat_map(|golden| golden.prompt).collect();
    rounds.send(1, Op::Open(with_features(greedy(&long, 5)))).await;
    let prompt = rounds.features().await;
    let rows = lease.rows(&prompt.refs, 0);
    rounds.committed().await;
    rounds.send(1, fetch(0)).await;
    let held = rounds.features().await;
    let count: u32 = held.refs.iter().map(|at| at.rows).sum();
    assert_eq!(held.first_held + count, long.len() as u32);
    assert!(count > 64 && count <= 128, "{count} rows held");
    assert!(lease.rows(&held.refs, held.first_held) == rows[held.first_held as usize * lease.width()..]);
    let load = server.load().await;
    assert_eq!((load.aux_bytes, load.aux_rows_let_go), (128 * row, u64::from(held.first_held)));
    drop(lease);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_lasts_as_long_as_its_stream_and_shows_in_the_card() {
    let server = Server::start().await;
    let mut client = server.client.clone();
    let lease = attach(&server).await;
    let card = client.describe(eyrie_wire::v1::DescribeRequest {}).await.unwrap().into_inner();
    assert_eq!((card.leases[0].holder.as_str(), card.leases[0].pid), ("draft", 7));
    assert_eq!((card.shared_bytes, card.shared_kind.as_str()), (lease.weights.bytes().len() as u64, "memfd"));
    assert_eq!(card.aux_layers, lease.grant.aux_layers);
    assert_eq!((lease.grant.epoch, &lease.grant.fingerprint), (card.epoch, &card.fingerprint));
    let (door, token) = (lease.grant.door.clone(), Token::try_from(lease.grant.token.as_ref()).unwrap());
    drop(lease);
    server.load_until(|load| load.leases == 0).await;
    let refused = FdDoor::fetch(&door, &token, Duration::from_secs(5)).unwrap_err();
    assert!(refused.to_string().contains("refused"), "{refused}");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn leases_are_limited_in_number_and_holders_have_short_printable_names() {
    let server = Server::start().await;
    for holder in ["", "a\u{1b}[2Jb", "tag\u{202e}", &"x".repeat(65)] {
        let status = ask(&server, holder).await.err().unwrap();
        assert_eq!(reason_of(&status).as_deref(), Some("INVALID_ARGUMENT"), "{status}");
        assert!(status.message().contains("64 printable"), "{status}");
    }
    let mut held = Vec::new();
    let longest = "x".repeat(64);
    // The room of a refused one may be given back after its refusal was read.
    while held.len() < 64 {
        match ask(&server, &longest).await {
            Ok(lease) => held.push(lease),
            Err(status) => assert_eq!(reason_of(&status).as_deref(), Some("BUSY"), "{status}"),
        }
    }
    let status = ask(&server, "draft").await.err().unwrap();
    assert_eq!(reason_of(&status).as_deref(), Some("BUSY"));
    assert!(status.message().contains("64 leases"), "{status}");
    held.pop();
    server.load_until(|load| load.leases == 63).await;
    let retry = async { while ask(&server, "draft").await.is_err() {} };
    tokio::time::timeout(LIMIT, retry).await.unwrap();
    drop(held);
    server.stop().await;
}

#[tokio::test]
async fn the_record_of_importers_holds_up_nobody_else() {
    let server = Server::start().await;
    // Who opens a pipe for writing waits for a reader.
    let pipe = server.dir.path().join(format!("t.sock.importers.{}", std::process::id()));
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let (answered, told) = std::sync::mpsc::sync_channel(1);
    let reader = std::thread::spawn(move || {
        let in_time = told.recv_timeout(LIMIT / 4).is_ok();
        std::fs::read(pipe).unwrap();
        in_time
    });
    let others = async {
        for _ in 0..200 {
            server.load().await;
        }
        answered.send(()).unwrap();
    };
    let (lease, ()) = tokio::join!(ask(&server, "draft"), others);
    assert!(lease.is_ok() && reader.join().unwrap(), "the service stood still");
    drop(lease);
    server.stop().await;
}
