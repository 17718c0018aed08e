//! Too few KV pages for all: who gets them, and that nobody else can tell from the tokens.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use eyrie_wire::v1::{Committed, Open, Verify, target_item::Op, target_out::Body};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

use crate::harness::{
    Golden, Rounds, Server, close, drafts, fetch, goldens, greedy, next_verify, seeded, together, tree_after,
    verify_after,
};

/// The verify rows that a request must leave room for.
const VERIFY_ROWS: usize = 64;

/// Sequences that all go on in another way: credits, chains with wrong drafts, trees, single steps.
fn mixed(seq: u64, state: &Committed, right: &[u32], at: usize) -> Option<Op> {
    match seq % 4 {
        0 => state.last.then(|| Op::Verify(Verify { steps: 7, ..verify_after(state, vec![]) })),
        1 => Some(next_verify(state, drafts(right, at, 4, 5))),
        2 => Some(tree_after(state, right, at)),
        _ => Some(next_verify(state, vec![])),
    }
}

fn credit(state: &Committed, steps: u32) -> Op {
    Op::Verify(Verify { steps, ..verify_after(state, vec![]) })
}

/// Room for one sequence at a time, so that a better one always preempts.
async fn one_place() -> Server {
    Server::start_with(|options| options.max_sequences = 1).await
}

fn of_priority(priority: i32, open: Open) -> Op {
    Op::Open(Open { priority, ..open })
}

#[tokio::test(flavor = "multi_thread")]
async fn sequences_that_need_three_times_the_cache_get_the_tokens_of_a_large_one() {
    let goldens = goldens(10);
    let open = |i: usize| {
        let (prompt, tokens) = (&goldens[i].prompt, 130 + 8 * (i as u32 % 4));
        let open =
            if i.is_multiple_of(3) { greedy(prompt, tokens) } else { seeded(prompt, tokens, i as u64) };
        Open { features: i.is_multiple_of(2), ..open }
    };
    let opens: Vec<Open> = (0..goldens.len()).map(open).collect();
    let need: usize =
        opens.iter().map(|o| o.tokens.len() + o.limits.as_ref().unwrap().max_tokens as usize).sum();
    let large = Server::start().await;
    let plain = |_, state: &Committed, _: &[u32]| Some(next_verify(state, vec![]));
    let wanted = together(&mut large.rounds(1).await, opens.clone(), plain).await;
    assert_eq!(large.load().await.preemptions, 0);
    large.stop().await;

    let small = Server::start_with(|options| options.kv_tokens = need / 3).await;
    let next =
        |seq: u64, state: &Committed, so_far: &[u32]| mixed(seq, state, &wanted[seq as usize], so_far.len());
    let got = together(&mut small.rounds(1).await, opens, next).await;
    assert_eq!(got, wanted);
    let load = small.load().await;
    assert!(load.preemptions > 0, "{load:?}");
    assert_eq!((load.running, load.waiting, load.kv_used, load.aux_bytes), (0, 0, 0, 0));
    small.stop().await;
}

/// A stream with sequence 1, of a worse priority than all that come, and its first reply.
async fn low(server: &Server, boot: u64, golden: &Golden) -> (Rounds, Committed) {
    let mut rounds = server.rounds(boot).await;
    rounds.send(1, of_priority(1, greedy(&golden.prompt, 96))).await;
    let state = rounds.committed().await;
    (rounds, state)
}

