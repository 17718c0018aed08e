//! A Rounds stream: frames to the engine, replies back, until either half ends.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use eyrie_wire::v1::{TargetFrame, TargetReply};
use eyrie_wire::{Reason, refuse};
use tokio::sync::mpsc;
use tokio::sync::mpsc::WeakSender;
use tokio_stream::Stream;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::{Status, Streaming};

use super::{Service, hello};
use crate::engine::{Command, Ending, Life, Replies, StreamId};

/// Reply frames that may wait for a slow gateway.
const REPLY_FRAMES: usize = 64;
/// How long a gateway may leave its replies unread before its stream is dropped.
const STALL_LIMIT: Duration = Duration::from_secs(5);
const STALL_CHECK: Duration = Duration::from_secs(1);
/// How long a new stream may take to say hello.
const HELLO_LIMIT: Duration = Duration::from_secs(10);

impl Service {
    /// Answers `frames` until either side ends the stream.
    pub(super) fn converse(self, frames: Streaming<TargetFrame>) -> super::Replies<TargetReply> {
        let (sender, receiver) = mpsc::channel(REPLY_FRAMES);
        let ending = Ending::default();
        let gone = CancellationToken::new();
        let replies = ReplyStream {
            receiver,
            ending: ending.clone(),
            service: self.clone(),
            done: false,
            _gone: gone.clone().drop_guard(),
        };
        let drain = self.drain.clone();
        drain.spawn(async move { self.read(frames, Replies { frames: sender, ending }, gone).await });
        Box::pin(replies)
    }

    /// Carries frames to the engine. The engine holds the only lasting sender, so the replies end when it lets go.
    async fn read(self, mut frames: Streaming<TargetFrame>, replies: Replies, gone: CancellationToken) {
        let stream = self.new_stream();
        let ending = replies.ending.clone();
        let weak = replies.frames.downgrade();
        let conversation = async {
            self.greet(stream, &mut frames, replies).await?;
            self.forward(stream, &mut frames, &weak).await
        };
        let outcome = tokio::select! {
            outcome = conversation => outcome,
            () = stalled(&weak) => {
                let limit = STALL_LIMIT.as_secs();
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

    async fn greet(
        &self,
        stream: StreamId,
        frames: &mut Streaming<TargetFrame>,
        replies: Replies,
    ) -> Result<(), Status> {
        let first = tokio::time::timeout(HELLO_LIMIT, frames.message()).await;
        let first = first.map_err(|_| {
            let limit = HELLO_LIMIT.as_secs();
            refuse(Reason::Deadline, format!("the first frame must come within {limit} s"))
        })??;
        let Some(first) = first else { return Ok(()) };
        let boot = hello::check(&self.state, first.hello.as_ref())?;
        let reply = TargetReply { hello: Some(hello::answer(&self.state, boot)), outs: Vec::new() };
        // The channel is new and empty.
        let _ = replies.frames.try_send(reply);
        self.tell(Command::Attach { stream, boot, life: Life::Lasting, replies }).await?;
        self.tell(Command::Items { stream, items: first.items }).await
    }

    async fn forward(
        &self,
        stream: StreamId,
        frames: &mut Streaming<TargetFrame>,
        replies: &WeakSender<TargetReply>,
    ) -> Result<(), Status> {
        while let Some(frame) = frames.message().await? {
            if frame.hello.is_some() {
                let message = "hello may be in the first frame of a stream only";
                return Err(refuse(Reason::InvalidArgument, message));
            }
            self.tell(Command::Items { stream, items: frame.items }).await?;
            // A gateway that does not read is not read from, so that its errors cannot pile up either.
            if let Some(replies) = replies.upgrade() {
                let _ = replies.reserve().await;
            }
        }
        Ok(())
    }
}

/// Resolves when replies have been left unread for too long.
async fn stalled(replies: &WeakSender<TargetReply>) {
    loop {
        tokio::time::sleep(STALL_CHECK).await;
        if let Some(replies) = replies.upgrade()
            && replies.capacity() == 0
            && tokio::time::timeout(STALL_LIMIT, replies.reserve()).await.is_err()
        {
            return;
        }
    }
}

/// What the gateway reads: the engine's frames, then the status the stream ended with.
struct ReplyStream {
    receiver: mpsc::Receiver<TargetReply>,
    ending: Ending,
    service: Service,
    done: bool,
    /// Tells the reading half when the gateway drops this one.
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
