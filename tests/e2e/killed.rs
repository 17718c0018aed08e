//! P1 and P3 with processes that crash: the tokens are those of an undisturbed run, or there is one clear status, and
//! nothing is left behind.

use std::time::Duration;

use crate::EYRIE;
use eyrie_tests::{
    Asked, Outcome, Signal, TargetFault, TargetProxy, Trio, ask, client, collect, goldens, load, speculating,
    target_card, until,
};
use eyrie_wire::{reason_of, retry_after};
use tonic::{Code, Status};

const TOKENS: u32 = 400;

/// Four requests that run beside each other: plain, chain, tree, and adaptive with a seed.
fn mixed() -> Vec<Asked> {
    let prompts: Vec<_> = goldens().into_iter().take(4).map(|golden| golden.prompt_ids).collect();
    let asked = |n: usize| ask(&prompts[n], TOKENS);
    vec![asked(0), asked(1).chain(3), asked(2).tree(4, 4, 12), asked(3).auto().sampled(0.8, 5)]
}

/// Runs `requests` at once; `hit` is called when a quarter of the tokens of the first are out.
async fn run_and_hit(endpoint: &str, requests: &[Asked], hit: impl FnOnce()) -> Vec<Outcome> {
    let (sender, told) = tokio::sync::oneshot::channel();
    let mut sender = Some(sender);
    let mut running = Vec::new();
    for asked in requests {
        let stream = client(endpoint).await.generate_stream(asked.0.clone()).await.unwrap().into_inner();
        let mut sender = sender.take();
        running.push(async move {
            let outcome = collect(stream, |so_far| {
                if so_far.ids.len() >= TOKENS as usize / 4
                    && let Some(sender) = sender.take()
                {
                    let _ = sender.send(());
                }
            });
            outcome.await.unwrap()
        });
    }
    let mut tasks = tokio::task::JoinSet::new();
    for (n, request) in running.into_iter().enumerate() {
        tasks.spawn(async move { (n, request.await) });
    }
    told.await.unwrap();
    hit();
    let mut outcomes = tasks.join_all().await;
    outcomes.sort_by_key(|(n, _)| *n);
    outcomes.into_iter().map(|(_, outcome)| outcome).collect()
}

async fn undisturbed(endpoint: &str, requests: &[Asked]) -> Vec<Vec<u32>> {
    let mut client = client(endpoint).await;
    let mut all = Vec::new();
    for asked in requests {
        all.push(asked.run(&mut client).await.unwrap().ids);
    }
    all
}

