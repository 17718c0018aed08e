//! P2 and A12: a draft that dies or freezes costs speed, never a token, and heals within the request.

use crate::EYRIE;
use eyrie_tests::{Fleet, Outcome, Signal, ask, client, collect, goldens, signal, until};

/// Long enough that a restarted draft comes back while the request still runs.
const TOKENS: u32 = 1500;
const HIT_AT: usize = 100;

/// Index of the first traced round after `ids` tokens.
fn round_after(outcome: &Outcome, ids: usize) -> usize {
    let mut seen = 1;
    outcome
        .rounds
        .iter()
        .take_while(|r| {
            seen += r.emitted.len();
            seen <= ids
        })
        .count()
}

/// Runs a K = 3 request, calls `hit` once when `HIT_AT` tokens are out, and returns the outcome.
async fn run_and_hit(endpoint: &str, prompt: &[u32], mut hit: impl FnMut()) -> Outcome {
    let mut client = client(endpoint).await;
    let request = ask(prompt, TOKENS).chain(3).sampled(0.7, 5).0;
    let stream = client.generate_stream(request).await.unwrap().into_inner();
    let mut pending = true;
    let outcome = collect(stream, |so_far| {
        if pending && so_far.ids.len() >= HIT_AT {
            pending = false;
            hit();
        }
    });
    outcome.await.unwrap()
}

fn drafted(outcome: &Outcome, from: usize) -> usize {
    outcome.rounds[from..].iter().filter(|r| !r.proposed.is_empty()).count()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_draft_is_missed_and_speculates_again_in_the_same_request() {
    let fleet = Fleet::start(EYRIE, &["--restart"]);
    let before = fleet.ready();
    let prompt = &goldens()[0].prompt_ids;
    let plain = ask(prompt, TOKENS).sampled(0.7, 5).run(&mut client(&before.grpc).await).await.unwrap();

    let killed = run_and_hit(&before.grpc, prompt, || signal(before.pids.draft.unwrap(), Signal::KILL)).await;

    assert_eq!(killed.ids, plain.ids);
    let hit = round_after(&killed, HIT_AT);
    let gap =
        killed.rounds[hit..].iter().position(|r| r.proposed.is_empty()).expect("rounds without a draft")
            + hit;
    assert!(drafted(&killed, gap) > 0, "speculates again after round {gap} of {}", killed.rounds.len());
    assert!(killed.usage.rounds_without_draft > 0);
    let after = until("the new draft's pid", async || {
        Some(fleet.ready()).filter(|r| r.pids.draft != before.pids.draft)
    });
    let after = after.await;
    assert_eq!(after.pids.target, before.pids.target, "the target was not touched");
    assert_eq!(after.pids.gateway, before.pids.gateway);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frozen_draft_is_left_aside_and_taken_back_when_it_thaws() {
    let fleet = Fleet::start(EYRIE, &[]);
    let ready = fleet.ready();
    let draft = ready.pids.draft.unwrap();
    let prompt = &goldens()[1].prompt_ids;
    let plain = ask(prompt, TOKENS).sampled(0.7, 5).run(&mut client(&ready.grpc).await).await.unwrap();

    let mut client = client(&ready.grpc).await;
    let stream =
        client.generate_stream(ask(prompt, TOKENS).chain(3).sampled(0.7, 5).0).await.unwrap().into_inner();
    let (mut frozen, mut thawed) = (false, false);
    let outcome = collect(stream, |so_far| {
        if !frozen && so_far.ids.len() >= HIT_AT {
            frozen = true;
            signal(draft, Signal::STOP);
        }
        if frozen && !thawed && so_far.ids.len() >= 2 * HIT_AT {
            thawed = true;
            signal(draft, Signal::CONT);
        }
    });
    let outcome = outcome.await.unwrap();

    assert_eq!(outcome.ids, plain.ids);
    assert!(frozen && thawed);
    assert!(outcome.usage.rounds_without_draft > 0, "went on without it");
    assert!(drafted(&outcome, round_after(&outcome, 2 * HIT_AT + 50)) > 0, "speculates again");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dead_draft_without_restart_leaves_a_plain_service() {
    let fleet = Fleet::start(EYRIE, &[]);
    let ready = fleet.ready();
    let golden = &goldens()[2];
    signal(ready.pids.draft.unwrap(), Signal::KILL);
    let mut client = client(&ready.grpc).await;
    for _ in 0..2 {
        let outcome = ask(&golden.prompt_ids, 96).chain(3).run(&mut client).await.unwrap();
        assert_eq!(outcome.ids, golden.greedy_ids);
    }
    let model = until("the gateway to notice", async || {
        let mut client = eyrie_tests::client(&ready.grpc).await;
        let model = client.get_model(eyrie_wire::v1::GetModelRequest {}).await.ok()?.into_inner();
        (!model.speculating).then_some(model)
    });
    assert!(!model.await.not_speculating_because.is_empty());
}
