//! A draft that shares no memory with its target, and one with several targets.
#![allow(clippy::unwrap_used, reason = "a helper that fails fails its test")]

mod common;

use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;

use common::exporter::Exporter;
use common::reference::{Text, texts};
use common::{Draft, Rounds, demo, hello};
use eyrie_checkpoint::TargetCheckpoint;
use eyrie_draft::{DraftOptions, SharedSource};
use eyrie_service::Drain;
use eyrie_wire::v1::draft_out::Body;
use eyrie_wire::v1::{Hello, Propose, TargetLease};
use eyrie_wire::{Address, reason_of};

/// The round of a prompt and `ahead` tokens that the draft knows nothing of yet.
fn whole(exporter: &mut Exporter, text: &Text, ahead: u32) -> Propose {
    let base_len = text.prompt_len + ahead;
    let features = exporter.publish(0, text.rows(0, base_len));
    Propose { round: 1, base_len, tokens: text.tokens(0, base_len), features, k: 5, ..Default::default() }
}

async fn attached(dir: &Path, target: &Address, shared: SharedSource) -> (Draft, TargetLease) {
    let draft = Draft::start_with(dir, target, |options| options.shared = shared).await;
    let lease = draft.until_attached(true).await;
    (draft, lease)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn copies_propose_what_mapped_memory_does_and_are_counted_as_copies() {
    let (exporting, mapping, copying, building) = (folder(), folder(), folder(), folder());
    let mut exporter = Exporter::start(exporting.path());
    let address = exporter.address.clone();
    let (mapped, _) = attached(mapping.path(), &address, SharedSource::Map).await;
    let (copied, copied_lease) = attached(copying.path(), &address, SharedSource::Target).await;
    let (built, built_lease) = attached(building.path(), &address, SharedSource::Folder(demo("mini"))).await;
    for lease in [copied_lease, built_lease] {
        assert_eq!((lease.kind.as_str(), lease.mapped_bytes, lease.mapped_private_dirty), ("copy", 0, 0));
        assert_eq!(lease.copied_bytes, exporter.shared_bytes());
    }
    assert_eq!(exporter.shared_reads.load(Relaxed), 1, "the folder's weights were not read from the target");

    let mut streams = [mapped.rounds(1).await, copied.rounds(1).await, built.rounds(1).await];
    let texts = texts(2);
    for (seq, text) in (1..).zip(&texts) {
        for ahead in [0, 9] {
            let wanted = whole(&mut exporter, text, ahead);
            let before = exporter.feature_reads.load(Relaxed);
            let mut told = Vec::new();
            for rounds in &mut streams {
                told.push(rounds.proposal(seq, wanted.clone()).await);
            }
            assert_eq!(told[0].tokens.len(), 5);
            assert!(told[1] == told[0] && told[2] == told[0], "{told:?}");
            let reads = exporter.feature_reads.load(Relaxed) - before;
            assert_eq!(reads, 2, "one call a frame of each draft without the ring");
        }
    }
    for draft in [mapped, copied, built] {
        draft.stop().await;
    }
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_damaged_copy_is_refused_by_name() {
    type Damage = fn(&mut Vec<u8>);
    let cases: [(Damage, &str); 4] = [
        (|bytes| bytes[12_345] ^= 1, "tensor embed_tokens: checksum"),
        (|bytes| *bytes.last_mut().unwrap() ^= 1, "tensor lm_head: checksum"),
        (|bytes| bytes.truncate(1_000_000), "bytes and sent 1000000"),
        (|bytes| bytes.extend([0; 9]), "bytes and sent"),
    ];
    for (damage, part) in cases {
        let dir = folder();
        let exporter = Exporter::start_corrupt(dir.path(), damage);
        let draft =
            Draft::start_with(dir.path(), &exporter.address, |o| o.shared = SharedSource::Target).await;
        let lease = draft.until_refused(part).await;
        assert!(!lease.attached && lease.copied_bytes == 0, "{lease:?}");
        draft.stop().await;
    }
}

/// The demo target with one bit of its embedding changed.
fn another_model(dir: &Path) {
    for name in ["config.json", "generation_config.json", "tokenizer.json"] {
        std::fs::copy(demo("mini").join(name), dir.join(name)).unwrap();
    }
    let mut weights = std::fs::read(demo("mini").join("model.safetensors")).unwrap();
    let checkpoint = TargetCheckpoint::open(&demo("mini")).unwrap();
    let embed = checkpoint.index().get("model.embed_tokens.weight").unwrap();
    weights[embed.range.start + 77] ^= 1;
    std::fs::write(dir.join("model.safetensors"), weights).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_folder_with_another_model_is_refused_and_one_without_is_not_started_with() {
    let (dir, other) = (folder(), folder());
    another_model(other.path());
    let exporter = Exporter::start(dir.path());
    let shared = SharedSource::Folder(other.path().to_owned());
    let draft = Draft::start_with(dir.path(), &exporter.address, |o| o.shared = shared).await;
    let lease = draft.until_refused("tensor embed_tokens is not the target's: its checksum differs").await;
    assert!(lease.because.contains(other.path().to_str().unwrap()), "{}", lease.because);
    draft.stop().await;

    let listen = Address::Unix(dir.path().join("none.sock"));
    let options = DraftOptions {
        shared: SharedSource::Folder(dir.path().to_owned()),
        ..DraftOptions::new(demo("mini-eagle3"), listen, vec![exporter.address.clone()])
    };
    let ended = eyrie_draft::run(options, Drain::new(), |_| {}).await.unwrap_err().to_string();
    assert!(ended.contains("config.json"), "{ended}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_target_whose_door_is_elsewhere_is_refused_with_the_way_out() {
    let dir = folder();
    let exporter =
        Exporter::start_with(dir.path(), |grant, _| grant.door = "/on/another/host.door".to_owned());
    let draft = Draft::start(dir.path(), &exporter.address).await;
    let lease = draft.until_refused("--shared-weights target or a folder").await;
    assert!(lease.because.contains("/on/another/host.door"), "{}", lease.because);
    assert_eq!(exporter.shared_reads.load(Relaxed), 0, "never a copy in its place");
    draft.stop().await;
}

async fn rounds_at(draft: &Draft, exporter: &Exporter) -> Rounds {
    draft.rounds_as(Hello { epoch: exporter.epoch.get(), ..hello(1) }).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_draft_serves_two_targets_and_outlives_either() {
    for shared in [SharedSource::Map, SharedSource::Target] {
        let (dir, first_dir, second_dir) = (folder(), folder(), folder());
        let (first, mut second) = (Exporter::start(first_dir.path()), Exporter::start(second_dir.path()));
        let addresses = vec![first.address.clone(), second.address.clone()];
        let copies = shared == SharedSource::Target;
        let draft = Draft::start_with(dir.path(), &first.address, |options| {
            (options.targets, options.shared) = (addresses, shared);
        })
        .await;
        let told = draft.until("two leases", |targets| targets.iter().all(|lease| lease.attached)).await;
        let epochs = [first.epoch.get(), second.epoch.get()];
        assert_eq!([told[0].epoch, told[1].epoch], epochs);
        let reads = first.shared_reads.load(Relaxed) + second.shared_reads.load(Relaxed);
        assert_eq!(reads, usize::from(copies), "targets of one model share a copy");
        let unnamed = draft.rounds_as(hello(1)).await.err().unwrap();
        assert_eq!(reason_of(&unnamed).as_deref(), Some("STALE_EPOCH"), "{unnamed:?}");
        assert!(epochs.iter().all(|epoch| unnamed.message().contains(&format!("{epoch:016x}"))));

        // The same sequence number at both: two sequences.
        let (mut at_first, mut at_second) =
            (rounds_at(&draft, &first).await, rounds_at(&draft, &second).await);
        let mut first = first;
        let texts = texts(2);
        let one = at_first.proposal(1, whole(&mut first, &texts[0], 0)).await;
        let other = at_second.proposal(1, whole(&mut second, &texts[1], 0)).await;
        assert_ne!(one, other);
        let held: Vec<u32> = draft.card().await.targets.iter().map(|lease| lease.sequences).collect();
        assert_eq!(held, [1, 1]);

        drop(first);
        let lost = common::patient("the stream to end", at_first.replies.message()).await.unwrap_err();
        assert_eq!(reason_of(&lost).as_deref(), Some("UNREACHABLE"), "{lost:?}");
        assert_eq!(at_second.proposal(2, whole(&mut second, &texts[1], 0)).await, other);
        let told = draft.until("the first lease to go", |targets| !targets[0].attached).await;
        assert!(told[1].attached && told[1].sequences == 2 && !told[0].because.is_empty(), "{told:?}");
        draft.rounds_as(hello(2)).await.unwrap();
        let again = Exporter::start(first_dir.path());
        draft.until("the first lease anew", |targets| targets[0].epoch == again.epoch.get()).await;
        assert_eq!(at_second.proposal(3, whole(&mut second, &texts[1], 0)).await, other);
        draft.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn targets_share_the_cache_in_equal_parts_and_none_is_attached_twice() {
    let (dir, target_dir) = (folder(), folder());
    let mut exporter = Exporter::start(target_dir.path());
    let link = target_dir.path().join("link.sock");
    std::os::unix::fs::symlink(target_dir.path().join("target.sock"), &link).unwrap();
    let addresses = vec![exporter.address.clone(), Address::Unix(link)];
    let draft = Draft::start_with(dir.path(), &exporter.address, |options| {
        (options.targets, options.cache_tokens) = (addresses, 64);
    })
    .await;
    let one = |targets: &[TargetLease]| {
        let twice = targets.iter().filter(|lease| lease.because.contains("is attached already, by")).count();
        targets.iter().filter(|lease| lease.attached).count() == 1 && twice == 1
    };
    draft.until("one lease of two", one).await;
    let text = &texts(1)[0];
    let ahead = 64 - text.prompt_len.min(64);
    match draft.rounds(1).await.ask(1, whole(&mut exporter, text, ahead)).await {
        Body::Error(error) => assert!(error.message.contains("cache_tokens allows 32"), "{}", error.message),
        other => panic!("wanted an error, got {other:?}"),
    }
    draft.stop().await;
}
