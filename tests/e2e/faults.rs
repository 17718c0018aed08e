//! P2, P3 and A1 on the wire: peers that lie, lose, repeat and reorder frames, and sockets that break in the middle of
//! one, change no token and leave nothing behind.

use std::time::Duration;

use crate::EYRIE;
use eyrie_tests::{
    Asked, Cable, DraftFault, DraftProxy, TargetFault, TargetProxy, Trio, ask, client, goldens, until,
};
use eyrie_wire::MAX_MESSAGE;
use eyrie_wire::v1::GetModelRequest;

const TOKENS: u32 = 24;

/// Three services with a proxy on each stream of the gateway, which waits a short time for the draft.
async fn proxied() -> (Trio, DraftProxy, TargetProxy) {
    let mut trio = Trio::new(EYRIE);
    trio.start_target("target", &[]);
    trio.start_draft("target");
    let draft = DraftProxy::start(&trio.at("to-draft"), &trio.at("draft")).await;
    let target = TargetProxy::start(&trio.at("to-target"), &trio.at("target")).await;
    trio.start_gateway("to-target", "to-draft", &["--draft-deadline", "30"]);
    trio.speculating().await;
    (trio, draft, target)
}

/// Requests with the tokens that each gives by plain decoding when nothing is wrong.
async fn plain(trio: &Trio, drafted: fn(Asked) -> Asked) -> Vec<(Asked, Vec<u32>)> {
    let goldens = goldens();
    let mut all: Vec<(Asked, Vec<u32>)> = Vec::new();
    for golden in &goldens[..2] {
        all.push((ask(&golden.prompt_ids, TOKENS), golden.greedy_ids[..TOKENS as usize].to_vec()));
    }
    let seeded = ask(&goldens[2].prompt_ids, TOKENS).sampled(0.8, 7);
    let tokens = seeded.run(&mut client(&trio.at("gateway")).await).await.unwrap().ids;
    all.push((seeded, tokens));
    all.into_iter().map(|(asked, tokens)| (drafted(asked), tokens)).collect()
}

/// Runs all requests at once; returns how many tokens were drafted and accepted, and the rounds without a draft.
async fn run_all(trio: &Trio, requests: &[(Asked, Vec<u32>)], what: &str) -> (u32, u32, u32) {
    let mut running = tokio::task::JoinSet::new();
    for (asked, tokens) in requests {
        let mut client = client(&trio.at("gateway")).await;
        let (asked, tokens, what) = (asked.clone(), tokens.clone(), what.to_owned());
        running.spawn(async move {
            let outcome = asked.run(&mut client).await.unwrap_or_else(|e| panic!("{what}: {asked:?}: {e}"));
            assert_eq!(outcome.ids, tokens, "{what}: {asked:?}");
            outcome.usage
        });
    }
    running.join_all().await.into_iter().fold((0, 0, 0), |(drafted, accepted, without), usage| {
        (
            drafted + usage.drafted_tokens,
            accepted + usage.accepted_tokens,
            without + usage.rounds_without_draft,
        )
    })
}

/// Waits until a request speculates as if nothing had been.
async fn heals(trio: &Trio, requests: &[(Asked, Vec<u32>)], what: &str) {
    until("drafts to be accepted again", async || {
        trio.speculating().await;
        (run_all(trio, requests, what).await.1 > 0).then_some(())
    })
    .await;
    trio.at_rest().await;
}

