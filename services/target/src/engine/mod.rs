//! The engine: one thread that owns the model, the KV cache and every sequence, and runs step after step.

mod admission;
mod features;
#[cfg(test)]
mod gather_tests;
mod gauges;
mod items;
mod kept;
#[cfg(test)]
mod leaving_tests;
mod load;
mod mailbox;
mod paging;
mod ring;
mod rows;
mod scheduler;
mod sequence;
mod step;
mod streams;
#[cfg(test)]
mod turn_tests;
mod warm;

use std::collections::{BTreeMap, VecDeque};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use eyrie_model::{LatentCache, PageAllocator, PageCopy, TargetModel};
use eyrie_service::Drain;
use eyrie_speculation::Sampler;
use eyrie_wire::v1::{TargetItem, target_out::Body};
use eyrie_wire::{Reason, item_error};
use tokio::time::Instant;

use self::admission::Limits;
use self::features::Features;
use self::sequence::{Key, Sequence, Work};
use self::streams::Streams;
use crate::TargetError;

pub(crate) use self::features::SLOT_ROWS;
pub(crate) use self::gauges::Gauges;
pub(crate) use self::load::{Exports, LoadRequest, Loaded, PAGE_ROWS, assemble, load};
pub(crate) use self::mailbox::{Receiver, Sender, Stopped, mailbox};
pub(crate) use self::ring::RingCopy;
pub(crate) use self::streams::{Ending, Life, Replies, StreamId};

/// How long sequences outlive the Rounds stream of their gateway.
const STREAM_GRACE: Duration = Duration::from_secs(5);
/// How long sequences outlive the last unary Round that spoke of them: a person types the next one.
const UNARY_GRACE: Duration = Duration::from_secs(60);
/// How long an Open may wait for pages where its caller says nothing more until it is answered.
const PAGE_WAIT: Duration = Duration::from_secs(5);
/// Finished sequences kept for replays; one more lets the oldest go.
const MAX_FINISHED: usize = 256;
/// How long a step may wait for sequences that have no item yet, and as a part of the last step.
const GATHER: Duration = Duration::from_micros(200);
const GATHER_PART: u32 = 20;
/// How often a stream that was too full is tried again.
const RETRY: Duration = Duration::from_millis(2);

/// What the engine is told.
pub(crate) enum Command {
    /// A stream began.
    Attach { stream: StreamId, boot: u64, life: Life, replies: Replies },
    /// A frame's items.
    Items { stream: StreamId, items: Vec<TargetItem> },
    /// No more items come on this stream: it ends when those it brought are answered.
    Finish(StreamId),
    /// A stream ended.
    Detach(StreamId),
    /// Look at the drain state.
    Wake,
    /// End the thread.
    Stop,
}

/// Everything a step touches. Invariant: a sequence has finished and is in `finished`, or it has what it takes to
/// compute all its rows.
pub(crate) struct Engine {
    model: Box<dyn TargetModel>,
    cache: LatentCache,
    pages: PageAllocator,
    /// Rows of shared pages to be copied before the next step.
    copies: Vec<PageCopy>,
    prefixes: Prefixes,
    features: Option<Features>,
    sequences: BTreeMap<Key, Sequence>,
    /// In the order in which they finished.
    finished: VecDeque<Key>,
    /// Sequences opened so far.
    arrivals: u64,
    /// Sequences preempted so far.
    preemptions: u64,
    streams: Streams,
    sampler: Sampler,
    limits: Limits,
    max_sequences: usize,
    prefill_chunk: usize,
    gauges: Arc<Gauges>,
    drain: Drain,
    last_step: Duration,
    /// When the next step could first have begun.
    ready_since: Option<Instant>,
}

/// Prompt tokens looked up in the prefix cache so far, and found there.
#[derive(Debug, Default, Clone, Copy)]
struct Prefixes {
    lookups: u64,
    hits: u64,
}

/// What the loop does next.
enum Next {
    Step,
    Sleep(Option<Instant>),
}

/// What a pass of the loop came to.
pub(crate) enum Pass {
    Stepped,
    /// Nothing to do until a command comes, or until then.
    Idle(Option<Instant>),
    Stopped,
}

