//! P3 and A11: clients that leave or run out of time, while they queue, in prefill and in decode, are computed for no
//! longer and leave nothing behind.

use std::time::{Duration, Instant};

use crate::EYRIE;
use eyrie_tests::{Asked, Outcome, Signal, TargetProxy, Trio, ask, client, collect, goldens, load, until};
use eyrie_wire::reason_of;
use eyrie_wire::v1::GenerateChunk;
use tonic::{Code, Request, Status, Streaming};

/// Long enough for a request to get anywhere on a busy machine; nothing is computed until it is over.
const TIMEOUT: Duration = Duration::from_secs(2);
const LONG: u32 = 3000;

/// Three services with a proxy before the target.
async fn proxied(flags: &[&str]) -> (Trio, TargetProxy) {
    let mut trio = Trio::new(EYRIE);
    trio.start_target("target", flags);
    trio.start_draft("target");
    let target = TargetProxy::start(&trio.at("to-target"), &trio.at("target")).await;
    trio.start_gateway("to-target", "draft", &[]);
    trio.speculating().await;
    (trio, target)
}

async fn begin(trio: &Trio, asked: Asked) -> Streaming<GenerateChunk> {
    client(&trio.at("gateway")).await.generate_stream(asked.0).await.unwrap().into_inner()
}

/// Reads until `tokens` ids have come.
async fn read(stream: &mut Streaming<GenerateChunk>, tokens: usize) {
    let mut seen = 0;
    while seen < tokens {
        seen += stream.message().await.unwrap().expect("it goes on").token_ids.len();
    }
}

async fn within(timeout: Duration, trio: &Trio, asked: Asked) -> Result<Outcome, Status> {
    let mut request = Request::new(asked.0);
    request.set_timeout(timeout);
    collect(client(&trio.at("gateway")).await.generate_stream(request).await?.into_inner(), |_| {}).await
}

fn assert_overdue(outcome: Result<Outcome, Status>) {
    let status = outcome.expect_err("the deadline passes");
    assert_eq!((status.code(), reason_of(&status).as_deref()), (Code::DeadlineExceeded, Some("DEADLINE")));
}

/// Waits until `closes` sequences have been closed and all is at rest, and looks at what was computed meanwhile: the step
/// under way when the news left, and one that may have begun before it came. What begins once it has come is none of that
/// sequence's: the target's `leaving_tests` know the moment.
async fn stops(trio: &Trio, target: &TargetProxy, closes: u32) {
    target.passed(|passed| passed.closes == closes).await;
    let before = load(&trio.at("target")).await.unwrap();
    trio.at_rest().await;
    let after = load(&trio.at("target")).await.unwrap();
    assert!(after.steps - before.steps <= 2, "{before:?}, then {after:?}");
}

/// As many prompt tokens as the context has room for beside some to generate.
fn long_prompt() -> Vec<u32> {
    (0..3900).map(|n| 100 + n * 7 % 3000).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn in_the_queue() {
    let (trio, proxy) = proxied(&["--max-sequences", "1"]).await;
    let target = trio.at("target");
    let mut holder = begin(&trio, ask(&goldens()[0].prompt_ids, LONG)).await;
    read(&mut holder, 1).await;
    let waiting = async |wanted: u32| {
        let what = format!("{wanted} sequences to wait");
        until(&what, async || load(&target).await.ok().filter(|load| load.waiting == wanted)).await
    };
    // Every part that is computed of a prompt whose features are wanted is told.
    let asked = ask(&long_prompt(), 64).auto();
    let stream = begin(&trio, asked.clone()).await;
    waiting(1).await;
    drop(stream);
    waiting(0).await;
    assert_overdue(within(Duration::from_millis(500), &trio, asked).await);
    let after = waiting(0).await;
    assert_eq!(after.running, 1, "the place is still held");
    assert_eq!(proxy.passed(|_| true).await.chunks, 0, "nothing was computed");
    drop(holder);
    let golden = &goldens()[1];
    let outcome = ask(&golden.prompt_ids, 96).chain(3).run(&mut client(&trio.at("gateway")).await).await;
    assert_eq!(outcome.unwrap().ids, golden.greedy_ids);
    trio.at_rest().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn in_prefill() {
    let (trio, target) = proxied(&["--prefill-chunk", "256", "--prefix-cache-bytes", "0"]).await;
    let began = Instant::now();
    ask(&long_prompt(), 1).run(&mut client(&trio.at("gateway")).await).await.unwrap();
    let whole = began.elapsed();
    let passed = target.passed(|passed| passed.closes == 1).await;

    let asked = ask(&long_prompt(), 64).auto();
    let mut computed = load(&trio.at("target")).await.unwrap().rows;
    let mut is_partial = async |closes| {
        stops(&trio, &target, closes).await;
        let rows = load(&trio.at("target")).await.unwrap().rows;
        let prefilled = rows - std::mem::replace(&mut computed, rows);
        assert!((1..long_prompt().len() as u64).contains(&prefilled), "{prefilled} rows");
    };

    let stream = begin(&trio, asked.clone()).await;
    target.passed(|now| now.chunks >= passed.chunks + 2).await;
    drop(stream);
    is_partial(2).await;

    assert_overdue(within(whole / 3, &trio, asked.clone()).await);
    is_partial(3).await;

    let passed = target.passed(|_| true).await;
    let stop = async {
        target.passed(|now| now.chunks > passed.chunks).await;
        trio.signal("target", Signal::STOP);
    };
    let (outcome, ()) = tokio::join!(within(TIMEOUT, &trio, asked), stop);
    assert_overdue(outcome);
    trio.signal("target", Signal::CONT);
    is_partial(4).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn in_decode() {
    let (trio, target) = proxied(&["--prefill-chunk", "512"]).await;
    let golden = &goldens()[0];
    let mut closes = 0;
    for asked in [ask(&golden.prompt_ids, LONG), ask(&golden.prompt_ids, LONG).chain(3)] {
        let began = Instant::now();
        let mut stream = begin(&trio, asked.clone()).await;
        read(&mut stream, 100).await;
        let some = began.elapsed();
        // Beside the prompt of another a step takes so long that a credit cannot run out before the news is there.
        let before = target.passed(|_| true).await;
        let other = begin(&trio, ask(&long_prompt(), 8).auto()).await;
        target.passed(|passed| passed.chunks > before.chunks).await;
        drop((stream, other));
        closes += 2;
        stops(&trio, &target, closes).await;

        let before = target.passed(|_| true).await;
        assert_overdue(within(some, &trio, asked.clone()).await);
        closes += 1;
        let after = target.passed(|passed| passed.closes == closes).await;
        assert!(after.commits > before.commits + 1, "{before:?}, then {after:?}");
        trio.at_rest().await;

        let stop = async {
            target.passed(|passed| passed.commits > after.commits + 20).await;
            trio.signal("target", Signal::STOP);
        };
        let (outcome, ()) = tokio::join!(within(TIMEOUT, &trio, asked), stop);
        assert_overdue(outcome);
        trio.signal("target", Signal::CONT);
        closes += 1;
        trio.at_rest().await;
    }
}
