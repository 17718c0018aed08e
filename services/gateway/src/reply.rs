//! The stream a client reads: bounded chunks, then the end. The end waits beside the chunks, so that
//! a session never has to wait for a slow client to tell it.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use eyrie_wire::v1::{GenerateChunk, GenerateReply};
use eyrie_wire::{Reason, refuse};
use tokio::sync::{mpsc, oneshot};
use tokio_stream::{Stream, StreamExt};
use tonic::Status;

/// Chunks and the end of one request. Dropping it is how a client leaves.
#[derive(Debug)]
pub(crate) struct Reply {
    chunks: mpsc::Receiver<GenerateChunk>,
    end: Option<oneshot::Receiver<Result<(), Status>>>,
}

impl Reply {
    pub(crate) fn new(
        chunks: mpsc::Receiver<GenerateChunk>,
        end: oneshot::Receiver<Result<(), Status>>,
    ) -> Self {
        Self { chunks, end: Some(end) }
    }

    /// The whole reply: the chunks joined.
    ///
    /// # Errors
    /// The status that ended the request.
    pub(crate) async fn collect(mut self) -> Result<GenerateReply, Status> {
        let mut reply = GenerateReply::default();
        while let Some(chunk) = self.next().await {
            let GenerateChunk { token_ids, text, started, finished, rounds, .. } = chunk?;
            reply.token_ids.extend(token_ids);
            reply.text.push_str(&text);
            reply.rounds.extend(rounds);
            if let Some(started) = started {
                reply.request_id = started.request_id;
                reply.prompt_ids = started.prompt_ids;
                reply.seed = started.seed;
            }
            if let Some(finished) = finished {
                reply.finish_reason = finished.reason;
                reply.usage = finished.usage;
            }
        }
        Ok(reply)
    }
}

impl Stream for Reply {
    type Item = Result<GenerateChunk, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if let Some(chunk) = ready!(self.chunks.poll_recv(cx)) {
            return Poll::Ready(Some(Ok(chunk)));
        }
        let Some(end) = &mut self.end else { return Poll::Ready(None) };
        let ended = ready!(Pin::new(end).poll(cx));
        self.end = None;
        Poll::Ready(match ended {
            Ok(Ok(())) => None,
            Ok(Err(status)) => Some(Err(status)),
            Err(_) => Some(Err(refuse(Reason::Internal, "the session ended without a word"))),
        })
    }
}
