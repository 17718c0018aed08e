//! Kills: memory comes back, the others go on, tokens stay.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use eyrie_tests::{Asked, Trio, client, collect, target_card, until};
use tokio::task::JoinSet;

use crate::EYRIE;
use crate::device::{Device, MIB, range};
use crate::memory::{GIVEN_BACK, LARGE, LARGE_DRAFT};
use crate::services::{Pair, asked, attached, lease, run, start_draft, start_target};

/// How soon an importer must have let go of memory whose lease it lost.
const UNMAP_LIMIT: Duration = Duration::from_secs(2);
const KIND: &str = "cuda_vmm";
const TOKENS: u32 = 1500;

/// Requests one after the other, each checked against what it gives undisturbed.
struct Streams {
    ending: Arc<AtomicBool>,
    running: JoinSet<usize>,
}

impl Streams {
    async fn start(gateway: &str, asked: Asked, expected: Vec<u32>) -> Self {
        let ending = Arc::new(AtomicBool::new(false));
        let (told, mut client) = (Arc::clone(&ending), client(gateway).await);
        let mut running = JoinSet::new();
        running.spawn(async move {
            let mut streams = 0;
            while !told.load(Ordering::Relaxed) {
                assert_eq!(asked.run(&mut client).await.unwrap().ids, expected, "stream {streams}");
                streams += 1;
            }
            streams
        });
        Self { ending, running }
    }

    /// Lets the running one end; returns how many there were.
    async fn end(mut self) -> usize {
        self.ending.store(true, Ordering::Relaxed);
        self.running.join_next().await.unwrap().unwrap()
    }
}

pub(crate) async fn ten_drafts(device: &Device) -> String {
    let mut trio = Trio::new(EYRIE);
    let card = start_target(&mut trio, Pair::Bundled, KIND, &[]).await;
    start_draft(&mut trio, Pair::Bundled, "draft", &[], &[]).await.unwrap();
    trio.start_gateway("target", "draft", &[]);
    trio.speculating().await;
    let expected = run(&trio, "gateway", &asked(1, TOKENS)).await.ids;
    let drafted = asked(1, TOKENS).chain(3);
    assert_eq!(run(&trio, "gateway", &drafted).await.ids, expected);
    let streams = Streams::start(&trio.at("gateway"), drafted, expected).await;
    let (mut without, mut with) = (Vec::new(), Vec::new());
    for _ in 0..10 {
        trio.kill("draft");
        let free = match without.first() {
            None => device.settled().await,
            Some(&first) => {
                device.has_again(first, GIVEN_BACK).await;
                device.free()
            }
        };
        without.push(free);
        start_draft(&mut trio, Pair::Bundled, "draft", &[], &[]).await.unwrap();
        trio.speculating().await;
        device.has_again(with.first().copied().unwrap_or_default(), GIVEN_BACK).await;
        with.push(device.free());
    }
    let streams = streams.end().await;
    let after = target_card(&trio.at("target")).await.unwrap();
    assert_eq!((after.epoch, after.pid), (card.epoch, card.pid));
    format!(
        "free without a draft {}, with one {}; {streams} streams of {TOKENS} exact tokens; the same target",
        range(&without),
        range(&with)
    )
}

pub(crate) async fn target_in_a_stream(device: &Device) -> String {
    let mut trio = Trio::new(EYRIE);
    start_target(&mut trio, Pair::Bundled, KIND, &[]).await;
    start_draft(&mut trio, Pair::Bundled, "draft", &[], &[]).await.unwrap();
    trio.start_gateway("target", "draft", &["--target-timeout", "60"]);
    trio.speculating().await;
    let drafted = asked(2, TOKENS).chain(3);
    let expected = run(&trio, "gateway", &asked(2, TOKENS)).await.ids;
    assert_eq!(run(&trio, "gateway", &drafted).await.ids, expected);
    let level = device.free();

    let (quarter, reached) = tokio::sync::oneshot::channel();
    let mut quarter = Some(quarter);
    let mut client = client(&trio.at("gateway")).await;
    let stream = client.generate_stream(drafted.0).await.unwrap().into_inner();
    let mut running = JoinSet::new();
    running.spawn(async move {
        let outcome = collect(stream, |so_far| {
            if so_far.ids.len() >= TOKENS as usize / 4 {
                quarter.take().map(|quarter| quarter.send(()));
            }
        });
        outcome.await.unwrap()
    });
    reached.await.unwrap();
    trio.kill("target");
    let killed = Instant::now();
    until("the draft to let go", async || lease(&trio, "draft").await.filter(|lease| !lease.attached)).await;
    let let_go = killed.elapsed();
    assert!(let_go < UNMAP_LIMIT, "{let_go:?}");
    let card = start_target(&mut trio, Pair::Bundled, KIND, &[]).await;
    assert!(card.left_behind.is_empty(), "{:?}", card.left_behind);
    let serves = killed.elapsed();
    assert_eq!(attached(&trio, "draft").await.epoch, card.epoch);
    let again = killed.elapsed();
    let outcome = running.join_next().await.unwrap().unwrap();
    assert_eq!(outcome.ids, expected);
    device.has_again(level, GIVEN_BACK).await;
    format!(
        "lease lost {let_go:.2?} after the kill, target serves after {serves:.1?}, draft attached after {again:.1?}; the \
         stream went on to its {TOKENS} exact tokens, {} rounds without the draft",
        outcome.usage.rounds_without_draft
    )
}

pub(crate) async fn target_with_large_head(device: &Device) -> String {
    const FLAGS: [&str; 2] = ["--kv-tokens", "4096"];
    let mut trio = Trio::new(EYRIE);
    let start = device.free();
    start_target(&mut trio, LARGE, KIND, &FLAGS).await;
    let alone = device.free();
    start_draft(&mut trio, LARGE, "draft", &[], &LARGE_DRAFT).await.unwrap();
    let level = device.free();
    trio.kill("target");
    // All but what the draft has for itself: a mapping would hold 4,480 MiB of the target's.
    let unmapped = device.has_again(start - (alone - level), UNMAP_LIMIT).await;
    let card = start_target(&mut trio, LARGE, KIND, &FLAGS).await;
    assert!(card.left_behind.is_empty(), "{:?}", card.left_behind);
    assert_eq!(attached(&trio, "draft").await.epoch, card.epoch);
    device.has_again(level, GIVEN_BACK).await;
    format!(
        "{} MiB free {unmapped:.2?} after the kill; {} MiB once the next target serves the same draft, {} before",
        (start - (alone - level)) / MIB,
        device.free() / MIB,
        level / MIB
    )
}
