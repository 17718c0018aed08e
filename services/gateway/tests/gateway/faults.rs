//! Drafts that freeze, lie, refuse and die; targets that restart, break off and contradict themselves.

use std::time::{Duration, Instant};

use eyrie_wire::v1::draft_out::Body;
use eyrie_wire::v1::{GenerateRequest, Speculation};
use eyrie_wire::{Reason, reason_of};
use tokio_stream::StreamExt;
use tonic::Code;

use crate::fake::*;

const PROMPT: [u32; 5] = [11, 12, 13, 14, 15];

async fn world() -> (World, FakeTarget, FakeDraft) {
    world_with(Rule::Right, |_| {}).await
}

fn auto(max_tokens: u32) -> GenerateRequest {
    let speculation = Speculation { trace: true, ..Default::default() };
    GenerateRequest { speculation: Some(speculation), ..ids(&PROMPT, max_tokens) }
}

/// Reads until `tokens` ids have arrived.
async fn read(stream: &mut tonic::Streaming<eyrie_wire::v1::GenerateChunk>, tokens: usize) -> Vec<u32> {
    let mut seen = Vec::new();
    while seen.len() < tokens {
        seen.extend(within(stream.next()).await.unwrap().unwrap().token_ids);
    }
    seen
}

fn drafted(seen: &Seen) -> bool {
    matches!(seen, Seen::Verify { drafted, .. } if *drafted > 0)
}

#[tokio::test]
async fn without_a_draft_rounds_are_plain_until_one_comes() {
    let dir = tempfile::tempdir().unwrap();
    let target = FakeTarget::start(&socket(&dir, "target"), 7).await;
    let world = World::start(dir, |_| {}).await;
    target.hold();
    target.allow(9);
    let mut stream = world.stream(auto(60)).await;
    let mut tokens = read(&mut stream, 9).await;
    assert_eq!(target.events().count(drafted), 0);
    let _draft = FakeDraft::start(&socket(&world.dir, "draft"), 7, Rule::Right).await;
    world.speculating(true).await;
    target.allow(1000);
    let rest = drained(stream).await;
    tokens.extend(rest.iter().flat_map(|c| c.token_ids.clone()));
    assert_eq!(tokens, plain(&PROMPT, 5, 60));
    let usage = rest.last().unwrap().finished.as_ref().unwrap().usage.clone().unwrap();
    assert!(usage.rounds_without_draft >= 8 && usage.rounds_without_draft < 20, "{usage:?}");
    assert!(usage.accepted_tokens > 20, "it speculates within the same request: {usage:?}");
    // The references were kept for a draft that might come.
    assert_eq!(target.events().count(|s| matches!(s, Seen::Fetch { .. })), 0);
}

#[tokio::test]
async fn a_frozen_draft_costs_one_deadline_and_heals_when_it_answers() {
    let (world, target, draft) =
        world_with(Rule::Right, |o| o.draft_deadline = Duration::from_millis(100)).await;
    target.hold();
    target.allow(2);
    let mut stream = world.stream(auto(80)).await;
    let mut tokens = read(&mut stream, 5).await;
    draft.set(Mood::Frozen);
    let before = draft.proposes().count(|_| true);
    target.allow(17);
    tokens.extend(read(&mut stream, 10).await);
    world.speculating(false).await;
    let asked = draft.proposes().count(|_| true) - before;
    assert!(asked <= 2, "asked {asked} times: the one that froze and at most one before");
    draft.set(Mood::Fine);
    world.speculating(true).await;
    target.allow(1000);
    let rest = drained(stream).await;
    tokens.extend(rest.iter().flat_map(|c| c.token_ids.clone()));
    assert_eq!(tokens, plain(&PROMPT, 5, 80));
    let last = rest.iter().flat_map(|c| &c.rounds).next_back().unwrap();
    assert!(last.accepted > 0, "it speculates again");
}