/// Whether proposals of a draft that misbehaves are verified.
#[derive(Debug, Clone, Copy)]
enum Used {
    Always,
    /// Some are missed, others may come in time.
    InTime,
    Never,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_draft_that_misbehaves_costs_speed_alone() {
    let (trio, draft, _target) = proxied().await;
    let requests = plain(&trio, Asked::auto).await;
    let wrong = |token| (token * 7 + 11) % 4096;
    for (fault, used) in [
        (DraftFault::Tokens(wrong), Used::Always),
        // The first id that is none.
        (DraftFault::Tokens(|_| 4096), Used::Never),
        (DraftFault::WrongBase, Used::Never),
        (DraftFault::WrongRound, Used::Never),
        // What is only late may be in time: for a gateway that is slow itself, or when another sequence is answered soon.
        (DraftFault::Slow(Duration::from_millis(60)), Used::InTime),
        (DraftFault::Late, Used::InTime),
        (DraftFault::Swallow, Used::Never),
        (DraftFault::Swapped, Used::Always),
        (DraftFault::Twice, Used::Always),
        (DraftFault::AskedTwice, Used::Always),
        // The draft is had again before the requests end, or not.
        (DraftFault::Break, Used::InTime),
        (DraftFault::Stale, Used::InTime),
    ] {
        draft.set(fault);
        let (drafted, _, without) = run_all(&trio, &requests, &format!("{fault:?}")).await;
        assert!(draft.injected() > 0, "{fault:?} was never done");
        let as_expected = match used {
            Used::Always => drafted > 0,
            Used::InTime => without > 0,
            Used::Never => without > 0 && drafted == 0,
        };
        assert!(as_expected, "{fault:?}: {drafted} drafted, {without} rounds without a draft");
        // What a draft has swallowed is only made up for on a new stream.
        draft.set(if matches!(fault, DraftFault::Swallow) { DraftFault::Break } else { DraftFault::None });
        heals(&trio, &requests, &format!("after {fault:?}")).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rounds_repeated_late_or_cut_off_at_the_target_change_no_token() {
    let (trio, _draft, target) = proxied().await;
    let plans: [fn(Asked) -> Asked; 3] =
        [|asked| asked, |asked| asked.chain(3), |asked| asked.tree(4, 4, 12)];
    for plan in plans {
        let requests = plain(&trio, plan).await;
        for fault in [
            TargetFault::AskedTwice,
            TargetFault::AskedLate,
            TargetFault::Twice,
            TargetFault::Late,
            TargetFault::BreakAtOpen,
            // In the middle of a credit of sixteen steps, and of three sequences' rounds.
            TargetFault::BreakAfter(8),
        ] {
            target.set(fault);
            run_all(&trio, &requests, &format!("{fault:?}")).await;
            assert!(target.injected() > 0, "{fault:?} was never done");
            target.set(TargetFault::None);
            trio.at_rest().await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gateway_reads_frames_of_5_mib_and_makes_a_stream_again_that_brings_more_than_32() {
    let (trio, draft, target) = proxied().await;
    let requests = plain(&trio, Asked::auto).await;
    let at_target = target.streams();
    for (bytes, made) in [(5 << 20, 0), (MAX_MESSAGE, 1)] {
        target.set(TargetFault::Padded(bytes));
        heals(&trio, &requests, "a long frame of the target").await;
        assert_eq!((target.injected(), target.streams() - at_target), (1, made), "{bytes} bytes");
    }
    let at_draft = draft.streams();
    for (bytes, made) in [(5 << 20, 0), (MAX_MESSAGE, 1)] {
        draft.set(DraftFault::Padded(bytes));
        heals(&trio, &requests, "a long frame of the draft").await;
        assert_eq!((draft.injected(), draft.streams() - at_draft), (1, made), "{bytes} bytes");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sockets_that_break_within_a_frame_are_made_again() {
    let mut trio = Trio::new(EYRIE);
    trio.start_target("target", &[]);
    trio.start_draft("target");
    let draft = Cable::lay(&trio.path("to-draft"), &trio.path("draft"));
    let target = Cable::lay(&trio.path("to-target"), &trio.path("target"));
    trio.start_gateway("to-target", "to-draft", &[]);
    trio.speculating().await;
    let requests = plain(&trio, Asked::auto).await;
    for (name, cable) in [("draft", &draft), ("target", &target)] {
        for bytes in [1, 77, 600, 1501] {
            cable.cut_after(bytes);
            let what = format!("{name} after {bytes} bytes");
            until(&what, async || {
                run_all(&trio, &requests, &what).await;
                cable.was_cut().then_some(())
            })
            .await;
        }
    }
    heals(&trio, &requests, "whole again").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_draft_of_another_target_is_not_asked() {
    let mut trio = Trio::new(EYRIE);
    trio.start_target("target", &[]);
    trio.start_target("other", &[]);
    trio.start_draft("other");
    trio.start_gateway("target", "draft", &[]);
    let mut gateway = until("the gateway to answer", async || {
        let channel = eyrie_wire::connect(&trio.at("gateway").parse().unwrap()).await.ok()?;
        Some(eyrie_wire::v1::generation_client::GenerationClient::new(channel))
    })
    .await;
    until("the draft's epoch to be refused", async || {
        let model = gateway.get_model(GetModelRequest {}).await.ok()?.into_inner();
        model.not_speculating_because.contains("epoch").then_some(())
    })
    .await;
    let golden = &goldens()[3];
    let outcome = ask(&golden.prompt_ids, 96).chain(3).run(&mut gateway).await.unwrap();
    assert_eq!(outcome.ids, golden.greedy_ids);
    assert_eq!(outcome.usage.drafted_tokens, 0);
    assert!(outcome.usage.rounds_without_draft > 0);
    eyrie_tests::at_rest(&trio.at("gateway"), &trio.at("target"), None).await;
}
