//! Counters since boot, for logs.

use std::sync::atomic::{AtomicU64, Ordering};

use eyrie_wire::v1::ItemError;

use crate::round::Commit;

/// What the gateway did since boot.
#[derive(Debug, Default)]
pub(crate) struct Stats {
    pub(crate) requests: AtomicU64,
    pub(crate) finished: AtomicU64,
    pub(crate) failed: AtomicU64,
    pub(crate) cancelled: AtomicU64,
    pub(crate) refused: AtomicU64,
    pub(crate) reopened: AtomicU64,
    pub(crate) draft_moves: AtomicU64,
    pub(crate) rounds: AtomicU64,
    pub(crate) drafted: AtomicU64,
    pub(crate) accepted: AtomicU64,
    pub(crate) rounds_without_draft: AtomicU64,
    pub(crate) draft_deadlines: AtomicU64,
    pub(crate) draft_refusals: AtomicU64,
    pub(crate) draft_garbage: AtomicU64,
}

/// Adds to one counter.
pub(crate) fn add(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Relaxed);
}

impl Stats {
    /// One committed round.
    pub(crate) fn round(&self, commit: &Commit) {
        add(&self.rounds, 1);
        add(&self.drafted, commit.proposal.len() as u64);
        add(&self.accepted, commit.path.len() as u64);
    }

    /// The draft refused a sequence.
    pub(crate) fn refused(&self, error: &ItemError) {
        if is_rare(self.draft_refusals.fetch_add(1, Ordering::Relaxed)) {
            tracing::warn!(reason = error.reason, "the draft refused: {}", error.message);
        }
    }

    /// The draft's reply was not what was asked.
    pub(crate) fn garbage(&self, why: &str) {
        if is_rare(self.draft_garbage.fetch_add(1, Ordering::Relaxed)) {
            tracing::warn!("a reply of the draft was dropped: {why}");
        }
    }

    /// One line with every counter.
    pub(crate) fn log(&self) {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        tracing::info!(
            requests = get(&self.requests),
            finished = get(&self.finished),
            failed = get(&self.failed),
            cancelled = get(&self.cancelled),
            refused = get(&self.refused),
            reopened = get(&self.reopened),
            draft_moves = get(&self.draft_moves),
            rounds = get(&self.rounds),
            drafted = get(&self.drafted),
            accepted = get(&self.accepted),
            rounds_without_draft = get(&self.rounds_without_draft),
            draft_deadlines = get(&self.draft_deadlines),
            draft_refusals = get(&self.draft_refusals),
            draft_garbage = get(&self.draft_garbage),
            "totals"
        );
    }
}

/// Of a fault that repeats every round, the 1st, 2nd, 4th, 8th … is logged.
fn is_rare(seen_before: u64) -> bool {
    (seen_before + 1).is_power_of_two()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_faults_are_logged_ever_more_rarely() {
        assert_eq!((0..20).filter(|&n| is_rare(n)).collect::<Vec<_>>(), [0, 1, 3, 7, 15]);
    }
}