impl Engine {
    /// Wraps the model, for tests of what happens when it fails.
    #[cfg(test)]
    pub(crate) fn with_model(self, wrap: impl FnOnce(Box<dyn TargetModel>) -> Box<dyn TargetModel>) -> Self {
        Self { model: wrap(self.model), ..self }
    }

    /// Steps until told to stop. Errors are faults of the machine or of ours; no item of a stream causes one.
    pub(crate) fn run(&mut self, mailbox: &Receiver<Command>) -> Result<(), TargetError> {
        loop {
            match self.pass(mailbox)? {
                Pass::Stepped => {}
                Pass::Idle(deadline) => {
                    mailbox.wait(deadline);
                }
                Pass::Stopped => return Ok(()),
            }
        }
    }

    /// Obeys what waits in the mailbox, then runs one step if one is due.
    pub(crate) fn pass(&mut self, mailbox: &Receiver<Command>) -> Result<Pass, TargetError> {
        let mut inbox = VecDeque::new();
        mailbox.drain_into(&mut inbox);
        while let Some(command) = inbox.pop_front() {
            if self.obey(command).is_break() {
                self.streams.flush();
                return Ok(Pass::Stopped);
            }
        }
        let now = Instant::now();
        self.expire(now);
        // Before the replies go out, so that who has read one finds it in the report.
        self.report();
        let stalled = self.streams.flush();
        self.end_finished_streams();
        if self.admit(now) {
            self.report();
        }
        match self.next(now, stalled) {
            Next::Step => {
                self.ready_since = None;
                self.step()?;
                self.report();
                self.streams.flush();
                Ok(Pass::Stepped)
            }
            Next::Sleep(deadline) => Ok(Pass::Idle(deadline)),
        }
    }

    fn obey(&mut self, command: Command) -> ControlFlow<()> {
        match command {
            Command::Attach { stream, boot, life, replies } => self.attach(stream, boot, life, replies),
            Command::Items { stream, items } => self.take_items(stream, items),
            Command::Finish(stream) => self.streams.finish(stream),
            Command::Detach(stream) => self.detach(stream),
            Command::Wake => {}
            Command::Stop => return ControlFlow::Break(()),
        }
        ControlFlow::Continue(())
    }

    fn attach(&mut self, stream: StreamId, boot: u64, life: Life, replies: Replies) {
        self.streams.attach(stream, boot, life, replies);
        if life == Life::Lasting {
            for (_, sequence) in self.sequences.range_mut(Key::all_of(boot)) {
                if !self.streams.is_unary(sequence.route) {
                    sequence.route = stream;
                    sequence.expires = None;
                }
            }
        }
    }

    fn detach(&mut self, stream: StreamId) {
        let boot = self.streams.boot_of(stream);
        let (Some(boot), Some(life)) = (boot, self.streams.detach(stream)) else { return };
        let grace = if life == Life::Lasting { STREAM_GRACE } else { UNARY_GRACE };
        let successor = self.streams.lasting_of(boot);
        let sequences = self.sequences.range_mut(Key::all_of(boot)).map(|(_, sequence)| sequence);
        for sequence in sequences.filter(|sequence| sequence.route == stream) {
            match successor {
                Some(successor) => sequence.route = successor,
                None => sequence.expires = Some(Instant::now() + grace),
            }
        }
    }

    /// Ends the streams on which nothing more is said when nothing is left to answer.
    fn end_finished_streams(&mut self) {
        let waits = |id| self.sequences.values().any(|s| s.route == id && s.has_work());
        let ended: Vec<StreamId> = self.streams.finished().filter(|&id| !waits(id)).collect();
        for stream in ended {
            self.detach(stream);
        }
    }

    /// Frees sequences whose gateway did not come back, and those that have waited too long for pages.
    fn expire(&mut self, now: Instant) {
        let expired = |sequence: &Sequence| sequence.expires.is_some_and(|at| at <= now);
        let keys: Vec<Key> = self.sequences.iter().filter(|(_, s)| expired(s)).map(|(&key, _)| key).collect();
        if !keys.is_empty() {
            tracing::info!(sequences = keys.len(), "freed sequences whose stream did not come back");
        }
        for key in keys {
            self.close(key);
        }
        self.refuse_overdue(now);
    }

