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
mod warm;

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

use eyrie_kernels::KernelError;
use eyrie_model::{DraftCache, Eagle3Head, ModelError};
use eyrie_speculation::{GrowError, ProposalError};
use eyrie_wire::v1::{draft_item::Op, draft_out::Body};
use eyrie_wire::{Reason, item_error};
use tokio::sync::{mpsc, oneshot};

use self::attached::{Attached, Work};
pub(crate) use self::features::{DEVICE_ROOM, DeviceRing, FeatureSource};
use self::job::{Origin, Outbox};
pub(crate) use self::mailbox::{Command, Frame, Replies, StreamId};
use self::sequence::SeqKey;

/// Work items that the engine takes in before it leaves further frames in the mailbox.
const QUEUE: usize = 1024;

/// Everything of one lease that rounds need.
#[derive(Debug)]
pub(crate) struct Attachment {
    /// The target's place among the options'.
    pub(crate) place: usize,
    pub(crate) epoch: u64,
    pub(crate) head: Eagle3Head,
    /// An empty cache of that head.
    pub(crate) cache: DraftCache,
    pub(crate) features: FeatureSource,
    /// Tokens of a sequence at most.
    pub(crate) context: usize,
    pub(crate) vocab: usize,
    /// Where the engine tells how many sequences it holds.
    pub(crate) sequences: Arc<AtomicU32>,
}

