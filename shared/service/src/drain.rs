//! One drain per service: stop taking new work, let the running work end, then stop.

use std::future::Future;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Handle shared by all tasks of a service.
///
/// Two stages: `draining` (refuse new work) and `stopped` (end streams that still run). Every task is
/// spawned through [`Drain::spawn`], so none outlives the service.
#[derive(Debug, Clone, Default)]
pub struct Drain {
    draining: CancellationToken,
    stopped: CancellationToken,
    tasks: TaskTracker,
}

impl Drain {
    /// A service that runs.
    pub fn new() -> Self {
        Self::default()
    }

    /// Spawns a task that belongs to the service.
    pub fn spawn<F>(&self, task: F) -> tokio::task::JoinHandle<F::Output>
    where
        F: Future + Send + 'static,
        F::Output: Send + 'static,
    {
        self.tasks.spawn(task)
    }

    /// Begins to drain. Idempotent.
    pub fn start(&self) {
        self.draining.cancel();
    }

    /// Ends what still runs. Idempotent; implies [`Drain::start`].
    pub fn stop(&self) {
        self.draining.cancel();
        self.stopped.cancel();
    }

    /// New work is refused.
    pub fn is_draining(&self) -> bool {
        self.draining.is_cancelled()
    }

    /// Resolves when the drain begins.
    pub async fn draining(&self) {
        self.draining.cancelled().await;
    }

    /// Resolves when streams have to end.
    pub async fn stopped(&self) {
        self.stopped.cancelled().await;
    }

    /// Waits for every task to end, at most `grace`; false if some did not.
    pub async fn join(&self, grace: Duration) -> bool {
        self.tasks.close();
        tokio::time::timeout(grace, self.tasks.wait()).await.is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn stop_ends_tasks_and_join_waits_for_them() {
        let drain = Drain::new();
        let task = drain.clone();
        drain.spawn(async move { task.stopped().await });
        assert!(!drain.is_draining());
        assert!(!drain.join(Duration::from_millis(20)).await, "the task still runs");
        drain.stop();
        assert!(drain.is_draining());
        assert!(drain.join(Duration::from_secs(5)).await);
    }
}
