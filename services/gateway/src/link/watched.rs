//! A value that tasks wait on. Unlike `tokio::sync::watch` it lets waiters go on in the order in which they came, so
//! that after an outage the requests that waited longest are served first, and always in the same order.

use std::sync::Arc;

use parking_lot::{MappedMutexGuard, Mutex, MutexGuard};
use tokio::sync::Notify;

#[derive(Debug)]
struct Shared<T> {
    value: Mutex<Versioned<T>>,
    changed: Notify,
}

#[derive(Debug)]
struct Versioned<T> {
    value: T,
    version: u64,
}

/// The side that sets the value. Unlike a channel's it has no end: whoever waits is ended by dropping it.
#[derive(Debug)]
pub(crate) struct Watched<T>(Arc<Shared<T>>);

impl<T> Clone for Watched<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T> Watched<T> {
    pub(crate) fn new(value: T) -> Self {
        let value = Mutex::new(Versioned { value, version: 0 });
        Self(Arc::new(Shared { value, changed: Notify::new() }))
    }

    /// The value as it is; do not hold it.
    pub(crate) fn borrow(&self) -> MappedMutexGuard<'_, T> {
        MutexGuard::map(self.0.value.lock(), |held| &mut held.value)
    }

    /// Which value it is: another one has another number.
    pub(crate) fn version(&self) -> u64 {
        self.0.value.lock().version
    }

    pub(crate) fn replace(&self, value: T) {
        self.modify(|held| {
            *held = value;
            true
        });
    }

    /// Wakes who waits if `modify` says that it changed something.
    pub(crate) fn modify(&self, modify: impl FnOnce(&mut T) -> bool) {
        let mut held = self.0.value.lock();
        if modify(&mut held.value) {
            held.version += 1;
            drop(held);
            self.0.changed.notify_waiters();
        }
    }

    /// Resolves once the value is another than that of `version`.
    pub(crate) async fn changed(&self, version: u64) {
        self.find(|held| (held.version != version).then_some(())).await;
    }

    /// Resolves with what `wanted` finds in the value, as soon as it finds something.
    pub(crate) async fn wait_for<R>(&self, wanted: impl Fn(&T) -> Option<R>) -> R {
        self.find(|held| wanted(&held.value)).await
    }

    async fn find<R>(&self, wanted: impl Fn(&Versioned<T>) -> Option<R>) -> R {
        loop {
            let changed = self.0.changed.notified();
            if let Some(found) = wanted(&self.0.value.lock()) {
                return found;
            }
            changed.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn waiters_go_on_in_the_order_they_came() {
        let watched = Watched::new(0);
        let served = Watched::new(Vec::new());
        let tasks = eyrie_service::Drain::new();
        let waiters: Vec<_> = (0..20)
            .map(|i| {
                let (watched, served) = (watched.clone(), served.clone());
                tasks.spawn(async move {
                    watched.wait_for(|&value| (value == 1).then_some(())).await;
                    served.modify(|served| {
                        served.push(i);
                        true
                    });
                })
            })
            .collect();
        tokio::task::yield_now().await;
        watched.replace(1);
        for waiter in waiters {
            waiter.await.unwrap();
        }
        assert_eq!(*served.borrow(), (0..20).collect::<Vec<_>>());
    }
}
