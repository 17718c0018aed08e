//! Prompts that begin alike: computed once, with the same tokens and the same rounds.

use crate::EYRIE;
use eyrie_tests::{Asked, Fleet, Outcome, Signal, Trio, ask, client, goldens, signal, until};
use eyrie_wire::v1::GetModelRequest;

/// Tokens that all prompts of these tests begin with.
const COMMON: usize = 150;
const TOKENS: u32 = 48;
/// The cache keeps whole pages of this many tokens.
const PAGE: u32 = 64;
/// Bytes of the feature rows of a page: 3 captured streams of 384 values a row.
const ROWS_BYTES: u32 = PAGE * 3 * 384 * 4;

/// Requests that begin alike and go on in every way: plain, chains and trees, greedy and sampled.
fn requests() -> Vec<Asked> {
    let goldens = goldens();
    let common: Vec<u32> = goldens.iter().flat_map(|golden| golden.prompt_ids.clone()).take(COMMON).collect();
    let asked = |(i, golden): (usize, &eyrie_tests::Golden)| {
        let asked = ask(&[common.as_slice(), &golden.prompt_ids].concat(), TOKENS);
        let asked = if i.is_multiple_of(2) { asked } else { asked.sampled(0.8, i as u64) };
        match i % 3 {
            0 => asked.chain(3),
            1 => asked.tree(4, 4, 12),
            _ => asked,
        }
    };
    goldens.iter().skip(6).take(6).enumerate().map(asked).collect()
}

async fn run_all(fleet: &Fleet, requests: &[Asked]) -> Vec<Outcome> {
    run_at(&fleet.ready().grpc, requests).await
}

async fn run_at(gateway: &str, requests: &[Asked]) -> Vec<Outcome> {
    let mut client = client(gateway).await;
    let mut outcomes = Vec::new();
    for asked in requests {
        outcomes.push(asked.run(&mut client).await.unwrap());
    }
    outcomes
}

fn accepted(outcomes: &[Outcome]) -> Vec<u32> {
    outcomes.iter().map(|outcome| outcome.usage.accepted_tokens).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hits_change_neither_tokens_nor_what_the_draft_is_good_for() {
    let requests = requests();
    let cold = Fleet::start(EYRIE, &["--prefix-cache-bytes", "0"]);
    let wanted = run_all(&cold, &requests).await;
    assert!(wanted.iter().all(|outcome| outcome.usage.cached_tokens == 0));
    drop(cold);
    with_half_of_the_feature_rows(&requests, &wanted).await;

    let fleet = Fleet::start(EYRIE, &["--restart"]);
    for pass in 0..2 {
        let got = run_all(&fleet, &requests).await;
        check(&got, &wanted);
        for (i, outcome) in got.iter().enumerate().skip(usize::from(pass == 0)) {
            let whole = if pass == 0 { COMMON as u32 } else { outcome.prompt_ids.len() as u32 };
            let cached = outcome.usage.cached_tokens;
            // The last token of a prompt is always computed: the first of the reply is drawn from its row.
            let least = (whole - whole % PAGE).min(outcome.prompt_ids.len() as u32 - 1);
            assert!(cached >= least, "request {i} of pass {pass}: {cached} cached");
        }
    }

    // A draft that starts anew has none of it: it asks for the rows and is as good as before.
    let draft = fleet.ready().pids.draft;
    signal(draft.unwrap(), Signal::KILL);
    let endpoint = fleet.ready().grpc;
    until("the new draft to serve", async || {
        let is_new = fleet.ready().pids.draft != draft;
        let model = client(&endpoint).await.get_model(GetModelRequest {}).await.ok()?.into_inner();
        (is_new && model.speculating).then_some(())
    })
    .await;
    check(&run_all(&fleet, &requests).await, &wanted);
}

/// The prompts have eight pages that differ: the two that they begin with, and one each. A draft may start late for want of
/// rows, and a prompt is computed from its first page without rows on.
async fn with_half_of_the_feature_rows(requests: &[Asked], wanted: &[Outcome]) {
    let trio = Trio::start(EYRIE, &["--aux-cache-bytes", &(4 * ROWS_BYTES).to_string()]);
    trio.speculating().await;
    let others: Vec<Asked> = goldens().iter().map(|golden| ask(&golden.prompt_ids, TOKENS)).collect();
    for pass in 0..2 {
        for (i, (asked, wanted)) in requests.iter().zip(wanted).enumerate() {
            let got = run_at(&trio.at("gateway"), &[asked.clone(), others[i].clone()]).await;
            assert_eq!(got[0].ids, wanted.ids, "request {i} of pass {pass}");
            assert!(got[0].usage.cached_tokens > 0 || (pass, i) == (0, 0), "request {i} of pass {pass}");
        }
    }
}

fn check(got: &[Outcome], wanted: &[Outcome]) {
    for (i, (got, wanted)) in got.iter().zip(wanted).enumerate() {
        assert_eq!(got.ids, wanted.ids, "request {i}");
        assert_eq!(got.usage.rounds_without_draft, 0, "request {i}");
    }
    assert_eq!(accepted(got), accepted(wanted));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_with_one_beginning_at_the_same_time_get_the_tokens_they_get_alone() {
    let requests = requests();
    let fleet = Fleet::start(EYRIE, &["--kv-tokens", "1024"]);
    let endpoint = fleet.ready().grpc;
    let alone = run_all(&fleet, &requests).await;
    let mut running = tokio::task::JoinSet::new();
    for (i, asked) in requests.iter().cycle().take(12).cloned().enumerate() {
        let endpoint = endpoint.clone();
        running.spawn(async move { (i, asked.run(&mut client(&endpoint).await).await.unwrap().ids) });
    }
    while let Some(ended) = running.join_next().await {
        let (i, ids) = ended.unwrap();
        assert_eq!(ids, alone[i % alone.len()].ids, "stream {i}");
    }
}
