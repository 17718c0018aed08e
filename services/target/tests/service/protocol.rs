//! Rules of the round stream: turns, repeats, refusals, credits, and what outlives a stream.

use std::time::{Duration, Instant};

use eyrie_wire::reason_of;
use eyrie_wire::v1::{
    Committed, FinishReason, Hello, Limits, Open, TargetFrame, TargetItem, Verify, target_item::Op,
    target_out::Body,
};
use tonic::Code;

use crate::harness::{
    Golden, Rounds, Server, close, fetch, goldens, greedy, next_verify, revoke, verify_after,
};

async fn opened(rounds: &mut Rounds, seq: u64, open: Open) -> Committed {
    rounds.send(seq, Op::Open(open)).await;
    rounds.committed().await
}

fn limits(max_tokens: u32) -> Option<Limits> {
    Some(Limits { max_tokens, ignore_eos: true, ..Default::default() })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_begins_with_a_hello_that_fits() {
    let server = Server::start().await;
    let good = server.hello(5);
    let (epoch, fingerprint) = (server.ready.epoch, server.ready.fingerprint.clone());
    for (hello, reason, part) in [
        (Hello { protocol_version: 2, ..good.clone() }, "PROTOCOL_VERSION", "must be 1, given 2"),
        (Hello { epoch: epoch ^ 1, ..good.clone() }, "STALE_EPOCH", "this boot's"),
        (Hello { fingerprint: "f00".to_owned(), ..good.clone() }, "STALE_EPOCH", "given f00"),
        (Hello { boot_id: 0, ..good.clone() }, "INVALID_ARGUMENT", "boot_id"),
    ] {
        let status = Rounds::connect(&server, hello).await.err().unwrap();
        assert_eq!(reason_of(&status).as_deref(), Some(reason), "{status}");
        assert!(status.message().contains(part), "{status}");
    }
    let known = Hello { epoch, fingerprint: fingerprint.clone(), ..good.clone() };
    let rounds = Rounds::connect(&server, known).await.unwrap();
    assert_eq!((rounds.hello.epoch, rounds.hello.boot_id), (epoch, 5));
    assert_eq!(rounds.hello.fingerprint, fingerprint);

    let mut rounds = server.rounds(6).await;
    rounds.send_frame(TargetFrame { hello: Some(good), items: vec![] }).await;
    let status = rounds.status().await;
    assert_eq!(status.code(), Code::InvalidArgument, "{status}");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_item_leaves_the_stream_and_other_items_alone() {
    let server = Server::start().await;
    let mut rounds = server.rounds(1).await;
    let Golden { prompt, tokens } = &goldens(1)[0];
    let open = greedy(prompt, 20);
    for (bad, reason, part) in [
        (
            Open { tokens: vec![1, 4096], ..open.clone() },
            "TOKEN_RANGE",
            "tokens[1] must be below the vocabulary size 4096, given 4096",
        ),
        (Open { tokens: vec![], ..open.clone() }, "INVALID_ARGUMENT", "tokens"),
        (Open { limits: limits(4090), ..open.clone() }, "CONTEXT", "29 + 4090"),
        (Open { limits: limits(4060), ..open.clone() }, "KV_CAPACITY", "29 + 4060"),
        (Open { sampling: None, ..open.clone() }, "INVALID_ARGUMENT", "sampling"),
    ] {
        rounds.send_all(vec![(1, Op::Open(bad)), (9, close())]).await;
        let error = rounds.error().await;
        assert_eq!(error.reason, reason, "{}", error.message);
        assert!(error.message.contains(part), "{}", error.message);
        rounds.closed().await;
    }
    let state = opened(&mut rounds, 1, open).await;
    let good = verify_after(&state, tokens[1..3].to_vec());
    for (bad, reason, part) in [
        (Verify { root: good.root + 1, ..good.clone() }, "INVALID_ARGUMENT", "root"),
        (Verify { tokens: vec![5000], ..good.clone() }, "TOKEN_RANGE", "given 5000"),
        (Verify { tokens: vec![1; 64], ..good.clone() }, "INVALID_ARGUMENT", "given 64"),
        (Verify { parents: vec![0, 2], ..good.clone() }, "INVALID_ARGUMENT", "parents[1]"),
        (Verify { parents: vec![0], ..good.clone() }, "INVALID_ARGUMENT", "parents"),
        (Verify { steps: 2, ..good.clone() }, "INVALID_ARGUMENT", "steps"),
    ] {
        rounds.send(1, Op::Verify(bad)).await;
        let error = rounds.error().await;
        assert_eq!(error.reason, reason, "{}", error.message);
        assert!(error.message.contains(part), "{}", error.message);
    }
    rounds.send_frame(TargetFrame { hello: None, items: vec![TargetItem { seq: 1, op: None }] }).await;
    assert_eq!(rounds.error().await.reason, "INVALID_ARGUMENT");
    for op in [Op::Verify(good.clone()), fetch(0), revoke()] {
        rounds.send(77, op).await;
        assert_eq!(rounds.error().await.reason, "UNKNOWN_SEQ");
    }
    rounds.send(1, fetch(0)).await;
    assert_eq!(rounds.error().await.reason, "UNSUPPORTED", "opened without features");
    rounds.send(1, Op::Verify(good)).await;
    assert_eq!(rounds.committed().await.tokens, tokens[1..4]);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_turn_tells_the_right_one_and_a_repeated_one_is_replayed() {
    let server = Server::start().await;
    let mut rounds = server.rounds(1).await;
    let Golden { prompt, tokens } = &goldens(1)[0];
    let state = opened(&mut rounds, 1, greedy(prompt, 20)).await;
    let first = verify_after(&state, tokens[1..4].to_vec());
    rounds.send(1, Op::Verify(first.clone())).await;
    let reply = rounds.committed().await;

    // The same turn with other tokens is still the same turn.
    rounds.send(1, Op::Verify(Verify { tokens: vec![1], ..first.clone() })).await;
    assert_eq!(rounds.committed().await, reply);
    for (round, base_len) in [(2, reply.kv_len + 1), (3, reply.kv_len), (1, reply.kv_len), (0, 0)] {
        let wrong = Verify { round, base_len, ..verify_after(&reply, vec![]) };
        rounds.send(1, Op::Verify(wrong)).await;
        let error = rounds.error().await;
        assert_eq!((error.reason.as_str(), error.code), ("BASE_LEN", Code::FailedPrecondition as i32));
        assert_eq!((error.expected_len, error.expected_round), (reply.kv_len, 2), "{}", error.message);
    }
    rounds.send(1, Op::Open(greedy(prompt, 20))).await;
    assert_eq!(rounds.error().await.reason, "DUPLICATE_SEQ");
    rounds.send(1, next_verify(&reply, vec![])).await;
    assert_eq!(rounds.committed().await.tokens, tokens[5..6]);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_repeated_open_is_answered_once_more() {
    let server = Server::start().await;
    let mut rounds = server.rounds(1).await;
    let prompt = &goldens(1)[0].prompt;
    let state = opened(&mut rounds, 1, greedy(prompt, 20)).await;
    assert_eq!(opened(&mut rounds, 1, greedy(prompt, 20)).await, state);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn stop_ids_and_the_end_of_the_text_end_a_sequence_inside_a_run() {
    let server = Server::start().await;
    let mut rounds = server.rounds(1).await;
    let Golden { prompt, tokens } = &goldens(1)[0];
    // The first occurrence of the id that stands at 6 is there.
    let stop = tokens[6];
    assert_eq!(tokens.iter().position(|&id| id == stop), Some(6));
    let stop_ids = Some(Limits { max_tokens: 50, stop_ids: vec![stop], ignore_eos: true });
    let state = opened(&mut rounds, 1, Open { limits: stop_ids, ..greedy(prompt, 50) }).await;
    rounds.send(1, next_verify(&state, tokens[1..9].to_vec())).await;
    let end = rounds.committed().await;
    assert_eq!((end.tokens.as_slice(), end.path.len()), (&tokens[1..7], 8));
    assert_eq!((end.finish, end.last), (FinishReason::Stop as i32, true));
    assert_eq!(end.kv_len, prompt.len() as u32 + 6);
    rounds.send(1, next_verify(&end, vec![])).await;
    assert!(rounds.error().await.message.contains("finished"));

    let state = opened(&mut rounds, 2, greedy(prompt, 3)).await;
    rounds.send(2, next_verify(&state, tokens[1..9].to_vec())).await;
    let end = rounds.committed().await;
    assert_eq!((end.tokens.as_slice(), end.finish), (&tokens[1..3], FinishReason::Length as i32));
    let end = opened(&mut rounds, 3, greedy(prompt, 1)).await;
    assert_eq!((end.tokens.as_slice(), end.finish), (&tokens[..1], FinishReason::Length as i32));
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_credit_streams_plain_steps_and_a_revoke_ends_it() {
    let server = Server::start().await;
    let mut rounds = server.rounds(1).await;
    let Golden { prompt, tokens } = &goldens(1)[0];
    let state = opened(&mut rounds, 1, greedy(prompt, 90)).await;
    let credit = Verify { steps: 5, ..verify_after(&state, vec![]) };
    rounds.send(1, Op::Verify(credit.clone())).await;
    let mut replies = Vec::new();
    for step in 1..=5 {
        let reply = rounds.committed().await;
        assert_eq!((reply.round, reply.kv_len), (step, prompt.len() as u32 + step));
        assert_eq!(reply.tokens, [tokens[step as usize]]);
        assert_eq!(reply.last, step == 5);
        replies.push(reply);
    }
    rounds.send(1, Op::Verify(credit)).await;
    for reply in &replies {
        assert_eq!(&rounds.committed().await, reply, "a repeated credit is replayed whole");
    }
    // A credit that no test could wait for: only the revoke ends it so early.
    let long = Verify { steps: 80, ..verify_after(&replies[4], vec![]) };
    rounds.send(1, Op::Verify(long)).await;
    rounds.committed().await;
    rounds.send(1, revoke()).await;
    let mut last = rounds.committed().await;
    while !last.last {
        last = rounds.committed().await;
    }
    assert!(last.finish == 0 && last.round < 80, "revoked only at round {}", last.round);
    // Revoking again changes nothing; the sequence goes on where it is.
    rounds.send(1, revoke()).await;
    rounds.send(1, next_verify(&last, vec![])).await;
    assert_eq!(rounds.committed().await.tokens, [tokens[last.round as usize + 1]]);

    let state = opened(&mut rounds, 2, greedy(prompt, 3)).await;
    rounds.send(2, Op::Verify(Verify { steps: 9, ..verify_after(&state, vec![]) })).await;
    assert!(!rounds.committed().await.last);
    let end = rounds.committed().await;
    assert_eq!((end.last, end.finish), (true, FinishReason::Length as i32));
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn close_frees_a_sequence_in_every_phase() {
    let server = Server::start_with(|options| options.prefill_chunk = 1).await;
    let mut rounds = server.rounds(1).await;
    let prompt = &goldens(1)[0].prompt;
    rounds.send(1, Op::Open(greedy(prompt, 20))).await;
    server.load_until(|load| load.kv_used > 0).await;
    rounds.send(1, close()).await;
    while !matches!(rounds.body().await, Body::Closed(_)) {}
    server.load_until(|load| load.kv_used == 0 && load.running == 0).await;

    let state = opened(&mut rounds, 2, greedy(prompt, 900)).await;
    rounds.send(2, Op::Verify(Verify { steps: 800, ..verify_after(&state, vec![]) })).await;
    rounds.committed().await;
    rounds.send(2, close()).await;
    while !matches!(rounds.body().await, Body::Closed(_)) {}
    let load = server.load_until(|load| load.kv_used == 0).await;
    assert!(load.steps < 800, "the credit went on after the close");
    rounds.send(2, close()).await;
    rounds.closed().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sequences_outlive_a_broken_stream_for_its_boot_and_are_freed_after_the_grace() {
    let server = Server::start().await;
    let Golden { prompt, tokens } = &goldens(1)[0];
    let mut rounds = server.rounds(1).await;
    let state = opened(&mut rounds, 1, greedy(prompt, 40)).await;
    let verify = verify_after(&state, tokens[1..4].to_vec());
    rounds.send(1, Op::Verify(verify.clone())).await;
    let reply = rounds.committed().await;
    drop(rounds);
    server.load_until(|load| load.streams == 0).await;

    let mut stranger = server.rounds(2).await;
    stranger.send(1, Op::Verify(verify.clone())).await;
    assert_eq!(stranger.error().await.reason, "UNKNOWN_SEQ", "another boot's sequence");
    let mut rounds = server.rounds(1).await;
    rounds.send(1, Op::Verify(verify)).await;
    assert_eq!(rounds.committed().await, reply);
    rounds.send(1, next_verify(&reply, vec![])).await;
    assert_eq!(rounds.committed().await.tokens, tokens[5..6]);

    let broken = Instant::now();
    drop(rounds);
    assert!(server.load().await.kv_used > 0);
    server.load_until(|load| load.kv_used == 0).await;
    let kept = broken.elapsed();
    assert!(kept > Duration::from_secs(4) && kept < Duration::from_secs(15), "kept {kept:?}");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_stream_of_a_boot_takes_over_a_running_credit() {
    let server = Server::start().await;
    let Golden { prompt, tokens } = &goldens(1)[0];
    let mut old = server.rounds(1).await;
    let state = opened(&mut old, 1, greedy(prompt, 90)).await;
    let credit = Verify { steps: 80, ..verify_after(&state, vec![]) };
    old.send(1, Op::Verify(credit.clone())).await;
    old.committed().await;
    let mut new = server.rounds(1).await;
    assert_eq!(old.status().await.code(), Code::Aborted);
    new.send(1, Op::Verify(credit)).await;
    // The replay and steps that were under way may both show a round; together they show every one.
    let mut got = vec![0; 81];
    loop {
        let reply = new.committed().await;
        got[reply.round as usize] = reply.tokens[0];
        if reply.last {
            break;
        }
    }
    assert_eq!(got[1..], tokens[1..81]);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unary_rounds_carry_a_sequence_from_call_to_call() {
    let server = Server::start().await;
    let Golden { prompt, tokens } = &goldens(1)[0];
    let mut client = server.client.clone();
    let mut call = async |op: Op| {
        let items = vec![TargetItem { seq: 3, op: Some(op) }];
        let frame = TargetFrame { hello: Some(server.hello(8)), items };
        let reply = client.round(frame).await.unwrap().into_inner();
        assert_eq!(reply.hello.unwrap().epoch, server.ready.epoch);
        let bodies = reply.outs.into_iter().map(|out| out.body.unwrap());
        bodies.collect::<Vec<_>>()
    };
    let Body::Committed(state) = call(Op::Open(greedy(prompt, 20))).await.remove(0) else { panic!() };
    assert_eq!(state.tokens, tokens[..1]);
    let Body::Committed(state) = call(next_verify(&state, tokens[1..4].to_vec())).await.remove(0) else {
        panic!()
    };
    assert_eq!(state.tokens, tokens[1..5]);
    let credit = call(Op::Verify(Verify { steps: 3, ..verify_after(&state, vec![]) })).await;
    assert_eq!(credit.len(), 3);
    assert!(call(revoke()).await.is_empty());
    assert!(matches!(call(close()).await[..], [Body::Closed(_)]));
    assert!(matches!(&call(fetch(0)).await[..], [Body::Error(error)] if error.reason == "UNKNOWN_SEQ"));
    assert_eq!(server.load().await.kv_used, 0);
    let twice = [close(), close()].map(|op| TargetItem { seq: 3, op: Some(op) }).to_vec();
    for (hello, items) in [(None, vec![]), (Some(server.hello(8)), twice)] {
        let status = client.round(TargetFrame { hello, items }).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument);
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_unary_round_that_waits_is_answered_when_another_call_interferes() {
    let server = Server::start().await;
    let prompt = &goldens(1)[0].prompt;
    let frame =
        |op| TargetFrame { hello: Some(server.hello(8)), items: vec![TargetItem { seq: 3, op: Some(op) }] };
    let (mut waiting, mut other) = (server.client.clone(), server.client.clone());
    let opened = waiting.round(frame(Op::Open(greedy(prompt, 1000)))).await.unwrap().into_inner();
    let Some(Body::Committed(state)) = opened.outs[0].body.clone() else { panic!() };
    let credit = Op::Verify(Verify { steps: 900, ..verify_after(&state, vec![]) });
    let interfere = async {
        server.load_until(|load| load.steps > 5).await;
        let busy = other.round(frame(fetch(0))).await.unwrap().into_inner();
        assert!(matches!(&busy.outs[0].body, Some(Body::Error(error)) if error.reason == "BUSY"), "{busy:?}");
        other.round(frame(close())).await.unwrap();
    };
    let (credit, ()) = tokio::join!(waiting.round(frame(credit)), interfere);
    let outs = credit.unwrap().into_inner().outs;
    assert!(outs.len() < 900);
    let last = outs.last().unwrap().body.clone();
    assert!(matches!(&last, Some(Body::Error(error)) if error.message.contains("closed")), "{last:?}");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_are_limited_in_number() {
    let server = Server::start().await;
    let mut open = Vec::new();
    for boot in 1..=256 {
        open.push(server.rounds(boot).await);
    }
    let status = Rounds::connect(&server, server.hello(999)).await.err().unwrap();
    assert_eq!(reason_of(&status).as_deref(), Some("BUSY"), "{status}");
    drop(open);
    server.load_until(|load| load.streams == 0).await;
    server.rounds(999).await;
    server.stop().await;
}
