//! What a gateway or a draft could send to the target.

use std::collections::HashSet;
use std::sync::Arc;

use eyrie_tests::{Wild, goldens};
use eyrie_wire::v1::target_item::Op;
use eyrie_wire::v1::target_out::Body;
use eyrie_wire::v1::{
    Close, Committed, FetchFeatures, Hello, LeaseFrame, Limits, Open, ReadFeaturesRequest, ReadFileRequest,
    ReadSharedRequest, Revoke, RingSlot, Sampling, TargetFrame, TargetItem, TargetReply, Verify,
};
use eyrie_wire::{Message, PROTOCOL_VERSION};

use super::Peer;

const ROUND: &str = "/eyrie.v1.Target/Round";

pub(super) async fn case(peer: Arc<Peer>, mut wild: Wild) {
    match wild.below(4) {
        0 => return small(&peer, &mut wild).await,
        1 => return conversation(&peer, &mut wild).await,
        _ => {}
    }
    let boot = 1 + wild.below(4) as u64;
    let mut frames: Vec<Vec<u8>> = (0..=wild.below(4))
        .map(|i| {
            let hello = (i == 0 || wild.once_in(12)).then(|| hello(&mut wild, boot));
            let items = (0..wild.below(5)).map(|_| item(&mut wild)).collect();
            TargetFrame { hello, items }.encode_to_vec()
        })
        .collect();
    if wild.once_in(3) {
        let spoilt = wild.below(frames.len());
        wild.spoil(&mut frames[spoilt]);
    }
    let unary = wild.once_in(3);
    if unary {
        frames.truncate(1);
    }
    let path = if unary { ROUND } else { "/eyrie.v1.Target/Rounds" };
    converse(&peer, &mut wild, path, &frames).await;
    close(&peer, &frames).await;
}

/// Sends frames and checks the answers to their items; returns what was committed.
async fn converse(peer: &Peer, wild: &mut Wild, path: &str, frames: &[Vec<u8>]) -> Vec<Committed> {
    let mut commits = Vec::new();
    for reply in peer.ask(wild, path, frames).await.messages {
        for out in TargetReply::decode(reply).unwrap().outs {
            match out.body {
                Some(Body::Error(error)) => peer.check_item(&error),
                Some(Body::Committed(committed)) => commits.push(committed),
                Some(Body::Features(_) | Body::Closed(_)) | None => {}
            }
        }
    }
    commits
}

/// One sequence that goes on after what it was told wrongly, by one call after the other: its tokens are the plain ones.
async fn conversation(peer: &Peer, wild: &mut Wild) {
    let golden = &goldens()[wild.below(8)];
    let boot = wild.bits() | 8;
    let mut frames = Vec::new();
    let mut tell = async |wild: &mut Wild, op: Op| {
        let items = vec![TargetItem { seq: 1, op: Some(op) }];
        frames.push(TargetFrame { hello: Some(plain_hello(boot)), items }.encode_to_vec());
        converse(peer, wild, ROUND, &frames[frames.len() - 1..]).await
    };
    let mut tokens = Vec::new();
    let mut last = Committed::default();
    for _ in 0..12 {
        let op = match tokens.is_empty() {
            true => Op::Open(plain_open(golden.prompt_ids.clone())),
            false => Op::Verify(verify(wild, &last, &golden.greedy_ids[tokens.len()..])),
        };
        for committed in tell(wild, op).await {
            // A repeat replays what is known already.
            if tokens.is_empty() || committed.round > last.round {
                tokens.extend_from_slice(&committed.tokens);
                last = committed;
            }
        }
    }
    assert_eq!(tokens, golden.greedy_ids[..tokens.len()]);
    close(peer, &frames).await;
}

/// Closes whatever `frames` may have opened.
async fn close(peer: &Peer, frames: &[Vec<u8>]) {
    let frames: Vec<TargetFrame> =
        frames.iter().filter_map(|bytes| TargetFrame::decode(bytes.as_slice()).ok()).collect();
    let boots: HashSet<u64> = frames.iter().filter_map(|f| f.hello.as_ref()).map(|h| h.boot_id).collect();
    let opened = frames.iter().flat_map(|frame| &frame.items);
    let opened: HashSet<u64> =
        opened.filter(|item| matches!(item.op, Some(Op::Open(_)))).map(|item| item.seq).collect();
    for boot_id in boots.into_iter().filter(|&boot| boot != 0) {
        let items = opened.iter().map(|&seq| TargetItem { seq, op: Some(Op::Close(Close {})) }).collect();
        let frame = TargetFrame { hello: Some(plain_hello(boot_id)), items }.encode_to_vec();
        let answer = eyrie_tests::call(&peer.channel, ROUND, &[], eyrie_tests::framed(&frame)).await;
        assert!(answer.is_ok(), "{:?}", answer.status);
    }
}

