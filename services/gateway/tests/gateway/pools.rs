//! Several targets and drafts: who serves a sequence, and what becomes of it when one of them goes.

use std::time::Duration;

use eyrie_gateway::GatewayOptions;
use eyrie_wire::v1::draft_out::Body;
use eyrie_wire::v1::peer::{Role, State};
use eyrie_wire::v1::{GenerateChunk, GenerateRequest, Speculation};
use eyrie_wire::{Reason, reason_of, retry_after};
use tokio_stream::StreamExt;
use tonic::{Code, Streaming};

use crate::fake::*;

const PROMPT: [u32; 5] = [11, 12, 13, 14, 15];

/// A gateway over `targets` and `drafts`, by the names of their sockets.
async fn world(
    dir: tempfile::TempDir,
    targets: &[&str],
    drafts: &[&str],
    adjust: impl FnOnce(&mut GatewayOptions),
) -> World {
    let at = |names: &[&str]| names.iter().map(|name| socket(&dir, name)).collect::<Vec<_>>();
    let (targets, drafts) = (at(targets), at(drafts));
    World::start(dir, |options| {
        (options.targets, options.drafts) = (targets, drafts);
        adjust(options);
    })
    .await
}

/// Two targets that serve the same model, and no draft.
async fn two_targets(adjust: impl FnOnce(&mut GatewayOptions)) -> (World, FakeTarget, FakeTarget) {
    let dir = tempfile::tempdir().unwrap();
    let a = FakeTarget::start(&socket(&dir, "a"), 1).await;
    let b = FakeTarget::start(&socket(&dir, "b"), 2).await;
    let world = world(dir, &["a", "b"], &[], adjust).await;
    world.until_peers(2, Role::Target, State::Up).await;
    (world, a, b)
}

/// One target with two drafts that are attached to it.
async fn two_drafts(limits: [u32; 2]) -> (World, FakeTarget, FakeDraft, FakeDraft) {
    let dir = tempfile::tempdir().unwrap();
    let target = FakeTarget::start(&socket(&dir, "target"), 7).await;
    let c = FakeDraft::start_limited(&socket(&dir, "c"), 7, Rule::Right, limits[0]).await;
    let d = FakeDraft::start_limited(&socket(&dir, "d"), 7, Rule::Right, limits[1]).await;
    let soon = |o: &mut GatewayOptions| o.draft_deadline = Duration::from_millis(200);
    let world = world(dir, &["target"], &["c", "d"], soon).await;
    world.until_peers(2, Role::Draft, State::Up).await;
    (world, target, c, d)
}

fn open(seen: &Seen) -> bool {
    matches!(seen, Seen::Open { .. })
}

fn opens(target: &FakeTarget) -> usize {
    target.events().count(open)
}

async fn read(stream: &mut Streaming<GenerateChunk>, tokens: usize) -> Vec<u32> {
    let mut seen = Vec::new();
    while seen.len() < tokens {
        seen.extend(within(stream.next()).await.unwrap().unwrap().token_ids);
    }
    seen
}

/// The rest of a stream whose first tokens are `tokens`.
async fn whole(stream: Streaming<GenerateChunk>, mut tokens: Vec<u32>) -> Vec<u32> {
    tokens.extend(drained(stream).await.into_iter().flat_map(|chunk| chunk.token_ids));
    tokens
}

#[tokio::test]
async fn a_sequence_goes_to_the_target_with_the_fewest_and_stays_there() {
    let (world, a, b) = two_targets(|_| {}).await;
    a.hold();
    b.hold();
    let mut streams = Vec::new();
    for count in 1..=4 {
        streams.push(world.stream(ids(&PROMPT, 40)).await);
        within(async {
            while opens(&a) + opens(&b) < count {
                tokio::task::yield_now().await;
            }
        })
        .await;
    }
    assert_eq!((opens(&a), opens(&b)), (2, 2));
    a.allow(1000);
    a.events().wait(2, |seen| matches!(seen, Seen::Close { .. })).await;
    // Two have ended at one target: it gets the next two, whoever's turn it is.
    let more = [world.stream(ids(&PROMPT, 40)).await, world.stream(ids(&PROMPT, 40)).await];
    a.events().wait(4, open).await;
    b.allow(1000);
    for stream in streams.into_iter().chain(more) {
        assert_eq!(whole(stream, Vec::new()).await, plain(&PROMPT, 5, 40));
    }
    assert_eq!((opens(&a), opens(&b)), (4, 2), "no sequence was opened twice");
}

