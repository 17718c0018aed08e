use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use eyrie_service::Drain;
use eyrie_speculation::{Finish, Proposal, StopRules, verify};
use eyrie_wire::v1::target_item::Op;
use eyrie_wire::v1::target_out::Body;
use eyrie_wire::v1::target_server::{Target, TargetServer};
use eyrie_wire::v1::{feature_ref::At, *};
use eyrie_wire::{Address, PROTOCOL_VERSION, Reason, item_error, refuse};
use parking_lot::Mutex;
use tokio::sync::{Semaphore, mpsc, oneshot, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::service::Routes;
use tonic::{Request, Response, Status, Streaming};

use super::{CONTEXT, Events, VOCAB, demo_file, next_token, serve};

const CHUNK: u32 = 8;

/// What the target was asked.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Seen {
    Stream { boot_id: u64 },
    Open { seq: u64, tokens: usize, generated: u32, features: bool },
    Verify { seq: u64, round: u32, drafted: usize, steps: u32 },
    Step { seq: u64 },
    Fetch { seq: u64, from: u32 },
    Close { seq: u64 },
    Load,
}

#[derive(Debug)]
struct Inner {
    epoch: u64,
    events: Events<Seen>,
    /// One permit for every step; plenty unless a test takes them away.
    gate: Semaphore,
    kick: watch::Sender<u32>,
    /// The engine is stuck: streams open, and nothing else happens.
    wedged: watch::Sender<bool>,
    /// What Load tells, and by how much it grows from call to call.
    steps: AtomicU64,
    pace: AtomicU64,
    /// The next Opens are refused with these.
    refuse_open: Mutex<VecDeque<(Reason, &'static str)>>,
    refuse_fetch: Mutex<Option<Reason>>,
    /// Sequences that wait for pages, as Load tells.
    waiting: AtomicU32,
    /// Break the protocol in this round.
    lie_in_round: AtomicU32,
    cached: AtomicU32,
    fingerprint: Mutex<String>,
    /// The stream of each boot id, which a newer one ends.
    streams: Mutex<HashMap<u64, oneshot::Sender<()>>>,
}

/// A running fake target.
pub(crate) struct FakeTarget {
    inner: Arc<Inner>,
    drain: Drain,
}

impl FakeTarget {
    pub(crate) async fn start(address: &Address, epoch: u64) -> Self {
        let inner = Arc::new(Inner {
            epoch,
            events: Events::default(),
            gate: Semaphore::new(1 << 20),
            kick: watch::channel(0).0,
            wedged: watch::channel(false).0,
            steps: AtomicU64::new(0),
            pace: AtomicU64::new(0),
            refuse_open: Mutex::default(),
            refuse_fetch: Mutex::default(),
            waiting: AtomicU32::new(0),
            lie_in_round: AtomicU32::new(u32::MAX),
            cached: AtomicU32::new(0),
            fingerprint: Mutex::new("f00d".to_owned()),
            streams: Mutex::default(),
        });
        let service = TargetServer::new(Service(Arc::clone(&inner)));
        let drain = serve(address, Routes::new(service)).await;
        Self { inner, drain }
    }

    pub(crate) fn events(&self) -> &Events<Seen> {
        &self.inner.events
    }

    pub(crate) fn break_streams(&self) {
        self.inner.kick.send_modify(|n| *n += 1);
    }

    /// From now on every step needs a permit of [`FakeTarget::allow`].
    pub(crate) fn hold(&self) {
        self.inner.gate.forget_permits(usize::MAX >> 4);
    }

    pub(crate) fn allow(&self, steps: usize) {
        self.inner.gate.add_permits(steps);
    }

    /// Whether the engine is stuck, while the transport and the unary calls still answer.
    pub(crate) fn wedge(&self, wedged: bool) {
        self.inner.wedged.send_replace(wedged);
    }

    /// From now on the target says that it computes something, though nobody hears of it.
    pub(crate) fn compute_for_others(&self) {
        self.inner.pace.store(1, Ordering::SeqCst);
    }

    /// One more Open is refused.
    pub(crate) fn refuse_open(&self, reason: Reason, message: &'static str) {
        self.inner.refuse_open.lock().push_back((reason, message));
    }

    /// From now on the target has no rows for drafts.
    pub(crate) fn refuse_fetch(&self, reason: Reason) {
        *self.inner.refuse_fetch.lock() = Some(reason);
    }

