//! Clients that leave, are slow, are too many, or set a deadline; drain, health and the small calls.

use std::time::Duration;

use eyrie_wire::v1::generate_request::Prompt;
use eyrie_wire::v1::{DetokenizeRequest, GenerateRequest, GetModelRequest, TokenizeRequest};
use eyrie_wire::{reason_of, retry_after};
use tokio_stream::StreamExt;
use tonic::{Code, Request};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use crate::fake::*;

const PROMPT: [u32; 4] = [21, 22, 23, 24];

fn closed(seen: &Seen) -> bool {
    matches!(seen, Seen::Close { .. })
}

fn step(seen: &Seen) -> bool {
    matches!(seen, Seen::Step { .. })
}

#[tokio::test]
async fn a_client_that_leaves_frees_both_sides_within_a_round() {
    let (world, target, draft) = world_with(Rule::Right, |_| {}).await;
    target.hold();
    target.allow(3);
    let mut stream = world.stream(ids(&PROMPT, 300)).await;
    while within(stream.next()).await.unwrap().unwrap().token_ids.is_empty() {}
    target.events().wait(3, step).await;
    drop(stream);
    target.events().wait(1, closed).await;
    draft.closes().wait(1, |_| true).await;
    let before = target.events().count(step);
    target.allow(100);
    // Another request passes; the one that left computes nothing more.
    world.generate(ids(&PROMPT, 1)).await.unwrap();
    assert!(target.events().count(step) <= before + 2);
}