#[tokio::test]
async fn sequences_of_other_gateways_count_where_our_own_are_equal() {
    let (world, a, b) = two_targets(|_| {}).await;
    a.queue();
    // The answer to the first question after that is known when the next one comes.
    let asked = a.events().count(|seen| *seen == Seen::Load);
    a.events().wait(asked + 2, |seen| *seen == Seen::Load).await;
    let before = opens(&a);
    for _ in 0..3 {
        world.generate(ids(&PROMPT, 2)).await.unwrap();
    }
    assert_eq!((opens(&a), opens(&b)), (before, 3));
}

#[tokio::test]
async fn what_one_target_refuses_another_takes() {
    for reason in [Reason::Busy, Reason::Loading, Reason::Draining, Reason::KvCapacity, Reason::Context] {
        let (world, a, b) = two_targets(|_| {}).await;
        a.refuse_open(reason, "not here");
        assert_eq!(world.generate(ids(&PROMPT, 20)).await.unwrap().token_ids, plain(&PROMPT, 5, 20));
        assert_eq!((opens(&a), opens(&b)), (1, 1), "{reason:?}");
    }
    let (world, a, b) = two_targets(|_| {}).await;
    a.refuse_open(Reason::Busy, "full");
    b.refuse_open(Reason::KvCapacity, "too small");
    let status = world.generate(ids(&PROMPT, 20)).await.unwrap_err();
    assert_eq!(
        (status.message(), reason_of(&status).as_deref()),
        ("full", Some("BUSY")),
        "the one that passes"
    );
}

#[tokio::test]
async fn too_long_is_the_clients_fault_only_where_no_target_could_take_it() {
    let (world, a, b) = two_targets(|_| {}).await;
    a.refuse_open(Reason::KvCapacity, "too small");
    b.refuse_open(Reason::Context, "too small");
    let told = |status: &tonic::Status| (status.code(), status.message().contains("too small"));
    let status = world.generate(ids(&PROMPT, 20)).await.unwrap_err();
    assert_eq!(told(&status), (Code::InvalidArgument, true));
    // The other one might take it, and is away.
    b.stop().await;
    world.until_peers(1, Role::Target, State::Up).await;
    a.refuse_open(Reason::KvCapacity, "too small");
    let status = world.generate(ids(&PROMPT, 20)).await.unwrap_err();
    assert_eq!(told(&status), (Code::Unavailable, true), "{status:?}");
    let status = world.generate(ids(&[11; CONTEXT as usize], 2)).await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable, "{status:?}");
}

#[tokio::test]
async fn one_target_by_two_names_serves_as_two() {
    let dir = tempfile::tempdir().unwrap();
    let target = FakeTarget::start(&socket(&dir, "a"), 1).await;
    std::os::unix::fs::symlink(dir.path().join("a.sock"), dir.path().join("b.sock")).unwrap();
    let world = world(dir, &["a", "b"], &[], |_| {}).await;
    world.until_peers(2, Role::Target, State::Up).await;
    target.hold();
    let mut streams = Vec::new();
    for count in 1..=4 {
        streams.push(world.stream(ids(&PROMPT, 40)).await);
        target.events().wait(count, open).await;
    }
    target.allow(1000);
    for stream in streams {
        assert_eq!(whole(stream, Vec::new()).await, plain(&PROMPT, 5, 40));
    }
    assert_eq!(opens(&target), 4, "no stream took the place of the other");
    assert_eq!(target.events().count(|seen| matches!(seen, Seen::Stream { .. })), 2);
}

