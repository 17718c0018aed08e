//! P6: the draft maps the target's embedding (and head), it does not copy it.

use crate::EYRIE;
use std::path::Path;

use eyrie_tests::{Fleet, ask, client, draft_card, root};

/// One mapping of a process as /proc/PID/smaps tells it, in bytes.
#[derive(Debug, Default)]
struct Mapping {
    size: u64,
    rss: u64,
    private_dirty: u64,
    writable: bool,
}

/// The mappings of `pid` whose backing is a memfd.
fn memfd_mappings(pid: u32) -> Vec<Mapping> {
    let smaps = std::fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("smaps")).unwrap();
    let mut found: Vec<(bool, Mapping)> = Vec::new();
    for line in smaps.lines() {
        let fields: Vec<&str> = line.split_whitespace().collect();
        match fields[..] {
            [range, flags, _, _, inode, ..]
                if range.contains('-') && inode.parse::<u64>().is_ok()
                    || flags.len() == 4 && range.contains('-') =>
            {
                let memfd = line.contains("/memfd:");
                found.push((memfd, Mapping { writable: flags.contains('w'), ..Mapping::default() }));
            }
            [key, kb, "kB"] => {
                let bytes = kb.parse::<u64>().unwrap() * 1024;
                let Some((_, mapping)) = found.last_mut() else { continue };
                match key {
                    "Size:" => mapping.size = bytes,
                    "Rss:" => mapping.rss = bytes,
                    "Private_Dirty:" => mapping.private_dirty = bytes,
                    _ => {}
                }
            }
            _ => {}
        }
    }
    found.into_iter().filter(|(memfd, _)| *memfd).map(|(_, mapping)| mapping).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn draft_maps_the_embedding_and_owns_none_of_it() {
    let fleet = Fleet::start(EYRIE, &[]);
    let ready = fleet.ready();
    let prompt: Vec<u32> = (100..400).collect();
    ask(&prompt, 64).chain(3).run(&mut client(&ready.grpc).await).await.unwrap();

    let card = draft_card(ready.draft.as_ref().unwrap()).await.unwrap();
    let lease = &card.targets[0];
    // Embedding and head of the bundled target: 2 x 4096 x 384 bf16.
    let shared = 2 * 4096 * 384 * 2;
    assert!(lease.mapped_bytes >= shared, "{card:?}");
    assert_eq!(lease.mapped_private_dirty, 0, "no page of the mapping is the draft's own");
    assert_eq!((lease.kind.as_str(), lease.copied_bytes), ("memfd", 0));

    let mappings = memfd_mappings(ready.pids.draft.unwrap());
    let weights =
        mappings.iter().filter(|m| m.size >= shared).max_by_key(|m| m.rss).expect("a mapping of the weights");
    assert!(weights.rss > 0, "looked-up rows are resident through the mapping");
    for mapping in &mappings {
        assert!(!mapping.writable, "mapped read-only: {mapping:?}");
        assert_eq!(mapping.private_dirty, 0, "{mapping:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn draft_without_a_head_uses_the_target_s() {
    let fixtures = root().join("tests/fixtures");
    let (target, draft) = (fixtures.join("v3"), fixtures.join("v3_eagle3_shared"));
    let fleet =
        Fleet::start(EYRIE, &["--target", target.to_str().unwrap(), "--draft", draft.to_str().unwrap()]);
    let ready = fleet.ready();
    let mut client = client(&ready.grpc).await;
    let prompt: Vec<u32> = (1..40).collect();
    let plain = ask(&prompt, 40).run(&mut client).await.unwrap();
    let drafted = ask(&prompt, 40).chain(3).run(&mut client).await.unwrap();
    assert_eq!(drafted.ids, plain.ids);
    assert!(drafted.usage.drafted_tokens > 0);
    let card = draft_card(ready.draft.as_ref().unwrap()).await.unwrap();
    assert_eq!(card.targets[0].mapped_private_dirty, 0);
    let own = std::fs::metadata(draft.join("model.safetensors")).unwrap().len();
    assert!(card.own_bytes <= own, "own {} of a file of {own} bytes without embed and head", card.own_bytes);
}
