//! The engine's bounded mailbox: filled from async tasks, emptied by the engine's own thread.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};
use tokio::sync::{Notify, Semaphore};
use tokio::time::Instant;

/// Frames that may wait for the engine before senders have to.
pub(crate) const CAPACITY: usize = 256;

struct Shared<T> {
    queue: Mutex<VecDeque<T>>,
    filled: Condvar,
    /// As `filled`, for an engine that is a task.
    news: Notify,
    room: Semaphore,
}

/// The engine no longer reads its mailbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the engine has stopped")]
pub(crate) struct Stopped;

/// The sending half; clones share the mailbox.
pub(crate) struct Sender<T>(Arc<Shared<T>>);

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T> Sender<T> {
    /// Puts `message` in, waiting while the mailbox is full.
    pub(crate) async fn send(&self, message: T) -> Result<(), Stopped> {
        let room = self.0.room.acquire().await.map_err(|_| Stopped)?;
        room.forget();
        self.push(message);
        Ok(())
    }

    /// Puts `message` in at once, over the capacity if need be: for messages of which a stream sends one.
    pub(crate) fn post(&self, message: T) -> Result<(), Stopped> {
        if self.0.room.is_closed() {
            return Err(Stopped);
        }
        // The receiver gives back one permit a message, so the one not taken here is taken back there.
        self.0.room.forget_permits(1);
        self.push(message);
        Ok(())
    }

    fn push(&self, message: T) {
        self.0.queue.lock().push_back(message);
        self.0.filled.notify_one();
        self.0.news.notify_one();
    }
}

/// The receiving half. Dropping it makes every send fail.
pub(crate) struct Receiver<T>(Arc<Shared<T>>);

impl<T> Receiver<T> {
    /// Moves all messages into `inbox`.
    pub(crate) fn drain_into(&self, inbox: &mut VecDeque<T>) {
        let before = inbox.len();
        inbox.append(&mut self.0.queue.lock());
        let room = CAPACITY.saturating_sub(self.0.room.available_permits());
        self.0.room.add_permits(room.min(inbox.len() - before));
    }

    /// Sleeps until a message is there or `deadline` passes; true if one is there.
    pub(crate) fn wait(&self, deadline: Option<Instant>) -> bool {
        let mut queue = self.0.queue.lock();
        while queue.is_empty() {
            match deadline {
                None => self.0.filled.wait(&mut queue),
                Some(deadline) => {
                    if self.0.filled.wait_until(&mut queue, deadline.into_std()).timed_out() {
                        return !queue.is_empty();
                    }
                }
            }
        }
        true
    }

    /// As [`Receiver::wait`], for an engine that is a task.
    pub(crate) async fn filled(&self, deadline: Option<Instant>) {
        while self.0.queue.lock().is_empty() {
            let news = self.0.news.notified();
            match deadline {
                None => news.await,
                Some(deadline) => {
                    if tokio::time::timeout_at(deadline, news).await.is_err() {
                        return;
                    }
                }
            }
        }
    }
}

impl<T> Drop for Receiver<T> {
    fn drop(&mut self) {
        self.0.room.close();
        self.0.queue.lock().clear();
    }
}

/// A new mailbox.
pub(crate) fn mailbox<T>() -> (Sender<T>, Receiver<T>) {
    let shared = Arc::new(Shared {
        queue: Mutex::new(VecDeque::new()),
        filled: Condvar::new(),
        news: Notify::new(),
        room: Semaphore::new(CAPACITY),
    });
    (Sender(Arc::clone(&shared)), Receiver(shared))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn a_full_mailbox_makes_senders_wait_and_a_drained_one_lets_them_in() {
        let (sender, receiver) = mailbox();
        for i in 0..CAPACITY {
            sender.send(i).await.unwrap();
        }
        let late = tokio::time::timeout(Duration::from_millis(20), sender.send(0)).await;
        assert!(late.is_err(), "the mailbox took more than its capacity");
        sender.post(999).unwrap();
        let mut inbox = VecDeque::new();
        receiver.drain_into(&mut inbox);
        assert_eq!((inbox.len(), inbox.back()), (CAPACITY + 1, Some(&999)));
        for i in 0..CAPACITY {
            sender.send(i).await.unwrap();
        }
        assert!(tokio::time::timeout(Duration::from_millis(20), sender.send(0)).await.is_err());
    }

    #[tokio::test]
    async fn the_receiver_wakes_for_a_message_and_for_its_deadline() {
        let (sender, receiver) = mailbox();
        assert!(!receiver.wait(Some(Instant::now() + Duration::from_millis(5))));
        let waiter = std::thread::spawn(move || receiver.wait(None));
        sender.post(1).unwrap();
        assert!(waiter.join().unwrap());
        assert_eq!(sender.post(2), Err(Stopped));
        assert_eq!(sender.send(3).await, Err(Stopped));
    }
}
