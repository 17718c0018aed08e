//! P1: speculative output equals plain output, bit for bit, whatever runs beside it.

use crate::EYRIE;
use eyrie_tests::{Asked, Fleet, ask, client, goldens};

const TOKENS: u32 = 64;

/// Greedy and seeded variants of one prompt.
fn variants(prompt: &[u32]) -> Vec<Asked> {
    let mut all = vec![ask(prompt, TOKENS)];
    all.extend((1..=3).map(|seed| ask(prompt, TOKENS).sampled(0.8, seed)));
    all
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn same_tokens_with_every_k_and_every_chunk_size() {
    let prompts: Vec<_> = goldens().into_iter().take(3).map(|g| g.prompt_ids).collect();
    let mut reference: Option<Vec<Vec<u32>>> = None;
    for chunk in ["256", "7"] {
        let fleet = Fleet::start(EYRIE, &["--prefill-chunk", chunk]);
        let mut client = client(&fleet.ready().grpc).await;
        let mut plain = Vec::new();
        for asked in prompts.iter().flat_map(|p| variants(p)) {
            let ids = asked.run(&mut client).await.unwrap().ids;
            assert_eq!(ids.len(), TOKENS as usize);
            for k in [1, 3, 7] {
                let drafted = asked.clone().chain(k).run(&mut client).await.unwrap();
                assert_eq!(drafted.ids, ids, "chunk {chunk}, K = {k}, {asked:?}");
                assert!(drafted.usage.drafted_tokens > 0, "it did speculate");
                assert_eq!(drafted.usage.rounds_without_draft, 0);
            }
            plain.push(ids);
        }
        match &reference {
            None => reference = Some(plain),
            Some(whole) => assert_eq!(&plain, whole, "prompt cut into chunks of {chunk}"),
        }
    }
    let seeded = &reference.unwrap()[..4];
    assert!((1..4).all(|i| (0..i).all(|j| seeded[i] != seeded[j])), "seeds give different tokens");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn same_tokens_beside_seven_others_that_join_and_leave() {
    let fleet = Fleet::start(EYRIE, &[]);
    let endpoint = fleet.ready().grpc;
    let mut alone = client(&endpoint).await;
    let prompts: Vec<_> = goldens().into_iter().map(|g| g.prompt_ids).collect();
    let watched = [ask(&prompts[0], 96).chain(3), ask(&prompts[1], 96).chain(5).sampled(0.9, 11)];
    let mut expected = Vec::new();
    for asked in &watched {
        let mut plain = asked.clone();
        plain.0.speculation = ask(&prompts[0], 1).0.speculation;
        expected.push(plain.run(&mut alone).await.unwrap().ids);
    }
    let mut others = tokio::task::JoinSet::new();
    for i in 0..7usize {
        let (endpoint, prompts) = (endpoint.clone(), prompts.clone());
        others.spawn(async move {
            let mut client = client(&endpoint).await;
            // Lengths differ, so that sequences join and leave all the time.
            for n in 0..4usize {
                let tokens = 10 + 13 * ((i + n) as u32 % 5);
                let asked = ask(&prompts[2 + (i * 4 + n) % 22], tokens);
                let asked = if n % 2 == 0 { asked.chain(1 + i as u32) } else { asked.sampled(1.0, n as u64) };
                assert_eq!(asked.run(&mut client).await.unwrap().ids.len(), tokens as usize);
            }
        });
    }
    for (asked, expected) in watched.iter().zip(&expected) {
        assert_eq!(&asked.run(&mut alone).await.unwrap().ids, expected, "{asked:?}");
    }
    while let Some(other) = others.join_next().await {
        other.unwrap();
    }
    for (asked, expected) in watched.iter().zip(&expected) {
        assert_eq!(&asked.run(&mut alone).await.unwrap().ids, expected, "and alone again");
    }
}