    /// From now on the target says that one sequence waits for pages.
    pub(crate) fn queue(&self) {
        self.inner.waiting.store(1, Ordering::SeqCst);
    }

    /// From now on a prefix cache holds the first `rows` positions of every prompt, and they are not published.
    pub(crate) fn cache(&self, rows: u32) {
        self.inner.cached.store(rows, Ordering::SeqCst);
    }

    pub(crate) fn lie_in_round(&self, round: u32) {
        self.inner.lie_in_round.store(round, Ordering::SeqCst);
    }

    pub(crate) fn set_fingerprint(&self, fingerprint: &str) {
        *self.inner.fingerprint.lock() = fingerprint.to_owned();
    }

    pub(crate) async fn stop(self) {
        self.break_streams();
        self.drain.stop();
        assert!(self.drain.join(super::PATIENCE).await);
    }
}

impl Drop for FakeTarget {
    fn drop(&mut self) {
        self.drain.stop();
    }
}

struct Service(Arc<Inner>);

struct Sequence {
    tokens: Vec<u32>,
    kv_len: u32,
    round: u32,
    generated: u32,
    seed: u64,
    rules: StopRules,
    features: bool,
}

/// One step that waits for the gate.
enum Work {
    Prefill(u64),
    Verify { seq: u64, proposal: Proposal },
    Plain { seq: u64, left: u32 },
}

#[derive(Default)]
struct Engine {
    sequences: HashMap<u64, Sequence>,
    work: VecDeque<Work>,
}

fn rows(first: u32, end: u32) -> Vec<FeatureRef> {
    let at = Some(At::Ring(RingSlot { slot: first, generation: 1 }));
    let mut refs = Vec::new();
    let mut from = first;
    while from < end {
        let to = (from + CHUNK).min(end);
        refs.push(FeatureRef { first: from, rows: to - from, at: at.clone() });
        from = to;
    }
    refs
}

impl Engine {
    fn take(&mut self, item: TargetItem, inner: &Inner) -> Option<Body> {
        let seq = item.seq;
        match item.op.unwrap() {
            Op::Open(open) => {
                let Open { tokens, generated, sampling, limits, features, priority: _ } = open;
                inner.events.push(Seen::Open { seq, tokens: tokens.len(), generated, features });
                if let Some((reason, message)) = inner.refuse_open.lock().pop_front() {
                    return Some(Body::Error(item_error(reason, message)));
                }
                let limits = limits.unwrap();
                let rules = StopRules::max_tokens(limits.max_tokens).stop_ids(limits.stop_ids);
                let seed = sampling.unwrap().seed;
                let sequence = Sequence { tokens, kv_len: 0, round: 0, generated, seed, rules, features };
                assert!(self.sequences.insert(seq, sequence).is_none(), "{seq} opened twice");
                self.work.push_back(Work::Prefill(seq));
                None
            }
            Op::Verify(v) => {
                let (drafted, steps) = (v.tokens.len(), v.steps);
                inner.events.push(Seen::Verify { seq, round: v.round, drafted, steps });
                let Some(sequence) = self.sequences.get(&seq) else {
                    return Some(Body::Error(item_error(Reason::UnknownSeq, format!("{seq} is not open"))));
                };
                assert_eq!(v.base_len, sequence.kv_len);
                assert_eq!(v.round, sequence.round + 1);
                assert_eq!(Some(&v.root), sequence.tokens.last());
                let parents: Vec<u16> = v.parents.iter().map(|&p| p as u16).collect();
                let proposal = match parents.is_empty() {
                    true => Proposal::chain(v.tokens).unwrap(),
                    false => Proposal::try_new(v.tokens, parents).unwrap(),
                };
                self.work.push_back(match proposal.is_empty() {
                    true => Work::Plain { seq, left: steps.max(1) },
                    false => Work::Verify { seq, proposal },
                });
                None
            }
            Op::FetchFeatures(FetchFeatures { from }) => {
                inner.events.push(Seen::Fetch { seq, from });
                if let Some(reason) = *inner.refuse_fetch.lock() {
                    return Some(Body::Error(item_error(reason, "no rows")));
                }
                let kv_len = self.sequences.get(&seq)?.kv_len;
                let refs = rows(from, kv_len);
                Some(Body::Features(Features { refs, first_held: from, fetched: true }))
            }
            Op::Close(_) => {
                inner.events.push(Seen::Close { seq });
                self.sequences.remove(&seq);
                self.work.retain(|w| w.seq() != seq);
                Some(Body::Closed(Closed {}))
            }
            Op::Revoke(_) => None,
        }
    }

