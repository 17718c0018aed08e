//! Drafts in namespaces of their own, as containers have them.

use eyrie_tests::Trio;

use crate::EYRIE;
use crate::services::{Pair, proposes, start_draft, start_target};

/// A namespace, and the command that starts a draft in it.
pub(crate) struct Space {
    pub(crate) name: &'static str,
    through: &'static [&'static str],
    driver: Driver,
}

/// What the driver does there.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Driver {
    Works,
    /// Drivers differ in opening another process's handles; a line that says why is as good as success.
    OpensHandlesPerhaps,
    /// It looks its own process up in a /proc that does not know it: no memory of any kind, and a line that says so.
    MayNotStart,
}

/// A draft that loses its parent ends with it.
pub(crate) const ALL: [Space; 4] = [
    Space {
        name: "a pid namespace, the host's /proc",
        through: &["unshare", "--kill-child", "--pid", "--fork"],
        driver: Driver::MayNotStart,
    },
    Space {
        name: "a pid namespace, a /proc of its own",
        through: &["unshare", "--kill-child", "--pid", "--fork", "--mount-proc"],
        driver: Driver::OpensHandlesPerhaps,
    },
    Space { name: "an ipc namespace", through: &["unshare", "--ipc"], driver: Driver::Works },
    Space {
        name: "a net namespace, by a unix socket",
        through: &["unshare", "--net"],
        driver: Driver::Works,
    },
];

pub(crate) async fn draft_in(kind: &str, space: Space) -> String {
    let mut trio = Trio::new(EYRIE);
    start_target(&mut trio, Pair::Bundled, kind, &[]).await;
    let flags: &[&str] = if kind == "cuda_ipc" { &["--allow-writable-ipc"] } else { &[] };
    match start_draft(&mut trio, Pair::Bundled, "draft", space.through, flags).await {
        Ok(_) => format!("attached, {}", proposes(&mut trio, "draft").await),
        Err(refused) => {
            let is_expected = match space.driver {
                Driver::Works => false,
                Driver::OpensHandlesPerhaps => kind == "cuda_ipc",
                Driver::MayNotStart => true,
            };
            assert!(is_expected, "not attached: {refused}");
            assert!(refused.contains("CUDA_ERROR"), "{refused}");
            format!("refused: {refused}")
        }
    }
}
