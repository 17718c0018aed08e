//! The reply half of a Rounds stream: replies in order, then the status that says why there are no more.

use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};

use eyrie_service::Drain;
use eyrie_wire::v1::DraftReply;
use eyrie_wire::{Reason, refuse};
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio_stream::Stream;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::Status;

use crate::state::Lease;

/// Replies until the reading half and the engine have let go of the channel.
#[derive(Debug)]
pub(crate) struct Outgoing {
    replies: mpsc::Receiver<DraftReply>,
    ending: Ending,
    ended: bool,
    // Given back before the reading half learns that this one is gone.
    _room: OwnedSemaphorePermit,
    /// Tells the reading half that this one is gone.
    _gone: DropGuard,
}

/// What can have ended a stream that its client did not end.
#[derive(Debug)]
pub(crate) struct Ending {
    pub(crate) lease: Arc<Lease>,
    pub(crate) overrun: CancellationToken,
    /// Why nothing more is read of what the client sends.
    pub(crate) refused: Arc<OnceLock<Status>>,
    pub(crate) drain: Drain,
}

impl Ending {
    fn status(&self) -> Option<Status> {
        if self.overrun.is_cancelled() {
            Some(refuse(Reason::Busy, "replies were not read: the stream is given up"))
        } else if let Some(status) = self.refused.get() {
            Some(status.clone())
        } else if self.drain.is_draining() {
            Some(refuse(Reason::Draining, "the draft is draining"))
        } else if self.lease.lost.is_cancelled() {
            Some(refuse(Reason::Unreachable, "the draft lost its lease on the target"))
        } else {
            None
        }
    }
}

impl Outgoing {
    /// Takes up `room` for as long as somebody reads.
    pub(crate) fn new(
        replies: mpsc::Receiver<DraftReply>,
        ending: Ending,
        gone: &CancellationToken,
        room: OwnedSemaphorePermit,
    ) -> Self {
        Self { replies, ending, ended: false, _room: room, _gone: gone.clone().drop_guard() }
    }
}

impl Stream for Outgoing {
    type Item = Result<DraftReply, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.ended {
            return Poll::Ready(None);
        }
        self.replies.poll_recv(cx).map(|reply| match reply {
            Some(reply) => Some(Ok(reply)),
            None => {
                self.ended = true;
                self.ending.status().map(Err)
            }
        })
    }
}
