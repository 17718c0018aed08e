//! The engine while it holds a lease: which work goes into the next step.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};

use eyrie_model::{Aux, DraftCache, Eagle3Head};
use eyrie_wire::v1::draft_out::Body;
use eyrie_wire::v1::{ItemError, Need, Proposal, Propose};
use eyrie_wire::{Reason, item_error};

use super::features::{FeatureSource, collect};
use super::growth::Wanted;
use super::job::{Job, Origin, Outbox};
use super::mailbox::StreamId;
use super::pace::Pace;
use super::request::Limits;
use super::sequence::{SeqKey, Sequence};
use super::step::Step;
use super::store::Store;
use super::{Attachment, EngineSizes};

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
    pub(super) fn work(&mut self, outbox: &mut Outbox) {
        self.admit(outbox);
        // Told before the answers go out: who has one sees its sequence counted.
        self.count();
        self.step(outbox);
        self.count();
    }

    fn step(&mut self, outbox: &mut Outbox) {
        let jobs = std::mem::take(&mut self.active);
        if jobs.is_empty() {
            return;
        }
        let Self { head, cache, store, pace, failures, .. } = self;
        self.active = Step { head, cache, store, pace, failures, outbox }.run(jobs);
    }

    /// Moves work from the queue into the step. A sequence has one round in a step, and what closes it or its
    /// stream waits for the rounds before.
    fn admit(&mut self, outbox: &mut Outbox) {
        let mut sequences: HashSet<SeqKey> = self.active.iter().map(|job| job.origin.key).collect();
        let mut streams: HashSet<StreamId> = self.active.iter().map(|job| job.origin.stream).collect();
        for work in std::mem::take(&mut self.queue) {
            match work {
                Work::Propose { origin, propose } => {
                    streams.insert(origin.stream);
                    if self.active.len() >= self.max_jobs || sequences.contains(&origin.key) {
                        sequences.insert(origin.key);
                        self.queue.push_back(Work::Propose { origin, propose });
                        continue;
                    }
                    match self.begin(&origin, propose) {
                        Ok(Begun::Job(job)) => {
                            sequences.insert(origin.key);
                            self.active.push(job);
                        }
                        Ok(Begun::Answer(body)) => outbox.push(&origin, body),
                        Err(error) => outbox.push(&origin, Body::Error(error)),
                    }
                }
                Work::CloseSeq(key) if sequences.contains(&key) => self.queue.push_back(work),
                Work::CloseSeq(key) => self.store.close(key),
                Work::CloseStream(stream) if streams.contains(&stream) => self.queue.push_back(work),
                Work::CloseStream(stream) => self.store.close_stream(stream),
            }
        }
    }

    fn begin(&mut self, origin: &Origin, propose: Propose) -> Result<Begun, ItemError> {
        let wanted = self.limits.check(&propose)?;
        let mut sequence = self.sequence(origin.key, propose.start, propose.base_len);
        sequence.owner = origin.stream;
        sequence.unary = origin.unary;
        let answer = self.prepare(&mut sequence, &propose, wanted);
        match answer {
            Ok(Prepared::Rows(rows)) => {
                let job = Job::new(origin.clone(), propose.base_len, wanted, sequence, rows);
                Ok(Begun::Job(job))
            }
            Ok(Prepared::Answer(body)) => {
                self.store.put(origin.key, sequence);
                Ok(Begun::Answer(body))
            }
            Err(error) => {
                self.store.put(origin.key, sequence);
                Err(error)
            }
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

    /// Takes in the tokens and reads the features.
    fn prepare(
        &mut self,
        sequence: &mut Sequence,
        propose: &Propose,
        wanted: Wanted,
    ) -> Result<Prepared, ItemError> {
        let base_len = propose.base_len;
        let mut keep = sequence.take_tokens(propose.token_from, &propose.tokens, base_len);
        if sequence.table.is_empty() {
            self.store.find(sequence, base_len);
            keep = sequence.built();
        }
        let has_tip = keep == sequence.built() && sequence.tip.is_some();
        if keep == base_len && wanted != Wanted::Nothing && !has_tip {
            // Drafting starts from the output of the last slot, which only its feature can give again.
            keep = base_len - 1;
        }
        self.store.cut(sequence, keep);
        let built = sequence.built();
        let mut rows = collect(&propose.features, built, base_len, &mut self.features, self.head.backend())?;
        let end = built + rows.as_ref().map_or(0, |rows| rows.rows() as u32);
        if end > built && sequence.slot_tokens(built, end).is_none() {
            rows = None;
        }
        if rows.is_none() && built < base_len {
            return Ok(Prepared::Answer(Body::Need(Need { from: built })));
        }
        // A sequence that starts at `base_len` has no slot to draft from.
        if rows.is_none() && (wanted == Wanted::Nothing || sequence.tip.is_none()) {
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

enum Begun {
    Job(Job),
    Answer(Body),
}

enum Prepared {
    Rows(Option<Aux>),
    Answer(Body),
}
