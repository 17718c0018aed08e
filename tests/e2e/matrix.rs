//! P1 over everything at once: sixteen sequences of every kind beside each other, prompts cut anywhere, a cache that is
//! too small for all, shared beginnings, priorities, and services that crash on the way.

use crate::EYRIE;
use eyrie_tests::{Asked, Trio, ask, client, collect, goldens, load};

const SEQUENCES: u64 = 16;

/// Numbers that differ between calls and never between runs.
struct Chance(u64);

impl Chance {
    fn below(&mut self, limit: u32) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) % u64::from(limit)) as u32
    }
}

/// What is asked, plain, and the way it is drafted.
fn sequence(chance: &mut Chance, prompts: &[Vec<u32>]) -> (Asked, Asked) {
    let of = |chance: &mut Chance| prompts[chance.below(prompts.len() as u32) as usize].clone();
    // Half begin as another does, and part somewhere within a page of the cache.
    let mut prompt = of(chance);
    if chance.below(2) == 0 {
        prompt = prompts.iter().take(4).flatten().copied().take(20 + chance.below(150) as usize).collect();
        prompt.extend(of(chance));
    }
    let mut plain = ask(&prompt, 24 + chance.below(100));
    if chance.below(2) == 0 {
        plain = plain.sampled(0.6 + 0.1 * chance.below(6) as f32, u64::from(chance.below(1000)));
    }
    plain.0.priority = chance.below(3) as i32 - 1;
    let asked = plain.clone();
    let drafted = match chance.below(8) {
        0 | 1 => asked,
        2 => asked.auto(),
        3 => asked.tree(2, 3, 6),
        4 => asked.tree(4, 5, 16),
        _ => asked.chain([1, 3, 5, 7][chance.below(4) as usize]),
    };
    (plain, drafted)
}

/// Room for all, and every prompt is computed as a whole.
const COLD: &[&str] = &["--prefix-cache-bytes", "0"];

/// All sequences with the tokens that each gives by itself in plain mode.
async fn alone(endpoint: &str, seed: u64) -> Vec<(Asked, Vec<u32>)> {
    let prompts: Vec<_> = goldens().into_iter().map(|golden| golden.prompt_ids).collect();
    let (mut chance, mut client) = (Chance(seed), client(endpoint).await);
    let mut all = Vec::new();
    for _ in 0..SEQUENCES {
        let (plain, drafted) = sequence(&mut chance, &prompts);
        all.push((drafted, plain.run(&mut client).await.unwrap().ids));
    }
    all
}

/// Runs all sequences at once. `hits` are called one by one, each after another quarter of all tokens.
async fn together(endpoint: &str, all: &[(Asked, Vec<u32>)], hits: &mut [&mut dyn FnMut()]) {
    let (sender, mut tokens) = tokio::sync::mpsc::channel(1024);
    let mut running = tokio::task::JoinSet::new();
    for (asked, expected) in all.iter().cloned() {
        let (mut client, sender) = (client(endpoint).await, sender.clone());
        running.spawn(async move {
            let stream = client.generate_stream(asked.0.clone()).await.unwrap().into_inner();
            let mut seen = 0;
            let outcome = collect(stream, |so_far| {
                // A count that is lost only makes a hit later.
                let _ = sender.try_send(so_far.ids.len() - seen);
                seen = so_far.ids.len();
            });
            let outcome = outcome.await.unwrap_or_else(|status| panic!("{asked:?}: {status}"));
            assert_eq!(outcome.ids, expected, "{asked:?}");
        });
    }
    drop(sender);
    let quarter = all.iter().map(|(_, ids)| ids.len()).sum::<usize>() / 4;
    let (mut seen, mut hits) = (0, hits.iter_mut().zip(1..));
    let mut next = hits.next();
    while let Some(more) = tokens.recv().await {
        seen += more;
        if let Some((hit, quarters)) = &mut next
            && seen >= *quarters * quarter
        {
            hit();
            next = hits.next();
        }
    }
    assert!(next.is_none(), "the sequences ended before everything happened");
    running.join_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sixteen_mixed_sequences_give_what_each_gives_alone() {
    let roomy = Trio::start(EYRIE, COLD);
    roomy.speculating().await;
    let mut expected = Vec::new();
    for seed in [1, 2] {
        expected.push(alone(&roomy.at("gateway"), seed).await);
    }
    together(&roomy.at("gateway"), &expected[0], &mut []).await;
    roomy.at_rest().await;
    let computed = load(&roomy.at("target")).await.unwrap();
    assert_eq!((computed.preemptions, computed.prefix_hits), (0, 0), "the reference is cold");
    let (mut preemptions, mut hits) = (0, 0);
    for (all, chunk) in expected.iter().zip(["5", "64"]) {
        // Room for about three of the sixteen.
        let trio = Trio::start(EYRIE, &["--prefill-chunk", chunk, "--kv-tokens", "1280"]);
        trio.speculating().await;
        together(&trio.at("gateway"), all, &mut []).await;
        trio.at_rest().await;
        let load = load(&trio.at("target")).await.unwrap();
        preemptions += load.preemptions;
        hits += load.prefix_hits;
    }
    assert!(preemptions > 0 && hits > 0, "{preemptions} preemptions, {hits} hits");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sixteen_mixed_sequences_live_through_crashes_of_draft_and_target() {
    let flags = ["--prefill-chunk", "48", "--kv-tokens", "2048"];
    let mut trio = Trio::start(EYRIE, &flags);
    trio.speculating().await;
    let endpoint = trio.at("gateway");
    let cold = Trio::start(EYRIE, COLD);
    cold.speculating().await;
    let all = alone(&cold.at("gateway"), 3).await;
    drop(cold);
    let shared = std::cell::RefCell::new(&mut trio);
    let mut draft = || {
        let mut trio = shared.borrow_mut();
        trio.kill("draft");
        trio.start_draft("target");
    };
    let mut target = || {
        let mut trio = shared.borrow_mut();
        trio.kill("target");
        trio.start_target("target", &flags);
    };
    together(&endpoint, &all, &mut [&mut draft, &mut target]).await;
    trio.speculating().await;
    trio.at_rest().await;
}