    fn step(&mut self, inner: &Inner) -> Vec<TargetOut> {
        let Some(work) = self.work.pop_front() else { return Vec::new() };
        let seq = work.seq();
        inner.events.push(Seen::Step { seq });
        let Some(s) = self.sequences.get_mut(&seq) else { return Vec::new() };
        let mut bodies = Vec::new();
        match work {
            Work::Prefill(_) => {
                s.kv_len = s.tokens.len() as u32;
                let cached = inner.cached.load(Ordering::SeqCst).min(s.kv_len - 1);
                if s.features {
                    for chunk in rows(cached, s.kv_len) {
                        bodies.push(Body::Features(Features { refs: vec![chunk], ..Default::default() }));
                    }
                }
                let first = next_token(&s.tokens, s.seed);
                let committed = Committed { cached, ..s.commit(&[], vec![first], true, 0) };
                bodies.push(Body::Committed(committed));
            }
            Work::Verify { proposal, .. } => bodies.push(Body::Committed(s.verify(&proposal, true))),
            Work::Plain { left, .. } => {
                let committed = s.verify(&Proposal::empty(), left == 1);
                if left > 1 && committed.finish() == FinishReason::Unspecified {
                    self.work.push_front(Work::Plain { seq, left: left - 1 });
                }
                bodies.push(Body::Committed(committed));
            }
        }
        for body in &mut bodies {
            if let Body::Committed(c) = body
                && c.round == inner.lie_in_round.load(Ordering::SeqCst)
            {
                c.kv_len += 1;
            }
        }
        bodies.into_iter().map(|body| TargetOut { seq, body: Some(body) }).collect()
    }
}

impl Work {
    fn seq(&self) -> u64 {
        match self {
            Self::Prefill(seq) | Self::Verify { seq, .. } | Self::Plain { seq, .. } => *seq,
        }
    }
}

impl Sequence {
    fn verify(&mut self, proposal: &Proposal, last: bool) -> Committed {
        let (tokens, seed) = (self.tokens.clone(), self.seed);
        let verdict = verify(proposal, self.kv_len, |node, _| {
            let mut prefix = tokens.clone();
            prefix.extend(proposal.ancestors(node).into_iter().filter_map(|n| proposal.token(n)));
            Ok::<_, ()>(next_token(&prefix, seed))
        })
        .unwrap();
        let path: Vec<u32> = verdict.path.iter().map(|&n| n as u32).collect();
        self.round += 1;
        self.commit(&path, verdict.emitted, last, self.round)
    }

    fn commit(&mut self, path: &[u32], mut tokens: Vec<u32>, last: bool, round: u32) -> Committed {
        let base = self.kv_len;
        if round > 0 {
            self.kv_len += 1 + path.len() as u32;
        }
        let admitted = self.rules.admit(self.generated, &tokens);
        tokens.truncate(admitted.keep);
        self.generated += tokens.len() as u32;
        self.tokens.extend_from_slice(&tokens);
        let finish = match admitted.finish {
            None => FinishReason::Unspecified,
            Some(Finish::Length) => FinishReason::Length,
            Some(Finish::Stop { .. }) => FinishReason::Stop,
        };
        let features = if self.features { rows(base, self.kv_len) } else { Vec::new() };
        Committed {
            round,
            kv_len: self.kv_len,
            tokens,
            path: path.to_vec(),
            finish: finish as i32,
            features,
            last: last || finish != FinishReason::Unspecified,
            cached: 0,
        }
    }
}

#[tonic::async_trait]
impl Target for Service {
    type RoundsStream = ReceiverStream<Result<TargetReply, Status>>;
    type AttachStream = ReceiverStream<Result<LeaseGrant, Status>>;
    type ReadSharedStream = ReceiverStream<Result<FileChunk, Status>>;
    type ReadFileStream = ReceiverStream<Result<FileChunk, Status>>;

