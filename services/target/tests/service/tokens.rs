//! What is generated: equal to an independent implementation, and to itself however it is computed.

use eyrie_wire::v1::{Committed, Open, target_item::Op};

use crate::harness::{Golden, Server, drafts, goldens, greedy, next_verify, seeded, together, tree_after};

const TOKENS: u32 = 48;

#[tokio::test(flavor = "multi_thread")]
async fn greedy_tokens_equal_the_goldens_plain_and_with_drafts_of_any_quality() {
    let server = Server::start().await;
    let mut rounds = server.rounds(1).await;
    for (seq, Golden { prompt, tokens }) in goldens(3).iter().enumerate() {
        let wanted = &tokens[..TOKENS as usize];
        let seq = seq as u64 * 10;
        assert_eq!(rounds.plain(seq, greedy(prompt, TOKENS)).await, wanted);
        for (k, wrong) in [(1, 3), (3, 1000), (5, 2), (7, 4), (7, 1), (63, 9)] {
            let open = greedy(prompt, TOKENS);
            let got = rounds.drafted(seq + k, open, |_, at| drafts(tokens, at, k as usize, wrong)).await;
            assert_eq!(got, wanted, "k {k}, every {wrong}th wrong");
        }
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_right_draft_is_accepted_whole_and_a_wrong_one_up_to_the_error() {
    let server = Server::start().await;
    let mut rounds = server.rounds(1).await;
    let Golden { prompt, tokens } = &goldens(1)[0];
    rounds.send(1, Op::Open(greedy(prompt, 90))).await;
    let opened = rounds.committed().await;
    assert_eq!((opened.round, opened.kv_len, opened.last), (0, prompt.len() as u32, true));
    assert_eq!(opened.tokens, tokens[..1]);
    rounds.send(1, next_verify(&opened, tokens[1..8].to_vec())).await;
    let right = rounds.committed().await;
    assert_eq!((right.path.as_slice(), &right.tokens), (&[1, 2, 3, 4, 5, 6, 7][..], &tokens[1..9].to_vec()));
    let mut wrong = tokens[9..14].to_vec();
    wrong[2] += 1;
    rounds.send(1, next_verify(&right, wrong)).await;
    let cut = rounds.committed().await;
    assert_eq!((cut.path.as_slice(), &cut.tokens), (&[1, 2][..], &tokens[9..12].to_vec()));
    assert_eq!((cut.round, cut.kv_len), (2, prompt.len() as u32 + 11));
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tree_accepts_the_path_that_plain_decoding_takes_and_goes_on_right() {
    let server = Server::start().await;
    let mut rounds = server.rounds(1).await;
    let Golden { prompt, tokens } = &goldens(1)[0];
    rounds.send(1, Op::Open(greedy(prompt, TOKENS))).await;
    let mut state = rounds.committed().await;
    let mut got = state.tokens.clone();
    while state.finish == 0 {
        rounds.send(1, tree_after(&state, tokens, got.len())).await;
        state = rounds.committed().await;
        assert_eq!(state.path, [2, 4, 6]);
        got.extend(&state.tokens);
    }
    assert_eq!(got, tokens[..TOKENS as usize]);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_chunks_a_prompt_is_computed_in_do_not_matter() {
    let long: Vec<u32> = goldens(8).into_iter().flat_map(|golden| golden.prompt).collect();
    let mut all = Vec::new();
    for prefill_chunk in [7, 64, 256] {
        let server = Server::start_with(|options| options.prefill_chunk = prefill_chunk).await;
        let mut rounds = server.rounds(1).await;
        let Golden { prompt, tokens } = &goldens(1)[0];
        assert_eq!(rounds.plain(1, greedy(prompt, 16)).await, tokens[..16]);
        all.push(rounds.plain(2, seeded(&long, TOKENS, 5)).await);
        server.stop().await;
    }
    assert_eq!(all[0], all[1]);
    assert_eq!(all[0], all[2]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_seed_gives_the_same_tokens_whatever_is_drafted() {
    let server = Server::start().await;
    let mut rounds = server.rounds(1).await;
    let Golden { prompt, tokens } = &goldens(1)[0];
    let plain = rounds.plain(1, seeded(prompt, TOKENS, 42)).await;
    assert_ne!(plain, tokens[..TOKENS as usize], "the temperature had no effect");
    assert_ne!(plain, rounds.plain(2, seeded(prompt, TOKENS, 43)).await, "the seed had no effect");
    for (seq, (k, wrong)) in [(1, 1000), (3, 4), (7, 5)].into_iter().enumerate() {
        let open = seeded(prompt, TOKENS, 42);
        let got = rounds.drafted(10 + seq as u64, open, |_, at| drafts(&plain, at, k, wrong)).await;
        assert_eq!(got, plain, "k {k}");
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sequence_opened_again_elsewhere_goes_on_with_the_same_tokens() {
    let server = Server::start().await;
    let mut rounds = server.rounds(1).await;
    let prompt = &goldens(1)[0].prompt;
    let whole = rounds.plain(1, seeded(prompt, TOKENS, 9)).await;
    let mut tokens = prompt.clone();
    tokens.extend(&whole[..20]);
    let again = Open { tokens, generated: 20, ..seeded(prompt, TOKENS, 9) };
    assert_eq!(rounds.plain(2, again).await, whole[20..]);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sequences_beside_others_get_the_tokens_they_get_alone() {
    let server = Server::start().await;
    let mut rounds = server.rounds(1).await;
    let goldens = goldens(8);
    // Different lengths, so that sequences join and leave.
    let open = |i: usize| match i % 2 {
        0 => greedy(&goldens[i].prompt, 10 + 5 * i as u32),
        _ => seeded(&goldens[i].prompt, 10 + 5 * i as u32, i as u64),
    };
    let mut alone = Vec::new();
    for i in 0..goldens.len() {
        alone.push(rounds.plain(100 + i as u64, open(i)).await);
    }
    let opens = (0..goldens.len()).map(open).collect();
    let drafted = |seq: u64, state: &Committed, so_far: &[u32]| {
        let drafts = drafts(&alone[seq as usize], so_far.len(), seq as usize % 4, 5);
        Some(next_verify(state, drafts))
    };
    let got = together(&mut rounds, opens, drafted).await;
    assert_eq!(got, alone);
    assert_eq!(server.load().await.kv_used, 0);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sequences_that_do_not_fit_wait_for_pages_and_then_run() {
    // Room for one of them at a time.
    let server = Server::start_with(|options| options.kv_tokens = 192).await;
    let mut rounds = server.rounds(1).await;
    let goldens = goldens(4);
    let opens = goldens.iter().map(|golden| greedy(&golden.prompt, 30)).collect();
    let got = together(&mut rounds, opens, |_, state, _| Some(next_verify(state, vec![]))).await;
    for (got, golden) in got.iter().zip(&goldens) {
        assert_eq!(got, &golden.tokens[..30]);
    }
    server.stop().await;
}