    /// When a sequence that waits for pages and was never computed is refused: its caller says nothing more until it is
    /// answered, and may not wait for ever.
    fn page_deadline(&self, sequence: &Sequence) -> Option<Instant> {
        let is_new = sequence.waits() && sequence.kv_len == 0;
        (is_new && self.streams.is_final(sequence.route)).then(|| sequence.active + PAGE_WAIT)
    }

    fn refuse_overdue(&mut self, now: Instant) {
        let overdue = |sequence: &Sequence| self.page_deadline(sequence).is_some_and(|at| at <= now);
        let keys: Vec<Key> = self.sequences.iter().filter(|(_, s)| overdue(s)).map(|(&key, _)| key).collect();
        for key in keys {
            let message = format!("no KV pages became free for the sequence in {} s", PAGE_WAIT.as_secs());
            if let Some(sequence) = self.sequences.get(&key) {
                let body = Body::Error(item_error(Reason::Busy, message));
                self.streams.reply(sequence.route, key.seq, body);
            }
            self.close(key);
        }
    }

    /// Frees a sequence, whatever it is doing.
    fn close(&mut self, key: Key) {
        let Some(sequence) = self.sequences.remove(&key) else { return };
        if sequence.is_finished() {
            self.finished.retain(|&finished| finished != key);
        }
        self.pages.free(sequence.table);
        if let Some(features) = &mut self.features {
            features.forget(key);
        }
    }

    /// Takes back what a sequence holds once it has finished; its last replies stay until it is closed.
    fn release_finished(&mut self, key: Key) {
        let Some(sequence) = self.sequences.get_mut(&key).filter(|sequence| sequence.is_finished()) else {
            return;
        };
        self.pages.free(sequence.release());
        if let Some(features) = &mut self.features {
            features.forget(key);
        }
        self.finished.push_back(key);
        if self.finished.len() > MAX_FINISHED
            && let Some(oldest) = self.finished.pop_front()
        {
            self.sequences.remove(&oldest);
        }
    }

    /// Whether a step would compute rows of this sequence.
    fn is_ready(&self, sequence: &Sequence) -> bool {
        sequence.has_work() && sequence.holds_pages() && self.streams.is_flowing(sequence.route)
    }

    fn next(&mut self, now: Instant, stalled: bool) -> Next {
        if self.sequences.values().any(|sequence| self.is_ready(sequence)) {
            let gather_until =
                *self.ready_since.get_or_insert(now) + GATHER.min(self.last_step / GATHER_PART);
            let awaited =
                |s: &Sequence| s.work == Work::Idle && s.holds_pages() && self.streams.is_flowing(s.route);
            return match now < gather_until && self.sequences.values().any(awaited) {
                true => Next::Sleep(Some(gather_until)),
                false => Next::Step,
            };
        }
        self.ready_since = None;
        let expiry = self.sequences.values().filter_map(|sequence| sequence.expires).min();
        let overdue = self.sequences.values().filter_map(|sequence| self.page_deadline(sequence)).min();
        // A full channel tells nobody when it has room again.
        let blocked = |s: &Sequence| s.has_work() && self.streams.is_blocked(s.route);
        let retry = (stalled || self.sequences.values().any(blocked)).then(|| now + RETRY);
        Next::Sleep([expiry, overdue, retry, self.next_dormancy(now)].into_iter().flatten().min())
    }

    fn report(&mut self) {
        let running = self.holders();
        let used = (self.pages.pages() - self.pages.free_pages()) * self.pages.page_rows();
        self.gauges.set_sequences(running, self.sequences.len() - self.finished.len() - running);
        self.gauges.set_kv(used as u64, self.preemptions);
        let cached = self.pages.idle_pages() * self.pages.page_rows();
        self.gauges.set_prefixes(cached as u64, self.prefixes.lookups, self.prefixes.hits);
        if let Some(features) = &mut self.features {
            features.sweep(&self.pages);
            let (kept, cached) = features.kept_bytes();
            self.gauges.set_features(kept, cached, features.rows_let_go());
        }
        self.gauges.set_streams(self.streams.len());
    }
}
