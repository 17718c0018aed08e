//! P1 on the bundled pair against an independent reference, through all three services.

use crate::EYRIE;
use eyrie_tests::{Asked, Fleet, Golden, Outcome, Trio, ask, client, goldens};
use tokio::task::JoinSet;

/// Two correct float32 implementations may choose differently only where the reference's gap is smaller.
const CLOSE: f64 = 2e-4;
/// The same for the relative gap of tree scores.
const CLOSE_SCORE: f64 = 1e-5;

/// Three services whose gateway waits for every draft, however busy the machine is.
pub(crate) async fn patient() -> Trio {
    let mut trio = Trio::new(EYRIE);
    trio.start_target("target", &[]);
    trio.start_draft("target");
    trio.start_gateway("target", "draft", &["--draft-deadline", "60000"]);
    trio.speculating().await;
    trio
}

/// Runs requests, `places` of them beside each other; each comes back with what it gave.
pub(crate) async fn beside<K: Send + 'static>(
    trio: &Trio,
    places: usize,
    all: impl IntoIterator<Item = (K, Asked)>,
) -> Vec<(K, Outcome)> {
    let client = client(&trio.at("gateway")).await;
    let (mut running, mut done) = (JoinSet::new(), Vec::new());
    for (key, asked) in all {
        while running.len() >= places {
            done.extend(running.join_next().await.map(Result::unwrap));
        }
        let mut client = client.clone();
        running.spawn(async move { (key, asked.run(&mut client).await.unwrap()) });
    }
    done.extend(running.join_all().await);
    done
}

/// Beside each other, since a batch is quicker.
async fn at_once<K: Send + 'static>(
    trio: &Trio,
    all: impl IntoIterator<Item = (K, Asked)>,
) -> Vec<(K, Outcome)> {
    beside(trio, usize::MAX, all).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn greedy_tokens_and_chain_rounds_equal_the_reference() {
    let trio = patient().await;
    let goldens = goldens();
    assert_eq!(goldens.len(), 24);
    for golden in goldens.iter().filter(|g| g.min_gap >= CLOSE) {
        let asked = ask(&golden.prompt_ids, 96);
        let chains = [1, 3, 5, 7].map(|k| (k, asked.clone().chain(k)));
        for (k, outcome) in at_once(&trio, chains.into_iter().chain([(0, asked)])).await {
            assert_eq!(outcome.ids, golden.greedy_ids, "{} K={k}", golden.id);
            if k == 0 {
                assert!(outcome.rounds.iter().all(|r| r.proposed.is_empty()), "{} plain", golden.id);
            } else {
                check_rounds(golden, k, &outcome);
            }
        }
    }
}

fn check_rounds(golden: &Golden, k: u32, outcome: &Outcome) {
    let want = &golden.chain[&k.to_string()];
    if want.min_draft_gap < CLOSE {
        return;
    }
    let got: Vec<_> = outcome.rounds.iter().map(|r| (r.proposed.clone(), r.accepted)).collect();
    assert_eq!(got.len(), want.rounds.len(), "{} K={k}: rounds", golden.id);
    // The reference lets its last round run past 96 tokens.
    let all_but_last = got.len() - 1;
    assert_eq!(got[..all_but_last], want.rounds[..all_but_last], "{} K={k}", golden.id);
    assert_eq!(got[all_but_last].0, want.rounds[all_but_last].0, "{} K={k}: last proposal", golden.id);
    for round in &outcome.rounds {
        let chain: Vec<u32> = (0..k).collect();
        assert_eq!(round.parents, chain, "{} K={k}: root is node 0, the first proposal node 1", golden.id);
        let path: Vec<u32> = (1..=round.accepted).collect();
        assert_eq!(round.accepted_path, path);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dynamic_tree_rounds_equal_the_reference() {
    let trio = patient().await;
    let mut compared = 0;
    for golden in goldens().iter().filter(|g| g.min_gap >= CLOSE) {
        let asked = ask(&golden.prompt_ids, 96);
        let trees = golden.tree.keys().map(|n| (n.clone(), asked.clone().tree(4, 5, n.parse().unwrap())));
        for (nodes, outcome) in at_once(&trio, trees).await {
            let want = &golden.tree[&nodes];
            assert_eq!(outcome.ids, golden.greedy_ids, "{} tree of {nodes}", golden.id);
            assert_eq!(outcome.rounds.len(), want.rounds.len(), "{} tree of {nodes}", golden.id);
            let all_but_last = want.rounds.len() - 1;
            for (got, want) in outcome.rounds.iter().zip(&want.rounds[..all_but_last]) {
                if want.min_rel_gap < CLOSE_SCORE {
                    continue;
                }
                let parents: Vec<i64> = got.parents.iter().map(|&p| i64::from(p)).collect();
                assert_eq!((&got.proposed[..], &parents[..]), (&want.tokens[1..], &want.parents[1..]));
                assert_eq!(got.accepted_path, want.accepted_path);
                compared += 1;
            }
        }
    }
    assert!(compared > 100, "{compared} rounds compared");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn text_prompts_encode_as_the_reference_did_and_decode_back() {
    let fleet = Fleet::start(EYRIE, &["--no-draft"]);
    for golden in goldens().iter().take(4) {
        let out = std::process::Command::new(EYRIE)
            .args(["generate", "--json", "--ignore-eos", "--temperature", "0", "--max-tokens", "96"])
            .args(["--endpoint", &fleet.ready().grpc, "--prompt", &golden.prompt])
            .output()
            .unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        let reply: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
        assert_eq!(reply["prompt_ids"], serde_json::json!(golden.prompt_ids));
        assert_eq!(reply["token_ids"], serde_json::json!(golden.greedy_ids));
        assert_eq!(reply["finish_reason"], "length");
        assert_eq!(reply["usage"]["completion_tokens"], 96);
    }
}
