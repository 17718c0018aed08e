//! A Rounds stream: frames to the engine, replies back, until the gateway stops reading or all it sent is answered.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use eyrie_wire::v1::{TargetFrame, TargetItem, TargetReply};
use eyrie_wire::{Reason, check_frame, check_items, first_frame, refuse, with_reason};
use tokio::sync::OwnedSemaphorePermit;
use tokio::sync::mpsc::{self, WeakSender};
use tokio_stream::Stream;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::{Status, Streaming};

use super::{Service, hello};
use crate::engine::{Command, Ending, Life, Replies, StreamId};

/// Reply frames that may wait for a slow gateway.
const REPLY_FRAMES: usize = 64;
/// How often streams are looked at, and for how many looks a gateway may leave its replies unread before its stream is
/// dropped.
const STALL_CHECK: Duration = Duration::from_secs(1);
const STALL_CHECKS: usize = 5;

impl Service {
    /// Answers `frames` until either side ends the stream, which gives back its `room`.
    pub(super) fn converse(
        self,
        frames: Streaming<TargetFrame>,
        room: OwnedSemaphorePermit,
    ) -> super::Replies<TargetReply> {
        let (sender, receiver) = mpsc::channel(REPLY_FRAMES);
        let ending = Ending::default();
        let gone = CancellationToken::new();
        let replies = ReplyStream {
            receiver,
            ending: ending.clone(),
            service: self.clone(),
            done: false,
            _gone: gone.clone().drop_guard(),
            _room: room,
        };
        let drain = self.drain.clone();
        drain.spawn(async move { self.read(frames, Replies { frames: sender, ending }, gone).await });
        Box::pin(replies)
    }

    /// Carries frames to the engine until none come, then waits for the replies to end. Once it has said hello the engine
    /// holds the only lasting sender, so the replies end when it lets go; until then this half does, so that they do not
    /// end before their ending is known.
    async fn read(self, mut frames: Streaming<TargetFrame>, replies: Replies, gone: CancellationToken) {
        let stream = self.new_stream();
        let ending = replies.ending.clone();
        let weak = replies.frames.downgrade();
        let mut held = Some(replies);
        let conversation = async {
            let first = self.greet(stream, &mut frames, &mut held).await?;
            self.tell(Command::Items { stream, items: first }).await?;
            self.forward(stream, &mut frames, &weak).await?;
            self.tell(Command::Finish(stream)).await?;
            // The engine ends the replies, and the gateway's taking the end of them ends this.
            std::future::pending().await
        };
        let outcome = tokio::select! {
            biased;
            outcome = conversation => outcome,
            () = stalled(&weak, async || tokio::time::sleep(STALL_CHECK).await) => {
                let limit = STALL_CHECKS as u64 * STALL_CHECK.as_secs();
                Err(refuse(Reason::Busy, format!("replies must be read within {limit} s; the stream is dropped")))
            }
            () = gone.cancelled() => Ok(()),
            () = self.drain.stopped() => Err(refuse(Reason::Draining, "the target is stopping")),
        };
        if let Err(status) = &outcome {
            tracing::debug!(stream = stream.0, %status, "rounds stream ended");
        }
        let _ = ending.set(outcome);
        let _ = self.engine.post(Command::Detach(stream));
    }

    /// Checks the first frame, answers it and hands `replies` to the engine; returns the frame's items.
    async fn greet(
        &self,
        stream: StreamId,
        frames: &mut Streaming<TargetFrame>,
        replies: &mut Option<Replies>,
    ) -> Result<Vec<TargetItem>, Status> {
        let first = first_frame(frames).await?.unwrap_or_default();
        let boot = hello::check(&self.state, first.hello)?;
        check_items(first.items.len())?;
        if let Some(replies) = replies.take() {
            let hello = Some(hello::answer(&self.state, boot));
            // The channel is new and empty.
            let _ = replies.frames.try_send(TargetReply { hello, outs: Vec::new() });
            self.tell(Command::Attach { stream, boot, life: Life::Lasting, replies }).await?;
        }
        Ok(first.items)
    }

