//! The prefix cache: what it finds, and that nobody can tell from tokens or rows.

use eyrie_wire::v1::{Committed, Features, Open, Verify, target_item::Op};

use crate::features::attach;
use crate::harness::{
    Rounds, Server, close, drafts, fetch, goldens, greedy, next_verify, seeded, together, tree_after,
    verify_after,
};

/// Slots of a KV page.
const PAGE: usize = 64;
/// Bytes of a KV page of the demo model: 8 layers of 128 + 32 values a slot.
const PAGE_BYTES: u64 = (PAGE * 8 * 160 * 4) as u64;
/// Bytes of the feature rows of a page: 3 captured streams of 384 values a row.
const ROWS_BYTES: u64 = (PAGE * 3 * 384 * 4) as u64;

async fn with_cache(bytes: Option<u64>) -> Server {
    Server::start_with(|options| options.prefix_cache_bytes = bytes).await
}

/// At least `len` tokens of text.
fn text(len: usize) -> Vec<u32> {
    let text: Vec<u32> = goldens(12).into_iter().flat_map(|golden| golden.prompt).collect();
    text[..len].to_vec()
}

/// A prompt that begins as `text` and goes on otherwise from `at` on.
fn fork(text: &[u32], at: usize) -> Vec<u32> {
    [&text[..at], &[(text[at] + 1) % 4096, 17, 23]].concat()
}

/// Runs a sequence whose tokens are `right` to its end in one of four ways; the reply to its Open, and its tokens.
async fn run(rounds: &mut Rounds, way: usize, open: Open, right: &[u32]) -> (Committed, Vec<u32>) {
    rounds.send(1, Op::Open(open)).await;
    let opened = rounds.committed().await;
    let (mut state, mut tokens) = (opened.clone(), opened.tokens.clone());
    while state.finish == 0 {
        let op = match way % 4 {
            0 => next_verify(&state, drafts(right, tokens.len(), 4, 3)),
            1 => tree_after(&state, right, tokens.len()),
            2 => Op::Verify(Verify { steps: 3, ..verify_after(&state, vec![]) }),
            _ => next_verify(&state, vec![]),
        };
        rounds.send(1, op).await;
        state = rounds.committed().await;
        tokens.extend(&state.tokens);
        while !state.last {
            state = rounds.committed().await;
            tokens.extend(&state.tokens);
        }
    }
    rounds.send(1, close()).await;
    rounds.closed().await;
    (opened, tokens)
}

