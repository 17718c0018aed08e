//! What a gateway could send to the draft.

use std::sync::Arc;

use eyrie_tests::Wild;
use eyrie_wire::Message;
use eyrie_wire::v1::draft_item::Op;
use eyrie_wire::v1::draft_out::Body;
use eyrie_wire::v1::feature_ref::At;
use eyrie_wire::v1::{
    CloseDraft, DraftFrame, DraftItem, DraftReply, FeatureRef, Propose, RingSlot, TreeShape,
};

use super::Peer;
use super::target::hello;

/// Bytes of a captured row of the bundled target.
const ROW_BYTES: usize = 3 * 384 * 4;

pub(super) async fn case(peer: Arc<Peer>, mut wild: Wild) {
    if wild.once_in(10) {
        let method = wild.pick(&["/eyrie.v1.Draft/Describe", "/eyrie.v1.Draft/Nonsense"]);
        let mut message = b"\x08\x01".to_vec();
        wild.spoil(&mut message);
        peer.ask(&mut wild, method, &[message]).await;
        return;
    }
    let boot = 1 + wild.below(4) as u64;
    let mut frames: Vec<Vec<u8>> = (0..=wild.below(4))
        .map(|i| {
            let hello = (i == 0 || wild.once_in(12)).then(|| hello(&mut wild, boot));
            let items = (0..wild.below(4)).map(|_| item(&mut wild)).collect();
            DraftFrame { hello, items }.encode_to_vec()
        })
        .collect();
    if wild.once_in(3) {
        let spoilt = wild.below(frames.len());
        wild.spoil(&mut frames[spoilt]);
    }
    // Sequences of a stream go with it, those of unary calls rest: only what they are told to close is asked of them.
    let path = match wild.once_in(3) {
        true => {
            frames = vec![closing(&mut wild, boot)];
            "/eyrie.v1.Draft/Round"
        }
        false => "/eyrie.v1.Draft/Rounds",
    };
    let answer = peer.ask(&mut wild, path, &frames).await;
    for reply in answer.messages {
        for out in DraftReply::decode(reply).unwrap().outs {
            if let Some(Body::Error(error)) = out.body {
                peer.check_item(&error);
            }
        }
    }
}

/// A unary frame that leaves nothing behind.
fn closing(wild: &mut Wild, boot: u64) -> Vec<u8> {
    let mut items: Vec<DraftItem> = (0..wild.below(4)).map(|_| item(wild)).collect();
    items.extend((0..3).map(|seq| DraftItem { seq, op: Some(Op::Close(CloseDraft {})) }));
    DraftFrame { hello: Some(hello(wild, boot)), items }.encode_to_vec()
}

fn item(wild: &mut Wild) -> DraftItem {
    let op = match wild.below(12) {
        0 => Some(Op::Close(CloseDraft {})),
        1 => None,
        _ => Some(Op::Propose(propose(wild))),
    };
    DraftItem { seq: wild.below(3) as u64, op }
}

fn propose(wild: &mut Wild) -> Propose {
    let base_len = 1 + wild.below(12) as u32;
    let token_from = wild.below(base_len as usize + 2) as u32;
    let mut tokens: Vec<u32> = (token_from..=base_len).map(|position| 20 + position).collect();
    if wild.once_in(10) {
        tokens = wild.numbers(9, 30);
    }
    let shape = TreeShape { top_k: wild.number(2), levels: wild.number(3), nodes: wild.number(6) };
    let first = wild.below(base_len as usize) as u32;
    let start = wild.pick(&[0, 0, 0, first, base_len]);
    Propose {
        round: wild.number(1),
        base_len: if wild.once_in(10) { wild.number(base_len) } else { base_len },
        token_from: if wild.once_in(10) { wild.number(token_from) } else { token_from },
        tokens,
        features: features(wild, first, base_len),
        k: wild.number(3),
        tree: wild.once_in(3).then_some(shape),
        start: wild.number(start),
    }
}

/// Rows of `first..end`, or such as nobody has.
fn features(wild: &mut Wild, first: u32, end: u32) -> Vec<FeatureRef> {
    let rows = end - first;
    let value = wild.float(0.25).to_le_bytes();
    let inline = value.repeat(ROW_BYTES / 4 * rows as usize);
    let ring = RingSlot { slot: wild.number(0), generation: u64::from(wild.number(2)) };
    let whole = FeatureRef { first, rows, at: Some(At::Inline(inline.into())) };
    match wild.below(6) {
        0 => Vec::new(),
        1 => vec![FeatureRef { at: Some(At::Ring(ring)), ..whole }],
        2 => vec![FeatureRef { first: wild.number(first), rows: wild.number(rows), ..whole }],
        3 => vec![FeatureRef { at: None, ..whole }],
        _ => vec![FeatureRef { first, ..whole.clone() }, whole],
    }
}
