//! Rounds of an attached draft: what it proposes, and how it comes back from missing rows.
#![allow(clippy::unwrap_used, reason = "a helper that fails fails its test")]

mod common;

use common::exporter::{Exporter, SLOTS};
use common::reference::{Text, texts};
use common::{Draft, Rounds, item, proposal};
use eyrie_draft::{DraftOptions, SharedSource};
use eyrie_wire::reason_of;
use eyrie_wire::v1::draft_out::Body;
use eyrie_wire::v1::feature_ref::At;
use eyrie_wire::v1::{CloseDraft, DraftFrame, DraftItem, FeatureRef, Propose, TreeShape, draft_item};
use serde_json::Value;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

const BOOT: u64 = 7;

/// The round at `base_len` of a draft that has tokens and features below `from`.
fn propose(text: &Text, from: u32, base_len: u32, features: Vec<FeatureRef>, k: u32) -> Propose {
    let token_from = if from == 0 { 0 } else { from + 1 };
    let tokens = text.tokens(token_from, base_len);
    Propose { round: base_len, base_len, token_from, tokens, features, k, ..Default::default() }
}

async fn pair(dir: &tempfile::TempDir) -> (Exporter, Draft) {
    pair_with(dir, |_| ()).await
}

async fn pair_with(dir: &tempfile::TempDir, edit: impl FnOnce(&mut DraftOptions)) -> (Exporter, Draft) {
    let exporter = Exporter::start(dir.path());
    let draft = Draft::start_with(dir.path(), &exporter.address, edit).await;
    draft.until_attached(true).await;
    (exporter, draft)
}

/// Runs the golden rounds of one text and compares every proposal.
async fn follow(
    rounds: &mut Rounds,
    exporter: &mut Exporter,
    text: &Text,
    seq: u64,
    golden: &[Value],
    shape: impl Fn(&mut Propose),
    check: impl Fn(&eyrie_wire::v1::Proposal, &Value),
    accepted: impl Fn(&Value) -> u32,
) -> usize {
    let (mut from, mut base_len, mut checked) = (0, text.prompt_len, 0);
    for round in golden {
        if base_len as usize >= text.tokens.len() {
            break;
        }
        let features = exporter.publish(from, text.rows(from, base_len));
        let mut wanted = propose(text, from, base_len, features, 0);
        shape(&mut wanted);
        let proposal = rounds.proposal(seq, wanted).await;
        assert_eq!(proposal.base_len, base_len);
        check(&proposal, round);
        from = base_len;
        base_len += 1 + accepted(round);
        checked += 1;
    }
    checked
}