#[tokio::test]
async fn what_the_draft_says_wrongly_is_dropped() {
    for mood in [Mood::TooMany, Mood::BadIds, Mood::BadParents, Mood::Refusing] {
        let (world, target, draft) = world().await;
        draft.set(mood);
        let reply = world.generate(traced(&PROMPT, 40, 3)).await.unwrap();
        assert_eq!(reply.token_ids, plain(&PROMPT, 5, 40), "{mood:?}");
        assert_eq!(reply.usage.unwrap().rounds_without_draft, 39, "{mood:?}");
        assert_eq!(target.events().count(drafted), 0, "{mood:?}");
        let asked = draft.proposes().count(|p| p.k > 0);
        assert!((2..12).contains(&asked), "{mood:?}: asked {asked} times");
    }
}

#[tokio::test]
async fn a_proposal_for_another_round_is_not_waited_for_longer_than_the_deadline() {
    let (world, target, draft) =
        world_with(Rule::Right, |o| o.draft_deadline = Duration::from_millis(50)).await;
    draft.set(Mood::WrongBase);
    let reply = world.generate(auto(12)).await.unwrap();
    assert_eq!(reply.token_ids, plain(&PROMPT, 5, 12));
    assert_eq!(target.events().count(drafted), 0);
}

#[tokio::test]
async fn a_draft_stream_made_again_heals_within_the_request() {
    let (world, target, draft) = world().await;
    target.hold();
    target.allow(4);
    let mut stream = world.stream(auto(100)).await;
    let mut tokens = read(&mut stream, 10).await;
    let needs = draft.replies().count(|b| matches!(b, Body::Need(_)));
    draft.break_streams();
    target.allow(1);
    draft.streams().wait(2, |_| true).await;
    world.speculating(true).await;
    target.allow(1000);
    let rest = drained(stream).await;
    tokens.extend(rest.iter().flat_map(|c| c.token_ids.clone()));
    assert_eq!(tokens, plain(&PROMPT, 5, 100));
    assert!(draft.replies().count(|b| matches!(b, Body::Need(_))) > needs);
    assert!(target.events().count(|s| matches!(s, Seen::Fetch { .. })) >= 1);
    let last = rest.iter().flat_map(|c| &c.rounds).next_back().unwrap();
    assert!(last.accepted > 0, "it speculates again");
}

#[tokio::test]
async fn rows_that_the_target_had_cached_are_fetched_for_the_first_round() {
    for (prompt, cached) in [(PROMPT.to_vec(), 4), ((20..90).collect(), 30)] {
        let (world, target, _draft) = world().await;
        target.cache(cached);
        let speculation = Speculation { trace: true, ..Default::default() };
        let request = GenerateRequest { speculation: Some(speculation), ..ids(&prompt, 40) };
        let reply = world.generate(request).await.unwrap();
        assert_eq!(reply.token_ids, plain(&prompt, 5, 40));
        let usage = reply.usage.unwrap();
        assert_eq!((usage.rounds_without_draft, usage.cached_tokens), (0, cached));
        assert_eq!(target.events().count(|s| matches!(s, Seen::Fetch { from: 0, .. })), 1);
    }
}

#[tokio::test]
async fn an_exact_request_waits_for_a_draft_that_heals() {
    let (world, target, draft) = world().await;
    target.hold();
    target.allow(4);
    let mut stream = world.stream(traced(&PROMPT, 60, 3)).await;
    read(&mut stream, 13).await;
    // The fifth step waits: nothing is in flight to the draft while its stream is made again.
    target.events().wait(4, drafted).await;
    draft.break_streams();
    draft.streams().wait(2, |_| true).await;
    world.speculating(true).await;
    target.allow(1000);
    let rest = drained(stream).await;
    assert!(rest.iter().flat_map(|c| &c.rounds).all(|r| r.proposed.len() == 3));
    let usage = rest.last().unwrap().finished.as_ref().unwrap().usage.clone().unwrap();
    assert_eq!((usage.rounds_without_draft, usage.rounds), (0, 15));
    assert!(draft.replies().count(|b| matches!(b, Body::Need(_))) >= 1);
}

