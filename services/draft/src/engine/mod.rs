//! The engine: one thread that owns the head, its cache and every sequence, and works in steps.

mod attached;
mod features;
mod growth;
mod job;
mod mailbox;
mod pace;
mod request;
mod sequence;
mod step;
mod store;

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use eyrie_model::{DraftCache, Eagle3Head, ModelError};
use eyrie_region::RingReader;
use eyrie_speculation::{GrowError, ProposalError};
use eyrie_wire::v1::{draft_item::Op, draft_out::Body};
use eyrie_wire::{Reason, item_error};
use tokio::sync::{mpsc, oneshot};

use self::attached::{Attached, Work};
use self::job::{Origin, Outbox};
pub(crate) use self::mailbox::{Command, Frame, Replies, StreamId};
use self::sequence::SeqKey;

/// Work items that the engine takes in before it leaves further frames in the mailbox.
const QUEUE: usize = 1024;

/// Everything of one lease that rounds need.
#[derive(Debug)]
pub(crate) struct Attachment {
    pub(crate) epoch: u64,
    pub(crate) head: Eagle3Head,
    /// An empty cache of that head.
    pub(crate) cache: DraftCache,
    pub(crate) ring: RingReader,
    /// Tokens of a sequence at most.
    pub(crate) context: usize,
    pub(crate) vocab: usize,
}

/// Sizes of the engine.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EngineSizes {
    pub(crate) max_sequences: usize,
    pub(crate) max_draft_tokens: usize,
    /// Bytes of slots kept of ended sequences; `None` as much as is free.
    pub(crate) prefix_cache_bytes: Option<u64>,
    /// How long a sequence of unary calls may rest.
    pub(crate) unary_idle: Duration,
}

/// What can go wrong inside a step. None of it is the sender's fault.
#[derive(Debug, thiserror::Error)]
pub(crate) enum EngineError {
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error(transparent)]
    Kernel(#[from] eyrie_kernels::KernelError),
    #[error(transparent)]
    Grow(#[from] GrowError),
    #[error(transparent)]
    Proposal(#[from] ProposalError),
    #[error("broken invariant: {0}")]
    Invariant(&'static str),
}

/// The way to the engine's thread.
#[derive(Debug, Clone)]
pub(crate) struct EngineHandle {
    mailbox: mpsc::Sender<Command>,
    sequences: Arc<AtomicU32>,
}

impl EngineHandle {
    /// Starts the thread. The receiver resolves when it ends.
    pub(crate) fn start(sizes: EngineSizes) -> io::Result<(Self, oneshot::Receiver<()>)> {
        let (sender, receiver) = mpsc::channel(mailbox::MAILBOX);
        let (ended, end) = oneshot::channel();
        let sequences = Arc::new(AtomicU32::new(0));
        let engine = Engine {
            mailbox: receiver,
            sizes,
            attached: None,
            queue: VecDeque::new(),
            outbox: Outbox::default(),
            sequences: Arc::clone(&sequences),
        };
        std::thread::Builder::new().name("draft-engine".to_owned()).spawn(move || {
            // Dropped, and so told, on every way out of the thread.
            let _ended = ended;
            engine.run();
        })?;
        Ok((Self { mailbox: sender, sequences }, end))
    }

    /// Hands over a command, waiting while the mailbox is full; false once the engine is gone.
    pub(crate) async fn send(&self, command: Command) -> bool {
        self.mailbox.send(command).await.is_ok()
    }

    /// Returns once the engine has let go of everything mapped from the target.
    pub(crate) async fn detach(&self) {
        let (done, told) = oneshot::channel();
        if self.send(Command::Detach(done)).await {
            let _ = told.await;
        }
    }

    /// Sequences held now.
    pub(crate) fn sequences(&self) -> u32 {
        self.sequences.load(Ordering::Relaxed)
    }
}

#[derive(Debug)]
struct Engine {
    mailbox: mpsc::Receiver<Command>,
    sizes: EngineSizes,
    attached: Option<Attached>,
    queue: VecDeque<Work>,
    outbox: Outbox,
    sequences: Arc<AtomicU32>,
}

impl Engine {
    fn run(mut self) {
        while self.take_in() {
            if let Some(attached) = &mut self.attached {
                attached.admit(&mut self.queue, &mut self.outbox);
                // Told before the answers go out: who has one sees its sequence counted.
                self.sequences.store(attached.sequences() as u32, Ordering::Relaxed);
                attached.step(&mut self.outbox);
                self.sequences.store(attached.sequences() as u32, Ordering::Relaxed);
            }
            self.outbox.flush();
        }
    }

    /// Takes in what the mailbox holds, waiting when there is nothing to do; false at the end.
    fn take_in(&mut self) -> bool {
        let busy = self.attached.as_ref().is_some_and(Attached::is_busy);
        if self.queue.is_empty() && !busy {
            let Some(command) = self.mailbox.blocking_recv() else { return false };
            if !self.handle(command) {
                return false;
            }
        }
        while self.queue.len() < QUEUE {
            let Ok(command) = self.mailbox.try_recv() else { break };
            if !self.handle(command) {
                return false;
            }
        }
        true
    }

    fn handle(&mut self, command: Command) -> bool {
        match command {
            Command::Attach(attachment) => {
                self.detach();
                self.attached = Some(Attached::new(*attachment, self.sizes));
            }
            Command::Detach(done) => {
                self.detach();
                // The one who asked may be gone; the memory is let go either way.
                let _ = done.send(());
            }
            Command::Frame(frame) => self.enqueue(frame),
            Command::Close(stream) if self.attached.is_some() => {
                self.queue.push_back(Work::CloseStream(stream));
            }
            Command::Close(_) => {}
            Command::Expire => {
                if let Some(attached) = &mut self.attached {
                    attached.expire();
                }
            }
            Command::Stop => return false,
        }
        true
    }

    fn enqueue(&mut self, frame: Frame) {
        let Frame { stream, unary, boot_id, epoch, items, replies } = frame;
        let refusal = match &self.attached {
            None => Some((Reason::Unreachable, "the draft is not attached to a target".to_owned())),
            Some(attached) if attached.epoch() != epoch => Some((
                Reason::StaleEpoch,
                format!("epoch must be {:016x}, given {epoch:016x}", attached.epoch()),
            )),
            Some(_) => None,
        };
        for item in items {
            let key = SeqKey { boot_id, seq: item.seq };
            let mut origin = Origin { key, stream, unary, round: 0, replies: replies.clone() };
            match (item.op, &refusal) {
                (Some(Op::Close(_)), None) => self.queue.push_back(Work::CloseSeq(key)),
                (Some(Op::Close(_)), Some(_)) => {}
                (Some(Op::Propose(propose)), None) => {
                    origin.round = propose.round;
                    self.queue.push_back(Work::Propose { origin, propose });
                }
                (Some(Op::Propose(propose)), Some((reason, why))) => {
                    origin.round = propose.round;
                    self.outbox.push(&origin, Body::Error(item_error(*reason, why.clone())));
                }
                (None, _) => {
                    let what = "item must carry propose or close, given neither";
                    self.outbox.push(&origin, Body::Error(item_error(Reason::InvalidArgument, what)));
                }
            }
        }
    }

    fn detach(&mut self) {
        let Some(attached) = self.attached.take() else { return };
        let waiting = attached.abandon(&mut self.queue);
        for origin in waiting {
            let what = "the draft lost its lease on the target";
            self.outbox.push(&origin, Body::Error(item_error(Reason::Unreachable, what)));
        }
        self.sequences.store(0, Ordering::Relaxed);
    }
}