#[tokio::test(flavor = "multi_thread")]
async fn hits_around_page_borders_change_no_token_however_the_sequence_goes_on() {
    let (warm, cold) = (with_cache(None).await, with_cache(Some(0)).await);
    let (mut rounds, mut plain) = (warm.rounds(1).await, cold.rounds(1).await);
    let text = text(3 * PAGE + 20);
    rounds.plain(1, greedy(&text, 2)).await;
    let (mut lookups, mut hits) = (text.len() as u64 - 1, 0);
    for (way, at) in [1, 30, 63, 64, 65, 127, 128, 129, 191, 192, 193].into_iter().enumerate() {
        // The whole prompt is known, or a part of it.
        for prompt in [text[..at].to_vec(), fork(&text, at)] {
            let open = if way.is_multiple_of(2) { seeded(&prompt, 9, 7) } else { greedy(&prompt, 9) };
            let wanted = plain.plain(1, open.clone()).await;
            let (opened, got) = run(&mut rounds, way + prompt.len(), open, &wanted).await;
            let known = at.min(prompt.len() - 1);
            assert_eq!(got, wanted, "prompt of {} tokens, {known} known", prompt.len());
            assert!(opened.cached as usize >= known.min(3 * PAGE), "{} of {known} found", opened.cached);
            assert!((opened.cached as usize) < prompt.len());
            (lookups, hits) = (lookups + prompt.len() as u64 - 1, hits + u64::from(opened.cached));
        }
    }
    let load = warm.load().await;
    assert_eq!((load.prefix_lookups, load.prefix_hits), (lookups, hits));
    assert_eq!((load.running, load.kv_used, load.aux_bytes), (0, 0, 0));
    assert!(load.cached_tokens >= 3 * PAGE as u64, "{load:?}");
    let load = cold.load().await;
    assert_eq!((load.cached_tokens, load.prefix_lookups, load.prefix_hits), (0, 0, 0));
    warm.stop().await;
    cold.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_next_turn_of_a_conversation_starts_where_the_last_one_ended() {
    let (warm, cold) = (with_cache(None).await, with_cache(Some(0)).await);
    let (mut rounds, mut plain) = (warm.rounds(1).await, cold.rounds(1).await);
    let mut conversation = text(20);
    for turn in 0..4 {
        let open = seeded(&conversation, 40, turn);
        let wanted = plain.plain(1, open.clone()).await;
        let (opened, got) = run(&mut rounds, turn as usize, open, &wanted).await;
        assert_eq!(got, wanted, "turn {turn}");
        // The last token of a turn has no row, and of the rows whole pages are known.
        let rows = if turn == 0 { 0 } else { conversation.len() - 6 };
        assert_eq!(opened.cached as usize, rows - rows % PAGE, "turn {turn}");
        conversation.extend(got.iter().chain(&[40, 41, 42, 43, 44]));
    }
    warm.stop().await;
    cold.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sequences_with_one_beginning_share_its_pages_while_they_run() {
    let (warm, cold) = (with_cache(None).await, with_cache(Some(0)).await);
    let beginning = text(2 * PAGE + 3);
    let opens: Vec<Open> = (0..8)
        .map(|i| {
            let prompt = [beginning.as_slice(), &[100 + i / 2]].concat();
            Open { features: i % 3 != 0, ..seeded(&prompt, 30, u64::from(i / 2)) }
        })
        .collect();
    let plain = |_, state: &Committed, _: &[u32]| Some(next_verify(state, vec![]));
    let wanted = together(&mut cold.rounds(1).await, opens.clone(), plain).await;
    let next = |seq: u64, state: &Committed, so_far: &[u32]| {
        let right = &wanted[seq as usize];
        Some(match seq % 2 {
            0 => next_verify(state, drafts(right, so_far.len(), 4, 5)),
            _ => tree_after(state, right, so_far.len()),
        })
    };
    let mut rounds = warm.rounds(1).await;
    assert_eq!(together(&mut rounds, opens.clone(), next).await, wanted);
    assert_eq!(together(&mut rounds, opens.clone(), next).await, wanted, "all of them hit");

    // Opened one after the other, they hold the two pages of the beginning once.
    for (seq, open) in (0..).zip(opens) {
        rounds.send(seq, Op::Open(Open { features: false, ..open })).await;
        let opened = rounds.committed().await;
        assert!(opened.cached as usize >= 2 * PAGE, "{opened:?}");
    }
    let load = warm.load().await;
    assert_eq!((load.running, load.kv_used), (8, (2 + 8) * PAGE as u64));
    warm.stop().await;
    cold.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_preempted_sequence_finds_its_own_pages_again() {
    let server = Server::start_with(|options| options.max_sequences = 1).await;
    let prompt = text(2 * PAGE + 2);
    let mut rounds = server.rounds(1).await;
    let wanted = rounds.plain(1, greedy(&prompt, 9)).await;
    rounds.send(1, Op::Open(Open { priority: 1, ..greedy(&prompt, 9) })).await;
    let state = rounds.committed().await;
    rounds.send(2, Op::Open(greedy(&[1, 2, 3], 9))).await;
    rounds.committed().await;
    assert_eq!(server.load().await.preemptions, 1);
    rounds.send(2, close()).await;
    rounds.closed().await;
    let before = server.load().await;
    rounds.send(1, next_verify(&state, wanted[1..4].to_vec())).await;
    let reply = rounds.committed().await;
    assert_eq!((reply.tokens.as_slice(), reply.cached), (&wanted[1..5], 0));
    let after = server.load().await;
    assert_eq!(after.rows - before.rows, 2 + 4, "two rows of the prompt lie in no whole page");
    assert_eq!(after.prefix_lookups, before.prefix_lookups, "the prompt was looked up before");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_small_cache_forgets_what_was_used_longest_ago_and_is_never_wrong() {
    let prompts: Vec<Vec<u32>> = (0..6).map(|i| [&[i, i + 1], text(PAGE + 9).as_slice()].concat()).collect();
    let cold = with_cache(Some(0)).await;
    let mut plain = cold.rounds(1).await;
    let mut wanted = Vec::new();
    for prompt in &prompts {
        wanted.push(plain.plain(1, greedy(prompt, 5)).await);
    }
    cold.stop().await;
    for (bytes, kv_tokens, kept) in [(Some(2 * PAGE_BYTES), 4096, 2), (None, 4 * PAGE, 4), (Some(1), 4096, 0)]
    {
        let server = Server::start_with(|options| {
            (options.prefix_cache_bytes, options.kv_tokens) = (bytes, kv_tokens);
        })
        .await;
        let mut rounds = server.rounds(1).await;
        for (prompt, wanted) in prompts.iter().zip(&wanted) {
            for _ in 0..2 {
                assert_eq!(&rounds.plain(1, greedy(prompt, 5)).await, wanted);
            }
        }
        let load = server.load().await;
        assert!(load.cached_tokens <= (kept * PAGE) as u64, "{load:?}");
        assert_eq!((load.cached_tokens > 0, load.prefix_hits > 0, load.kv_used), (kept > 0, kept > 0, 0));
        // The first prompt was used longest ago, the last one just now.
        for (i, found) in [(0, 0), (5, if kept > 0 { PAGE } else { 0 })] {
            rounds.send(1, Op::Open(greedy(&prompts[i], 5))).await;
            assert_eq!(rounds.committed().await.cached as usize, found);
            rounds.send(1, close()).await;
            rounds.closed().await;
        }
        server.stop().await;
    }
}

/// Opens with features; those of the prompt and the first token's reply.
async fn opened(rounds: &mut Rounds, prompt: &[u32]) -> (Features, Committed) {
    rounds.send(1, Op::Open(Open { features: true, ..greedy(prompt, 9) })).await;
    (rounds.features().await, rounds.committed().await)
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_of_a_hit_are_fetched_and_are_those_first_published() {
    let server = with_cache(None).await;
    let lease = attach(&server).await;
    let mut rounds = server.rounds(1).await;
    let prompt = text(2 * PAGE + 10);
    let (first, _) = opened(&mut rounds, &prompt).await;
    let rows = lease.rows(&first.refs, 0);
    assert_eq!(rows.len(), prompt.len() * lease.width());
    // The page that a hit ends in has a copy until it is whole.
    for (at, blocks) in [(PAGE + 5, 3), (2 * PAGE, 2), (2 * PAGE + 4, 3)] {
        rounds.send(1, close()).await;
        rounds.closed().await;
        let (published, state) = opened(&mut rounds, &prompt[..at]).await;
        let cached = (at - 1).min(2 * PAGE);
        assert_eq!(state.cached as usize, cached);
        assert!(
            lease.rows(&published.refs, state.cached) == rows[cached * lease.width()..at * lease.width()]
        );
        rounds.send(1, fetch(3)).await;
        let again = rounds.features().await;
        assert_eq!((again.first_held, again.fetched), (0, true));
        assert!(lease.rows(&again.refs, 3) == rows[3 * lease.width()..at * lease.width()]);
        let load = server.load().await;
        assert_eq!(load.aux_bytes + load.cached_aux_bytes, blocks * ROWS_BYTES, "{at} tokens");
    }
    rounds.send(1, close()).await;
    rounds.closed().await;
    let load = server.load().await;
    assert_eq!((load.aux_bytes, load.cached_aux_bytes), (0, 2 * ROWS_BYTES));
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_that_were_let_go_start_later() {
    let server = Server::start_with(|options| options.aux_cache_bytes = 2 * ROWS_BYTES).await;
    let lease = attach(&server).await;
    let mut rounds = server.rounds(1).await;
    let prompt = text(3 * PAGE + 4);
    let (first, _) = opened(&mut rounds, &prompt).await;
    let rows = lease.rows(&first.refs, 0);
    rounds.send(1, close()).await;
    rounds.closed().await;
    let (_, state) = opened(&mut rounds, &prompt).await;
    assert_eq!(state.cached as usize, 3 * PAGE);
    rounds.send(1, fetch(0)).await;
    let held = rounds.features().await;
    assert_eq!(held.first_held as usize, 2 * PAGE, "two blocks: the last page's and the one before");
    assert!(lease.rows(&held.refs, held.first_held) == rows[2 * PAGE * lease.width()..]);
    rounds.send(1, close()).await;
    rounds.closed().await;

    // Computed for sequences that wanted no features: kept, since there is a draft.
    let other = [fork(&prompt, 0).as_slice(), &prompt].concat();
    rounds.plain(1, greedy(&other, 2)).await;
    let (published, state) = opened(&mut rounds, &other).await;
    assert_eq!((state.cached, published.refs[0].first), (3 * PAGE as u32, 3 * PAGE as u32));
    rounds.send(1, fetch(0)).await;
    assert_eq!(rounds.features().await.first_held as usize, 2 * PAGE);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_cache_of_rows_keeps_beginnings() {
    let server = Server::start_with(|options| options.aux_cache_bytes = 4 * ROWS_BYTES).await;
    let lease = attach(&server).await;
    let mut rounds = server.rounds(1).await;
    let prompt = text(3 * PAGE + 4);
    let mut rows = Vec::new();
    // The second prompt needs two blocks: the rows of one page of the first one go.
    for (prompt, cached) in [(&prompt, 0), (&fork(&prompt, 0).repeat(30), 0), (&prompt, 2)] {
        let (published, state) = opened(&mut rounds, prompt).await;
        assert_eq!(state.cached as usize, cached * PAGE);
        rows.push(lease.rows(&published.refs, state.cached));
        rounds.send(1, close()).await;
        rounds.closed().await;
        assert_eq!(server.load().await.cached_aux_bytes, 3 * ROWS_BYTES);
    }
    assert!(rows[2] == rows[0][2 * PAGE * lease.width()..]);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_whose_rows_are_more_than_are_kept_is_not_computed_again() {
    let server = Server::start_with(|options| options.aux_cache_bytes = 2 * ROWS_BYTES).await;
    let _lease = attach(&server).await;
    let mut rounds = server.rounds(1).await;
    let prompt = text(2 * PAGE + 10);
    for cached in [0, 2 * PAGE, 2 * PAGE] {
        let (_, state) = opened(&mut rounds, &prompt).await;
        assert_eq!(state.cached as usize, cached);
        rounds.send(1, close()).await;
        rounds.closed().await;
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_computed_without_a_draft_get_their_rows_when_one_wants_them() {
    let server = with_cache(None).await;
    let mut rounds = server.rounds(1).await;
    let prompt = text(2 * PAGE + 10);
    let wanted = rounds.plain(1, greedy(&prompt, 2)).await;
    let load = server.load().await;
    assert_eq!((load.aux_bytes, load.cached_aux_bytes), (0, 0));
    let lease = attach(&server).await;
    let (published, state) = opened(&mut rounds, &prompt).await;
    assert_eq!((state.cached, published.refs[0].first, &state.tokens[0]), (0, 0, &wanted[0]));
    let rows = lease.rows(&published.refs, 0);
    rounds.send(1, fetch(0)).await;
    assert_eq!(rounds.features().await.first_held, 0);
    rounds.send(1, close()).await;
    rounds.closed().await;

    // The pages are the ones that were known, and have their rows from now on.
    assert_eq!(server.load().await.cached_aux_bytes, 2 * ROWS_BYTES);
    let (_, state) = opened(&mut rounds, &prompt).await;
    assert_eq!(state.cached as usize, 2 * PAGE);
    rounds.send(1, fetch(0)).await;
    let again = rounds.features().await;
    assert_eq!(again.first_held, 0);
    assert!(lease.rows(&again.refs, 0) == rows);
    server.stop().await;
}