/// Takes `count` replies of sequence 1, all rounds after `state`; returns the last one and the tokens.
async fn follow(rounds: &mut Rounds, mut state: Committed, count: usize) -> (Committed, Vec<u32>) {
    let mut tokens = Vec::new();
    for _ in 0..count {
        let next = rounds.committed().await;
        assert_eq!((next.round, next.kv_len), (state.round + 1, state.kv_len + next.tokens.len() as u32));
        tokens.extend(&next.tokens);
        state = next;
    }
    (state, tokens)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sequence_preempted_while_idle_keeps_its_place_its_replies_and_its_features() {
    let server = one_place().await;
    let Golden { prompt, tokens } = &goldens(1)[0];
    let mut rounds = server.rounds(1).await;
    let open = Open { features: true, ..greedy(prompt, 96) };
    rounds.send(1, of_priority(1, open.clone())).await;
    rounds.features().await;
    let state = rounds.committed().await;
    rounds.send(2, of_priority(0, greedy(prompt, 9))).await;
    let high = rounds.committed().await;
    let load = server.load().await;
    assert_eq!((load.running, load.waiting, load.preemptions), (1, 1, 1));

    rounds.send(1, of_priority(1, open)).await;
    assert_eq!(rounds.committed().await, state);
    rounds.send(1, fetch(0)).await;
    let held = rounds.features().await;
    assert_eq!((held.first_held, held.refs.iter().map(|at| at.rows).sum()), (0, state.kv_len));

    // The round waits; saying it again neither answers nor doubles it, and the better sequence goes on.
    let verify = next_verify(&state, tokens[1..4].to_vec());
    rounds.send_all(vec![(1, verify.clone()), (1, verify.clone()), (2, next_verify(&high, vec![]))]).await;
    assert_eq!(rounds.committed().await.tokens, tokens[1..2]);
    rounds.send(2, close()).await;
    rounds.closed().await;
    let reply = rounds.committed().await;
    assert_eq!((reply.round, &reply.tokens, reply.path.len()), (1, &tokens[1..5].to_vec(), 3));
    assert_eq!(reply.features.iter().map(|at| (at.first, at.rows)).collect::<Vec<_>>(), [(state.kv_len, 4)]);
    rounds.send(1, verify).await;
    assert_eq!(rounds.committed().await, reply);
    rounds.send(1, next_verify(&reply, vec![])).await;
    assert_eq!(rounds.committed().await.tokens, tokens[5..6]);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_credit_goes_on_after_a_preemption_and_after_a_broken_stream() {
    let server = one_place().await;
    let golden = &goldens(1)[0];
    let (mut rounds, opened) = low(&server, 1, golden).await;
    rounds.send(1, credit(&opened, 90)).await;
    let (state, mut got) = follow(&mut rounds, opened.clone(), 1).await;
    let mut better = server.rounds(2).await;
    better.send(7, of_priority(0, greedy(&golden.prompt, 9))).await;
    assert_eq!(better.committed().await.tokens, golden.tokens[..1]);
    let load = server.load().await;
    assert_eq!((load.running, load.waiting, load.preemptions), (1, 1, 1), "in the credit");
    drop(rounds);
    server.load_until(|load| load.streams == 1).await;

    let mut rounds = server.rounds(1).await;
    rounds.send(1, credit(&opened, 90)).await;
    let (_, replayed) = follow(&mut rounds, opened, 1).await;
    assert_eq!(replayed, got, "what was computed is replayed at once");
    better.send(7, close()).await;
    let (last, rest) = follow(&mut rounds, state, 89).await;
    got.extend(rest);
    assert_eq!((got.as_slice(), last.last), (&golden.tokens[1..91], true));
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_that_is_preempted_publishes_each_row_once_and_draws_the_same_token() {
    let server = Server::start_with(|options| {
        options.max_sequences = 1;
        options.prefill_chunk = 1;
        options.prefix_cache_bytes = Some(0);
    })
    .await;
    let long: Vec<u32> = goldens(12).into_iter().flat_map(|golden| golden.prompt).collect();
    let mut rounds = server.rounds(1).await;
    let whole = rounds.plain(1, greedy(&long, 2)).await;
    let before = server.load().await.rows;
    rounds.send(2, of_priority(1, Open { features: true, ..greedy(&long, 2) })).await;
    server.load_until(|load| load.rows > before + 20).await;
    let mut better = server.rounds(2).await;
    better.send(1, of_priority(0, greedy(&long[..30], 9))).await;
    better.committed().await;
    let load = server.load().await;
    assert_eq!((load.running, load.waiting, load.preemptions), (1, 1, 1));
    better.send(1, close()).await;
    let mut rows = 0;
    let state = loop {
        match rounds.body().await {
            Body::Features(features) => {
                for at in &features.refs {
                    assert_eq!(at.first, rows);
                    rows += at.rows;
                }
            }
            Body::Committed(state) => break state,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!((rows as usize, state.tokens.as_slice()), (long.len(), &whole[..1]));
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_preempted_sequence_can_be_closed() {
    let server = one_place().await;
    let golden = &goldens(1)[0];
    let (mut rounds, state) = low(&server, 1, golden).await;
    rounds.send(2, of_priority(0, greedy(&golden.prompt, 9))).await;
    rounds.committed().await;
    rounds.send_all(vec![(1, credit(&state, 90)), (1, close())]).await;
    rounds.closed().await;
    let load = server.load_until(|load| load.waiting == 0).await;
    assert_eq!(load.running, 1);
    rounds.send(2, close()).await;
    rounds.closed().await;
    assert_eq!(server.load().await.kv_used, 0);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_better_priority_is_served_first_and_equal_ones_by_arrival() {
    let server = one_place().await;
    let mut rounds = server.rounds(1).await;
    let opens = [i32::MAX, 0, -1, 0].into_iter().enumerate();
    let open = |(seq, priority)| (seq as u64, of_priority(priority, greedy(&[7, 8], 1)));
    rounds.send_all(opens.map(open).collect()).await;
    let mut order = Vec::new();
    for _ in 0..4 {
        order.push(rounds.next().await.unwrap().unwrap().0);
    }
    assert_eq!(order, [2, 1, 3, 0]);
    assert_eq!(server.load().await.preemptions, 0);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_better_priority_takes_the_place_of_a_worse_one_that_waits() {
    // The last of the worst, unless somebody has tokens of it already.
    for (begun, refused, served) in [(None, [4, 2], [3, 0, 5, 1]), (Some(2), [4, 1], [3, 0, 5, 2])] {
        let server = one_place().await;
        let mut rounds = server.rounds(1).await;
        // Four may wait; one frame is taken before any of it is admitted.
        let opens = [1, 2, 2, 0, 2, 1].into_iter().enumerate();
        let open = |(seq, priority)| {
            let generated = u32::from(begun == Some(seq));
            (seq as u64, of_priority(priority, Open { generated, ..greedy(&[7, 8], generated + 1) }))
        };
        rounds.send_all(opens.map(open).collect()).await;
        for refused in refused {
            let (seq, body) = rounds.next().await.unwrap().unwrap();
            assert!(matches!(&body, Body::Error(e) if e.reason == "BUSY"), "{body:?}");
            assert_eq!(seq, refused);
        }
        for served in served {
            assert_eq!(rounds.next().await.unwrap().unwrap().0, served);
        }
        assert_eq!(server.load().await.waiting, 0);
        server.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sequence_that_says_nothing_for_a_while_gives_way_to_its_equals() {
    let server = one_place().await;
    let Golden { prompt, tokens } = &goldens(1)[0];
    let mut rounds = server.rounds(1).await;
    let began = Instant::now();
    rounds.send(1, Op::Open(greedy(prompt, 9))).await;
    let first = rounds.committed().await;
    rounds.send(2, Op::Open(greedy(prompt, 9))).await;
    assert_eq!(rounds.committed().await.tokens, tokens[..1]);
    assert!(began.elapsed() >= Duration::from_secs(1), "an equal one was preempted at once");
    rounds.send(1, next_verify(&first, vec![])).await;
    assert_eq!(rounds.committed().await.tokens, tokens[1..2]);
    assert_eq!(server.load().await.preemptions, 2);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_shared_with_a_sequence_that_gives_way_needs_no_page_for_its_copy() {
    // Ten pages: five of the first sequence, and the five that the second one needs beside the four that it shares.
    let server = Server::start_with(|options| options.kv_tokens = 640).await;
    let text: Vec<u32> = goldens(30).into_iter().flat_map(|golden| golden.prompt).collect();
    let mut prompt = text[..575].to_vec();
    prompt[230] = (prompt[230] + 1) % 4096;
    let mut rounds = server.rounds(1).await;
    rounds.send(1, of_priority(1, greedy(&text[..300], 9))).await;
    rounds.committed().await;
    rounds.send(2, of_priority(0, greedy(&prompt, 1))).await;
    let opened = rounds.committed().await;
    assert_eq!((opened.kv_len, opened.cached), (575, 3 * 64));
    assert_eq!(server.load().await.preemptions, 1);
    server.stop().await;
}

/// One sequence of a random run.
#[derive(Debug, Clone)]
struct Job {
    golden: usize,
    seed: Option<u64>,
    tokens: usize,
    priority: i32,
    features: bool,
    /// Closed after so many tokens.
    until: usize,
}

const FUZZ_GOLDENS: usize = 4;
const FUZZ_TOKENS: usize = 150;

impl Job {
    fn open(&self, goldens: &[Golden]) -> Open {
        let (prompt, tokens) = (&goldens[self.golden].prompt, self.tokens as u32);
        let open = match self.seed {
            None => greedy(prompt, tokens),
            Some(seed) => seeded(prompt, tokens, seed),
        };
        Open { features: self.features, priority: self.priority, ..open }
    }
}

fn job() -> impl Strategy<Value = Job> {
    let what = (0..FUZZ_GOLDENS, proptest::option::of(0..2_u64), FUZZ_TOKENS / 3..=FUZZ_TOKENS);
    let how = (0..3_i32, any::<bool>(), 1..2 * FUZZ_TOKENS);
    (what, how).prop_map(|((golden, seed, tokens), (priority, features, until))| Job {
        golden,
        seed,
        tokens,
        priority,
        features,
        until,
    })
}

/// Tokens for each prompt and seed.
type References = BTreeMap<(usize, Option<u64>), Vec<u32>>;

/// What a server with room for all says.
async fn references(goldens: &[Golden]) -> References {
    let server = Server::start().await;
    let keys = (0..FUZZ_GOLDENS).flat_map(|golden| [None, Some(0), Some(1)].map(|seed| (golden, seed)));
    let job =
        |(golden, seed)| Job { golden, seed, tokens: FUZZ_TOKENS, priority: 0, features: false, until: 0 };
    let opens = keys.clone().map(|key| job(key).open(goldens)).collect();
    let credits = |_, state: &Committed, _: &[u32]| state.last.then(|| credit(state, FUZZ_TOKENS as u32));
    let tokens = together(&mut server.rounds(1).await, opens, credits).await;
    server.stop().await;
    keys.zip(tokens).collect()
}

/// Sizes of a server that has room for the longest of `jobs` and `spare` tokens.
#[derive(Debug, Clone)]
struct Sizes {
    spare: usize,
    prefill_chunk: usize,
    max_sequences: usize,
    prefix_cache_bytes: Option<u64>,
}

/// Runs `jobs` together and checks what they are told; returns how often one was preempted.
async fn check(jobs: &[Job], sizes: &Sizes, goldens: &[Golden], references: &References) -> u64 {
    let need = jobs.iter().map(|job| goldens[job.golden].prompt.len() + job.tokens).max().unwrap();
    let server = Server::start_with(|options| {
        options.kv_tokens = need + VERIFY_ROWS + sizes.spare;
        options.prefill_chunk = sizes.prefill_chunk;
        options.max_sequences = sizes.max_sequences;
        options.prefix_cache_bytes = sizes.prefix_cache_bytes;
    })
    .await;
    let right = |job: &Job| &references[&(job.golden, job.seed)][..job.tokens];
    let next = |seq: u64, state: &Committed, so_far: &[u32]| {
        let job = &jobs[seq as usize];
        match so_far.len() < job.until {
            true => mixed(seq, state, right(job), so_far.len()),
            false => Some(close()),
        }
    };
    let opens = jobs.iter().map(|job| job.open(goldens)).collect();
    let got = together(&mut server.rounds(1).await, opens, next).await;
    for (job, got) in jobs.iter().zip(&got) {
        assert_eq!(got.as_slice(), &right(job)[..got.len()], "{job:?}");
        assert!(got.len() >= job.until.min(job.tokens), "{} tokens of {job:?}", got.len());
    }
    let load = server.load().await;
    assert_eq!((load.running, load.waiting, load.kv_used, load.aux_bytes), (0, 0, 0, 0));
    server.stop().await;
    load.preemptions
}

#[test]
fn any_sequences_in_a_tiny_cache_get_the_tokens_of_a_large_one() {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let goldens = goldens(FUZZ_GOLDENS);
    let references = runtime.block_on(references(&goldens));
    let prefixes = prop_oneof![Just(None), Just(Some(0)), Just(Some(1))];
    let sizes = (0..100_usize, 1..80_usize, 2..6_usize, prefixes).prop_map(
        |(spare, prefill_chunk, max_sequences, prefix_cache_bytes)| Sizes {
            spare,
            prefill_chunk,
            max_sequences,
            prefix_cache_bytes,
        },
    );
    let config = ProptestConfig { cases: 6, failure_persistence: None, ..ProptestConfig::default() };
    let runs = (proptest::collection::vec(job(), 4..10), sizes);
    let preemptions = Cell::new(0);
    let outcome = TestRunner::new(config).run(&runs, |(jobs, sizes)| {
        let more = runtime.block_on(check(&jobs, &sizes, &goldens, &references));
        preemptions.set(preemptions.get() + more);
        Ok(())
    });
    outcome.unwrap();
    assert!(preemptions.get() > 0, "the caches were not tiny");
}
