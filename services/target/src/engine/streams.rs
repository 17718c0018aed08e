//! The open streams of gateways, as the engine sees them: where replies go.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use eyrie_wire::v1::{TargetOut, TargetReply, target_out::Body};
use eyrie_wire::{Reason, refuse};
use tokio::sync::mpsc;
use tonic::Status;

/// Replies that wait for one stream at most, with the references to feature rows in them: those of some 256 of the longest
/// credits, asked for again at once. A gateway beyond that, or one that repeats itself without end, loses its stream and
/// may ask for less on the next: it must not use up the memory.
const MAX_PENDING: usize = 1 << 18;

/// Number of a stream within this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct StreamId(pub(crate) u64);

/// How a stream ends: nothing while it runs. Beside the channel, because a full one would not take it.
pub(crate) type Ending = Arc<OnceLock<Result<(), Status>>>;

/// Where a stream's replies are put; bounded, so a slow gateway stalls its own sequences and nothing else.
#[derive(Debug)]
pub(crate) struct Replies {
    pub(crate) frames: mpsc::Sender<TargetReply>,
    pub(crate) ending: Ending,
}

impl Replies {
    fn has_room(&self) -> bool {
        !self.frames.is_closed() && self.frames.capacity() > 0
    }
}

/// How long a stream lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Life {
    /// A Rounds stream: there is one per gateway boot, and it takes over all of that boot's sequences.
    Lasting,
    /// One unary Round: it is answered for the sequences it speaks of.
    Unary,
}

#[derive(Debug)]
struct Outbox {
    boot: u64,
    life: Life,
    replies: Replies,
    pending: Vec<TargetOut>,
    /// Pending replies and the references in them.
    weight: usize,
    /// Whether it was ended because too much waits for it.
    is_cut_off: bool,
    /// Whether the other half has ended: no more items come.
    finished: bool,
}

impl Outbox {
    fn new(boot: u64, life: Life, replies: Replies) -> Self {
        Self { boot, life, replies, pending: Vec::new(), weight: 0, is_cut_off: false, finished: false }
    }

    /// Ends the stream, which frees its sequences as any broken one does.
    fn cut_off(&mut self) {
        let message =
            format!("{MAX_PENDING} replies and feature references may wait for a stream, and as many do");
        let _ = self.replies.ending.set(Err(refuse(Reason::Busy, message)));
        self.pending = Vec::new();
        self.is_cut_off = true;
        // With its sender gone the caller's half reads the end.
        self.replies.frames = mpsc::channel(1).0;
    }
}

/// All open streams.
#[derive(Debug, Default)]
pub(crate) struct Streams {
    open: BTreeMap<StreamId, Outbox>,
    /// The Rounds stream of each boot.
    lasting: BTreeMap<u64, StreamId>,
}

impl Streams {
    /// Enters a stream. A Rounds stream ends the earlier one of its boot, which is a dead connection's.
    pub(crate) fn attach(&mut self, id: StreamId, boot: u64, life: Life, replies: Replies) {
        self.open.insert(id, Outbox::new(boot, life, replies));
        if life == Life::Lasting
            && let Some(old) = self.lasting.insert(boot, id).and_then(|old| self.open.remove(&old))
        {
            let status = refuse(Reason::Replaced, "a newer stream of the same boot id took over");
            let _ = old.replies.ending.set(Err(status));
        }
    }

    /// Notes that no more items come on a stream.
    pub(crate) fn finish(&mut self, id: StreamId) {
        if let Some(outbox) = self.open.get_mut(&id) {
            outbox.finished = true;
        }
    }

    /// The streams on which no more items come and no reply is queued.
    pub(crate) fn finished(&self) -> impl Iterator<Item = StreamId> {
        let done = |outbox: &Outbox| outbox.finished && outbox.pending.is_empty();
        self.open.iter().filter(move |(_, outbox)| done(outbox)).map(|(&id, _)| id)
    }

    /// Strikes a stream, which then ends well unless it has ended otherwise; returns how it lived, if it was there.
    pub(crate) fn detach(&mut self, id: StreamId) -> Option<Life> {
        let outbox = self.open.remove(&id)?;
        let _ = outbox.replies.ending.set(Ok(()));
        if self.lasting.get(&outbox.boot) == Some(&id) {
            self.lasting.remove(&outbox.boot);
        }
        Some(outbox.life)
    }

    /// The boot that a stream speaks for.
    pub(crate) fn boot_of(&self, id: StreamId) -> Option<u64> {
        self.open.get(&id).map(|outbox| outbox.boot)
    }

    /// Whether a unary Round waits on this stream.
    pub(crate) fn is_unary(&self, id: StreamId) -> bool {
        self.open.get(&id).is_some_and(|outbox| outbox.life == Life::Unary)
    }

    /// Whether its items are to be taken: it is open and was not ended for what waits on it.
    pub(crate) fn takes_items(&self, id: StreamId) -> bool {
        self.open.get(&id).is_some_and(|outbox| !outbox.is_cut_off)
    }

    /// Whether its caller says nothing more on this stream, and waits for the answers.
    pub(crate) fn is_final(&self, id: StreamId) -> bool {
        self.open.get(&id).is_some_and(|outbox| outbox.life == Life::Unary || outbox.finished)
    }

    /// The Rounds stream of `boot`.
    pub(crate) fn lasting_of(&self, boot: u64) -> Option<StreamId> {
        self.lasting.get(&boot).copied()
    }