#[tokio::test]
async fn rows_that_cannot_be_fetched_cost_the_draft_and_nothing_else() {
    for (reason, request) in [
        (Reason::Internal, auto(90)),
        (Reason::Unsupported, traced(&PROMPT, 90, 3)),
        (Reason::Busy, auto(90)),
    ] {
        let (world, target, draft) = world().await;
        target.refuse_fetch(reason);
        target.hold();
        target.allow(4);
        let mut stream = world.stream(request).await;
        let mut tokens = read(&mut stream, 10).await;
        draft.break_streams();
        target.allow(1);
        draft.streams().wait(2, |_| true).await;
        world.speculating(true).await;
        target.allow(1000);
        let rest = drained(stream).await;
        tokens.extend(rest.iter().flat_map(|c| c.token_ids.clone()));
        assert_eq!(tokens, plain(&PROMPT, 5, 90), "{reason:?}");
        let fetches = target.events().count(|s| matches!(s, Seen::Fetch { .. }));
        assert!((1..10).contains(&fetches), "{reason:?}: {fetches} fetches");
        assert_eq!(target.events().count(|s| matches!(s, Seen::Open { .. })), 1, "{reason:?}");
    }
}

#[tokio::test]
async fn a_draft_that_was_never_asked_is_soon_trusted_again() {
    let (world, _target, draft) =
        world_with(Rule::Right, |o| o.draft_deadline = Duration::from_millis(50)).await;
    draft.set(Mood::Unasked);
    let reply = world.generate(auto(12)).await.unwrap();
    assert_eq!(reply.token_ids, plain(&PROMPT, 5, 12));
    assert_eq!(reply.usage.unwrap().rounds_without_draft, 11);
    draft.set(Mood::Fine);
    world.speculating(true).await;
    let reply = world.generate(auto(12)).await.unwrap();
    assert!(reply.usage.unwrap().accepted_tokens > 0);
}

#[tokio::test]
async fn a_dead_draft_changes_no_token() {
    let (world, target, draft) = world().await;
    target.hold();
    target.allow(4);
    let mut stream = world.stream(auto(50)).await;
    let mut tokens = read(&mut stream, 10).await;
    draft.stop().await;
    world.speculating(false).await;
    target.allow(1000);
    let rest = drained(stream).await;
    tokens.extend(rest.iter().flat_map(|c| c.token_ids.clone()));
    assert_eq!(tokens, plain(&PROMPT, 5, 50));
}

#[tokio::test]
async fn a_target_that_restarts_goes_on_where_it_was() {
    let (world, target, draft) = world().await;
    target.hold();
    target.allow(5);
    let mut stream = world.stream(auto(90)).await;
    let mut tokens = read(&mut stream, 12).await;
    target.stop().await;
    let _draft = draft;
    let target = FakeTarget::start(&socket(&world.dir, "target"), 8).await;
    let rest = drained(stream).await;
    tokens.extend(rest.iter().flat_map(|c| c.token_ids.clone()));
    assert_eq!(tokens, plain(&PROMPT, 5, 90));
    let reopened = target.events().all().into_iter().find_map(|seen| match seen {
        Seen::Open { tokens, generated, .. } => Some((tokens, generated)),
        _ => None,
    });
    let (opened, generated) = reopened.unwrap();
    assert_eq!(opened, PROMPT.len() + generated as usize);
    assert!(generated >= 12, "{generated} tokens were taken along");
}

#[tokio::test]
async fn a_broken_target_stream_is_made_again_and_the_old_sequence_closed() {
    let (world, target, _draft) = world().await;
    target.hold();
    target.allow(3);
    let mut stream = world.stream(auto(60)).await;
    let mut tokens = read(&mut stream, 5).await;
    target.break_streams();
    target.allow(1000);
    let rest = drained(stream).await;
    tokens.extend(rest.iter().flat_map(|c| c.token_ids.clone()));
    assert_eq!(tokens, plain(&PROMPT, 5, 60));
    target.events().wait(2, |s| matches!(s, Seen::Close { .. })).await;
    let boots: Vec<_> =
        target.events().all().into_iter().filter(|s| matches!(s, Seen::Stream { .. })).collect();
    assert_eq!(boots.len(), 2);
    assert_eq!(boots[0], boots[1], "the boot id names the link, not the stream");
}

#[tokio::test]
async fn a_target_that_comes_back_with_another_model_ends_the_request() {
    let (world, target, _draft) = world().await;
    target.hold();
    target.allow(3);
    let mut stream = world.stream(auto(60)).await;
    read(&mut stream, 5).await;
    target.set_fingerprint("beef");
    target.break_streams();
    let status = loop {
        match within(stream.next()).await.unwrap() {
            Ok(_) => {}
            Err(status) => break status,
        }
    };
    assert_eq!(reason_of(&status).as_deref(), Some("STALE_EPOCH"));
    assert!(status.message().contains("beef") && status.message().contains("f00d"), "{}", status.message());
}

