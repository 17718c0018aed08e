//! Harness of the cross-service tests: real processes, real sockets, the real pair.
//!
//! The tests themselves lie in `tests/e2e` and belong to the `eyrie` package, which builds the binary
//! they start. Everything here waits for conditions with a deadline and panics with what was missing.
#![forbid(unsafe_code)]
#![expect(clippy::panic, clippy::expect_used, reason = "a harness fails by panicking")]

mod fleet;
mod goldens;
mod proxy;
mod raw;
mod request;
mod rest;
mod trio;
mod wild;

pub use fleet::{Fleet, Pids, Ready, Service, Signal, signal, until};
pub use goldens::{Golden, Tree, TreeRound, goldens};
pub use proxy::{Cable, DraftFault, DraftProxy, Passed, TargetFault, TargetProxy};
pub use raw::{Answer, call, framed};
pub use request::{Asked, Outcome, ask, client, collect};
pub use rest::{at_rest, draft_card, load, target_card};
pub use trio::{Trio, speculating};
pub use wild::Wild;

use std::path::{Path, PathBuf};

/// Whether the services of these tests compute on a GPU: they take it from the environment, as this does.
pub fn on_gpu() -> bool {
    std::env::var("EYRIE_DEVICE").is_ok_and(|device| device.starts_with("cuda"))
}

/// The repository's root.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("tests/ has a parent").to_owned()
}

/// Folder of the bundled target.
pub fn mini() -> PathBuf {
    root().join("deploy/demo/mini")
}

/// Folder of the bundled draft.
pub fn mini_eagle3() -> PathBuf {
    root().join("deploy/demo/mini-eagle3")
}
