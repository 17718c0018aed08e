//! The engine while it holds a lease: which work goes into the next step.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};

use eyrie_model::{Aux, DraftCache, Eagle3Head};
use eyrie_wire::v1::draft_out::Body;
use eyrie_wire::v1::{ItemError, Need, Proposal, Propose};
use eyrie_wire::{Reason, item_error};

use super::features::{FeatureSource, Request};
use super::growth::Wanted;
use super::job::{Job, Origin, Outbox};
use super::mailbox::StreamId;
use super::pace::Pace;
use super::request::Limits;
use super::sequence::{SeqKey, Sequence};
use super::step::Step;
use super::store::Store;
use super::{Attachment, EngineError, EngineSizes};

/// Work in the order of its arrival.
#[derive(Debug)]
pub(super) enum Work {
    Propose { origin: Origin, propose: Propose },
    CloseSeq(SeqKey),
    CloseStream(StreamId),
}

/// Head, cache and sequences under one lease.
#[derive(Debug)]
pub(super) struct Attached {
    epoch: u64,
    head: Eagle3Head,
    features: FeatureSource,
    cache: DraftCache,
    store: Store,
    pace: Pace,
    limits: Limits,
    max_jobs: usize,
    unary_idle: Duration,
    /// Jobs that failed since the lease was taken.
    failures: u64,
    /// Rounds whose rows did not fit the last step.
    active: Vec<Job>,
    /// Work that waits for a step.
    queue: VecDeque<Work>,
    /// How many sequences are held, for readers elsewhere.
    sequences: Arc<AtomicU32>,
}

impl Attached {
    pub(super) fn new(attachment: Attachment, sizes: EngineSizes) -> Self {
        let Attachment { epoch, head, cache, features, context, vocab, sequences, .. } = attachment;
        let store = Store::new(cache.allocator_with_prefixes(sizes.prefix_cache_bytes), sizes.max_sequences);
        let (draft_vocab, max_draft_tokens) = (head.draft_vocab(), sizes.max_draft_tokens);
        let limits = Limits { vocab, draft_vocab, context, max_draft_tokens };
        Self {
            epoch,
            head,
            features,
            cache,
            store,
            pace: Pace::new(),
            limits,
            max_jobs: sizes.max_sequences,
            unary_idle: sizes.unary_idle,
            failures: 0,
            active: Vec::new(),
            queue: VecDeque::new(),
            sequences,
        }
    }

    pub(super) fn epoch(&self) -> u64 {
        self.epoch
    }

    pub(super) fn push(&mut self, work: Work) {
        self.queue.push_back(work);
    }

    /// Work that waits for a step.
    pub(super) fn queued(&self) -> usize {
        self.queue.len()
    }

    fn count(&self) {
        self.sequences.store((self.store.len() + self.active.len()) as u32, Relaxed);
    }

    /// Frees what unary calls left behind too long ago.
    pub(super) fn expire(&mut self) {
        if let Some(oldest) = Instant::now().checked_sub(self.unary_idle) {
            self.store.expire(oldest);
        }
    }

    /// There is work for a step.
    pub(super) fn is_busy(&self) -> bool {
        !self.active.is_empty() || !self.queue.is_empty()
    }

    /// Drops everything; returns the rounds that now get no answer from here.
    pub(super) fn abandon(self) -> Vec<Origin> {
        self.sequences.store(0, Relaxed);
        let active = self.active.into_iter().map(|job| job.origin);
        let queued = self.queue.into_iter().filter_map(|work| match work {
            Work::Propose { origin, .. } => Some(origin),
            Work::CloseSeq(_) | Work::CloseStream(_) => None,
        });
        active.chain(queued).collect()
    }

    /// Admits what waits and runs one step over it.
    ///
    /// # Errors
    /// What leaves nothing that could compute. All that waited is answered.
    pub(super) fn work(&mut self, outbox: &mut Outbox) -> Result<(), EngineError> {
        self.admit(outbox);
        // Told before the answers go out: who has one sees its sequence counted.
        self.count();
        let done = self.step(outbox);
        self.count();
        done
    }

    fn step(&mut self, outbox: &mut Outbox) -> Result<(), EngineError> {
        let jobs = std::mem::take(&mut self.active);
        if jobs.is_empty() {
            return Ok(());
        }
        let Self { head, cache, store, pace, failures, .. } = self;
        let mut step = Step { head, cache, store, pace, failures, outbox, ended: None };
        self.active = step.run(jobs);
        step.ended.map_or(Ok(()), Err)
    }

    /// Moves work from the queue into the step. A sequence has one round in a step, and what closes it or its
    /// stream waits for the rounds before.
    fn admit(&mut self, outbox: &mut Outbox) {
        let mut sequences: HashSet<SeqKey> = self.active.iter().map(|job| job.origin.key).collect();
        let mut streams: HashSet<StreamId> = self.active.iter().map(|job| job.origin.stream).collect();
        let mut begun = Vec::new();
        for work in std::mem::take(&mut self.queue) {
            match work {
                Work::Propose { origin, propose } => {
                    streams.insert(origin.stream);
                    let full = self.active.len() + begun.len() >= self.max_jobs;
                    if full || !sequences.insert(origin.key) {
                        sequences.insert(origin.key);
                        self.queue.push_back(Work::Propose { origin, propose });
                        continue;
                    }
                    match self.begin(origin.clone(), propose) {
                        Ok(round) => begun.push(round),
                        Err(error) => outbox.push(&origin, Body::Error(error)),
                    }
                }
                Work::CloseSeq(key) if sequences.contains(&key) => self.queue.push_back(work),
                Work::CloseSeq(key) => self.store.close(key),
                Work::CloseStream(stream) if streams.contains(&stream) => self.queue.push_back(work),
                Work::CloseStream(stream) => self.store.close_stream(stream),
            }
        }
        self.read(begun, outbox);
    }

