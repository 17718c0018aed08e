//! P1 and P3 when the target's KV cache is too small for all that run.

use crate::EYRIE;
use eyrie_tests::{Asked, Fleet, ask, client, goldens, until};
use eyrie_wire::v1::LoadReport;

const TOKENS: u32 = 100;

async fn load(fleet: &Fleet) -> LoadReport {
    eyrie_tests::load(&fleet.ready().target).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sixteen_streams_in_a_small_cache_get_the_tokens_they_get_alone() {
    // Eight pages of 64 tokens, and each stream needs three in the end.
    let fleet = Fleet::start(EYRIE, &["--kv-tokens", "512"]);
    let endpoint = fleet.ready().grpc;
    let sampled =
        |i: usize, asked: Asked| if i.is_multiple_of(3) { asked.sampled(0.8, i as u64) } else { asked };
    let prompts = goldens().into_iter().take(16).map(|golden| golden.prompt_ids);
    let plain: Vec<Asked> = prompts.enumerate().map(|(i, ids)| sampled(i, ask(&ids, TOKENS))).collect();
    let mut alone = Vec::new();
    for asked in &plain {
        alone.push(asked.run(&mut client(&endpoint).await).await.unwrap().ids);
    }
    assert_eq!(load(&fleet).await.preemptions, 0);

    let mut running = tokio::task::JoinSet::new();
    for (i, asked) in plain.into_iter().enumerate() {
        let mut asked = match i % 4 {
            0 => asked,
            1 => asked.chain(3),
            2 => asked.tree(3, 3, 8),
            _ => asked.auto(),
        };
        asked.0.priority = i as i32 % 2;
        let endpoint = endpoint.clone();
        running.spawn(async move { (i, asked.run(&mut client(&endpoint).await).await.unwrap().ids) });
    }
    while let Some(ended) = running.join_next().await {
        let (i, ids) = ended.unwrap();
        assert_eq!(ids, alone[i], "stream {i}");
    }
    let end =
        until("the cache to be empty", async || Some(load(&fleet).await).filter(|l| l.kv_used == 0)).await;
    assert!(end.preemptions > 0, "{end:?}");
    assert_eq!((end.running, end.waiting, end.aux_bytes), (0, 0, 0));
}