#[tokio::test]
async fn a_target_that_stays_away_is_one_clear_status() {
    let (world, target, _draft) =
        world_with(Rule::Right, |o| o.target_timeout = Duration::from_millis(150)).await;
    target.hold();
    target.allow(3);
    let mut stream = world.stream(auto(60)).await;
    read(&mut stream, 5).await;
    target.stop().await;
    let status = loop {
        match within(stream.next()).await.unwrap() {
            Ok(_) => {}
            Err(status) => break status,
        }
    };
    assert_eq!((status.code(), reason_of(&status).as_deref()), (Code::Unavailable, Some("UNREACHABLE")));
    let status = within(world.generate(auto(5))).await.unwrap_err();
    assert_eq!((status.code(), reason_of(&status).as_deref()), (Code::Unavailable, Some("UNREACHABLE")));
    assert!(status.message().contains("target.sock"), "{}", status.message());
}

#[tokio::test]
async fn a_target_whose_engine_hangs_is_one_clear_status_until_it_moves() {
    let (world, target, _draft) = world_with(Rule::Right, |o| {
        o.stall_limit = Duration::from_millis(50);
        o.target_timeout = Duration::from_millis(150);
    })
    .await;
    target.hold();
    target.allow(3);
    let mut stream = world.stream(auto(60)).await;
    read(&mut stream, 5).await;
    target.wedge(true);
    let status = loop {
        match within(stream.next()).await.unwrap() {
            Ok(_) => {}
            Err(status) => break status,
        }
    };
    assert_eq!((status.code(), reason_of(&status).as_deref()), (Code::Unavailable, Some("UNREACHABLE")));
    assert!(status.message().contains("computes nothing"), "{}", status.message());
    target.wedge(false);
    target.allow(1000);
    let again = within(async {
        loop {
            if let Ok(reply) = world.generate(auto(30)).await {
                return reply;
            }
        }
    });
    assert_eq!(again.await.token_ids, plain(&PROMPT, 5, 30));
}

#[tokio::test]
async fn a_target_that_works_for_others_is_waited_for() {
    let (world, target, _draft) =
        world_with(Rule::Right, |o| o.stall_limit = Duration::from_millis(20)).await;
    target.hold();
    target.compute_for_others();
    let mut stream = world.stream(auto(60)).await;
    target.events().wait(4, |s| *s == Seen::Load).await;
    target.allow(1000);
    assert_eq!(read(&mut stream, 60).await, plain(&PROMPT, 5, 60));
    assert_eq!(target.events().count(|s| matches!(s, Seen::Open { .. })), 1);
}

#[tokio::test]
async fn a_sequence_that_waits_for_pages_keeps_its_place() {
    let (world, target, _draft) =
        world_with(Rule::Right, |o| o.stall_limit = Duration::from_millis(20)).await;
    target.hold();
    target.queue();
    let mut stream = world.stream(auto(60)).await;
    // Two looks are needed to call a target stalled, and five stalls to give up.
    target.events().wait(12, |s| *s == Seen::Load).await;
    target.allow(1000);
    assert_eq!(read(&mut stream, 60).await, plain(&PROMPT, 5, 60));
    assert_eq!(target.events().count(|s| matches!(s, Seen::Open { .. })), 1);
}

#[tokio::test]
async fn a_sequence_that_waits_for_pages_of_a_hung_engine_is_not_left_waiting() {
    let (world, target, _draft) = world_with(Rule::Right, |o| {
        o.stall_limit = Duration::from_millis(20);
        o.target_timeout = Duration::from_millis(150);
    })
    .await;
    target.hold();
    target.queue();
    let mut stream = world.stream(auto(60)).await;
    target.events().wait(4, |s| *s == Seen::Load).await;
    target.wedge(true);
    let status = loop {
        match within(stream.next()).await.unwrap() {
            Ok(_) => {}
            Err(status) => break status,
        }
    };
    assert_eq!((status.code(), reason_of(&status).as_deref()), (Code::Unavailable, Some("UNREACHABLE")));
}

