//! What the engine tells about itself, readable from any thread.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use eyrie_wire::v1::LoadReport;
use tokio::sync::watch;

/// Counters and levels; each is exact by itself, together they are as of about now.
#[derive(Debug)]
pub(crate) struct Gauges {
    active: watch::Sender<usize>,
    has_drafts: AtomicBool,
    running: AtomicU64,
    waiting: AtomicU64,
    kv_used: AtomicU64,
    preemptions: AtomicU64,
    cached_tokens: AtomicU64,
    prefix_lookups: AtomicU64,
    prefix_hits: AtomicU64,
    aux_bytes: AtomicU64,
    cached_aux_bytes: AtomicU64,
    aux_rows_let_go: AtomicU64,
    streams: AtomicU64,
    rows: AtomicU64,
    steps: AtomicU64,
}

impl Gauges {
    pub(crate) fn new() -> Self {
        Self {
            active: watch::Sender::new(0),
            has_drafts: AtomicBool::new(false),
            running: AtomicU64::new(0),
            waiting: AtomicU64::new(0),
            kv_used: AtomicU64::new(0),
            preemptions: AtomicU64::new(0),
            cached_tokens: AtomicU64::new(0),
            prefix_lookups: AtomicU64::new(0),
            prefix_hits: AtomicU64::new(0),
            aux_bytes: AtomicU64::new(0),
            cached_aux_bytes: AtomicU64::new(0),
            aux_rows_let_go: AtomicU64::new(0),
            streams: AtomicU64::new(0),
            rows: AtomicU64::new(0),
            steps: AtomicU64::new(0),
        }
    }

    /// Unfinished sequences that hold pages, and those that wait for some.
    pub(crate) fn set_sequences(&self, running: usize, waiting: usize) {
        self.running.store(running as u64, Relaxed);
        self.waiting.store(waiting as u64, Relaxed);
        let active = running + waiting;
        self.active.send_if_modified(|held| std::mem::replace(held, active) != active);
    }

    /// KV slots of the pages that sequences hold, and how often one lost its pages to others.
    pub(crate) fn set_kv(&self, kv_used: u64, preemptions: u64) {
        self.kv_used.store(kv_used, Relaxed);
        self.preemptions.store(preemptions, Relaxed);
    }

    /// Slots that only the prefix cache holds, and prompt tokens looked up and found there since boot.
    pub(crate) fn set_prefixes(&self, cached_tokens: u64, lookups: u64, hits: u64) {
        self.cached_tokens.store(cached_tokens, Relaxed);
        self.prefix_lookups.store(lookups, Relaxed);
        self.prefix_hits.store(hits, Relaxed);
    }

    /// Bytes of feature rows kept for sequences and for the prefix cache alone, and rows of sequences let go since boot
    /// because there was no room for more.
    pub(crate) fn set_features(&self, bytes: u64, cached: u64, rows_let_go: u64) {
        self.aux_bytes.store(bytes, Relaxed);
        self.cached_aux_bytes.store(cached, Relaxed);
        self.aux_rows_let_go.store(rows_let_go, Relaxed);
    }

    pub(crate) fn set_streams(&self, streams: usize) {
        self.streams.store(streams as u64, Relaxed);
    }

    /// Counts a step of `rows` rows.
    pub(crate) fn add_step(&self, rows: usize) {
        self.rows.fetch_add(rows as u64, Relaxed);
        self.steps.fetch_add(1, Relaxed);
    }

    /// Notes that a draft has taken a lease.
    pub(crate) fn draft_attached(&self) {
        self.has_drafts.store(true, Relaxed);
    }

    /// Whether a draft has taken a lease since boot.
    pub(crate) fn has_drafts(&self) -> bool {
        self.has_drafts.load(Relaxed)
    }

    /// Sequences that have not ended, as they change.
    pub(crate) fn active(&self) -> watch::Receiver<usize> {
        self.active.subscribe()
    }

    /// All of it as a report that lacks the limits and the leases.
    pub(crate) fn report(&self) -> LoadReport {
        let clamp = |value: &AtomicU64| u32::try_from(value.load(Relaxed)).unwrap_or(u32::MAX);
        LoadReport {
            running: clamp(&self.running),
            waiting: clamp(&self.waiting),
            kv_used: self.kv_used.load(Relaxed),
            preemptions: self.preemptions.load(Relaxed),
            rows: self.rows.load(Relaxed),
            steps: self.steps.load(Relaxed),
            streams: clamp(&self.streams),
            cached_tokens: self.cached_tokens.load(Relaxed),
            prefix_lookups: self.prefix_lookups.load(Relaxed),
            prefix_hits: self.prefix_hits.load(Relaxed),
            aux_bytes: self.aux_bytes.load(Relaxed),
            cached_aux_bytes: self.cached_aux_bytes.load(Relaxed),
            aux_rows_let_go: self.aux_rows_let_go.load(Relaxed),
            ..Default::default()
        }
    }
}