/// Sizes of the engine.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EngineSizes {
    pub(crate) max_sequences: usize,
    pub(crate) max_draft_tokens: usize,
    /// Bytes of slots kept of ended sequences of each target; `None` as much as is free.
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
    Kernel(#[from] KernelError),
    #[error(transparent)]
    Grow(#[from] GrowError),
    #[error(transparent)]
    Proposal(#[from] ProposalError),
    #[error("broken invariant: {0}")]
    Invariant(&'static str),
}

impl EngineError {
    /// Whether nothing will be computed in this process any more: a GPU's context does not outlive a failed kernel.
    pub(super) fn is_final(&self) -> bool {
        matches!(
            self,
            Self::Kernel(KernelError::Cuda { .. })
                | Self::Model(ModelError::Kernel(KernelError::Cuda { .. }))
        )
    }
}

impl Attachment {
    /// Has a GPU load its kernels and take its memory before the first round waits for that.
    fn warm_up(&mut self) -> Result<(), EngineError> {
        if self.head.backend().is_gpu() {
            warm::warm_up(&mut self.head, &mut self.cache)?;
        }
        Ok(())
    }
}

/// The way to the engine's thread.
#[derive(Debug, Clone)]
pub(crate) struct EngineHandle {
    mailbox: mpsc::Sender<Command>,
}

impl EngineHandle {
    /// Starts the thread. The receiver resolves when it ends.
    pub(crate) fn start(sizes: EngineSizes) -> io::Result<(Self, oneshot::Receiver<()>)> {
        let (sender, receiver) = mpsc::channel(mailbox::MAILBOX);
        let (ended, end) = oneshot::channel();
        let engine =
            Engine { mailbox: receiver, sizes, attached: BTreeMap::new(), outbox: Outbox::default() };
        std::thread::Builder::new().name("draft-engine".to_owned()).spawn(move || {
            // Dropped, and so told, on every way out of the thread.
            let _ended = ended;
            engine.run();
        })?;
        Ok((Self { mailbox: sender }, end))
    }

    /// Hands over a command, waiting while the mailbox is full; false once the engine is gone.
    pub(crate) async fn send(&self, command: Command) -> bool {
        self.mailbox.send(command).await.is_ok()
    }

    /// Returns once the engine has let go of everything mapped from the target in this place.
    pub(crate) async fn detach(&self, place: usize) {
        let (done, told) = oneshot::channel();
        if self.send(Command::Detach(place, done)).await {
            let _ = told.await;
        }
    }
}

#[derive(Debug)]
struct Engine {
    mailbox: mpsc::Receiver<Command>,
    sizes: EngineSizes,
    /// By place.
    attached: BTreeMap<usize, Attached>,
    outbox: Outbox,
}

impl Engine {
    fn run(mut self) {
        while self.take_in() {
            // Refusals.
            self.outbox.flush();
            for attached in self.attached.values_mut() {
                let worked = attached.work(&mut self.outbox);
                self.outbox.flush();
                if let Err(why) = worked {
                    tracing::error!("the engine ends: {why}");
                    return;
                }
            }
        }
    }

    /// Takes in what the mailbox holds, waiting when there is nothing to do; false at the end.
    fn take_in(&mut self) -> bool {
        if !self.attached.values().any(Attached::is_busy) {
            let Some(command) = self.mailbox.blocking_recv() else { return false };
            if !self.handle(command) {
                return false;
            }
        }
        while self.attached.values().map(Attached::queued).sum::<usize>() < QUEUE {
            let Ok(command) = self.mailbox.try_recv() else { break };
            if !self.handle(command) {
                return false;
            }
        }
        true
    }

    fn handle(&mut self, command: Command) -> bool {
        match command {
            Command::Attach(mut attachment, done) => {
                let place = attachment.place;
                self.detach(place);
                let warm = attachment.warm_up();
                let goes_on = !warm.as_ref().is_err_and(EngineError::is_final);
                if warm.is_ok() {
                    self.attached.insert(place, Attached::new(*attachment, self.sizes));
                }
                // The one who asked may be gone: its lease then ends with a Detach.
                let _ = done.send(warm);
                return goes_on;
            }
            Command::Detach(place, done) => {
                self.detach(place);
                // The one who asked may be gone; the memory is let go either way.
                let _ = done.send(());
            }
            Command::Frame(frame) => self.enqueue(frame),
            // One of them knows the stream.
            Command::Close(stream) => {
                self.attached.values_mut().for_each(|attached| attached.push(Work::CloseStream(stream)));
            }
            Command::Expire => self.attached.values_mut().for_each(Attached::expire),
            Command::Stop => return false,
        }
        true
    }

    fn enqueue(&mut self, frame: Frame) {
        let Frame { stream, unary, boot_id, epoch, items, held, replies } = frame;
        let mut attached = self.attached.values_mut().find(|attached| attached.epoch() == epoch);
        for item in items {
            let key = SeqKey { boot_id, seq: item.seq };
            let mut origin =
                Origin { key, stream, unary, round: 0, replies: replies.clone(), _held: held.clone() };
            match (item.op, &mut attached) {
                (Some(Op::Close(_)), Some(attached)) => attached.push(Work::CloseSeq(key)),
                (Some(Op::Close(_)), None) => {}
                (Some(Op::Propose(propose)), Some(attached)) => {
                    origin.round = propose.round;
                    attached.push(Work::Propose { origin, propose });
                }
                (Some(Op::Propose(propose)), None) => {
                    origin.round = propose.round;
                    let why = format!("the draft is no longer attached to the target of epoch {epoch:016x}");
                    self.outbox.push(&origin, Body::Error(item_error(Reason::Unreachable, why)));
                }
                (None, _) => {
                    let what = "item must carry propose or close, given neither";
                    self.outbox.push(&origin, Body::Error(item_error(Reason::InvalidArgument, what)));
                }
            }
        }
    }

    fn detach(&mut self, place: usize) {
        let Some(attached) = self.attached.remove(&place) else { return };
        for origin in attached.abandon() {
            let what = "the draft lost its lease on the target";
            self.outbox.push(&origin, Body::Error(item_error(Reason::Unreachable, what)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_outlives_what_a_gpu_outlives() {
        let code = "CUDA_ERROR_ILLEGAL_ADDRESS".to_owned();
        let broken = || KernelError::Cuda { what: "linear", code: code.clone() };
        assert!(EngineError::from(broken()).is_final());
        assert!(EngineError::from(ModelError::from(broken())).is_final());
        let full = KernelError::GpuMemory { what: "linear", wanted: 9, free: 5, total: 7 };
        assert!(!EngineError::from(ModelError::from(full)).is_final());
        assert!(!EngineError::Invariant("x").is_final());
    }
}