#[tokio::test]
async fn a_target_that_dies_hands_its_sequences_to_another() {
    let (world, a, b) = two_targets(|_| {}).await;
    a.hold();
    a.allow(4);
    let mut stream = world.stream(ids(&PROMPT, 60)).await;
    let tokens = read(&mut stream, 4).await;
    assert_eq!(opens(&b), 0);
    a.stop().await;
    assert_eq!(whole(stream, tokens).await, plain(&PROMPT, 5, 60));
    let reopened = |seen: &Seen| matches!(seen, Seen::Open { generated, .. } if *generated >= 4);
    assert_eq!(b.events().count(reopened), 1);
    // It is back, and takes its share again.
    let a = FakeTarget::start(&socket(&world.dir, "a"), 3).await;
    world.until_peers(2, Role::Target, State::Up).await;
    for _ in 0..2 {
        world.generate(ids(&PROMPT, 2)).await.unwrap();
    }
    assert_eq!(opens(&a), 1);
}

#[tokio::test]
async fn a_draining_target_ends_what_it_has_and_gets_nothing_new() {
    let (world, a, b) = two_targets(|_| {}).await;
    a.hold();
    a.allow(3);
    let mut stream = world.stream(ids(&PROMPT, 30)).await;
    let tokens = read(&mut stream, 3).await;
    b.hold();
    b.allow(1000);
    world.generate(ids(&PROMPT, 2)).await.unwrap();
    // Both have one live sequence, and it is the first one's turn.
    b.hold();
    let beside = world.stream(ids(&PROMPT, 30)).await;
    b.events().wait(2, open).await;
    a.refuse_open(Reason::Draining, "draining");
    let next = world.stream(ids(&PROMPT, 30)).await;
    b.events().wait(3, open).await;
    world.until_peers(1, Role::Target, State::Draining).await;
    a.allow(1000);
    assert_eq!(whole(stream, tokens).await, plain(&PROMPT, 5, 30));
    assert_eq!(a.events().count(|seen| matches!(seen, Seen::Close { .. })), 2);
    // It is idle now, and still not asked.
    b.allow(1000);
    for stream in [beside, next, world.stream(ids(&PROMPT, 30)).await] {
        assert_eq!(whole(stream, Vec::new()).await, plain(&PROMPT, 5, 30));
    }
    assert_eq!((opens(&a), opens(&b)), (2, 4));
    a.stop().await;
    let a = FakeTarget::start(&socket(&world.dir, "a"), 3).await;
    world.until_peers(2, Role::Target, State::Up).await;
    for _ in 0..2 {
        world.generate(ids(&PROMPT, 2)).await.unwrap();
    }
    assert_eq!(opens(&a), 1, "its next boot takes sequences");
}

#[tokio::test]
async fn a_draft_that_dies_or_falls_silent_is_replaced_within_the_request() {
    for dies in [true, false] {
        let (world, target, c, d) = two_drafts([16, 16]).await;
        target.hold();
        target.allow(4);
        let speculation = Speculation { trace: true, ..Default::default() };
        let request = GenerateRequest { speculation: Some(speculation), ..ids(&PROMPT, 100) };
        let mut stream = world.stream(request).await;
        let mut tokens = read(&mut stream, 10).await;
        assert_eq!(d.proposes().count(|_| true), 0, "one draft serves the sequence");
        let c = match dies {
            true => {
                c.stop().await;
                None
            }
            false => {
                c.set(Mood::Frozen);
                target.allow(1);
                world.until_peers(1, Role::Draft, State::Suspect).await;
                // As long as a sequence stays with a draft that is silent.
                tokio::time::sleep(Duration::from_secs(1)).await;
                Some(c)
            }
        };
        target.allow(1000);
        let rest = drained(stream).await;
        tokens.extend(rest.iter().flat_map(|chunk| chunk.token_ids.clone()));
        assert_eq!(tokens, plain(&PROMPT, 5, 100));
        let last = rest.iter().flat_map(|chunk| &chunk.rounds).next_back().unwrap();
        assert!(last.accepted > 0, "the other draft's guesses are accepted");
        assert!(
            d.replies().count(|body| matches!(body, Body::Need(_))) >= 1,
            "it lacked what the first one had"
        );
        assert!(target.events().count(|seen| matches!(seen, Seen::Fetch { .. })) >= 1);
        let usage = rest.last().unwrap().finished.as_ref().unwrap().usage.as_ref().unwrap();
        assert!(usage.rounds_without_draft <= 12, "{usage:?}");
        drop(c);
    }
}

