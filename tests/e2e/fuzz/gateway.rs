//! What a client could send to the gateway.

use std::sync::Arc;
use std::time::Duration;

use eyrie_tests::Wild;
use eyrie_wire::Message;
use eyrie_wire::v1::generate_request::Prompt;
use eyrie_wire::v1::{DetokenizeRequest, GenerateRequest, Speculation, TokenIds, TokenizeRequest, TreeShape};

use super::Peer;

/// A client that waits no longer leaves, in whatever phase its request is.
const PATIENCE: Duration = Duration::from_millis(300);

pub(super) async fn case(peer: Arc<Peer>, mut wild: Wild) {
    let (method, mut message) = match wild.below(10) {
        0 => ("Tokenize", TokenizeRequest { text: text(&mut wild), add_special: true }.encode_to_vec()),
        1 => {
            ("Detokenize", DetokenizeRequest { ids: wild.numbers(9, 50), keep_special: true }.encode_to_vec())
        }
        2 => ("GetModel", Vec::new()),
        3 => ("Nonsense", Vec::new()),
        4..7 => ("Generate", request(&mut wild).encode_to_vec()),
        _ => ("GenerateStream", request(&mut wild).encode_to_vec()),
    };
    if wild.once_in(3) {
        wild.spoil(&mut message);
    }
    let path = format!("/eyrie.v1.Generation/{method}");
    // Either way is fine: the answer was checked, or nobody waits for one.
    let _ = tokio::time::timeout(PATIENCE, peer.ask(&mut wild, &path, &[message])).await;
}

fn text(wild: &mut Wild) -> String {
    wild.pick(&["", "a", "once upon a time", "\0", "\u{10ffff}é", " \n\t"]).repeat(wild.pick(&[1, 1, 1, 600]))
}

fn request(wild: &mut Wild) -> GenerateRequest {
    let ids = TokenIds { ids: wild.numbers(20, 40) };
    let prompt = match wild.below(20) {
        0 => None,
        1..6 => Some(Prompt::Text(text(wild))),
        _ => Some(Prompt::Ids(ids)),
    };
    let shape = TreeShape { top_k: wild.number(2), levels: wild.number(3), nodes: wild.number(6) };
    let speculation = Speculation {
        mode: if wild.once_in(9) { wild.number(1) as i32 } else { 0 },
        max_draft_tokens: wild.once_in(4).then(|| wild.number(3)),
        tree: wild.once_in(4).then_some(shape),
        trace: wild.once_in(2),
    };
    GenerateRequest {
        prompt,
        max_tokens: Some(wild.number(6)),
        temperature: Some(wild.float(0.0)),
        top_p: wild.once_in(3).then(|| wild.float(0.9)),
        top_k: wild.once_in(3).then(|| wild.number(9)),
        min_p: wild.once_in(3).then(|| wild.float(0.1)),
        seed: Some(wild.bits()),
        stop: (0..wild.pick(&[0, 0, 0, 0, 0, 0, 1, 2, 16, 17])).map(|_| text(wild)).collect(),
        stop_ids: wild.numbers(3, 9),
        ignore_eos: wild.once_in(2),
        speculation: wild.once_in(2).then_some(speculation),
        request_id: "r".repeat(wild.pick(&[0, 0, 0, 0, 0, 1, 64, 128, 129, 5_000_000])),
        priority: wild.number(0) as i32,
    }
}
