//! What the rest of the service knows about the leases: attached to which targets, or why not.

use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Weak};

use eyrie_region::{Region, RegionKind};
use eyrie_wire::v1::{DraftItem, Hello};
use eyrie_wire::{Address, Reason, check_fingerprint, refuse};
use parking_lot::RwLock;
use tokio_util::sync::CancellationToken;
use tonic::Status;

use crate::inline::{HeldRoom, RowReader};

/// One lease, as rounds and readiness see it.
#[derive(Debug)]
pub(crate) struct Lease {
    pub(crate) epoch: u64,
    pub(crate) fingerprint: String,
    pub(crate) memory: Memory,
    /// How rows of the target's ring are had where the ring is not mapped.
    pub(crate) rows: Option<RowReader>,
    pub(crate) aux_rule: String,
    /// Sequences that the engine holds under it.
    pub(crate) sequences: Arc<AtomicU32>,
    /// Cancelled when the lease is lost: every stream opened under it ends.
    pub(crate) lost: CancellationToken,
}

impl Lease {
    /// Fetches the rows that `items` speak of where the engine cannot read them itself.
    pub(crate) async fn take_in(&self, items: &mut [DraftItem]) -> HeldRoom {
        match &self.rows {
            Some(rows) => rows.inline(items).await,
            None => None,
        }
    }
}

/// How the target's embedding and head come to be in this process.
#[derive(Debug)]
pub(crate) enum Memory {
    /// Weak, so that a reader of the state never keeps a lost lease mapped.
    Mapped {
        region: Weak<dyn Region>,
        kind: RegionKind,
        bytes: u64,
    },
    Copied {
        bytes: u64,
    },
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mapped { kind, bytes, .. } => write!(f, "{bytes} bytes mapped by {kind}"),
            Self::Copied { bytes } => write!(f, "{bytes} bytes copied"),
        }
    }
}

/// A target as it stands: its lease, or why there is none.
pub(crate) type Standing = Result<Arc<Lease>, String>;

/// Shared by the attach loops, which write it, and the RPC handlers. A target goes by its place among the options'.
#[derive(Debug)]
pub(crate) struct LeaseState {
    targets: Vec<Address>,
    standings: RwLock<Vec<Standing>>,
}

impl LeaseState {
    pub(crate) fn new(targets: &[Address]) -> Self {
        let standings = targets.iter().map(|_| Err("starting".to_owned())).collect();
        Self { targets: targets.to_vec(), standings: RwLock::new(standings) }
    }

    /// Every target as it stands, in the order of the options.
    pub(crate) fn all(&self) -> Vec<(Address, Standing)> {
        self.targets.iter().cloned().zip(self.standings.read().iter().cloned()).collect()
    }

    fn leases(&self) -> Vec<Arc<Lease>> {
        self.standings.read().iter().flatten().cloned().collect()
    }

    pub(crate) fn is_attached(&self) -> bool {
        self.standings.read().iter().any(Result::is_ok)
    }

    /// Sequences held under all leases.
    pub(crate) fn sequences(&self) -> u32 {
        self.leases().iter().map(|lease| lease.sequences.load(Relaxed)).sum()
    }

    /// The address by which the target of `epoch` is attached already.
    pub(crate) fn address_of(&self, epoch: u64) -> Option<Address> {
        let standings = self.standings.read();
        let place = standings.iter().position(|standing| standing.as_ref().is_ok_and(|l| l.epoch == epoch));
        place.map(|place| self.targets[place].clone())
    }

