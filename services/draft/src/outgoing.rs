//! The reply half of a Rounds stream: replies in order, then the status that ended it.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use eyrie_wire::v1::DraftReply;
use eyrie_wire::{Reason, refuse};
use tokio::sync::mpsc;
use tokio_stream::Stream;
use tokio_util::sync::{CancellationToken, DropGuard, WaitForCancellationFutureOwned};
use tonic::Status;

use crate::state::Lease;

/// Replies until the engine has no more, the lease is lost, or the reader fell too far behind.
pub(crate) struct Outgoing {
    replies: mpsc::Receiver<Result<DraftReply, Status>>,
    lost: Pin<Box<WaitForCancellationFutureOwned>>,
    overrun: Pin<Box<WaitForCancellationFutureOwned>>,
    ended: bool,
    /// Tells the reading half that this one is gone.
    _gone: DropGuard,
}

impl Outgoing {
    pub(crate) fn new(
        replies: mpsc::Receiver<Result<DraftReply, Status>>,
        lease: &Arc<Lease>,
        overrun: &CancellationToken,
        gone: &CancellationToken,
    ) -> Self {
        Self {
            replies,
            lost: Box::pin(lease.lost.clone().cancelled_owned()),
            overrun: Box::pin(overrun.clone().cancelled_owned()),
            ended: false,
            _gone: gone.clone().drop_guard(),
        }
    }
}

impl Stream for Outgoing {
    type Item = Result<DraftReply, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.ended {
            return Poll::Ready(None);
        }
        let refusal = if self.overrun.as_mut().poll(cx).is_ready() {
            refuse(Reason::Busy, "replies were not read: the stream is given up")
        } else {
            match self.replies.poll_recv(cx) {
                // Replies from before the loss go out first; the channel ends by itself when all are out.
                Poll::Pending if self.lost.as_mut().poll(cx).is_ready() => {
                    refuse(Reason::Unreachable, "the draft lost its lease on the target")
                }
                Poll::Ready(Some(Err(status))) => status,
                other => return other,
            }
        };
        self.ended = true;
        Poll::Ready(Some(Err(refusal)))
    }
}

impl std::fmt::Debug for Outgoing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Outgoing").field("ended", &self.ended).finish_non_exhaustive()
    }
}