fn ids(outcomes: &[Outcome]) -> Vec<&[u32]> {
    outcomes.iter().map(|outcome| outcome.ids.as_slice()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn services_that_are_killed_one_after_the_other_lose_no_token_and_leave_nothing() {
    let mut trio = Trio::start(EYRIE, &[]);
    trio.speculating().await;
    let requests = mixed();
    let expected = undisturbed(&trio.at("gateway"), &requests).await;
    for name in ["draft", "target"] {
        let endpoint = trio.at("gateway");
        let outcomes = run_and_hit(&endpoint, &requests, || {
            trio.kill(name);
            match name {
                "draft" => trio.start_draft("target"),
                _ => trio.start_target("target", &[]),
            }
        })
        .await;
        assert_eq!(ids(&outcomes), expected, "{name} killed");
        trio.speculating().await;
        trio.at_rest().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frozen_draft_leaves_nothing_behind_once_it_goes_on() {
    let trio = Trio::start(EYRIE, &[]);
    trio.speculating().await;
    let requests = mixed();
    let expected = undisturbed(&trio.at("gateway"), &requests).await;
    let outcomes = run_and_hit(&trio.at("gateway"), &requests, || trio.signal("draft", Signal::STOP)).await;
    assert_eq!(ids(&outcomes), expected);
    trio.signal("draft", Signal::CONT);
    trio.speculating().await;
    trio.at_rest().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_draft_that_slept_while_its_target_was_restarted_is_had_again_in_the_same_stream() {
    let mut trio = Trio::new(EYRIE);
    trio.start_target("target", &[]);
    trio.start_draft("target");
    let proxy = TargetProxy::start(&trio.at("to-target"), &trio.at("target")).await;
    trio.start_gateway("to-target", "draft", &[]);
    trio.speculating().await;
    let asked = ask(&goldens()[1].prompt_ids, 3 * TOKENS).auto().sampled(0.7, 5);
    let mut client = client(&trio.at("gateway")).await;
    let expected = asked.run(&mut client).await.unwrap().ids;

    let before = proxy.passed(|_| true).await.commits;
    let stream = client.generate_stream(asked.0).await.unwrap().into_inner();
    let mut running = tokio::task::JoinSet::new();
    running.spawn(async move { collect(stream, |_| {}).await });
    proxy.passed(|passed| passed.commits > before + 20).await;
    // So that it is not over before the draft is back.
    proxy.set(TargetFault::Slow(Duration::from_millis(50)));
    trio.signal("draft", Signal::STOP);
    trio.kill("target");
    trio.start_target("target", &[]);
    let target = trio.at("target");
    until("the stream to go on", async || load(&target).await.ok().filter(|load| load.steps > 8)).await;
    let card = target_card(&target).await.unwrap();
    let left_behind: Vec<_> = card.left_behind.iter().map(|importer| importer.holder.as_str()).collect();
    assert_eq!(left_behind, ["draft"], "it holds the boot before");
    trio.signal("draft", Signal::CONT);
    trio.speculating().await;
    proxy.set(TargetFault::None);

    let outcome = running.join_next().await.unwrap().unwrap().unwrap();
    assert_eq!(outcome.ids, expected);
    let last = outcome.rounds.iter().rev().take(20);
    assert!(last.filter(|round| !round.proposed.is_empty()).count() > 0, "{:?}", outcome.usage);
    assert!(outcome.usage.rounds_without_draft > 0, "{:?}", outcome.usage);
    trio.at_rest().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sequences_of_a_killed_gateway_are_freed() {
    let mut trio = Trio::start(EYRIE, &[]);
    trio.speculating().await;
    let mut streams = Vec::new();
    for asked in mixed() {
        let mut stream =
            client(&trio.at("gateway")).await.generate_stream(asked.0).await.unwrap().into_inner();
        assert!(stream.message().await.unwrap().is_some());
        streams.push(stream);
    }
    trio.kill("gateway");
    for mut stream in streams {
        while let Ok(Some(chunk)) = stream.message().await {
            assert!(chunk.finished.is_none(), "it was killed before");
        }
    }
    trio.start_gateway("target", "draft", &[]);
    trio.speculating().await;
    trio.at_rest().await;
    let golden = &goldens()[4];
    let outcome = ask(&golden.prompt_ids, 96).chain(3).run(&mut client(&trio.at("gateway")).await).await;
    assert_eq!(outcome.unwrap().ids, golden.greedy_ids);
}

/// One clear status that tells when to try again.
fn assert_passing(status: &Status, code: Code, reason: &str) {
    assert_eq!((status.code(), reason_of(status).as_deref()), (code, Some(reason)), "{status:?}");
    assert!(retry_after(status).is_some(), "{status:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_target_that_stays_away_is_one_clear_status_and_every_place_is_free_again() {
    let mut trio = Trio::new(EYRIE);
    trio.start_target("target", &[]);
    trio.start_draft("target");
    trio.start_gateway("target", "draft", &["--target-timeout", "1", "--max-streams", "4"]);
    trio.speculating().await;
    let endpoint = trio.at("gateway");
    let mut running = tokio::task::JoinSet::new();
    for asked in mixed() {
        let mut stream = client(&endpoint).await.generate_stream(asked.0).await.unwrap().into_inner();
        assert!(stream.message().await.unwrap().is_some());
        running.spawn(async move { collect(stream, |_| {}).await });
    }
    let refused = mixed()[0].run(&mut client(&endpoint).await).await.unwrap_err();
    assert_passing(&refused, Code::ResourceExhausted, "BUSY");
    trio.kill("target");
    for outcome in running.join_all().await {
        assert_passing(&outcome.unwrap_err(), Code::Unavailable, "UNREACHABLE");
    }
    let absent = mixed()[0].run(&mut client(&endpoint).await).await.unwrap_err();
    assert_passing(&absent, Code::Unavailable, "UNREACHABLE");

    trio.start_target("target", &[]);
    speculating(&endpoint).await;
    // A full set of requests at once: none of those that failed has kept its place.
    let mut again = tokio::task::JoinSet::new();
    for golden in goldens().into_iter().take(4) {
        let mut client = client(&endpoint).await;
        again.spawn(async move {
            let outcome = ask(&golden.prompt_ids, 96).auto().run(&mut client).await.unwrap();
            assert_eq!(outcome.ids, golden.greedy_ids);
        });
    }
    again.join_all().await;
    trio.at_rest().await;
}
