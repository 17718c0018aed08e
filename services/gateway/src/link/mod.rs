//! One long-lived Rounds stream to a peer service, owned by one task: items of all sessions are
//! coalesced into frames, replies are routed back by sequence, a broken stream is made again.

mod draft;
mod peer;
mod pump;
mod target;
mod watched;

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use eyrie_service::Drain;
use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc};
use tokio::time::Instant;

pub(crate) use draft::DraftPeer;
pub(crate) use peer::Peer;
pub(crate) use target::{TargetPeer, TargetReady, load_of, target_load};
pub(crate) use watched::Watched;

/// Items of all sessions that wait for the next frame.
const QUEUE: usize = 1024;
/// Replies of one sequence that its session has not read. A session that stays further behind than
/// this is cut off: the peer was told to send no more than a credit and the chunks of one prompt.
const UNREAD: usize = 4096;
/// Closes that wait for the next frame; more than this and the stream is made again, which frees all.
const CLOSES: usize = 1 << 16;
/// Closes that are told again on a new stream of the same boot id: the last ones on the old stream may
/// have been lost, and a peer that keeps the sequences of this boot would hold them for good.
const RECENT_CLOSES: usize = 4096;

/// What is known about a peer.
#[derive(Debug, Clone)]
pub(crate) enum State<R> {
    /// No stream, and why.
    Down(Arc<str>),
    /// A stream that missed a deadline at that time and has said nothing since.
    Suspect(R, Instant),
    /// A stream that answers.
    Up(R),
    /// A stream that answers, of a peer that lets its sequences end and takes no new one.
    Draining(R),
}

impl<R> State<R> {
    /// What the peer said of itself, while it answers and takes sequences.
    pub(crate) fn up(&self) -> Option<&R> {
        match self {
            Self::Up(ready) => Some(ready),
            Self::Down(_) | Self::Suspect(..) | Self::Draining(_) => None,
        }
    }

    /// What the peer said of itself, while there is a stream.
    pub(crate) fn connected(&self) -> Option<&R> {
        match self {
            Self::Up(ready) | Self::Suspect(ready, _) | Self::Draining(ready) => Some(ready),
            Self::Down(_) => None,
        }
    }
}

/// Handle to the link; sessions register their sequences here.
pub(crate) struct Link<P: Peer> {
    shared: Arc<Shared<P>>,
}

struct Shared<P: Peer> {
    /// For logs.
    name: String,
    table: Mutex<Table<P>>,
    queue: mpsc::Sender<P::Item>,
    closes: Notify,
    state: Watched<State<P::Ready>>,
    next_seq: AtomicU64,
}

/// The live sequences. A sequence that is not here has no claim to be sent or to hear anything.
struct Table<P: Peer> {
    up: bool,
    routes: BTreeMap<u64, mpsc::Sender<P::Out>>,
    closing: Vec<u64>,
    closed: VecDeque<u64>,
}

/// The item was not taken: the service stops, or (for [`Route::try_send`]) the queue is full.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NotSent;

impl<P: Peer> Clone for Link<P> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared) }
    }
}

impl<P: Peer> fmt::Debug for Link<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link").field("peer", &P::NAME).finish_non_exhaustive()
    }
}

impl<P: Peer> Link<P> {
    /// Starts the link's task on `drain`; it ends with [`Drain::stop`].
    pub(crate) fn spawn(peer: P, drain: &Drain) -> Self {
        let (queue, items) = mpsc::channel(QUEUE);
        let link = Self::over(queue, peer.name());
        drain.spawn(pump::run(Arc::clone(&link.shared), peer, items, drain.clone()));
        link
    }

    fn over(queue: mpsc::Sender<P::Item>, name: String) -> Self {
        let state = Watched::new(State::Down(format!("connecting to the {}", P::NAME).into()));
        let table = Mutex::new(Table {
            up: false,
            routes: BTreeMap::new(),
            closing: Vec::new(),
            closed: VecDeque::new(),
        });
        let next_seq = AtomicU64::new(1);
        let shared = Arc::new(Shared { name, table, queue, closes: Notify::new(), state, next_seq });
        Self { shared }
    }

