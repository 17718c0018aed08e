//! The lease on the target's memory: refusals by name, loss, and what is shared.
#![allow(clippy::unwrap_used, reason = "a helper that fails fails its test")]

mod common;

use std::time::{Duration, Instant};

use common::exporter::Exporter;
use common::reference::texts;
use common::{Draft, hello, item};
use eyrie_draft::{DraftError, DraftOptions};
use eyrie_service::Drain;
use eyrie_wire::v1::{DraftFrame, DraftItem, Hello, LeaseGrant, ModelCard, Propose};
use eyrie_wire::{Address, reason_of};
use tonic::Code;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_does_not_match_is_refused_by_name() {
    type Edit = fn(&mut LeaseGrant, &mut ModelCard);
    let cases: [(Edit, &str); 10] = [
        (|grant, _| grant.aux_layers = vec![1, 3, 5], "aux layers [1, 3, 5], the head needs [2, 4, 5]"),
        (|grant, _| grant.hidden_size = 512, "hidden_size: the target has 512, the head was made for 384"),
        (|grant, _| grant.vocab_size = 9, "vocab_size: the target has 9, the head was made for"),
        (|grant, _| grant.layers = 4, "over the limit of 4 target layers"),
        (|grant, _| grant.ring = None, "the target captures no auxiliary states"),
        (|grant, _| grant.epoch ^= 1, "the target's card says"),
        (
            |grant, card| {
                grant.epoch ^= 2;
                card.epoch ^= 2;
            },
            "stale",
        ),
        (
            |_, card| card.fingerprint = "other".to_owned(),
            "the grant is of model demo, the target's card says other",
        ),
        (
            |grant, _| {
                let tensor = &mut grant.weights.as_mut().unwrap().tensors[0];
                tensor.checksum = vec![0; 32].into();
            },
            "tensor embed_tokens: checksum",
        ),
        (|grant, _| grant.token = vec![1; 32].into(), "the grant cannot be used"),
    ];
    for (edit, part) in cases {
        let dir = tempfile::tempdir().unwrap();
        let exporter = Exporter::start_with(dir.path(), edit);
        let draft = Draft::start(dir.path(), &exporter.address).await;
        let card = draft.until_refused(part).await;
        assert!(!card.attached && card.mapped_bytes == 0, "{card:?}");
        let refused = draft.rounds_as(hello(1)).await.err().unwrap();
        assert_eq!(refused.code(), Code::Unavailable);
        assert!(refused.message().contains(part), "{}", refused.message());
        draft.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_death_of_the_target_is_noticed_and_a_new_one_is_attached_to() {
    let dir = tempfile::tempdir().unwrap();
    // The draft is there first.
    let draft = Draft::start(dir.path(), &Address::Unix(dir.path().join("target.sock"))).await;
    draft.until_refused("cannot reach").await;
    let exporter = Exporter::start(dir.path());
    let first = draft.until_attached(true).await;
    let mut rounds = draft.rounds(1).await;
    assert_eq!((first.epoch, rounds.hello.epoch), (exporter.epoch.get(), exporter.epoch.get()));

    drop(exporter);
    let died = Instant::now();
    let card = draft.until_attached(false).await;
    assert!(died.elapsed() < Duration::from_secs(2), "{:?}", died.elapsed());
    assert!(card.mapped_bytes == 0 && !card.because.is_empty(), "{card:?}");
    let lost = common::patient("the stream to end", rounds.replies.message()).await.unwrap_err();
    assert_eq!(reason_of(&lost).as_deref(), Some("UNREACHABLE"), "{lost:?}");
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    assert!(!maps.contains("eyrie-shared-weights"), "the weights are still mapped:\n{maps}");

    let exporter = Exporter::start(dir.path());
    let second = draft.until_attached(true).await;
    assert_eq!(second.epoch, exporter.epoch.get());
    assert_ne!(second.epoch, first.epoch);
    let stale = draft.rounds_as(Hello { epoch: first.epoch, ..hello(1) }).await.err().unwrap();
    assert_eq!(reason_of(&stale).as_deref(), Some("STALE_EPOCH"), "{stale:?}");
    draft.rounds_as(Hello { epoch: second.epoch, ..hello(1) }).await.unwrap();
    draft.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_embedding_is_mapped_and_not_copied() {
    let dir = tempfile::tempdir().unwrap();
    let mut exporter = Exporter::start(dir.path());
    let draft = Draft::start(dir.path(), &exporter.address).await;
    draft.until_attached(true).await;
    let mut rounds = draft.rounds(1).await;
    let text = &texts(1)[0];
    let t = text.prompt_len;
    let features = exporter.publish(0, text.rows(0, t));
    let tokens = text.tokens(0, t);
    rounds.proposal(1, Propose { base_len: t, tokens, features, k: 5, ..Default::default() }).await;
    let card = draft.card().await;
    let lease = &card.targets[0];
    let config = std::fs::read_to_string(common::demo("mini").join("config.json")).unwrap();
    let config: serde_json::Value = serde_json::from_str(&config).unwrap();
    let embed = config["vocab_size"].as_u64().unwrap() * config["hidden_size"].as_u64().unwrap() * 2;
    assert_eq!((lease.kind.as_str(), lease.copied_bytes, lease.sequences), ("memfd", 0, 1));
    assert!(lease.mapped_bytes >= 2 * embed, "embedding and head: {card:?}");
    assert_eq!(lease.mapped_private_dirty, 0);
    let file = std::fs::metadata(common::demo("mini-eagle3").join("model.safetensors")).unwrap().len();
    assert!(card.own_bytes < file && card.own_bytes > file / 2, "{card:?}");
    assert!(lease.aux_rule.contains("[2, 4, 5]"), "{}", lease.aux_rule);
    draft.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn garbage_is_refused_and_the_stream_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let mut exporter = Exporter::start(dir.path());
    let draft = Draft::start(dir.path(), &exporter.address).await;
    draft.until_attached(true).await;
    let bad_hellos = [
        (None, Code::InvalidArgument, "INVALID_ARGUMENT"),
        (Some(hello(0)), Code::InvalidArgument, "INVALID_ARGUMENT"),
        (Some(Hello { protocol_version: 2, ..hello(1) }), Code::FailedPrecondition, "PROTOCOL_VERSION"),
        (Some(Hello { epoch: 5, ..hello(1) }), Code::FailedPrecondition, "STALE_EPOCH"),
        (Some(Hello { fingerprint: "x".to_owned(), ..hello(1) }), Code::FailedPrecondition, "STALE_EPOCH"),
    ];
    for (hello, code, reason) in bad_hellos {
        let frame = DraftFrame { hello, items: Vec::new() };
        let status = draft.client().await.round(frame).await.unwrap_err();
        assert_eq!((status.code(), reason_of(&status).as_deref()), (code, Some(reason)));
    }

    let mut rounds = draft.rounds(1).await;
    let text = &texts(1)[0];
    let t = text.prompt_len;
    let features = exporter.publish(0, text.rows(0, t));
    let good =
        Propose { base_len: t, tokens: text.tokens(0, t), features, k: 2, round: 9, ..Default::default() };
    let mut wild_slot = good.clone();
    wild_slot.features[0].rows = 4096;
    let mut big_id = good.clone();
    big_id.tokens[3] = u32::MAX;
    let cases = [
        (Propose::default(), "INVALID_ARGUMENT", "base_len must be at least 1"),
        (Propose { k: 64, ..good.clone() }, "INVALID_ARGUMENT", "k must be at most 63, given 64"),
        (
            Propose { base_len: u32::MAX, token_from: u32::MAX, ..good.clone() },
            "INVALID_ARGUMENT",
            "4294967295",
        ),
        (Propose { base_len: t - 1, ..good.clone() }, "INVALID_ARGUMENT", "up to and including"),
        (big_id, "TOKEN_RANGE", "given 4294967295"),
        (wild_slot, "INVALID_ARGUMENT", "features of position 0"),
    ];
    for (bad, reason, part) in cases {
        let (given, message) = rounds.refusal(3, bad).await;
        assert!(given == reason && message.contains(part), "{given}: {message}");
    }
    let ids = vec![5; 510];
    let over = Propose { base_len: 509, tokens: ids, k: 3, ..Default::default() };
    let (reason, message) = rounds.refusal(3, over).await;
    assert!(reason == "CONTEXT" && message.contains("513, over the context of 512"), "{message}");
    rounds.send(vec![DraftItem { seq: 4, op: None }, item(5, good)]).await;
    let outs = rounds.receive(2).await;
    assert_eq!(outs[1].round, 9);
    assert_eq!(common::proposal(outs[1].body.clone().unwrap()).tokens.len(), 2);
    draft.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_hello_ends_the_stream() {
    let dir = tempfile::tempdir().unwrap();
    let exporter = Exporter::start(dir.path());
    let draft = Draft::start(dir.path(), &exporter.address).await;
    draft.until_attached(true).await;
    let mut rounds = draft.rounds(1).await;
    rounds.sender.send(DraftFrame { hello: Some(hello(1)), items: Vec::new() }).await.unwrap();
    let ended = common::patient("the stream to end", rounds.replies.message()).await.unwrap_err();
    assert_eq!(reason_of(&ended).as_deref(), Some("INVALID_ARGUMENT"), "{ended:?}");
    assert_eq!(ended.message(), "hello may be in the first frame of a stream only");
    draft.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn features_that_are_no_numbers_fail_the_round_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let mut exporter = Exporter::start(dir.path());
    let draft = Draft::start(dir.path(), &exporter.address).await;
    draft.until_attached(true).await;
    let mut rounds = draft.rounds(1).await;
    let text = &texts(1)[0];
    let t = text.prompt_len;
    let mut rows = text.rows(0, t).to_vec();
    let good = exporter.publish(0, &rows);
    rows.fill(f32::NAN);
    let bad = exporter.publish(0, &rows);
    let ask = |features| {
        let tokens = text.tokens(0, t);
        Propose { base_len: t, tokens, features, k: 2, ..Default::default() }
    };
    rounds.send(vec![item(1, ask(good.clone())), item(2, ask(bad))]).await;
    let outs = rounds.receive(2).await;
    let alone = rounds.proposal(3, ask(good.clone())).await;
    assert_eq!(common::proposal(outs[0].body.clone().unwrap()), alone);
    assert!(format!("{:?}", outs[1].body).contains("INVALID_ARGUMENT"), "{:?}", outs[1]);
    assert_eq!(rounds.proposal(2, ask(good)).await, alone, "the sequence begins anew");
    draft.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn drain_ends_streams_and_the_service() {
    let dir = tempfile::tempdir().unwrap();
    let exporter = Exporter::start(dir.path());
    let draft = Draft::start(dir.path(), &exporter.address).await;
    draft.until_attached(true).await;
    let mut rounds = draft.rounds(1).await;
    draft.client().await.drain(eyrie_wire::v1::DrainRequest { grace_ms: 0 }).await.unwrap();
    let ended = common::patient("the stream to end", rounds.replies.message()).await.unwrap_err();
    assert_eq!(reason_of(&ended).as_deref(), Some("DRAINING"), "{ended:?}");
    common::patient("the service to end", draft.running).await.unwrap().unwrap();
    assert!(!dir.path().join("draft.sock").exists());
}

#[tokio::test]
async fn a_service_that_cannot_start_says_why() {
    let dir = tempfile::tempdir().unwrap();
    let listen = Address::Unix(dir.path().join("draft.sock"));
    let options = DraftOptions::new(common::demo("mini-eagle3"), listen.clone(), vec![listen]);
    let start = async |options: DraftOptions| -> String {
        let ended: Result<(), DraftError> = eyrie_draft::run(options, Drain::new(), |_| {}).await;
        ended.unwrap_err().to_string()
    };
    let wide = start(DraftOptions { max_draft_tokens: 64, ..options.clone() }).await;
    assert_eq!(wide, "option max-draft-tokens must be 1..=63, given 64");
    let none = start(DraftOptions { max_sequences: 0, ..options.clone() }).await;
    assert_eq!(none, "option max-sequences must be 1..=1048576, given 0");
    let empty = start(DraftOptions { cache_tokens: 0, ..options.clone() }).await;
    assert_eq!(empty, "option cache-tokens must be 1..=2147483648, given 0");
    let target = options.targets[0].clone();
    let none = start(DraftOptions { targets: Vec::new(), ..options.clone() }).await;
    assert_eq!(none, "option number of targets must be 1..=16, given 0");
    let twice = start(DraftOptions { targets: vec![target.clone(), target], ..options.clone() }).await;
    assert!(twice.starts_with("option targets must be all different, given unix:"), "{twice}");
    let hasty = start(DraftOptions { unary_idle: Duration::ZERO, ..options.clone() }).await;
    assert_eq!(hasty, "option unary-idle must be 1ms..=3600s, given 0ns");
    let idle = start(DraftOptions { threads: 0, ..options.clone() }).await;
    assert_eq!(idle, "cpu: threads is 0, limit 1..=1024");
    let absent = start(DraftOptions { model: dir.path().join("none").into(), ..options.clone() }).await;
    assert!(absent.contains("none/config.json"), "{absent}");
    let nowhere = Address::Unix(dir.path().join("no/such/folder.sock"));
    let deaf = start(DraftOptions { listen: nowhere, ..options }).await;
    assert!(deaf.contains("cannot listen on unix:"), "{deaf}");
}
