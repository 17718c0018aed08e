//! Who was granted the memory of this exporter.

use std::fmt;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

/// Number of a lease within one [`LeaseTable`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LeaseId(u64);

impl LeaseId {
    /// The number as it travels in messages.
    pub fn get(self) -> u64 {
        self.0
    }
}

impl From<u64> for LeaseId {
    fn from(value: u64) -> Self {
        Self(value)
    }
}

/// One importer's hold on the exported memory, or a remote holder's claim to copies of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lease {
    /// Its number.
    pub id: LeaseId,
    /// Name the importer gave itself.
    pub holder: String,
    /// Process id of the importer, in the exporter's pid namespace where they share one.
    pub pid: u32,
    /// The holder reads copies and maps nothing.
    pub remote: bool,
    /// When it was granted.
    pub since: SystemTime,
}

impl fmt::Display for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let held = self.since.elapsed().unwrap_or_default();
        write!(f, "{} (pid {}, for {:.1} s)", self.holder, self.pid, held.as_secs_f64())
    }
}

/// The leases of one exporter. A lease lasts until it is dropped by number; the caller ties that to the importer's
/// open stream, so a dead importer loses its lease with its connection.
#[derive(Debug, Default)]
pub struct LeaseTable {
    state: Mutex<State>,
    emptied: Condvar,
}

#[derive(Debug, Default)]
struct State {
    last: u64,
    // In order of grant; a handful at most.
    leases: Vec<Lease>,
}

impl State {
    fn importers(&self) -> impl Iterator<Item = &Lease> {
        self.leases.iter().filter(|lease| !lease.remote)
    }
}

impl LeaseTable {
    /// An empty table.
    pub fn new() -> Self {
        Self::default()
    }

    /// Enters a holder.
    pub fn grant(&self, holder: String, pid: u32, remote: bool) -> LeaseId {
        let mut state = self.lock();
        state.last += 1;
        let id = LeaseId(state.last);
        state.leases.push(Lease { id, holder, pid, remote, since: SystemTime::now() });
        id
    }

    /// Strikes a lease; false where there is none of that number, as after a second drop.
    pub fn drop_lease(&self, id: LeaseId) -> bool {
        let mut state = self.lock();
        let before = state.leases.len();
        state.leases.retain(|lease| lease.id != id);
        if state.importers().next().is_none() {
            self.emptied.notify_all();
        }
        state.leases.len() < before
    }

    /// The leases held now, oldest first.
    pub fn holders(&self) -> Vec<Lease> {
        self.lock().leases.clone()
    }

    /// Blocks until no importer holds a lease, for at most `timeout`. Remote holders map nothing and are not waited for.
    ///
    /// # Errors
    /// Those who still hold one when the time is up, oldest first.
    pub fn wait_unmapped(&self, timeout: Duration) -> Result<(), Vec<Lease>> {
        let deadline = Instant::now().checked_add(timeout);
        let mut state = self.lock();
        while state.importers().next().is_some() {
            let left = match deadline {
                Some(deadline) => deadline.saturating_duration_since(Instant::now()),
                None => Duration::MAX,
            };
            if left.is_zero() {
                return Err(state.importers().cloned().collect());
            }
            state = self.emptied.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(())
    }

    // No code panics while it holds the lock, and each change of the list is complete in itself.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holders_are_listed_until_dropped_once() {
        let table = LeaseTable::new();
        let a = table.grant("draft-a".to_owned(), 11, false);
        let b = table.grant("draft-b".to_owned(), 12, false);
        assert_ne!(a, b);
        let pids: Vec<u32> = table.holders().iter().map(|lease| lease.pid).collect();
        assert_eq!(pids, [11, 12]);
        assert!(table.drop_lease(a));
        assert!(!table.drop_lease(a));
        assert_eq!(table.holders()[0].id, b);
    }

    #[test]
    fn waiting_names_those_who_hold_on() {
        let table = LeaseTable::new();
        table.wait_unmapped(Duration::ZERO).unwrap();
        table.grant("draft-a".to_owned(), 11, false);
        let held = table.wait_unmapped(Duration::from_millis(5)).unwrap_err();
        assert_eq!(held.len(), 1);
        assert!(held[0].to_string().starts_with("draft-a (pid 11, for "), "{}", held[0]);
    }

    #[test]
    fn who_maps_nothing_is_listed_and_not_waited_for() {
        let table = LeaseTable::new();
        table.grant("draft-b".to_owned(), 12, true);
        assert!(table.holders()[0].remote);
        table.wait_unmapped(Duration::ZERO).unwrap();
    }

    // Which of the two comes first is up to the scheduler; over the rounds the waiter sleeps in many of them, and one
    // that is not woken sleeps on for a minute.
    #[test]
    fn the_last_drop_wakes_the_waiter() {
        let begun = Instant::now();
        for _ in 0..50 {
            let table = LeaseTable::new();
            let ids = [table.grant("a".to_owned(), 1, false), table.grant("b".to_owned(), 2, false)];
            let entered = std::sync::Barrier::new(2);
            std::thread::scope(|scope| {
                let waiter = scope.spawn(|| {
                    entered.wait();
                    table.wait_unmapped(Duration::from_secs(60))
                });
                entered.wait();
                for _ in 0..100 {
                    assert_eq!(table.holders().len(), 2);
                    std::thread::yield_now();
                }
                for id in ids {
                    assert!(table.drop_lease(id));
                }
                waiter.join().unwrap().unwrap();
            });
            assert!(begun.elapsed() < Duration::from_secs(60), "a waiter slept through the last drop");
        }
    }
}
