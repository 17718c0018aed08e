//! One copy of embedding and head, used where it lies by the target and by whoever imports it.

use std::sync::Arc;

use crate::common::driver::Pair;
use crate::common::rewrite::rewrite;
use crate::common::{cpu, demo, draft, fixture};
use eyrie_checkpoint::TargetCheckpoint;
use eyrie_model::{Backing, CaptureSet, DeepSeek, EMBED, HEAD, SharedWeights, TargetModel};
use eyrie_region::{Epoch, ImportedMemfd, Local, Region, RegionKind, mapping_usage};

fn checkpoint() -> TargetCheckpoint {
    TargetCheckpoint::open(&demo("mini")).unwrap()
}

/// What another process would map.
fn import(built: &SharedWeights) -> Arc<dyn Region> {
    let fd = built.descriptor().unwrap().try_clone_to_owned().unwrap();
    Arc::new(ImportedMemfd::import(fd, built.grant().bytes).unwrap())
}

#[test]
fn the_target_uses_the_exported_memory_itself() {
    let checkpoint = checkpoint();
    let built = SharedWeights::build(&checkpoint, Backing::Memfd, Epoch::random().unwrap()).unwrap();
    assert_eq!(built.region().kind(), RegionKind::Memfd);
    let target = DeepSeek::load(&checkpoint, built.clone(), &cpu(1), &mut |_| {}).unwrap();
    let used = target.embed_and_head();
    assert_eq!(used.embed_view().bytes().unwrap().as_ptr(), built.embed_view().bytes().unwrap().as_ptr());
    assert_eq!(used.head_view().bytes().unwrap().as_ptr(), built.head_view().bytes().unwrap().as_ptr());
    let published = checkpoint.linear("model.embed_tokens").unwrap();
    assert_eq!(built.embed_view().bytes().unwrap(), published.bytes().unwrap());
    let names: Vec<&str> = built.manifest().iter().map(|tensor| tensor.name.as_str()).collect();
    assert_eq!(names, [EMBED, HEAD]);
}

#[test]
fn a_draft_over_imported_weights_drafts_the_same_and_dirties_nothing() {
    let checkpoint = checkpoint();
    let cpu = cpu(1);
    let epoch = Epoch::random().unwrap();
    let built = SharedWeights::build(&checkpoint, Backing::Memfd, epoch).unwrap();
    let mut target = DeepSeek::load(&checkpoint, built.clone(), &cpu, &mut |_| {}).unwrap();
    let capture = CaptureSet::new(&[2, 4, 5], 8).unwrap();
    target.set_capture(&capture).unwrap();
    let region = import(&built);
    let imported = SharedWeights::import(Arc::clone(&region), built.grant(), epoch).unwrap();
    assert_eq!(imported.fingerprint(), built.fingerprint());
    assert_ne!(imported.embed_view().bytes().unwrap().as_ptr(), built.embed_view().bytes().unwrap().as_ptr());
    let mut rounds = Vec::new();
    for shared in [&built, &imported] {
        let mut head = draft(&demo("mini-eagle3"), &capture, shared, &cpu);
        let mut pair = Pair::start(&mut target, &mut head, &[481, 1164, 2220, 70, 72], 128);
        rounds.push((0..4).map(|_| pair.chain_round(4)).collect::<Vec<_>>());
    }
    assert_eq!(rounds[0], rounds[1]);
    let usage = mapping_usage(region.as_ref()).unwrap();
    assert_eq!(usage.private_dirty, 0, "{usage:?}");
}

#[test]
fn a_stale_epoch_and_a_changed_byte_are_refused() {
    let epoch = Epoch::random().unwrap();
    let built = SharedWeights::build(&checkpoint(), Backing::Local, epoch).unwrap();
    let copy = |flip: Option<usize>| -> Arc<dyn Region> {
        let mut local = Local::copy_of(built.region().host().unwrap());
        if let Some(at) = flip {
            local.bytes_mut()[at] ^= 1;
        }
        Arc::new(local)
    };
    SharedWeights::import(copy(None), built.grant(), epoch).unwrap();
    let other = Epoch::random().unwrap();
    let error = SharedWeights::import(copy(None), built.grant(), other).unwrap_err().to_string();
    assert!(error.contains(&epoch.to_string()) && error.contains(&other.to_string()), "{error}");
    for tensor in built.manifest() {
        let flipped = copy(Some(tensor.offset as usize + tensor.bytes as usize - 1));
        let error = SharedWeights::import(flipped, built.grant(), epoch).unwrap_err().to_string();
        assert!(error.contains(&tensor.name) && error.contains("checksum"), "{error}");
    }
}

#[test]
fn grants_that_lack_or_misdescribe_a_tensor_are_refused() {
    let epoch = Epoch::random().unwrap();
    let built = SharedWeights::build(&checkpoint(), Backing::Local, epoch).unwrap();
    let region = || Arc::clone(built.region());
    let mut grant = built.grant().clone();
    grant.tensors.retain(|tensor| tensor.name != HEAD);
    let error = SharedWeights::import(region(), &grant, epoch).unwrap_err().to_string();
    assert!(error.contains("no tensor lm_head"), "{error}");
    let mut grant = built.grant().clone();
    grant.tensors[1].layout = "swizzled".to_owned();
    let error = SharedWeights::import(region(), &grant, epoch).unwrap_err().to_string();
    assert!(error.contains("swizzled"), "{error}");
    // Sizes whose product wraps around to the bytes that are there; strides of 0 address one element only.
    let mut grant = built.grant().clone();
    let head = &mut grant.tensors[1];
    (head.shape, head.strides) = (vec![(1 << 63) + head.bytes / 2, 1], vec![0, 0]);
    let error = SharedWeights::import(region(), &grant, epoch).unwrap_err().to_string();
    assert!(error.contains("lm_head: not supported: strides [0, 0]"), "{error}");
}

#[test]
fn the_fingerprint_is_of_the_weights_and_not_of_the_boot() {
    let of = |dir: &std::path::Path| {
        let checkpoint = TargetCheckpoint::open(dir).unwrap();
        SharedWeights::build(&checkpoint, Backing::Local, Epoch::random().unwrap()).unwrap().fingerprint()
    };
    let v3 = of(&fixture("v3"));
    assert_eq!(of(&fixture("v3")), v3);
    for name in ["model.embed_tokens.weight", "lm_head.weight"] {
        let changed = rewrite(&fixture("v3"), |_, tensors| tensors.get_mut(name).unwrap().data[7] ^= 1);
        assert_ne!(of(changed.path()), v3, "{name}");
    }
}
