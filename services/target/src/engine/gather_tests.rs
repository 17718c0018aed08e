//! When a step begins: at once if every sequence that runs has an item, else a little later.

use std::path::Path;

use eyrie_checkpoint::TargetCheckpoint;
use eyrie_region::Epoch;
use eyrie_wire::Address;
use eyrie_wire::v1::{self, TargetReply, target_item::Op};
use tokio::sync::mpsc;

use super::*;
use crate::TargetOptions;
use crate::plan::Plan;

const SEQ: u64 = 1;

pub(super) fn engine() -> Engine {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/demo/mini");
    let options = TargetOptions {
        kv_tokens: 512,
        threads: Some(1),
        ..TargetOptions::new(&dir, Address::Tcp("127.0.0.1:0".to_owned()))
    };
    let checkpoint = Arc::new(TargetCheckpoint::open(&dir).unwrap());
    let plan = Plan::new(&options, checkpoint.config()).unwrap();
    let (epoch, gauges, drain) = (Epoch::random().unwrap(), Arc::new(Gauges::new()), Drain::new());
    let request = LoadRequest { checkpoint, config_hash: String::new(), plan, epoch, gauges, drain };
    load(request, &mut |_| {}).unwrap().engine
}

/// A gateway of boot `id` on a stream of that number, with one sequence; only one of its replies may wait.
fn open(engine: &mut Engine, id: u64) -> mpsc::Receiver<TargetReply> {
    let (frames, receiver) = mpsc::channel(1);
    let replies = Replies { frames, ending: Ending::default() };
    let _ = engine.obey(Command::Attach { stream: StreamId(id), boot: id, life: Life::Lasting, replies });
    let open = v1::Open {
        tokens: vec![7, 8],
        sampling: Some(v1::Sampling { top_p: 1.0, ..Default::default() }),
        limits: Some(v1::Limits { max_tokens: 9, ignore_eos: true, ..Default::default() }),
        ..Default::default()
    };
    tell(engine, id, Op::Open(open));
    receiver
}

fn tell(engine: &mut Engine, id: u64, op: Op) {
    let items = vec![TargetItem { seq: SEQ, op: Some(op) }];
    let _ = engine.obey(Command::Items { stream: StreamId(id), items });
}

/// The Verify that follows the only reply that waits.
fn verify(replies: &mut mpsc::Receiver<TargetReply>) -> Op {
    match replies.try_recv().unwrap().outs.pop().and_then(|out| out.body) {
        Some(Body::Committed(v1::Committed { round, kv_len, tokens, .. })) => Op::Verify(v1::Verify {
            round: round + 1,
            base_len: kv_len,
            root: tokens[0],
            ..Default::default()
        }),
        other => panic!("wanted a commit, got {other:?}"),
    }
}

/// How long the engine sleeps before the step that is due `now`.
fn pause(engine: &mut Engine, now: Instant) -> Option<Duration> {
    match engine.next(now, false) {
        Next::Step => None,
        Next::Sleep(until) => Some(until.unwrap() - now),
    }
}

#[tokio::test(start_paused = true)]
async fn a_step_waits_a_little_for_those_who_may_still_speak_and_for_no_others() {
    let mut engine = engine();
    let mut first = open(&mut engine, 1);
    let mut second = open(&mut engine, 2);
    let (_sender, mailbox) = mailbox();
    assert!(matches!(engine.pass(&mailbox).unwrap(), Pass::Stepped), "both prompts");
    let now = Instant::now();
    engine.last_step = Duration::from_secs(1);
    tell(&mut engine, 1, verify(&mut first));
    assert_eq!(pause(&mut engine, now), None, "the other one's gateway does not read");

    let other = verify(&mut second);
    for (step, wait) in [(2_000, 100), (4_000, 200), (1_000_000, 200)] {
        engine.last_step = Duration::from_micros(step);
        assert_eq!(pause(&mut engine, now), Some(Duration::from_micros(wait)), "after a step of {step} µs");
    }
    let later = now + GATHER / 2;
    assert_eq!(pause(&mut engine, later), Some(GATHER / 2), "counted from when the step could begin");
    assert_eq!(pause(&mut engine, now + GATHER), None);

    assert!(matches!(engine.pass(&mailbox).unwrap(), Pass::Idle(Some(until)) if until == now + GATHER));
    tell(&mut engine, 2, other);
    assert_eq!(pause(&mut engine, now), None, "all have an item");
    assert!(matches!(engine.pass(&mailbox).unwrap(), Pass::Stepped));

    tell(&mut engine, 1, verify(&mut first));
    let _ = second.try_recv();
    engine.last_step = Duration::from_secs(1);
    assert_eq!(pause(&mut engine, now), Some(GATHER));
    engine.preempt(Key { boot: 2, seq: SEQ });
    assert_eq!(pause(&mut engine, now), None, "the other one holds no pages");
}
