use parking_lot::Mutex;
use tokio::sync::watch;

/// What a fake has seen, in order, and a way to wait for it.
#[derive(Debug)]
pub(crate) struct Events<E> {
    seen: Mutex<Vec<E>>,
    count: watch::Sender<usize>,
}

impl<E: Clone> Default for Events<E> {
    fn default() -> Self {
        Self { seen: Mutex::default(), count: watch::channel(0).0 }
    }
}

impl<E: Clone> Events<E> {
    pub(crate) fn push(&self, event: E) {
        self.seen.lock().push(event);
        self.count.send_modify(|n| *n += 1);
    }

    pub(crate) fn all(&self) -> Vec<E> {
        self.seen.lock().clone()
    }

    pub(crate) fn count(&self, which: impl Fn(&E) -> bool) -> usize {
        self.seen.lock().iter().filter(|e| which(e)).count()
    }

    /// Waits until `at_least` events satisfy `which`.
    pub(crate) async fn wait(&self, at_least: usize, which: impl Fn(&E) -> bool) {
        let mut count = self.count.subscribe();
        super::within(count.wait_for(|_| self.count(&which) >= at_least)).await.unwrap();
    }
}