#[tokio::test]
async fn a_fixed_draft_goes_to_a_draft_that_is_long_enough() {
    let (world, _target, short, long) = two_drafts([2, 12]).await;
    for _ in 0..3 {
        let reply = world.generate(traced(&PROMPT, 40, 9)).await.unwrap();
        assert_eq!(reply.token_ids, plain(&PROMPT, 5, 40));
        assert!(reply.rounds.iter().all(|round| round.proposed.len() == 9));
    }
    assert_eq!(short.proposes().count(|_| true), 0);
    let status = world.generate(traced(&PROMPT, 40, 13)).await.unwrap_err();
    assert!(status.message().contains("at most 12, given 13"), "{}", status.message());
    long.stop().await;
    world.until_peers(1, Role::Draft, State::Up).await;
    // The gateway's own choice is cut to what the one that is left takes.
    let reply = world.generate(ids(&PROMPT, 40)).await.unwrap();
    assert!(reply.usage.unwrap().accepted_tokens > 0);
    assert!(short.proposes().all().iter().all(|propose| propose.k <= 2));
}

#[tokio::test]
async fn a_draft_serves_only_the_target_that_it_is_attached_to() {
    let dir = tempfile::tempdir().unwrap();
    let a = FakeTarget::start(&socket(&dir, "a"), 1).await;
    let b = FakeTarget::start(&socket(&dir, "b"), 2).await;
    let drafts = [
        FakeDraft::start(&socket(&dir, "c"), 1, Rule::Right).await,
        FakeDraft::start(&socket(&dir, "d"), 2, Rule::Right).await,
    ];
    let world = world(dir, &["a", "b"], &["c", "d"], |_| {}).await;
    world.until_peers(2, Role::Target, State::Up).await;
    world.until_peers(2, Role::Draft, State::Up).await;
    world.until_peers(2, Role::Draft, State::Down).await;
    for _ in 0..2 {
        let reply = world.generate(traced(&PROMPT, 41, 4)).await.unwrap();
        assert_eq!(reply.token_ids, plain(&PROMPT, 5, 41));
        assert_eq!(reply.usage.unwrap().rounds_without_draft, 0);
    }
    assert_eq!((opens(&a), opens(&b)), (1, 1));
    assert!(drafts.iter().all(|draft| draft.proposes().count(|propose| propose.k > 0) == 8));
    let peers = world.peers().await;
    let apart = peers.iter().filter(|peer| peer.state() == State::Down);
    assert!(apart.clone().all(|peer| peer.because.contains("attached to epoch")), "{peers:?}");
    assert_eq!(peers.iter().filter(|peer| peer.role() == Role::Target).count(), 2);
}

#[tokio::test]
async fn a_target_with_another_model_is_left_out_until_all_have_it() {
    let dir = tempfile::tempdir().unwrap();
    let a = FakeTarget::start(&socket(&dir, "a"), 1).await;
    let brief = |o: &mut GatewayOptions| o.target_timeout = Duration::from_millis(300);
    let world = world(dir, &["a", "b"], &[], brief).await;
    world.until_peers(1, Role::Target, State::Up).await;
    let b = FakeTarget::start(&socket(&world.dir, "b"), 2).await;
    b.set_fingerprint("beef");
    b.break_streams();
    world.until_peers(1, Role::Target, State::OtherModel).await;
    let peers = world.peers().await;
    assert!(peers[1].because.contains("beef"), "{peers:?}");
    for _ in 0..2 {
        world.generate(ids(&PROMPT, 4)).await.unwrap();
    }
    a.stop().await;
    let status = within(world.generate(ids(&PROMPT, 4))).await.unwrap_err();
    assert_eq!((status.code(), reason_of(&status).as_deref()), (Code::Unavailable, Some("UNREACHABLE")));
    assert_eq!(retry_after(&status), Some(Duration::from_secs(1)));
    for part in ["a.sock: ", "b.sock: it serves model beef"] {
        assert!(status.message().contains(part), "{}", status.message());
    }
    assert_eq!(opens(&b), 0, "a model is never served in place of another");
    let a = FakeTarget::start(&socket(&world.dir, "a"), 3).await;
    a.set_fingerprint("beef");
    a.break_streams();
    within(async {
        while world.generate(ids(&PROMPT, 4)).await.is_err() {
            tokio::task::yield_now().await;
        }
    })
    .await;
    world.until_peers(2, Role::Target, State::Up).await;
}