/// The methods beside the rounds.
async fn small(peer: &Peer, wild: &mut Wild) {
    let holder = wild.pick(&["draft", "", "two\nlines", "é"]).repeat(wild.pick(&[1, 1, 70]));
    let name = wild.pick(&["config.json", "tokenizer.json", "../config.json", "/etc/passwd", ""]);
    let slots =
        vec![RingSlot { slot: wild.number(1), generation: wild.bits() }; wild.pick(&[0, 1, 1024, 1025])];
    let (protocol_version, epoch) = (wild.number(PROTOCOL_VERSION), wild.bits());
    let kinds = wild.pick(&[vec![], vec!["memfd"], vec!["cuda_vmm", "two\nlines"]]);
    let kinds = kinds.into_iter().map(str::to_owned).collect();
    let lease = LeaseFrame { protocol_version, holder, pid: wild.number(9), remote: wild.once_in(2), kinds };
    let (method, mut message) = match wild.below(7) {
        0 => ("Describe", Vec::new()),
        1 => ("Load", Vec::new()),
        2 => ("ReadFile", ReadFileRequest { name: name.to_owned() }.encode_to_vec()),
        3 => ("ReadShared", ReadSharedRequest { epoch }.encode_to_vec()),
        4 => ("ReadFeatures", ReadFeaturesRequest { epoch, slots }.encode_to_vec()),
        5 => ("Attach", lease.encode_to_vec()),
        _ => ("Nonsense", Vec::new()),
    };
    if wild.once_in(2) {
        wild.spoil(&mut message);
    }
    peer.ask(wild, &format!("/eyrie.v1.Target/{method}"), &[message]).await;
}

fn plain_hello(boot_id: u64) -> Hello {
    Hello { protocol_version: PROTOCOL_VERSION, boot_id, ..Default::default() }
}

pub(super) fn hello(wild: &mut Wild, boot_id: u64) -> Hello {
    Hello {
        protocol_version: if wild.once_in(20) { wild.number(PROTOCOL_VERSION) } else { PROTOCOL_VERSION },
        boot_id: if wild.once_in(20) { 0 } else { boot_id },
        epoch: if wild.once_in(20) { wild.bits() } else { 0 },
        fingerprint: if wild.once_in(20) { "é".repeat(wild.pick(&[1, 3_000_000])) } else { String::new() },
    }
}

fn item(wild: &mut Wild) -> TargetItem {
    let op = match wild.below(12) {
        0..3 => Op::Open(open(wild)),
        3..8 => {
            let golden = &goldens()[0];
            let tokens = golden.greedy_ids[..1].to_vec();
            let opened = Committed { kv_len: golden.prompt_ids.len() as u32, tokens, ..Default::default() };
            Op::Verify(verify(wild, &opened, &golden.greedy_ids[1..]))
        }
        8 => Op::Close(Close {}),
        9 => Op::FetchFeatures(FetchFeatures { from: wild.number(3) }),
        10 => Op::Revoke(Revoke {}),
        _ => return TargetItem { seq: wild.below(3) as u64, op: None },
    };
    TargetItem { seq: wild.below(3) as u64, op: Some(op) }
}

fn plain_open(tokens: Vec<u32>) -> Open {
    Open {
        tokens,
        sampling: Some(Sampling { top_p: 1.0, ..Default::default() }),
        limits: Some(Limits { max_tokens: 80, stop_ids: Vec::new(), ignore_eos: true }),
        ..Default::default()
    }
}

fn open(wild: &mut Wild) -> Open {
    let tokens = if wild.once_in(3) { wild.numbers(40, 300) } else { goldens()[0].prompt_ids.clone() };
    let sampling = Sampling {
        temperature: wild.float(0.0),
        top_k: wild.number(0),
        top_p: wild.float(1.0),
        min_p: wild.float(0.0),
        seed: wild.bits(),
        choice: wild.number(0),
    };
    let limits = Limits { max_tokens: wild.number(9), stop_ids: wild.numbers(3, 7), ignore_eos: true };
    Open {
        tokens,
        generated: wild.number(0),
        sampling: (!wild.once_in(20)).then_some(sampling),
        limits: (!wild.once_in(20)).then_some(limits),
        features: wild.once_in(2),
        priority: wild.number(0) as i32,
    }
}

/// The round after `last`, where `plain` tokens follow, or what is nearly that.
fn verify(wild: &mut Wild, last: &Committed, plain: &[u32]) -> Verify {
    let mut tokens = match wild.below(3) {
        0 => Vec::new(),
        1 => wild.numbers(70, 5),
        _ => plain.iter().copied().take(3).collect(),
    };
    if wild.once_in(4) {
        tokens.push(wild.number(7));
    }
    let steps = if tokens.is_empty() { 3 } else { 0 };
    Verify {
        round: wild.number(last.round + 1),
        base_len: wild.number(last.kv_len),
        root: wild.number(last.tokens.last().copied().unwrap_or_default()),
        parents: if wild.once_in(2) { Vec::new() } else { tokens.iter().map(|_| wild.number(0)).collect() },
        tokens,
        steps: wild.number(steps),
    }
}
