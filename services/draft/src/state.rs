//! What the rest of the service knows about the lease: attached to what, or why not.

use std::sync::{Arc, Weak};

use eyrie_region::Region;
use parking_lot::RwLock;
use tokio_util::sync::CancellationToken;

/// One lease, as rounds and readiness see it.
#[derive(Debug)]
pub(crate) struct Lease {
    pub(crate) epoch: u64,
    pub(crate) fingerprint: String,
    /// The mapped weights; weak, so that a reader of the state never keeps a lost lease mapped.
    pub(crate) mapped: Weak<dyn Region>,
    pub(crate) mapped_bytes: u64,
    pub(crate) aux_rule: String,
    /// Cancelled when the lease is lost: every stream opened under it ends.
    pub(crate) lost: CancellationToken,
}

/// Shared by the attach loop, which writes it, and the RPC handlers.
#[derive(Debug)]
pub(crate) struct LeaseState(RwLock<Result<Arc<Lease>, String>>);

impl LeaseState {
    pub(crate) fn new() -> Self {
        Self(RwLock::new(Err("starting".to_owned())))
    }

    /// The lease, or why there is none.
    pub(crate) fn get(&self) -> Result<Arc<Lease>, String> {
        self.0.read().clone()
    }

    pub(crate) fn attached(&self, lease: Arc<Lease>) {
        *self.0.write() = Ok(lease);
    }

    /// Returns whether `because` is news.
    pub(crate) fn detached(&self, because: &str) -> bool {
        let mut state = self.0.write();
        if state.as_ref().is_err_and(|known| known == because) {
            return false;
        }
        if let Ok(lease) = &*state {
            lease.lost.cancel();
        }
        *state = Err(because.to_owned());
        true
    }
}