#[tokio::test]
async fn a_running_request_waits_out_a_target_that_takes_none_now() {
    for reason in [Reason::Busy, Reason::Loading, Reason::KvCapacity] {
        let (world, target, _draft) = world().await;
        target.hold();
        target.allow(3);
        let mut stream = world.stream(auto(60)).await;
        let mut tokens = read(&mut stream, 5).await;
        target.refuse_open(reason, "not now");
        target.break_streams();
        target.allow(1000);
        let rest = drained(stream).await;
        tokens.extend(rest.iter().flat_map(|c| c.token_ids.clone()));
        assert_eq!(tokens, plain(&PROMPT, 5, 60), "{reason:?}");
        assert_eq!(target.events().count(|s| matches!(s, Seen::Open { .. })), 3, "{reason:?}");
    }
}

#[tokio::test]
async fn a_running_request_waits_for_busy_targets_as_long_as_it_takes() {
    let limit = Duration::from_secs(1);
    let (world, target, _draft) = world_with(Rule::Right, |o| o.target_timeout = limit).await;
    target.hold();
    target.allow(3);
    let mut stream = world.stream(auto(60)).await;
    let mut tokens = read(&mut stream, 5).await;
    // With a pause after each, 50 ms and twice as long every time.
    (0..5).for_each(|_| target.refuse_open(Reason::Busy, "not now"));
    let began = Instant::now();
    target.break_streams();
    target.allow(1000);
    tokens.extend(drained(stream).await.iter().flat_map(|c| c.token_ids.clone()));
    assert_eq!(tokens, plain(&PROMPT, 5, 60));
    assert!(began.elapsed() > limit);
}

#[tokio::test]
async fn a_refusal_that_does_not_pass_ends_the_request_with_its_reason() {
    let (world, target, _draft) =
        world_with(Rule::Right, |o| o.target_timeout = Duration::from_millis(40)).await;
    for (reason, code) in [(Reason::Busy, Code::ResourceExhausted), (Reason::Draining, Code::Unavailable)] {
        target.refuse_open(reason, "not now");
        let status = within(world.generate(auto(30))).await.unwrap_err();
        assert_eq!((status.code(), reason_of(&status).as_deref()), (code, Some(reason.as_str())));
        assert_eq!(status.message(), "not now");
    }
}

#[tokio::test]
async fn a_target_that_contradicts_itself_ends_only_that_request() {
    let (world, target, _draft) = world().await;
    target.lie_in_round(2);
    let status = world.generate(auto(30)).await.unwrap_err();
    assert_eq!(status.code(), Code::Internal);
    assert!(status.message().contains("kv_len"), "{}", status.message());
    target.lie_in_round(u32::MAX);
    assert_eq!(world.generate(auto(30)).await.unwrap().token_ids, plain(&PROMPT, 5, 30));
}

#[tokio::test]
async fn a_refusal_of_the_target_keeps_its_reason() {
    let (world, target, _draft) = world().await;
    target.refuse_open(Reason::KvCapacity, "900 tokens wanted, the cache holds 512");
    let status = world.generate(auto(30)).await.unwrap_err();
    assert_eq!((status.code(), reason_of(&status).as_deref()), (Code::InvalidArgument, Some("KV_CAPACITY")));
    assert_eq!(status.message(), "900 tokens wanted, the cache holds 512");
    target.refuse_open(Reason::UnknownSeq, "lost it");
    assert_eq!(world.generate(auto(30)).await.unwrap().token_ids.len(), 30, "opened again");
}

#[tokio::test]
async fn services_start_in_any_order() {
    let dir = tempfile::tempdir().unwrap();
    let draft = FakeDraft::start(&socket(&dir, "draft"), 7, Rule::Right).await;
    let world = World::start(dir, |_| {}).await;
    let request = world.generate(auto(20));
    let target = async { FakeTarget::start(&socket(&world.dir, "target"), 7).await };
    let (reply, _target) = tokio::join!(request, target);
    assert_eq!(reply.unwrap().token_ids, plain(&PROMPT, 5, 20));
    world.speculating(true).await;
    drop(draft);
}