    /// Whether sequences of this stream may go on: it is open and its gateway takes its replies.
    pub(crate) fn is_flowing(&self, id: StreamId) -> bool {
        self.open.get(&id).is_some_and(|outbox| outbox.pending.is_empty() && outbox.replies.has_room())
    }

    /// Whether it is open, and its gateway takes no more replies for now.
    pub(crate) fn is_blocked(&self, id: StreamId) -> bool {
        self.open.contains_key(&id) && !self.is_flowing(id)
    }

    /// Queues a reply; it is dropped if the stream is gone, since a repeated item is answered again. A stream for which
    /// too many wait is ended.
    pub(crate) fn reply(&mut self, id: StreamId, seq: u64, body: Body) {
        let Some(outbox) = self.open.get_mut(&id) else { return };
        if outbox.is_cut_off {
            return;
        }
        outbox.weight += weight(&body);
        if outbox.weight <= MAX_PENDING {
            outbox.pending.push(TargetOut { seq, body: Some(body) });
        } else {
            outbox.cut_off();
        }
    }

    /// Sends what is queued, one frame a stream; true if some stream is too full to take its frame.
    pub(crate) fn flush(&mut self) -> bool {
        let mut stalled = false;
        for outbox in self.open.values_mut().filter(|outbox| !outbox.pending.is_empty()) {
            match outbox.replies.frames.try_reserve() {
                Ok(room) => {
                    let outs = std::mem::take(&mut outbox.pending);
                    outbox.weight = 0;
                    room.send(TargetReply { hello: None, outs });
                }
                Err(mpsc::error::TrySendError::Full(())) => stalled = true,
                Err(mpsc::error::TrySendError::Closed(())) => {
                    outbox.pending.clear();
                    outbox.weight = 0;
                }
            }
        }
        stalled
    }

    pub(crate) fn len(&self) -> usize {
        self.open.len()
    }
}

/// What a reply counts for against [`MAX_PENDING`].
fn weight(body: &Body) -> usize {
    1 + match body {
        Body::Features(features) => features.refs.len(),
        Body::Committed(committed) => committed.features.len(),
        Body::Closed(_) | Body::Error(_) => 0,
    }
}

#[cfg(test)]
mod tests {
    use eyrie_wire::v1::{self, Closed, FeatureRef};

    use super::*;

    fn closed() -> Body {
        Body::Closed(Closed {})
    }

    fn replies() -> (Replies, mpsc::Receiver<TargetReply>) {
        let (frames, receiver) = mpsc::channel(1);
        (Replies { frames, ending: Ending::default() }, receiver)
    }

    #[test]
    fn replies_of_one_flush_share_a_frame_and_a_full_stream_keeps_them() {
        let mut streams = Streams::default();
        let (sender, mut receiver) = replies();
        streams.attach(StreamId(1), 7, Life::Lasting, sender);
        streams.reply(StreamId(1), 1, closed());
        streams.reply(StreamId(1), 2, closed());
        streams.reply(StreamId(9), 2, closed());
        assert!(!streams.flush());
        assert!(!streams.is_flowing(StreamId(1)), "the channel is full");
        streams.reply(StreamId(1), 3, closed());
        assert!(streams.flush(), "it stays full");
        assert_eq!(receiver.try_recv().unwrap().outs.len(), 2);
        assert!(!streams.flush());
        assert_eq!(receiver.try_recv().unwrap().outs[0].seq, 3);
        assert!(streams.is_flowing(StreamId(1)));
    }

    #[test]
    fn a_stream_for_which_too_many_replies_wait_is_ended() {
        let mut streams = Streams::default();
        let (sender, mut receiver) = replies();
        let ending = sender.ending.clone();
        streams.attach(StreamId(1), 7, Life::Lasting, sender);
        let features = |refs| {
            Body::Features(v1::Features { refs: vec![FeatureRef::default(); refs], ..Default::default() })
        };
        streams.reply(StreamId(1), 0, features(MAX_PENDING / 2 - 1));
        for seq in 0..=MAX_PENDING as u64 / 2 {
            assert!(ending.get().is_none() && streams.takes_items(StreamId(1)));
            streams.reply(StreamId(1), seq, closed());
        }
        assert!(!streams.takes_items(StreamId(1)));
        assert!(ending.get().is_some_and(Result::is_err));
        assert_eq!(receiver.try_recv(), Err(mpsc::error::TryRecvError::Disconnected));
        assert!(!streams.flush() && !streams.is_flowing(StreamId(1)));
        assert_eq!(streams.detach(StreamId(1)), Some(Life::Lasting), "its sequences are still to be freed");
    }

    #[test]
    fn a_new_rounds_stream_replaces_the_old_one_of_its_boot_only() {
        let mut streams = Streams::default();
        let mut attach = |id, boot, life| {
            let (sender, _) = replies();
            let ending = sender.ending.clone();
            streams.attach(StreamId(id), boot, life, sender);
            ending
        };
        let first = attach(1, 7, Life::Lasting);
        let other = attach(2, 8, Life::Lasting);
        attach(3, 7, Life::Unary);
        assert!(first.get().is_none());
        attach(4, 7, Life::Lasting);
        assert!(first.get().is_some_and(Result::is_err) && other.get().is_none());
        assert_eq!(streams.lasting_of(7), Some(StreamId(4)));
        assert_eq!(streams.detach(StreamId(1)), None, "replaced before");
        assert_eq!(streams.lasting_of(7), Some(StreamId(4)));
        assert_eq!(streams.detach(StreamId(4)), Some(Life::Lasting));
        assert_eq!((streams.lasting_of(7), streams.boot_of(StreamId(3))), (None, Some(7)));
    }
}