    /// The lease that a stream opened with `hello` runs under: that of its epoch, or the only one where it names none.
    pub(crate) fn select(&self, hello: &Hello) -> Result<Arc<Lease>, Status> {
        let mut leases = self.leases();
        if leases.is_empty() {
            return Err(refuse(Reason::Unreachable, self.not_attached()));
        }
        let attached =
            leases.iter().map(|lease| format!("{:016x}", lease.epoch)).collect::<Vec<_>>().join(", ");
        let (epoch, several) = (hello.epoch, leases.len() > 1);
        leases.retain(|lease| lease.epoch == epoch || (epoch == 0 && !several));
        let Some(lease) = leases.pop() else {
            let limit = if several { "one of" } else { "that of" };
            let what =
                format!("hello.epoch must be {limit} the attached targets: {attached}; given {epoch:016x}");
            return Err(refuse(Reason::StaleEpoch, what));
        };
        check_fingerprint(hello, &lease.fingerprint)?;
        Ok(lease)
    }

    fn not_attached(&self) -> String {
        let standings = self.standings.read();
        let why = self.targets.iter().zip(standings.iter()).filter_map(|(target, standing)| {
            standing.as_ref().err().map(|because| format!("{target}: {because}"))
        });
        format!("the draft is not attached: {}", why.collect::<Vec<_>>().join("; "))
    }

    pub(crate) fn attached(&self, place: usize, lease: Arc<Lease>) {
        self.standings.write()[place] = Ok(lease);
    }

    /// Returns whether `because` is news.
    pub(crate) fn detached(&self, place: usize, because: &str) -> bool {
        let standing = &mut self.standings.write()[place];
        if standing.as_ref().is_err_and(|known| known == because) {
            return false;
        }
        if let Ok(lease) = &*standing {
            lease.lost.cancel();
        }
        *standing = Err(because.to_owned());
        true
    }
}

#[cfg(test)]
mod tests {
    use eyrie_wire::reason_of;

    use super::*;

    fn lease(epoch: u64) -> Arc<Lease> {
        Arc::new(Lease {
            epoch,
            fingerprint: format!("model {epoch}"),
            memory: Memory::Copied { bytes: 0 },
            rows: None,
            aux_rule: String::new(),
            sequences: Arc::new(AtomicU32::new(epoch as u32)),
            lost: CancellationToken::new(),
        })
    }

    #[test]
    fn a_hello_selects_the_target_of_its_epoch() {
        let targets = ["unix:/a".parse().unwrap(), "unix:/b".parse().unwrap()];
        let state = LeaseState::new(&targets);
        let select = |epoch, fingerprint: &str| {
            let hello = Hello { epoch, fingerprint: fingerprint.to_owned(), ..Default::default() };
            state.select(&hello).map(|lease| lease.epoch)
        };
        let refused = |epoch, fingerprint| {
            let status = select(epoch, fingerprint).unwrap_err();
            (reason_of(&status).unwrap(), status.message().to_owned())
        };
        let (reason, line) = refused(0, "");
        assert_eq!(reason, "UNREACHABLE");
        assert_eq!(line, "the draft is not attached: unix:/a: starting; unix:/b: starting");

        state.attached(1, lease(7));
        assert_eq!((select(0, "").unwrap(), select(7, "model 7").unwrap()), (7, 7));
        assert_eq!(refused(5, "").0, "STALE_EPOCH");
        state.attached(0, lease(5));
        assert_eq!((select(5, "").unwrap(), select(7, "").unwrap()), (5, 7));
        assert_eq!((state.sequences(), state.address_of(7)), (12, Some(targets[1].clone())));
        for (epoch, fingerprint) in [(0, ""), (6, ""), (5, "model 7")] {
            assert_eq!(refused(epoch, fingerprint).0, "STALE_EPOCH", "{epoch} {fingerprint}");
        }
        assert!(refused(0, "").1.contains("0000000000000005, 0000000000000007; given 0"));

        let lost =
            select(5, "").and_then(|_| state.select(&Hello { epoch: 5, ..Default::default() })).unwrap();
        assert!(state.detached(0, "gone") && !state.detached(0, "gone"));
        assert!(lost.lost.is_cancelled() && state.is_attached());
        assert_eq!(select(0, "").unwrap(), 7);
    }
}
