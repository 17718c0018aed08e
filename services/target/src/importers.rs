//! Who maps this target's memory, and who still maps that of its previous life.

use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;

use eyrie_region::{Importer, LeaseId, LeaseTable, Ledger};

/// How long a starting or stopping target waits for importers to unmap.
const UNMAP_GRACE: Duration = Duration::from_secs(2);

/// The ledger of importers. Without it a target serves as well, but a successor cannot know whom to wait for.
#[derive(Debug)]
pub(crate) struct Importers {
    ledger: Option<Ledger>,
    left_behind: OnceLock<Vec<Importer>>,
}

impl Importers {
    /// With the ledger at `path`, where it can be had.
    pub(crate) fn open(path: PathBuf) -> Self {
        let ledger = Ledger::open(&path).inspect_err(|error| {
            tracing::warn!("{}: {error}; importers are not recorded for a successor", path.display());
        });
        Self { ledger: ledger.ok(), left_behind: OnceLock::new() }
    }

    /// Nobody is recorded.
    pub(crate) fn none() -> Self {
        Self { ledger: None, left_behind: OnceLock::new() }
    }

    /// Waits, before anything is allocated, for importers of the previous boot to unmap; names those who do not.
    /// Blocking.
    pub(crate) fn await_former(&self) {
        let Some(ledger) = &self.ledger else { return };
        match ledger.wait_unmapped(UNMAP_GRACE) {
            Ok(left) => {
                for importer in &left {
                    tracing::warn!(%importer, "still holds the memory of this target's previous boot");
                }
                let _ = self.left_behind.set(left);
            }
            Err(error) => warn(&error),
        }
    }

    /// Waits, once leases were ended, for their holders to let go; names those who do not. False if there are any.
    /// Blocking.
    pub(crate) fn await_leases(leases: &LeaseTable) -> bool {
        let held = leases.wait_unmapped(UNMAP_GRACE).err().unwrap_or_default();
        for lease in &held {
            tracing::warn!(%lease, "still holds this target's shared memory");
        }
        held.is_empty()
    }

    /// Those who still held memory of the previous boot when this one went on.
    pub(crate) fn left_behind(&self) -> &[Importer] {
        self.left_behind.get().map_or(&[], Vec::as_slice)
    }

    /// Records the holder of a lease. Blocking, as [`left`](Self::left): both look at every importer's mappings.
    pub(crate) fn entered(&self, lease: LeaseId, importer: Importer) {
        self.note(|ledger| ledger.enter(lease, importer));
    }

    /// Notes that a lease has ended. Blocking.
    pub(crate) fn left(&self, lease: LeaseId) {
        self.note(|ledger| ledger.strike(lease));
    }

    fn note(&self, change: impl FnOnce(&Ledger) -> std::io::Result<()>) {
        if let Some(Err(error)) = self.ledger.as_ref().map(change) {
            warn(&error);
        }
    }
}

fn warn(error: &std::io::Error) {
    tracing::warn!("the record of importers cannot be written: {error}");
}
