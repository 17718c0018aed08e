//! What drafts own of the device's memory, by either way of sharing.

use std::time::Duration;

use eyrie_tests::{Trio, draft_card};

use crate::EYRIE;
use crate::device::{Device, MIB, TABLES};
use crate::services::{Pair, attach_ms, proposes, start_draft, start_target};

/// A target whose embedding and head have 163,840 rows of 7,168, and a draft without them. The rest is small: what is
/// looked at are those two.
pub(crate) const LARGE: Pair = Pair::Synth("kimi-k2:layers=8,experts=8,expert-width=256");
/// Embedding and head in bf16.
pub(crate) const LARGE_SHARED: u64 = 2 * 163_840 * 7_168 * 2;
/// Keeps the draft's KV small beside what is looked at.
pub(crate) const LARGE_DRAFT: [&str; 2] = ["--cache-tokens", "1024"];

/// Context, kernels and libraries of a process that computes.
const CONTEXT: u64 = 1024 * MIB;
/// How soon a killed process's memory is free again.
pub(crate) const GIVEN_BACK: Duration = Duration::from_secs(5);

/// KV of the bundled draft's 16,384 positions: 2 heads of 64, keys and values, in bf16.
const BUNDLED_KV: u64 = 16_384 * 2 * 64 * 2 * 2;

/// Bytes that the draft on socket `name` has in memory for its own weights.
async fn own_bytes(trio: &Trio, name: &str) -> u64 {
    draft_card(&trio.at(name)).await.unwrap().own_bytes
}

/// What is shared here is small beside a context, so a copy of it would not show: that it does is [`large_head`]'s part.
pub(crate) async fn bundled_pair(device: &Device) -> String {
    let mut trio = Trio::new(EYRIE);
    let start = device.free();
    let card = start_target(&mut trio, Pair::Bundled, "cuda_vmm", &[]).await;
    let alone = device.free();
    let lease = start_draft(&mut trio, Pair::Bundled, "draft", &[], &[]).await.unwrap();
    let one = device.free();
    start_draft(&mut trio, Pair::Bundled, "second", &[], &[]).await.unwrap();
    let two = device.free();
    assert_eq!(lease.mapped_bytes, card.shared_bytes);
    let own = own_bytes(&trio, "draft").await + BUNDLED_KV;
    let (first, second) = (alone - one, one - two);
    for took in [first, second] {
        assert!(took >= own && took < own + CONTEXT, "a draft took {} MiB", took / MIB);
    }
    assert!(first.abs_diff(second) <= TABLES, "{} and {} MiB", first / MIB, second / MIB);
    let attached = attach_ms(&trio.log("draft"));
    let proposed = [proposes(&mut trio, "draft").await, proposes(&mut trio, "second").await];
    let later = two - device.free();
    drop(trio);
    device.has_again(start, GIVEN_BACK).await;
    format!(
        "target {} MiB; drafts {} and {} MiB, of which weights and KV {:.1}, the rest context; shared {:.1} MiB (a \
         copy of so little shows with the large head alone); first rounds of all {} MiB more; attached {attached} ms after the grant; both propose: {}",
        (start - alone) / MIB,
        first / MIB,
        second / MIB,
        own as f64 / MIB as f64,
        card.shared_bytes as f64 / MIB as f64,
        later / MIB,
        proposed.join(", ")
    )
}

pub(crate) async fn large_head(device: &Device) -> String {
    let mut trio = Trio::new(EYRIE);
    let start = device.free();
    let card = start_target(&mut trio, LARGE, "cuda_vmm", &["--kv-tokens", "4096"]).await;
    assert!(card.shared_bytes >= LARGE_SHARED, "{} bytes are shared", card.shared_bytes);
    let alone = device.free();
    let lease = start_draft(&mut trio, LARGE, "draft", &[], &LARGE_DRAFT).await.unwrap();
    assert_eq!(lease.mapped_bytes, card.shared_bytes);
    let (took, own) = (alone - device.free(), own_bytes(&trio, "draft").await);
    let attached = attach_ms(&trio.log("draft"));
    // A copy of either table would be 2,240 MiB more.
    assert!(took >= own && took < own + CONTEXT, "the draft took {} MiB, {} its own", took / MIB, own / MIB);
    drop(trio);
    device.has_again(start, GIVEN_BACK).await;
    format!(
        "target {} MiB; draft {} MiB, of which weights {}; shared {} MiB once; attached {attached} ms after the grant",
        (start - alone) / MIB,
        took / MIB,
        own / MIB,
        card.shared_bytes / MIB
    )
}

pub(crate) async fn handle_without_leave(device: &Device) -> String {
    let mut trio = Trio::new(EYRIE);
    start_target(&mut trio, Pair::Bundled, "cuda_ipc", &[]).await;
    let granted = start_draft(&mut trio, Pair::Bundled, "draft", &[], &[]).await;
    let refused = granted.map(|lease| lease.kind).unwrap_err();
    assert!(refused.contains("--allow-writable-ipc"), "{refused}");
    drop(trio);
    format!("{refused} ({} MiB free after)", device.free() / MIB)
}

pub(crate) async fn handle_with_leave(device: &Device) -> String {
    const LEAVE: &[&str] = &["--allow-writable-ipc"];
    let mut trio = Trio::new(EYRIE);
    let start = device.free();
    start_target(&mut trio, Pair::Bundled, "cuda_ipc", &[]).await;
    start_draft(&mut trio, Pair::Bundled, "draft", &[], LEAVE).await.unwrap();
    let attached = attach_ms(&trio.log("draft"));
    // Once, so that what the target allocates with its first request is not counted below.
    proposes(&mut trio, "draft").await;
    trio.kill("draft");
    let without = device.settled().await;
    start_draft(&mut trio, Pair::Bundled, "draft", &[], LEAVE).await.unwrap();
    let proposed = proposes(&mut trio, "draft").await;
    trio.kill("draft");
    let back = device.has_again(without, GIVEN_BACK).await;
    drop(trio);
    device.has_again(start, GIVEN_BACK).await;
    format!(
        "attached {attached} ms after the grant; {proposed}; {} MiB free again {back:.0?} after the kill",
        without / MIB
    )
}