    async fn forward(
        &self,
        stream: StreamId,
        frames: &mut Streaming<TargetFrame>,
        replies: &WeakSender<TargetReply>,
    ) -> Result<(), Status> {
        while let Some(frame) = frames.message().await.map_err(with_reason)? {
            check_frame(frame.hello.as_ref(), frame.items.len())?;
            self.tell(Command::Items { stream, items: frame.items }).await?;
            // A gateway that does not read is not read from, so that its errors cannot pile up either.
            if let Some(replies) = replies.upgrade() {
                let _ = replies.reserve().await;
            }
        }
        Ok(())
    }
}

/// Resolves when replies have filled their channel, and none of them was taken, for [`STALL_CHECKS`] looks, or when all
/// that are to come were sent for as many; `pause` passes the time between two.
async fn stalled(replies: &WeakSender<TargetReply>, pause: impl AsyncFn()) {
    let mut ended = 0;
    loop {
        pause().await;
        let Some(replies) = replies.upgrade() else {
            // The end is there to be read: a gateway that reads takes it at once.
            ended += 1;
            if ended == STALL_CHECKS {
                return;
            }
            continue;
        };
        if replies.capacity() > 0 {
            continue;
        }
        let unread = async {
            for _ in 0..STALL_CHECKS {
                pause().await;
            }
        };
        tokio::select! {
            biased;
            _ = replies.reserve() => {}
            () = unread => return,
        }
    }
}

/// What the gateway reads: the engine's frames, then the status the stream ended with.
struct ReplyStream {
    receiver: mpsc::Receiver<TargetReply>,
    ending: Ending,
    service: Service,
    done: bool,
    // Given back before the reading half learns that the gateway dropped this one.
    _room: OwnedSemaphorePermit,
    _gone: DropGuard,
}

impl Stream for ReplyStream {
    type Item = Result<TargetReply, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.done {
            return Poll::Ready(None);
        }
        match self.receiver.poll_recv(cx) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(Some(reply)) => Poll::Ready(Some(Ok(reply))),
            Poll::Ready(None) => {
                self.done = true;
                match self.ending.get() {
                    Some(Ok(())) => Poll::Ready(None),
                    Some(Err(status)) => Poll::Ready(Some(Err(status.clone()))),
                    None => Poll::Ready(Some(Err(self.service.engine_gone()))),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::Waker;

    use tokio::sync::Semaphore;

    use super::*;

    #[test]
    fn only_a_channel_that_stays_full_is_stalled() {
        let (sender, mut receiver) = mpsc::channel(1);
        let weak = sender.downgrade();
        let clock = Semaphore::new(0);
        let pause = async || clock.acquire().await.unwrap().forget();
        let mut stalled = pin!(stalled(&weak, pause));
        let mut after = |looks| {
            clock.add_permits(looks);
            stalled.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready()
        };
        assert!(!after(3 * STALL_CHECKS), "nothing was left unread");
        sender.try_send(TargetReply::default()).unwrap();
        assert!(!after(1 + STALL_CHECKS - 1), "the limit is not over");
        receiver.try_recv().unwrap();
        assert!(!after(1), "it was read within the limit");
        sender.try_send(TargetReply::default()).unwrap();
        assert!(!after(1 + STALL_CHECKS - 1), "the time before does not count");
        assert!(after(1));
    }

    #[test]
    fn an_end_that_is_not_read_is_stalled() {
        let (sender, _receiver) = mpsc::channel::<TargetReply>(1);
        let weak = sender.downgrade();
        let mut clock = pin!(stalled(&weak, async || tokio::task::yield_now().await));
        let mut looks = 0;
        let mut look = || {
            looks += 1;
            clock.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready()
        };
        assert!((0..3 * STALL_CHECKS).all(|_| !look()));
        drop(sender);
        assert!((1..STALL_CHECKS).all(|_| !look()));
        assert!(look());
    }
}
