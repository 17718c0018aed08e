//! Drafts in namespaces of their own, as containers have them.

use eyrie_tests::Trio;

use crate::EYRIE;
use crate::services::{Pair, proposes, start_draft, start_target};

/// A namespace, and the command that starts a draft in it.
pub(crate) struct Space {
    pub(crate) name: &'static str,
    through: &'static [&'static str],
    /// Memory behind a handle can be opened there.
    handles: Handles,
}

/// Whether the driver opens handles of another process from there.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Handles {
    Open,
    /// Drivers differ; a line that says why is as good as success.
    Perhaps,
}

/// A draft that loses its parent ends with it.
pub(crate) const ALL: [Space; 4] = [
    Space {
        name: "a pid namespace, the host's /proc",
        through: &["unshare", "--kill-child", "--pid", "--fork"],
        handles: Handles::Perhaps,
    },
    Space {
        name: "a pid namespace, a /proc of its own",
        through: &["unshare", "--kill-child", "--pid", "--fork", "--mount-proc"],
        handles: Handles::Perhaps,
    },
    Space { name: "an ipc namespace", through: &["unshare", "--ipc"], handles: Handles::Open },
    Space {
        name: "a net namespace, by a unix socket",
        through: &["unshare", "--net"],
        handles: Handles::Open,
    },
];

pub(crate) async fn draft_in(kind: &str, space: Space) -> String {
    let mut trio = Trio::new(EYRIE);
    start_target(&mut trio, Pair::Bundled, kind, &[]).await;
    let flags: &[&str] = if kind == "cuda_ipc" { &["--allow-writable-ipc"] } else { &[] };
    match start_draft(&mut trio, Pair::Bundled, "draft", space.through, flags).await {
        Ok(_) => format!("attached, {}", proposes(&mut trio, "draft").await),
        Err(refused) => {
            assert!(kind == "cuda_ipc" && space.handles == Handles::Perhaps, "not attached: {refused}");
            assert!(refused.contains("CUDA_ERROR"), "{refused}");
            format!("refused: {refused}")
        }
    }
}