    /// Takes out the sequence of a round and takes in its tokens.
    fn begin(&mut self, origin: Origin, propose: Propose) -> Result<Begun, ItemError> {
        let wanted = self.limits.check(&propose)?;
        let mut sequence = self.sequence(origin.key, propose.start, propose.base_len);
        sequence.owner = origin.stream;
        sequence.unary = origin.unary;
        let base_len = propose.base_len;
        let mut keep = sequence.take_tokens(propose.token_from, &propose.tokens, base_len);
        if sequence.table.is_empty() {
            self.store.find(&mut sequence, base_len);
            keep = sequence.built();
        }
        let has_tip = keep == sequence.built() && sequence.tip.is_some();
        if keep == base_len && wanted != Wanted::Nothing && !has_tip {
            // Drafting starts from the output of the last slot, which only its feature can give again.
            keep = base_len - 1;
        }
        self.store.cut(&mut sequence, keep);
        Ok(Begun { origin, propose, wanted, sequence })
    }

    /// Reads the features of all rounds that began, and makes jobs of those that have something to compute.
    fn read(&mut self, begun: Vec<Begun>, outbox: &mut Outbox) {
        let requests: Vec<Request<'_>> = begun.iter().map(Begun::request).collect();
        let rows = self.features.collect(&requests, self.head.backend());
        for (mut round, rows) in begun.into_iter().zip(rows) {
            let answer = match rows.and_then(|rows| self.prepare(&mut round, rows)) {
                Ok(Prepared::Rows(rows)) => {
                    let Begun { origin, propose, wanted, sequence } = round;
                    self.active.push(Job::new(origin, propose.base_len, wanted, sequence, rows));
                    continue;
                }
                Ok(Prepared::Answer(body)) => body,
                Err(error) => Body::Error(error),
            };
            outbox.push(&round.origin, answer);
            self.store.put(round.origin.key, round.sequence);
        }
    }

    /// The sequence, taken out; a new one where it is unknown, where features before `start` are gone for good, or
    /// where all that it holds lies beyond `base_len`.
    fn sequence(&mut self, key: SeqKey, start: u32, base_len: u32) -> Sequence {
        match self.store.take(key) {
            Some(sequence) if sequence.built() >= start && sequence.origin() < base_len => sequence,
            Some(useless) => {
                self.store.release(useless);
                Sequence::new(start)
            }
            None => Sequence::new(start),
        }
    }

    /// Makes room for the slots of a round whose features are `rows`.
    fn prepare(&mut self, round: &mut Begun, mut rows: Option<Aux>) -> Result<Prepared, ItemError> {
        let Begun { propose, wanted, sequence, .. } = round;
        let (base_len, built) = (propose.base_len, sequence.built());
        let end = built + rows.as_ref().map_or(0, |rows| rows.rows() as u32);
        if end > built && sequence.slot_tokens(built, end).is_none() {
            rows = None;
        }
        if rows.is_none() && built < base_len {
            return Ok(Prepared::Answer(Body::Need(Need { from: built })));
        }
        // A sequence that starts at `base_len` has no slot to draft from.
        if rows.is_none() && (*wanted == Wanted::Nothing || sequence.tip.is_none()) {
            let nothing = Proposal { base_len, ..Default::default() };
            return Ok(Prepared::Answer(Body::Proposal(nothing)));
        }
        let scratch = if end == base_len { wanted.scratch_slots() } else { 0 };
        self.reserve(sequence, sequence.slot(end) as usize + scratch)?;
        Ok(Prepared::Rows(rows))
    }

    fn reserve(&mut self, sequence: &mut Sequence, slots: usize) -> Result<(), ItemError> {
        let all = self.store.slots();
        if slots.next_multiple_of(self.store.page_rows()) > all {
            let what = format!("the round needs {slots} cache slots, cache_tokens allows {all}");
            return Err(item_error(Reason::KvCapacity, what));
        }
        let busy = |e| item_error(Reason::Busy, format!("draft cache: {e}"));
        if let Some(copy) = self.store.reserve(sequence, slots).map_err(busy)? {
            let internal = |e| item_error(Reason::Internal, format!("draft cache: {e}"));
            self.cache.copy(copy).map_err(internal)?;
        }
        Ok(())
    }
}

/// A round whose features are still to be read. It owns its sequence meanwhile.
struct Begun {
    origin: Origin,
    propose: Propose,
    wanted: Wanted,
    sequence: Sequence,
}

impl Begun {
    fn request(&self) -> Request<'_> {
        let Propose { features, base_len, .. } = &self.propose;
        Request { refs: features, from: self.sequence.built(), end: *base_len }
    }
}

enum Prepared {
    Rows(Option<Aux>),
    Answer(Body),
}