#[tokio::test]
async fn a_client_may_leave_before_the_first_token() {
    let (world, target, _draft) = world_with(Rule::Right, |o| o.max_streams = 1).await;
    target.hold();
    let mut client = world.connect().await;
    let waiting = tokio::spawn(async move { client.generate(ids(&PROMPT, 50)).await });
    target.events().wait(1, |s| matches!(s, Seen::Open { .. })).await;
    waiting.abort();
    target.events().wait(1, closed).await;
    target.allow(1000);
    // Its place is free again.
    within(async {
        while world.generate(ids(&PROMPT, 2)).await.is_err() {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

#[tokio::test]
async fn a_deadline_ends_the_request_and_says_how_far_it_came() {
    let (world, target, _draft) = world_with(Rule::Right, |_| {}).await;
    target.hold();
    target.allow(1);
    let mut request = Request::new(ids(&PROMPT, 50));
    request.set_timeout(Duration::from_millis(400));
    let mut stream = world.client.clone().generate_stream(request).await.unwrap().into_inner();
    let status = loop {
        match within(stream.next()).await.unwrap() {
            Ok(_) => {}
            Err(status) => break status,
        }
    };
    assert_eq!((status.code(), reason_of(&status).as_deref()), (Code::DeadlineExceeded, Some("DEADLINE")));
    assert_eq!(status.message(), "the deadline passed after 1 tokens");
    target.events().wait(1, closed).await;

    let mut request = Request::new(ids(&PROMPT, 50));
    request.set_timeout(Duration::from_millis(1000));
    let status = world.client.clone().generate(request).await.unwrap_err();
    assert_eq!((status.code(), reason_of(&status).as_deref()), (Code::DeadlineExceeded, Some("DEADLINE")));
}

#[tokio::test]
async fn short_timeouts_end_in_the_gateway_s_own_words() {
    let (world, target, _draft) = world_with(Rule::Right, |_| {}).await;
    target.hold();
    let mut running = tokio::task::JoinSet::new();
    for i in 0..40 {
        let mut client = world.connect().await;
        running.spawn(async move {
            let mut request = Request::new(ids(&PROMPT, 50));
            // Not set_timeout: the client's own clock would end the call as well.
            request.metadata_mut().insert("grpc-timeout", format!("{}m", 100 + i).parse().unwrap());
            match client.generate_stream(request).await {
                Ok(stream) => {
                    let chunks: Vec<_> = stream.into_inner().collect().await;
                    chunks.into_iter().find_map(Result::err).unwrap()
                }
                Err(status) => status,
            }
        });
    }
    while let Some(status) = within(running.join_next()).await {
        let status = status.unwrap();
        assert_eq!(reason_of(&status).as_deref(), Some("DEADLINE"), "{status:?}");
    }
}

#[tokio::test]
async fn a_timeout_is_kept_while_the_target_is_away_and_refused_when_it_is_none() {
    let world = World::start(tempfile::tempdir().unwrap(), |_| {}).await;
    let asked = async |timeout: &str| {
        let mut request = Request::new(ids(&PROMPT, 50));
        request.metadata_mut().insert("grpc-timeout", timeout.parse().unwrap());
        within(world.client.clone().generate(request)).await.unwrap_err()
    };
    let late = asked("300m").await;
    assert_eq!((late.code(), reason_of(&late).as_deref()), (Code::Unavailable, Some("UNREACHABLE")));
    assert_eq!(retry_after(&late), Some(Duration::from_secs(1)));
    assert!(late.message().contains("target.sock"), "{}", late.message());
    let bad = asked("soon").await;
    assert_eq!((bad.code(), reason_of(&bad).as_deref()), (Code::InvalidArgument, Some("INVALID_ARGUMENT")));
    assert!(bad.message().contains("given \"soon\""), "{}", bad.message());
}

#[tokio::test]
async fn one_request_too_many_is_refused_and_the_others_go_on() {
    let (world, target, _draft) = world_with(Rule::Right, |o| o.max_streams = 2).await;
    target.hold();
    let first = world.stream(ids(&PROMPT, 20)).await;
    let second = world.stream(ids(&PROMPT, 20)).await;
    let status = world.generate(ids(&PROMPT, 20)).await.unwrap_err();
    assert_eq!((status.code(), reason_of(&status).as_deref()), (Code::ResourceExhausted, Some("BUSY")));
    assert!(retry_after(&status).is_some(), "it says when to come back: {status:?}");
    assert!(status.message().contains("limit 2"), "{}", status.message());
    target.allow(1000);
    for stream in [first, second] {
        let tokens: Vec<u32> = drained(stream).await.into_iter().flat_map(|c| c.token_ids).collect();
        assert_eq!(tokens, plain(&PROMPT, 5, 20));
    }
}

#[tokio::test]
async fn many_at_once_get_their_own_tokens() {
    let (world, _target, _draft) = world_with(Rule::Right, |_| {}).await;
    let mut running = tokio::task::JoinSet::new();
    for i in 0..40 {
        let mut client = world.client.clone();
        running.spawn(async move {
            let prompt = [30 + i, 31, 32 + i];
            let reply = client.generate(ids(&prompt, 20 + i)).await.unwrap().into_inner();
            assert_eq!(reply.token_ids, plain(&prompt, 5, 20 + i as usize));
        });
    }
    while let Some(done) = within(running.join_next()).await {
        done.unwrap();
    }
}

#[tokio::test]
async fn a_client_that_does_not_read_holds_up_nobody_else() {
    let (world, target, _draft) = world_with(Rule::Right, |_| {}).await;
    let slow_client = world.connect().await;
    let slow = slow_client.clone().generate_stream(ids(&PROMPT, 390)).await.unwrap().into_inner();
    let reply = within(world.generate(ids(&PROMPT, 100))).await.unwrap();
    assert_eq!(reply.token_ids, plain(&PROMPT, 5, 100));
    drop(slow);
    target.events().wait(2, closed).await;
}

#[tokio::test]
async fn a_drain_refuses_new_requests_and_lets_running_ones_end() {
    let (mut world, target, _draft) = world_with(Rule::Right, |_| {}).await;
    target.hold();
    target.allow(1);
    let mut stream = world.stream(ids(&PROMPT, 30)).await;
    while within(stream.next()).await.unwrap().unwrap().token_ids.is_empty() {}
    world.gateway.start();
    let status = world.generate(ids(&PROMPT, 5)).await.unwrap_err();
    assert_eq!((status.code(), reason_of(&status).as_deref()), (Code::Unavailable, Some("DRAINING")));
    target.allow(1000);
    let tokens: Vec<u32> = drained(stream).await.into_iter().flat_map(|c| c.token_ids).collect();
    assert_eq!(tokens, plain(&PROMPT, 5, 30)[1..]);
    within(&mut world.running).await.unwrap();
}

#[tokio::test]
async fn a_drain_that_takes_too_long_ends_requests_with_a_status() {
    let (mut world, target, _draft) =
        world_with(Rule::Right, |o| o.drain_grace = Duration::from_millis(50)).await;
    target.hold();
    let mut stream = world.stream(ids(&PROMPT, 30)).await;
    target.events().wait(1, |s| matches!(s, Seen::Open { .. })).await;
    world.gateway.start();
    let status = loop {
        match within(stream.next()).await.unwrap() {
            Ok(_) => {}
            Err(status) => break status,
        }
    };
    assert_eq!((status.code(), reason_of(&status).as_deref()), (Code::Unavailable, Some("DRAINING")));
    within(&mut world.running).await.unwrap();
}

#[tokio::test]
async fn health_follows_the_target() {
    let (world, target, _draft) = world_with(Rule::Right, |_| {}).await;
    let channel = eyrie_wire::connect(&world.address).await.unwrap();
    let request = HealthCheckRequest { service: "eyrie.v1.Generation".into() };
    let mut health = HealthClient::new(channel).watch(request).await.unwrap().into_inner();
    let mut until = async |want: ServingStatus| {
        while within(health.next()).await.unwrap().unwrap().status() != want {}
    };
    until(ServingStatus::Serving).await;
    target.stop().await;
    until(ServingStatus::NotServing).await;
    let _target = FakeTarget::start(&socket(&world.dir, "target"), 9).await;
    until(ServingStatus::Serving).await;
}

#[tokio::test]
async fn text_goes_in_and_comes_out() {
    let (world, _target, _draft) = world_with(Rule::Right, |_| {}).await;
    let mut client = world.client.clone();
    let text = "a b a b".to_owned();
    let request = TokenizeRequest { text: text.clone(), add_special: false };
    let ids_of_text = client.tokenize(request).await.unwrap().into_inner().ids;
    let request = DetokenizeRequest { ids: ids_of_text.clone(), keep_special: false };
    assert_eq!(client.detokenize(request).await.unwrap().into_inner().text, text);
    let in_vocabulary = ids_of_text.iter().all(|&id| id < VOCAB);
    assert!(in_vocabulary, "{ids_of_text:?}");
    let request = GenerateRequest { prompt: Some(Prompt::Text(text)), ..ids(&[], 8) };
    let reply = world.generate(request).await.unwrap();
    assert_eq!(reply.prompt_ids, ids_of_text);
    assert_eq!(reply.token_ids, plain(&ids_of_text, 5, 8));
    let request = DetokenizeRequest { ids: vec![VOCAB], keep_special: false };
    let status = client.detokenize(request).await.unwrap_err();
    assert_eq!(reason_of(&status).as_deref(), Some("TOKEN_RANGE"));
}

#[tokio::test]
async fn the_model_tells_why_it_does_not_speculate() {
    let (world, target, draft) = world_with(Rule::Right, |_| {}).await;
    let mut client = world.client.clone();
    let model = client.get_model(GetModelRequest {}).await.unwrap().into_inner();
    assert!(model.speculating && model.not_speculating_because.is_empty());
    assert_eq!((model.draft_name.as_str(), model.shared_kind.as_str()), ("echo", "map"));
    assert_eq!((model.max_draft_tokens, model.context_length), (16, CONTEXT));
    draft.stop().await;
    world.speculating(false).await;
    let model = client.get_model(GetModelRequest {}).await.unwrap().into_inner();
    assert!(!model.not_speculating_because.is_empty());
    drop(target);
    let dir = tempfile::tempdir().unwrap();
    let _target = FakeTarget::start(&socket(&dir, "target"), 7).await;
    let world = World::start(dir, |o| o.drafts.clear()).await;
    let model = world.client.clone().get_model(GetModelRequest {}).await.unwrap().into_inner();
    assert_eq!(model.not_speculating_because, "no draft is configured");
}