    /// The state, to be waited on.
    pub(crate) fn watched(&self) -> Watched<State<P::Ready>> {
        self.shared.state.clone()
    }

    pub(crate) fn state(&self) -> State<P::Ready> {
        self.shared.state.borrow().clone()
    }

    /// Whether the peer answers.
    pub(crate) fn is_up(&self) -> bool {
        self.shared.state.borrow().up().is_some()
    }

    /// Sequences on the current stream.
    pub(crate) fn sequences(&self) -> usize {
        self.shared.table.lock().routes.len()
    }

    /// A new sequence on the current stream; `None` while there is no stream.
    pub(crate) fn register(&self) -> Option<Route<P>> {
        let (sender, replies) = mpsc::channel(UNREAD);
        let seq = self.shared.next_seq.fetch_add(1, Ordering::Relaxed);
        let mut table = self.shared.table.lock();
        if !table.up {
            return None;
        }
        table.routes.insert(seq, sender);
        drop(table);
        Some(Route { seq, replies, shared: Arc::clone(&self.shared) })
    }

    /// Marks a peer that missed a deadline; any frame from it clears the mark.
    pub(crate) fn suspect(&self) {
        self.shared.state.modify(|state| match state {
            State::Up(ready) => {
                tracing::warn!(
                    peer = self.shared.name,
                    "missed its deadline: not asked again until it answers"
                );
                *state = State::Suspect(ready.clone(), Instant::now());
                true
            }
            State::Suspect(..) | State::Draining(_) | State::Down(_) => false,
        });
    }

    /// Marks a peer that drains, which it does until its stream ends.
    pub(crate) fn draining(&self) {
        self.shared.state.modify(|state| match state {
            State::Up(ready) | State::Suspect(ready, _) => {
                tracing::info!(peer = self.shared.name, "drains: no new sequences");
                *state = State::Draining(ready.clone());
                true
            }
            State::Draining(_) | State::Down(_) => false,
        });
    }
}

/// One sequence on one stream. Dropping it, at any phase, closes the sequence at the peer.
pub(crate) struct Route<P: Peer> {
    seq: u64,
    replies: mpsc::Receiver<P::Out>,
    shared: Arc<Shared<P>>,
}

impl<P: Peer> Route<P> {
    /// Queues an item for the next frame, waiting for room. A link without a stream drops what is
    /// queued, and the break is heard by [`Route::recv`].
    ///
    /// # Errors
    /// The service stops.
    pub(crate) async fn send(&self, op: P::Op) -> Result<(), NotSent> {
        self.shared.queue.send(P::item(self.seq, op)).await.map_err(|_| NotSent)
    }

    /// Queues an item without waiting.
    ///
    /// # Errors
    /// The queue is full, or the service stops.
    pub(crate) fn try_send(&self, op: P::Op) -> Result<(), NotSent> {
        self.shared.queue.try_send(P::item(self.seq, op)).map_err(|_| NotSent)
    }

    /// The next reply; `None` when the stream broke. Cancel-safe.
    pub(crate) async fn recv(&mut self) -> Option<P::Out> {
        self.replies.recv().await
    }

    /// A reply that is there already.
    pub(crate) fn try_recv(&mut self) -> Option<P::Out> {
        self.replies.try_recv().ok()
    }

    /// Whether the stream broke and every reply was read.
    pub(crate) fn is_broken(&self) -> bool {
        self.replies.is_closed() && self.replies.is_empty()
    }
}

impl<P: Peer> Drop for Route<P> {
    /// The route goes first: items of this sequence that are still queued are then left out of every
    /// later frame, so the Close can overtake them without an Open reviving the sequence behind it.
    fn drop(&mut self) {
        let mut table = self.shared.table.lock();
        table.routes.remove(&self.seq);
        if table.closing.len() <= CLOSES {
            table.closing.push(self.seq);
        }
        drop(table);
        self.shared.closes.notify_one();
    }
}
