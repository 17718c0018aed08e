//! What happens when a model's numbers fail: a demo model with a token whose embedding is not a number.

use std::path::{Path, PathBuf};

use eyrie_wire::v1::{Open, Verify, target_item::Op, target_out::Body};
use serde_json::Value;

use crate::harness::{Golden, Rounds, Server, close, goldens, greedy, next_verify, repository, verify_after};

/// The token without an embedding; no golden has it.
const BROKEN: u32 = 4000;

/// Copies the demo model into `dir`, with the embedding of [`BROKEN`] overwritten by NaNs.
fn broken_model(dir: &Path) -> PathBuf {
    let (from, to) = (repository().join("deploy/demo/mini"), dir.join("broken"));
    std::fs::create_dir(&to).unwrap();
    for name in ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(from.join(name), to.join(name)).unwrap();
    }
    let mut bytes = std::fs::read(from.join("model.safetensors")).unwrap();
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let tensors: Value = serde_json::from_slice(&bytes[8..header]).unwrap();
    let embed = &tensors["model.embed_tokens.weight"];
    assert_eq!(embed["dtype"], "BF16");
    let row = embed["shape"][1].as_u64().unwrap() as usize * 2;
    let start = header + embed["data_offsets"][0].as_u64().unwrap() as usize + BROKEN as usize * row;
    bytes[start..start + row].as_chunks_mut::<2>().0.fill(0x7fc0_u16.to_le_bytes());
    std::fs::write(to.join("model.safetensors"), bytes).unwrap();
    to
}

async fn broken_server(kv_tokens: usize) -> Server {
    let dir = tempfile::tempdir().unwrap();
    let model = broken_model(dir.path());
    Server::start_with(|options| {
        options.model = model.into();
        options.kv_tokens = kv_tokens;
    })
    .await
}

/// A prompt that fails at its end.
fn failing(prompt: &[u32]) -> Open {
    let mut tokens = prompt.to_vec();
    tokens.push(BROKEN);
    greedy(&tokens, 20)
}

/// Takes replies until sequence 1 has `count` more tokens and all `others` are heard; returns those tokens and the
/// others' replies.
async fn listen(rounds: &mut Rounds, count: usize, others: usize) -> (Vec<u32>, Vec<(u64, Body)>) {
    let (mut tokens, mut rest) = (Vec::new(), Vec::new());
    while tokens.len() < count || rest.len() < others {
        match rounds.next().await.unwrap().unwrap() {
            (1, Body::Committed(state)) => tokens.extend(state.tokens),
            other => rest.push(other),
        }
    }
    (tokens, rest)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sequence_whose_numbers_fail_ends_alone_and_leaves_clean_pages() {
    // Three pages: the third sequence gets that of the one that failed.
    let server = broken_server(192).await;
    let mut rounds = server.rounds(1).await;
    let goldens = goldens(3);
    let Golden { prompt, tokens } = &goldens[0];
    rounds.send(1, Op::Open(greedy(prompt, 35))).await;
    let state = rounds.committed().await;
    let credit = Verify { steps: 30, ..verify_after(&state, vec![]) };
    rounds.send_all(vec![(2, Op::Open(failing(&goldens[2].prompt))), (1, Op::Verify(credit))]).await;
    let (got, rest) = listen(&mut rounds, 30, 1).await;
    assert_eq!(got, tokens[1..31]);
    let [(2, Body::Error(error))] = rest.as_slice() else { panic!("{rest:?}") };
    assert!(error.reason == "INTERNAL" && error.message.contains("NaN"), "{error:?}");
    assert_eq!(server.load().await.kv_used, 64, "the failed sequence holds pages");
    assert_eq!(rounds.plain(3, greedy(&goldens[2].prompt, 30)).await, goldens[2].tokens[..30]);
    rounds.send(2, close()).await;
    rounds.closed().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drafted_token_whose_numbers_fail_costs_its_round_the_drafts_and_nothing_else() {
    let server = broken_server(4096).await;
    let mut rounds = server.rounds(1).await;
    let Golden { prompt, tokens } = &goldens(1)[0];
    rounds.send(1, Op::Open(greedy(prompt, 20))).await;
    let state = rounds.committed().await;
    rounds.send(1, next_verify(&state, vec![tokens[1], BROKEN])).await;
    let plain = rounds.committed().await;
    assert_eq!((plain.path.as_slice(), plain.tokens.as_slice()), (&[][..], &tokens[1..2]));
    rounds.send(1, next_verify(&plain, tokens[2..6].to_vec())).await;
    assert_eq!(rounds.committed().await.tokens, tokens[2..7]);
    server.stop().await;
}