fn numbers(value: &Value) -> Vec<i64> {
    value.as_array().unwrap().iter().map(|n| n.as_i64().unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chains_are_those_of_an_independent_implementation() {
    let dir = tempfile::tempdir().unwrap();
    let (mut exporter, draft) = pair(&dir).await;
    let mut rounds = draft.rounds(BOOT).await;
    let mut seq = 0;
    for text in texts(6) {
        for k in ["1", "3", "5", "7"] {
            seq += 1;
            let golden = text.golden["chain"][k]["rounds"].as_array().unwrap();
            let checked = follow(
                &mut rounds,
                &mut exporter,
                &text,
                seq,
                golden,
                |propose| propose.k = k.parse().unwrap(),
                |proposal, round| {
                    let ids: Vec<i64> = proposal.tokens.iter().map(|&id| id.into()).collect();
                    assert_eq!(ids, numbers(&round[0]), "{} k {k}", text.golden["id"]);
                    assert!(proposal.parents.is_empty());
                },
                |round| round[1].as_u64().unwrap() as u32,
            )
            .await;
            assert!(checked + 1 >= golden.len() && checked > 10, "{checked} of {} rounds", golden.len());
        }
    }
    draft.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn trees_are_those_of_an_independent_implementation() {
    let dir = tempfile::tempdir().unwrap();
    let (mut exporter, draft) = pair(&dir).await;
    let mut rounds = draft.rounds(BOOT).await;
    for (seq, text) in texts(4).iter().enumerate() {
        for nodes in [16, 17] {
            let golden = text.golden["tree"][nodes.to_string()]["rounds"].as_array().unwrap();
            let shape = TreeShape { top_k: 4, levels: 5, nodes };
            let checked = follow(
                &mut rounds,
                &mut exporter,
                text,
                seq as u64 * 2 + u64::from(nodes),
                golden,
                |propose| propose.tree = Some(shape),
                |proposal, round| {
                    if round["min_rel_gap"].as_f64().unwrap() < 1e-4 {
                        return;
                    }
                    let ids: Vec<i64> = proposal.tokens.iter().map(|&id| id.into()).collect();
                    let parents: Vec<i64> = proposal.parents.iter().map(|&node| node.into()).collect();
                    assert_eq!(ids, numbers(&round["tokens"])[1..], "{}", text.golden["id"]);
                    assert_eq!(parents, numbers(&round["parents"])[1..]);
                },
                |round| round["accepted_path"].as_array().unwrap().len() as u32,
            )
            .await;
            assert!(checked > 10, "{checked} of {} rounds", golden.len());
        }
    }
    draft.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn missing_rows_are_asked_for_and_the_draft_heals() {
    missing_rows(SharedSource::Map).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn missing_rows_are_asked_for_by_a_draft_elsewhere_as_well() {
    missing_rows(SharedSource::Target).await;
}

async fn missing_rows(shared: SharedSource) {
    let dir = tempfile::tempdir().unwrap();
    // Each sequence is to build all of its slots itself.
    let own_slots = |options: &mut DraftOptions| {
        options.shared = shared;
        options.prefix_cache_bytes = Some(0);
    };
    let (mut exporter, draft) = pair_with(&dir, own_slots).await;
    let mut rounds = draft.rounds(BOOT).await;
    let text = &texts(1)[0];
    let end = text.prompt_len + 20;
    let whole = exporter.publish(0, text.rows(0, end));
    let expected = rounds.proposal(1, propose(text, 0, end, whole.clone(), 5)).await;
    assert_eq!(expected.tokens.len(), 5);

    let mut gap = exporter.publish(0, text.rows(0, 10));
    gap.extend(exporter.publish(12, text.rows(12, end)));
    assert_eq!(rounds.need(2, propose(text, 0, end, gap, 5)).await, 10, "rows 10 and 11 are missing");
    let rest = exporter.publish(10, text.rows(10, end));
    assert_eq!(rounds.proposal(2, propose(text, 10, end, rest, 5)).await, expected);

    let first = exporter.publish(0, text.rows(0, 10));
    let late = exporter.publish(10, text.rows(10, end));
    for _ in 0..SLOTS - 1 {
        exporter.publish(0, text.rows(0, 1));
    }
    let overwritten = [first, late.clone()].concat();
    assert_eq!(
        rounds.need(3, propose(text, 0, end, overwritten, 5)).await,
        0,
        "the first slot was overwritten"
    );
    let again = [exporter.publish(0, text.rows(0, 10)), late].concat();
    assert_eq!(
        rounds.need(3, propose(text, 0, end, again, 5)).await,
        10,
        "by now the second slot is gone too"
    );
    let rest = exporter.publish(10, text.rows(10, end));
    assert_eq!(rounds.proposal(3, propose(text, 10, end, rest, 5)).await, expected);

    let step = exporter.publish(end, text.rows(end, end + 2));
    let unknown = propose(text, end, end + 2, step, 5);
    assert_eq!(rounds.need(4, unknown).await, 0, "as after a restart: nothing is known of the sequence");
    let healed = rounds.proposal(4, propose(text, 0, end, exporter.publish(0, text.rows(0, end)), 5)).await;
    assert_eq!(healed, expected);
    draft.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_that_do_not_reach_back_are_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let (mut exporter, draft) = pair(&dir).await;
    let mut rounds = draft.rounds(BOOT).await;
    let text = &texts(1)[0];
    let (t, end) = (text.prompt_len, text.prompt_len + 6);
    let features = exporter.publish(0, text.rows(0, t));
    rounds.proposal(1, propose(text, 0, t, features, 3)).await;
    let features = exporter.publish(t, text.rows(t, end));
    let hole = propose(text, t + 3, end, features.clone(), 3);
    assert_eq!(rounds.need(1, hole).await, t);
    let healed = rounds.proposal(1, propose(text, t - 1, end, features, 3)).await;
    let fresh = exporter.publish(0, text.rows(0, end));
    assert_eq!(healed, rounds.proposal(2, propose(text, 0, end, fresh, 3)).await);
    draft.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_late_start_builds_from_there_on() {
    let dir = tempfile::tempdir().unwrap();
    let (mut exporter, draft) = pair(&dir).await;
    let mut rounds = draft.rounds(BOOT).await;
    let text = &texts(1)[0];
    let (start, end) = (text.prompt_len - 4, text.prompt_len + 30);
    let features = exporter.publish(start, text.rows(start, end));
    let late = Propose { start, ..propose(text, start, end, features.clone(), 4) };
    let first = rounds.proposal(1, late.clone()).await;
    // Position by position: the slots must come out the same however they were filled.
    for base_len in start + 1..=end {
        let features = exporter.publish(base_len - 1, text.rows(base_len - 1, base_len));
        let next = Propose { start, ..propose(text, base_len - 1, base_len, features, 0) };
        let tokens = text.tokens(base_len - 1, base_len);
        rounds.proposal(2, Propose { token_from: base_len - 1, tokens, ..next }).await;
    }
    let again = Propose { start, ..propose(text, end, end, Vec::new(), 4) };
    assert_eq!(rounds.proposal(2, again).await, first);

    // A sequence whose rows below the start are gone for good begins anew there.
    let some = exporter.publish(0, text.rows(0, 3));
    rounds.proposal(3, propose(text, 0, 3, some, 0)).await;
    let features = exporter.publish(start, text.rows(start, end));
    assert_eq!(rounds.proposal(3, Propose { features, ..late }).await, first);
    draft.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_with_nothing_before_the_base_proposes_nothing_and_troubles_nobody() {
    let dir = tempfile::tempdir().unwrap();
    let (mut exporter, draft) = pair(&dir).await;
    let mut rounds = draft.rounds(BOOT).await;
    let text = &texts(1)[0];
    let (low, t) = (text.prompt_len - 8, text.prompt_len);
    let mut features = |from, end| exporter.publish(from, text.rows(from, end));
    let at_end = Propose { start: t, ..propose(text, t, t, vec![], 3) };
    let late = Propose { start: low, ..propose(text, low, t, features(low, t), 3) };
    let below = propose(text, 0, low, features(0, 1), 3);
    let fine = propose(text, 0, t, features(0, t), 3);
    let items = vec![item(1, at_end), item(2, late), item(2, below), item(3, fine)];
    rounds.send(items).await;
    let bodies: Vec<Body> = rounds.receive(4).await.into_iter().map(|out| out.body.unwrap()).collect();
    assert!(proposal(bodies[0].clone()).tokens.is_empty(), "no slot to draft from");
    assert_eq!(proposal(bodies[1].clone()).tokens.len(), 3);
    assert!(matches!(&bodies[2], Body::Need(need) if need.from == 1), "it begins anew: {:?}", bodies[2]);
    assert_eq!(proposal(bodies[3].clone()).tokens.len(), 3);
    draft.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lower_base_len_cuts() {
    let dir = tempfile::tempdir().unwrap();
    let (mut exporter, draft) = pair(&dir).await;
    let mut rounds = draft.rounds(BOOT).await;
    let text = &texts(1)[0];
    let (low, high) = (text.prompt_len + 5, text.prompt_len + 25);
    let rows = exporter.publish(0, text.rows(0, high));
    let fresh_low = rounds.proposal(1, propose(text, 0, low, rows.clone(), 5)).await;
    let fresh_high = rounds.proposal(2, propose(text, 0, high, rows.clone(), 5)).await;
    assert_ne!(fresh_low.tokens, fresh_high.tokens);

    let back =
        Propose { token_from: low, tokens: text.tokens(low, low), ..propose(text, low, low, vec![], 5) };
    assert_eq!(rounds.need(2, back.clone()).await, low - 1, "the last slot's feature is gone");
    assert_eq!(rounds.proposal(2, Propose { features: rows.clone(), ..back.clone() }).await, fresh_low);
    assert_eq!(rounds.proposal(2, back).await, fresh_low, "asked twice at the same length");
    assert_eq!(rounds.proposal(2, propose(text, low, high, rows, 5)).await, fresh_high);
    draft.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn eight_sequences_together_propose_what_each_does_alone() {
    let dir = tempfile::tempdir().unwrap();
    let (mut exporter, draft) = pair(&dir).await;
    let mut rounds = draft.rounds(BOOT).await;
    let texts = texts(8);
    let shapes = [(1, None), (7, None), (3, None), (5, None)];
    let tree = Some(TreeShape { top_k: 3, levels: 4, nodes: 12 });
    let wanted: Vec<(u32, Option<TreeShape>)> =
        shapes.into_iter().chain([(0, tree), (2, None), (0, None), (6, None)]).collect();
    // Eight slots hold eight short prompts at a time.
    let round = |exporter: &mut Exporter, i: usize| {
        let features = exporter.publish(0, texts[i].rows(0, texts[i].prompt_len));
        let (k, tree) = wanted[i];
        Propose { tree, ..propose(&texts[i], 0, texts[i].prompt_len, features, k) }
    };
    let mut alone = Vec::new();
    for i in 0..8 {
        let asked = round(&mut exporter, i);
        alone.push(rounds.proposal(100 + i as u64, asked).await);
    }
    let items = (0..8).map(|i| item(i as u64, round(&mut exporter, i))).collect();
    rounds.send(items).await;
    let together: Vec<_> =
        rounds.receive(8).await.into_iter().map(|out| proposal(out.body.unwrap())).collect();
    assert_eq!(together, alone);
    assert_eq!(alone.iter().map(|p| p.tokens.len()).collect::<Vec<_>>(), [1, 7, 3, 5, 11, 2, 0, 6]);
    draft.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn long_prompts_beside_short_rounds_change_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (mut exporter, draft) = pair(&dir).await;
    let mut rounds = draft.rounds(BOOT).await;
    let texts = texts(4);
    let end = |text: &Text| text.tokens.len() as u32 - 1;
    let short = &texts[3];
    let mut alone = Vec::new();
    for (seq, text) in texts[..3].iter().enumerate() {
        let features = exporter.publish(0, text.rows(0, end(text)));
        alone.push(rounds.proposal(100 + seq as u64, propose(text, 0, end(text), features, 4)).await);
    }
    let features = exporter.publish(0, short.rows(0, short.prompt_len));
    alone.push(rounds.proposal(103, propose(short, 0, short.prompt_len, features, 4)).await);

    // The long ones come inline, as from another host, and take several steps.
    let inline = |text: &Text| {
        let bytes: Vec<u8> = text.rows(0, end(text)).iter().flat_map(|value| value.to_le_bytes()).collect();
        FeatureRef { first: 0, rows: end(text), at: Some(At::Inline(bytes.into())) }
    };
    let again = propose(short, short.prompt_len, short.prompt_len, vec![], 4);
    let items =
        texts[..3].iter().zip(0..).map(|(t, seq)| item(seq, propose(t, 0, end(t), vec![inline(t)], 4)));
    rounds.send(items.chain([item(103, again)]).collect()).await;
    let outs = rounds.receive(4).await;
    let together: Vec<_> = outs.into_iter().map(|out| proposal(out.body.unwrap())).collect();
    assert_eq!(together, alone);
    draft.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rounds_of_one_sequence_in_one_frame_are_answered_in_order() {
    let dir = tempfile::tempdir().unwrap();
    let (mut exporter, draft) = pair(&dir).await;
    let mut rounds = draft.rounds(BOOT).await;
    let text = &texts(1)[0];
    let t = text.prompt_len;
    let (head, tail) = (exporter.publish(0, text.rows(0, t)), exporter.publish(t, text.rows(t, t + 3)));
    let close = DraftItem { seq: 1, op: Some(draft_item::Op::Close(CloseDraft {})) };
    let next = propose(text, t, t + 3, tail, 2);
    rounds
        .send(vec![item(1, propose(text, 0, t, head, 2)), item(1, next.clone()), close, item(1, next)])
        .await;
    let outs = rounds.receive(3).await;
    let lengths: Vec<_> =
        outs[..2].iter().map(|out| (out.round, proposal(out.body.clone().unwrap()).base_len)).collect();
    assert_eq!(lengths, [(t, t), (t + 3, t + 3)]);
    assert!(matches!(&outs[2].body, Some(Body::Need(need)) if need.from == 0), "closed in between");
    draft.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_cache_drops_the_sequence_used_longest_ago() {
    let dir = tempfile::tempdir().unwrap();
    let mut exporter = Exporter::start(dir.path());
    let draft = Draft::start_with(dir.path(), &exporter.address, |options| options.cache_tokens = 128).await;
    draft.until_attached(true).await;
    let mut rounds = draft.rounds(BOOT).await;
    let texts = texts(3);
    for (seq, text) in texts.iter().enumerate() {
        let features = exporter.publish(0, text.rows(0, text.prompt_len));
        rounds.proposal(seq as u64, propose(text, 0, text.prompt_len, features, 3)).await;
    }
    let again = |i: usize| propose(&texts[i], texts[i].prompt_len, texts[i].prompt_len, vec![], 3);
    assert_eq!(rounds.need(0, again(0)).await, 0);
    assert_eq!(rounds.proposal(2, again(2)).await.tokens.len(), 3);

    let long = &texts[0];
    let end = long.tokens.len() as u32 - 1;
    let features = exporter.publish(0, long.rows(0, end));
    let (reason, message) = rounds.refusal(9, propose(long, 0, end, features, 7)).await;
    assert!(reason == "KV_CAPACITY" && message.contains("cache_tokens allows 128"), "{reason}: {message}");
    draft.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn close_and_a_broken_stream_free_sequences() {
    let dir = tempfile::tempdir().unwrap();
    let (mut exporter, draft) = pair(&dir).await;
    let mut rounds = draft.rounds(BOOT).await;
    let text = &texts(1)[0];
    let mut open = async |rounds: &mut Rounds, seq| {
        let features = exporter.publish(0, text.rows(0, text.prompt_len));
        rounds.proposal(seq, propose(text, 0, text.prompt_len, features, 1)).await;
    };
    for seq in 1..=3 {
        open(&mut rounds, seq).await;
    }
    assert_eq!(draft.lease().await.sequences, 3);
    rounds.send(vec![DraftItem { seq: 2, op: Some(draft_item::Op::Close(CloseDraft {})) }]).await;
    open(&mut rounds, 1).await;
    assert_eq!(draft.lease().await.sequences, 2);

    // The same gateway comes back and speaks of 3 before the old stream is noticed to be gone.
    let mut second = draft.rounds(BOOT).await;
    open(&mut second, 3).await;
    drop(rounds);
    common::patient("the sequences of the broken stream to go", async {
        while draft.lease().await.sequences != 1 {}
    })
    .await;
    let t = text.prompt_len;
    second.proposal(3, propose(text, t, t, vec![], 2)).await;
    draft.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_unary_twin_answers_like_the_stream() {
    let dir = tempfile::tempdir().unwrap();
    let (mut exporter, draft) = pair(&dir).await;
    let mut rounds = draft.rounds(BOOT).await;
    let text = &texts(1)[0];
    let features = exporter.publish(0, text.rows(0, text.prompt_len));
    let asked = propose(text, 0, text.prompt_len, features, 4);
    let expected = rounds.proposal(1, asked.clone()).await;
    let items = vec![item(5, asked.clone()), item(6, Propose { k: 99, ..asked })];
    let frame = DraftFrame { hello: Some(common::hello(8)), items };
    let mut reply = draft.client().await.round(frame).await.unwrap().into_inner();
    assert_eq!(reply.hello.unwrap().epoch, exporter.epoch.get());
    reply.outs.sort_by_key(|out| out.seq);
    assert_eq!(proposal(reply.outs[0].body.clone().unwrap()), expected);
    assert!(matches!(&reply.outs[1].body, Some(Body::Error(error)) if error.message.contains("given 99")));
    draft.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sequences_of_unary_calls_expire_and_those_of_streams_stay() {
    let dir = tempfile::tempdir().unwrap();
    let mut exporter = Exporter::start(dir.path());
    let idle = std::time::Duration::from_millis(200);
    let draft = Draft::start_with(dir.path(), &exporter.address, |options| options.unary_idle = idle).await;
    draft.until_attached(true).await;
    let mut rounds = draft.rounds(BOOT).await;
    let text = &texts(1)[0];
    let t = text.prompt_len;
    let features = exporter.publish(0, text.rows(0, t));
    let asked = propose(text, 0, t, features, 1);
    rounds.proposal(1, asked.clone()).await;
    let begun = std::time::Instant::now();
    let frame = DraftFrame { hello: Some(common::hello(8)), items: vec![item(5, asked)] };
    draft.client().await.round(frame).await.unwrap();
    common::patient("the sequence to expire", async { while draft.lease().await.sequences != 1 {} }).await;
    assert!(begun.elapsed() >= idle, "{:?}", begun.elapsed());
    rounds.proposal(1, propose(text, t, t, vec![], 2)).await;
    draft.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frame_holds_a_bounded_number_of_items() {
    let dir = tempfile::tempdir().unwrap();
    let (_exporter, draft) = pair(&dir).await;
    let none = |count: u64| (0..count).map(|seq| DraftItem { seq, op: None }).collect::<Vec<_>>();
    let mut rounds = draft.rounds(BOOT).await;
    rounds.send(none(4096)).await;
    rounds.receive(4096).await;
    rounds.send(none(4097)).await;
    let ended = common::patient("the end", rounds.replies.message()).await.unwrap_err();
    let frame = DraftFrame { hello: Some(common::hello(8)), items: none(4097) };
    let mut client = draft.client().await;
    let refused = client.round(frame.clone()).await.unwrap_err();
    let (sender, frames) = mpsc::channel(1);
    sender.try_send(frame).unwrap();
    let first = client.rounds(ReceiverStream::new(frames)).await.unwrap_err();
    for status in [ended, refused, first] {
        assert_eq!(reason_of(&status).as_deref(), Some("INVALID_ARGUMENT"));
        assert!(status.message().contains("4096, given 4097"), "{status}");
    }
    draft.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bounded_number_of_streams_is_open() {
    let dir = tempfile::tempdir().unwrap();
    let (_exporter, draft) = pair(&dir).await;
    let mut client = draft.client().await;
    let mut open = Vec::new();
    for boot in 1..=256 {
        let (sender, frames) = mpsc::channel(1);
        sender.try_send(DraftFrame { hello: Some(common::hello(boot)), items: Vec::new() }).unwrap();
        open.push((sender, client.rounds(ReceiverStream::new(frames)).await.unwrap()));
    }
    let refused = draft.rounds_as(common::hello(257)).await.err().unwrap();
    assert_eq!(reason_of(&refused).as_deref(), Some("BUSY"));
    let frame = DraftFrame { hello: Some(common::hello(257)), items: Vec::new() };
    assert!(draft.client().await.round(frame.clone()).await.is_err());
    open.pop();
    common::patient("a place", async { while draft.client().await.round(frame.clone()).await.is_err() {} })
        .await;
    draft.stop().await;
}
