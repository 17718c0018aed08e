//! What the engine is told, and the bounded way its answers go back.

use eyrie_wire::v1::{DraftItem, DraftOut, DraftReply};
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use super::{Attachment, EngineError};
use crate::inline::HeldRoom;

/// Number of a Rounds stream or of a unary call.
pub(crate) type StreamId = u64;

/// Commands that wait for the engine; senders wait beyond that, and HTTP/2 slows the gateway down.
pub(super) const MAILBOX: usize = 64;

/// One message to the engine.
#[derive(Debug)]
pub(crate) enum Command {
    /// Use this head and ring for the target they belong to from now on; answered when the head has computed once.
    Attach(Box<Attachment>, oneshot::Sender<Result<(), EngineError>>),
    /// Let go of everything mapped from the target in this place, then answer.
    Detach(usize, oneshot::Sender<()>),
    /// Items of one frame.
    Frame(Frame),
    /// Free the sequences of a stream, once its frames are answered.
    Close(StreamId),
    /// Free the sequences of unary calls that nobody has spoken of for long.
    Expire,
    /// End the thread.
    Stop,
}

/// The items of one frame with the way back.
#[derive(Debug)]
pub(crate) struct Frame {
    pub(crate) stream: StreamId,
    /// Of a unary call: no end of a stream will free its sequences.
    pub(crate) unary: bool,
    pub(crate) boot_id: u64,
    /// The lease that the stream was opened under.
    pub(crate) epoch: u64,
    pub(crate) items: Vec<DraftItem>,
    /// Kept until the last item is answered.
    pub(crate) held: HeldRoom,
    pub(crate) replies: Replies,
}

/// Where replies of one stream go. The engine never waits for a reader: a stream whose reader lags behind by a
/// full channel is given up.
#[derive(Debug, Clone)]
pub(crate) struct Replies {
    pub(crate) sender: mpsc::Sender<DraftReply>,
    /// Cancelled when the channel was full.
    pub(crate) overrun: CancellationToken,
}

impl Replies {
    pub(super) fn send(&self, outs: Vec<DraftOut>) {
        if self.overrun.is_cancelled() {
            return;
        }
        let reply = DraftReply { hello: None, outs };
        if let Err(mpsc::error::TrySendError::Full(_)) = self.sender.try_send(reply) {
            self.overrun.cancel();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_that_falls_behind_is_given_up_and_never_waited_for() {
        let (sender, mut receiver) = mpsc::channel(2);
        let replies = Replies { sender, overrun: CancellationToken::new() };
        for seq in 1..=2 {
            replies.send(vec![DraftOut { seq, ..Default::default() }]);
        }
        assert!(!replies.overrun.is_cancelled());
        replies.send(vec![DraftOut { seq: 3, ..Default::default() }]);
        assert!(replies.overrun.is_cancelled());
        assert_eq!(receiver.try_recv().unwrap().outs[0].seq, 1);
        replies.send(vec![DraftOut { seq: 4, ..Default::default() }]);
        assert_eq!(receiver.try_recv().unwrap().outs[0].seq, 2);
        assert!(receiver.try_recv().is_err(), "a stream with a hole in it must not go on");
    }
}