    async fn describe(&self, _: Request<DescribeRequest>) -> Result<Response<ModelCard>, Status> {
        let tokenizer = std::fs::read(demo_file("tokenizer.json")).unwrap();
        let file = FileInfo {
            name: "tokenizer.json".into(),
            bytes: tokenizer.len() as u64,
            blake3: blake3::hash(&tokenizer).to_hex().to_string(),
        };
        Ok(Response::new(ModelCard {
            protocol_version: PROTOCOL_VERSION,
            state: LoadState::Serving as i32,
            epoch: self.0.epoch,
            name: "arithmetic".into(),
            fingerprint: self.0.fingerprint.lock().clone(),
            vocab_size: VOCAB,
            context_length: CONTEXT,
            max_verify_rows: 64,
            aux_layers: vec![2, 5, 9],
            files: vec![file],
            ..Default::default()
        }))
    }

    async fn rounds(
        &self,
        request: Request<Streaming<TargetFrame>>,
    ) -> Result<Response<Self::RoundsStream>, Status> {
        let (replies, stream) = mpsc::channel(64);
        let inner = Arc::clone(&self.0);
        let mut frames = request.into_inner();
        let mut kicked = inner.kick.subscribe();
        kicked.mark_unchanged();
        Drain::new().spawn(async move {
            let mut engine = Engine::default();
            let mut wedged = inner.wedged.subscribe();
            let mut greeted = false;
            let (current, mut replaced) = oneshot::channel();
            let mut current = Some(current);
            loop {
                let stuck = greeted && *wedged.borrow_and_update();
                let outs = tokio::select! {
                    biased;
                    _ = kicked.changed() => break,
                    _ = &mut replaced => break,
                    _ = wedged.changed() => continue,
                    frame = frames.message(), if !stuck => {
                        let Ok(Some(frame)) = frame else { break };
                        if let Some(hello) = frame.hello {
                            greeted = true;
                            inner.events.push(Seen::Stream { boot_id: hello.boot_id });
                            if let Some(current) = current.take() {
                                inner.streams.lock().insert(hello.boot_id, current);
                            }
                            let hello = Some(Hello { epoch: inner.epoch, ..hello });
                            let _ = replies.send(Ok(TargetReply { hello, outs: vec![] })).await;
                        }
                        let answer = |item: TargetItem| {
                            let seq = item.seq;
                            engine.take(item, &inner).map(|body| TargetOut { seq, body: Some(body) })
                        };
                        frame.items.into_iter().filter_map(answer).collect()
                    }
                    permit = inner.gate.acquire(), if !stuck && !engine.work.is_empty() => {
                        permit.unwrap().forget();
                        engine.step(&inner)
                    }
                };
                if !outs.is_empty() && replies.send(Ok(TargetReply { hello: None, outs })).await.is_err() {
                    break;
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    async fn read_file(
        &self,
        request: Request<ReadFileRequest>,
    ) -> Result<Response<Self::ReadFileStream>, Status> {
        let data = std::fs::read(demo_file(&request.into_inner().name)).unwrap();
        let (chunks, stream) = mpsc::channel(64);
        for piece in data.chunks(1 << 18) {
            chunks.send(Ok(FileChunk { data: piece.to_vec().into() })).await.unwrap();
        }
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    async fn attach(
        &self,
        _: Request<Streaming<LeaseFrame>>,
    ) -> Result<Response<Self::AttachStream>, Status> {
        Err(refuse(Reason::Unsupported, "no leases here"))
    }

    async fn round(&self, _: Request<TargetFrame>) -> Result<Response<TargetReply>, Status> {
        Err(refuse(Reason::Unsupported, "streams only"))
    }

    async fn load(&self, _: Request<LoadRequest>) -> Result<Response<LoadReport>, Status> {
        let pace = self.0.pace.load(Ordering::SeqCst);
        let steps = self.0.steps.fetch_add(pace, Ordering::SeqCst);
        self.0.events.push(Seen::Load);
        let waiting = self.0.waiting.load(Ordering::SeqCst);
        Ok(Response::new(LoadReport { steps, waiting, ..Default::default() }))
    }

    async fn drain(&self, _: Request<DrainRequest>) -> Result<Response<DrainReply>, Status> {
        Ok(Response::new(DrainReply::default()))
    }

    async fn read_shared(
        &self,
        _: Request<ReadSharedRequest>,
    ) -> Result<Response<Self::ReadSharedStream>, Status> {
        Err(refuse(Reason::Unsupported, "no region here"))
    }

    async fn read_features(
        &self,
        _: Request<ReadFeaturesRequest>,
    ) -> Result<Response<ReadFeaturesReply>, Status> {
        Err(refuse(Reason::Unsupported, "no ring here"))
    }
}
