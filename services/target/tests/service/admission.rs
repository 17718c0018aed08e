//! Who holds slots and KV pages, for how long, and what callers are told meanwhile.

use eyrie_wire::reason_of;
use eyrie_wire::v1::{Committed, FinishReason, Open, Verify, target_item::Op, target_out::Body};

use crate::harness::{Golden, Server, close, fetch, goldens, greedy, next_verify, verify_after};

fn opens(count: u64, open: &Open) -> Vec<(u64, Op)> {
    (0..count).map(|seq| (seq, Op::Open(open.clone()))).collect()
}

fn committed(body: &Body) -> &Committed {
    match body {
        Body::Committed(committed) => committed,
        other => panic!("wanted a commit, got {other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn finished_sequences_hold_neither_slots_nor_pages() {
    let server = Server::start_with(|options| options.max_sequences = 4).await;
    let prompt = &goldens(1)[0].prompt;
    let outs = server.round(1, opens(16, &greedy(prompt, 1))).await.unwrap();
    assert_eq!(outs.len(), 16);
    for (seq, body) in &outs {
        assert_eq!(committed(body).finish, FinishReason::Length as i32, "sequence {seq}");
    }
    let load = server.load().await;
    assert_eq!((load.kv_used, load.running, load.waiting), (0, 0, 0));
    let others = server.round(2, opens(1, &greedy(prompt, 9))).await.unwrap();
    assert_eq!(committed(&others[0].1).finish, 0);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_finished_sequence_replays_its_last_replies_and_has_no_features() {
    let server = Server::start().await;
    let mut rounds = server.rounds(1).await;
    let Golden { prompt, tokens } = &goldens(1)[0];
    let open = Op::Open(greedy(prompt, 1));
    rounds.send(1, open.clone()).await;
    let first = rounds.committed().await;
    assert_eq!(first.tokens, tokens[..1]);
    rounds.send(1, open).await;
    assert_eq!(rounds.committed().await, first);

    rounds.send(2, Op::Open(Open { features: true, ..greedy(prompt, 4) })).await;
    rounds.features().await;
    let state = rounds.committed().await;
    let running = server.load().await;
    assert!(running.kv_used > 0 && running.aux_bytes > 0, "{running:?}");
    let verify = Verify { steps: 3, ..verify_after(&state, vec![]) };
    rounds.send(2, Op::Verify(verify.clone())).await;
    let replies = [rounds.committed().await, rounds.committed().await, rounds.committed().await];
    assert_eq!(replies[2].finish, FinishReason::Length as i32);
    let load = server.load().await;
    assert_eq!((load.kv_used, load.aux_bytes), (0, 0));
    rounds.send(2, Op::Verify(verify)).await;
    for reply in &replies {
        assert_eq!(&rounds.committed().await, reply);
    }
    rounds.send(2, fetch(0)).await;
    let features = rounds.features().await;
    assert!(features.refs.is_empty() && features.fetched, "{features:?}");
    assert_eq!(features.first_held, replies[2].kv_len);
    rounds.send(2, close()).await;
    rounds.closed().await;
    rounds.send(2, fetch(0)).await;
    assert_eq!(rounds.error().await.reason, "UNKNOWN_SEQ");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_oldest_of_many_finished_sequences_is_let_go() {
    let server = Server::start().await;
    let mut rounds = server.rounds(1).await;
    for seq in 0..257 {
        rounds.send(seq, Op::Open(greedy(&[7], 1))).await;
        assert_eq!(rounds.committed().await.finish, FinishReason::Length as i32);
    }
    for (seq, reason) in [(0, "UNKNOWN_SEQ"), (1, "UNSUPPORTED"), (256, "UNSUPPORTED")] {
        rounds.send(seq, fetch(0)).await;
        assert_eq!(rounds.error().await.reason, reason, "sequence {seq}");
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_unary_round_holds_a_bounded_number_of_items() {
    let server = Server::start().await;
    let items = |count| (0..count).map(|seq| (seq, close())).collect();
    assert_eq!(server.round(1, items(64)).await.unwrap().len(), 64);
    let status = server.round(1, items(65)).await.unwrap_err();
    assert_eq!(reason_of(&status).as_deref(), Some("INVALID_ARGUMENT"));
    assert!(status.message().contains("64 items, given 65"), "{status}");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frame_of_a_stream_holds_a_bounded_number_of_items() {
    let server = Server::start().await;
    let mut rounds = server.rounds(1).await;
    let items = |count| (0..count).map(|seq| (seq, close())).collect();
    rounds.send_all(items(4096)).await;
    for _ in 0..4096 {
        rounds.closed().await;
    }
    rounds.send_all(items(4097)).await;
    let status = rounds.status().await;
    assert_eq!(reason_of(&status).as_deref(), Some("INVALID_ARGUMENT"));
    assert!(status.message().contains("4096, given 4097"), "{status}");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_unary_open_that_waits_for_its_own_call_is_answered() {
    let server = Server::start_with(|options| options.max_sequences = 2).await;
    let Golden { prompt, tokens } = &goldens(1)[0];
    let outs = server.round(1, opens(3, &greedy(prompt, 9))).await.unwrap();
    for (seq, body) in &outs {
        assert_eq!(committed(body).tokens, tokens[..1], "sequence {seq}");
    }
    let load = server.load().await;
    assert_eq!((outs.len(), load.running, load.waiting, load.preemptions), (3, 2, 1, 1));
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_unary_open_that_gets_no_pages_is_refused_in_time_and_a_begun_sequence_never() {
    let server = Server::start_with(|options| options.max_sequences = 1).await;
    let Golden { prompt, tokens } = &goldens(1)[0];
    let begun = server.round(2, vec![(5, Op::Open(greedy(prompt, 9)))]).await.unwrap();
    let verify = next_verify(committed(&begun[0].1), vec![]);

    let better = Op::Open(Open { priority: -1, ..greedy(prompt, 200) });
    let mut rounds = server.rounds(1).await;
    rounds.send(0, better.clone()).await;
    let mut state = rounds.committed().await;
    // One runs and the next waits, so that the only place is never free.
    let keep_busy = async {
        for seq in 0.. {
            let credit = Verify { steps: 199, ..verify_after(&state, vec![]) };
            rounds.send_all(vec![(seq, Op::Verify(credit)), (seq + 1, better.clone())]).await;
            while !rounds.committed().await.last {}
            state = rounds.committed().await;
        }
    };
    let refused = async {
        tokio::select! {
            () = keep_busy => unreachable!(),
            outs = server.round(2, opens(1, &greedy(prompt, 9))) => outs.unwrap(),
        }
    };
    let waiting = async { server.round(2, vec![(5, verify)]).await.unwrap() };
    let release = async {
        let outs = refused.await;
        assert!(matches!(&outs[0].1, Body::Error(error) if error.reason == "BUSY"), "{outs:?}");
    };
    // Then the better ones are silent and give way.
    let (answered, ()) = tokio::join!(waiting, release);
    assert_eq!(committed(&answered[0].1).tokens, tokens[1..2]);
    drop(rounds);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_that_has_said_all_gets_every_answer_and_then_the_end() {
    let server = Server::start_with(|options| options.max_sequences = 2).await;
    let Golden { prompt, tokens } = &goldens(1)[0];
    let mut rounds = server.rounds(1).await;
    rounds.send(1, Op::Open(greedy(prompt, 90))).await;
    let state = rounds.committed().await;
    let credit = Verify { steps: 60, ..verify_after(&state, vec![]) };
    let items =
        vec![(1, Op::Verify(credit)), (2, Op::Open(greedy(prompt, 9))), (3, Op::Open(greedy(prompt, 9)))];
    rounds.send_all(items).await;
    rounds.half_close();
    let (mut got, mut opened) = (Vec::new(), 0);
    while let Some((seq, body)) = rounds.next().await.unwrap() {
        match body {
            Body::Committed(state) if seq == 1 => got.extend(state.tokens),
            // One of them takes the place of the other, which nobody can close any more.
            Body::Committed(_) => opened += 1,
            other => panic!("{seq}: {other:?}"),
        }
    }
    assert_eq!((got.as_slice(), opened), (&tokens[1..61], 2));
    server.load_until(|load| load.streams == 0).await;
    let mut next = server.rounds(1).await;
    next.send(2, fetch(0)).await;
    assert_eq!(next.error().await.reason, "UNSUPPORTED", "the sequence outlives the stream that opened it");
    server.stop().await;
}
