//! A draft that knows the plain tokens, and tells them, or not, as its mood is. It reads the target's real ring and
//! checks that every reference it is handed leads to the rows of the position that it names.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use eyrie_region::{RingReader, SlotRef};
use eyrie_wire::v1::draft_item::Op;
use eyrie_wire::v1::draft_out::Body;
use eyrie_wire::v1::draft_server::{Draft, DraftServer};
use eyrie_wire::v1::{
    self, DraftCard, DraftFrame, DraftOut, DraftReply, FeatureRef, Hello, Need, Proposal, Propose,
    TargetLease, feature_ref::At,
};
use eyrie_wire::{PROTOCOL_VERSION, PeerChannel, Reason, in_process, item_error, refuse};
use tokio::sync::mpsc;
use tokio::time::sleep;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};

use crate::lm::{VOCAB, marks, state_of};
use crate::rng::Rng;

/// Longest proposal.
pub(crate) const MAX_DRAFT: u32 = 15;

/// How a draft is today.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mood {
    Fine,
    /// Answers well most of the time.
    Moody,
    /// Answers anything.
    Mad,
    /// Takes everything in and says nothing.
    Frozen,
}

/// The target boot that the draft is attached to.
#[derive(Debug)]
pub(crate) struct Attached {
    pub(crate) epoch: u64,
    pub(crate) fingerprint: String,
    pub(crate) ring: RingReader,
    pub(crate) lost: CancellationToken,
}

/// Epoch of the target, boot of the gateway, number there.
type Key = (u64, u64, u64);

#[derive(Debug, Default)]
struct Sequence {
    stream: u64,
    tokens: Vec<u32>,
    /// Features below this are gone for good.
    start: u32,
    /// Features held, from `start` on.
    have: u32,
}

struct State {
    rng: Rng,
    mood: Mood,
    /// By the target's name.
    attached: BTreeMap<String, Attached>,
    sequences: BTreeMap<Key, Sequence>,
    streams: u64,
    needs: u64,
    wrong: Vec<String>,
}

/// The draft's process; it may be restarted.
#[derive(Clone)]
pub(crate) struct OracleDraft {
    state: Arc<Mutex<State>>,
    /// Prompt and plain tokens of every request.
    book: Arc<Vec<Vec<u32>>>,
}

/// What becomes of an answer.
enum Delivery {
    Now(Body),
    After(Duration, Body),
    Twice(Body),
    Never,
}

impl OracleDraft {
    pub(crate) fn new(rng: Rng, mood: Mood, book: Arc<Vec<Vec<u32>>>) -> Self {
        let (sequences, wrong) = (BTreeMap::new(), Vec::new());
        let state = State { rng, mood, attached: BTreeMap::new(), sequences, streams: 0, needs: 0, wrong };
        Self { state: Arc::new(Mutex::new(state)), book }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    pub(crate) fn channel(&self) -> PeerChannel {
        in_process(DraftServer::new(self.clone()))
    }

    pub(crate) fn set_mood(&self, mood: Mood) {
        self.lock().mood = mood;
    }

    /// Another boot of a target, or none. What was built from the last one's rows is gone.
    pub(crate) fn attach(&self, target: &str, attached: Option<Attached>) {
        let mut state = self.lock();
        let last = match attached {
            Some(attached) => state.attached.insert(target.to_owned(), attached),
            None => state.attached.remove(target),
        };
        if let Some(last) = last {
            last.lost.cancel();
            state.sequences.retain(|&(epoch, ..), _| epoch != last.epoch);
        }
    }

    pub(crate) fn sequences(&self) -> usize {
        self.lock().sequences.len()
    }

    /// How often it lacked rows.
    pub(crate) fn needs(&self) -> u64 {
        self.lock().needs
    }

    /// What it saw that must not be.
    pub(crate) fn wrong(&self) -> Vec<String> {
        self.lock().wrong.clone()
    }

    fn admit(&self, hello: Option<Hello>) -> Result<(Hello, CancellationToken), Status> {
        let state = self.lock();
        let hello = hello.ok_or_else(|| refuse(Reason::InvalidArgument, "no hello"))?;
        let attached = state.attached.values().find(|attached| attached.epoch == hello.epoch);
        let attached = attached.ok_or_else(|| refuse(Reason::StaleEpoch, "hello.epoch is of no target"))?;
        let fingerprint = attached.fingerprint.clone();
        let hello = Hello { protocol_version: PROTOCOL_VERSION, fingerprint, ..hello };
        Ok((hello, attached.lost.clone()))
    }

    async fn converse(
        self,
        mut frames: Streaming<DraftFrame>,
        (epoch, boot, stream): (u64, u64, u64),
        replies: mpsc::Sender<Result<DraftReply, Status>>,
        lost: CancellationToken,
    ) {
        loop {
            let frame = tokio::select! {
                biased;
                () = lost.cancelled() => None,
                () = replies.closed() => None,
                frame = frames.message() => frame.ok().flatten(),
            };
            let Some(frame) = frame else { break };
            for item in frame.items {
                if let Some(out) = self.take((epoch, boot, item.seq), stream, item.op) {
                    self.deliver(out, &replies);
                }
            }
        }
        let ended = refuse(Reason::Unreachable, "the draft lost its lease");
        let _ = replies.try_send(Err(ended));
        self.lock().sequences.retain(|_, sequence| sequence.stream != stream);
    }

    /// Sends an answer the way the mood is.
    fn deliver(&self, out: DraftOut, replies: &mpsc::Sender<Result<DraftReply, Status>>) {
        let (seq, round) = (out.seq, out.round);
        let delivery = self.lock().spoil(out);
        let frame = |round, body| Ok(DraftReply { hello: None, outs: vec![DraftOut { seq, round, body }] });
        let round = delivery.0.unwrap_or(round);
        match delivery.1 {
            Delivery::Never => {}
            Delivery::Now(body) => drop(replies.try_send(frame(round, Some(body)))),
            Delivery::Twice(body) => {
                let _ = replies.try_send(frame(round, Some(body.clone())));
                let _ = replies.try_send(frame(round, Some(body)));
            }
            Delivery::After(late, body) => {
                let (replies, frame) = (replies.clone(), frame(round, Some(body)));
                tokio::spawn(async move {
                    sleep(late).await;
                    let _ = replies.try_send(frame);
                });
            }
        }
    }

    fn take(&self, key: Key, stream: u64, op: Option<Op>) -> Option<DraftOut> {
        let mut state = self.lock();
        let (epoch, _, seq) = key;
        match op {
            Some(Op::Close(_)) => {
                state.sequences.remove(&key);
                None
            }
            Some(Op::Propose(propose)) => {
                let mut sequence = state.sequences.remove(&key).unwrap_or_default();
                sequence.stream = stream;
                let body = state.answer(epoch, &mut sequence, &propose, &self.book);
                if matches!(body, Body::Need(_)) {
                    state.needs += 1;
                }
                state.sequences.insert(key, sequence);
                Some(DraftOut { seq, round: propose.round, body: Some(body) })
            }
            None => {
                let body = Body::Error(item_error(Reason::InvalidArgument, "no op"));
                Some(DraftOut { seq, round: 0, body: Some(body) })
            }
        }
    }
}

impl State {
    /// The contract's answer.
    fn answer(&mut self, epoch: u64, sequence: &mut Sequence, propose: &Propose, book: &[Vec<u32>]) -> Body {
        let Propose { base_len, token_from, tokens, features, start, .. } = propose;
        if *token_from as usize + tokens.len() != *base_len as usize + 1 {
            self.wrong.push(format!("tokens from {token_from} do not reach base_len {base_len}"));
        }
        if *token_from as usize > sequence.tokens.len() {
            return Body::Need(Need { from: sequence.tokens.len() as u32 });
        }
        sequence.tokens.truncate(*token_from as usize);
        sequence.tokens.extend_from_slice(tokens);
        if sequence.have < *start {
            sequence.start = *start;
            sequence.have = *start;
        }
        sequence.have = sequence.have.min(*base_len);
        let prefix = &sequence.tokens[..(*base_len as usize).min(sequence.tokens.len())];
        for part in features {
            if part.first <= sequence.have && self.reads(epoch, part, prefix) {
                sequence.have = sequence.have.max(part.first + part.rows);
            }
        }
        if sequence.have < *base_len {
            return Body::Need(Need { from: sequence.have });
        }
        if !book.iter().any(|plain| plain.starts_with(&sequence.tokens)) {
            self.wrong.push(format!("tokens are not those of plain decoding: {:?}", sequence.tokens));
        }
        Body::Proposal(self.proposal(&sequence.tokens, propose, book))
    }

    /// Whether the rows could be read; those that are not what `part` says are noted.
    fn reads(&mut self, epoch: u64, part: &FeatureRef, prefix: &[u32]) -> bool {
        let Some(At::Ring(slot)) = &part.at else { return false };
        let of_epoch = self.attached.values().find(|attached| attached.epoch == epoch);
        let Some(Attached { ring, .. }) = of_epoch else { return false };
        let mut rows = Vec::new();
        let published = SlotRef { slot: slot.slot, generation: slot.generation, rows: part.rows };
        if ring.read_into(published, &mut rows).is_err() {
            return false;
        }
        let width = ring.geometry().row_width as usize;
        for (row, position) in rows.chunks(width).zip(part.first..) {
            let Some(tokens) = prefix.get(..=position as usize) else {
                self.wrong.push(format!("a feature of position {position} beyond the base"));
                continue;
            };
            if !row.starts_with(&marks(position, state_of(tokens))) {
                self.wrong.push(format!("the feature row of position {position} is another one's"));
            }
        }
        true
    }

    fn proposal(&mut self, tokens: &[u32], propose: &Propose, book: &[Vec<u32>]) -> Proposal {
        let plain = book.iter().find(|plain| plain.starts_with(tokens));
        let mut right = plain.map_or(&[][..], |plain| &plain[tokens.len()..]).iter().copied();
        let mut next = |rng: &mut Rng| right.next().unwrap_or_else(|| rng.within(0..=VOCAB - 1));
        let mut proposal = Proposal { base_len: propose.base_len, ..Default::default() };
        match propose.tree {
            None => proposal.tokens = (0..propose.k).map(|_| next(&mut self.rng)).collect(),
            Some(shape) => {
                // A right child and a wrong one a level.
                let mut parent = 0;
                while proposal.tokens.len() + 2 < shape.nodes as usize {
                    let token = next(&mut self.rng);
                    proposal.tokens.extend([(token + 1) % VOCAB, token]);
                    proposal.parents.extend([parent, parent]);
                    parent = proposal.tokens.len() as u32;
                }
            }
        }
        proposal
    }

    /// Changes an answer, its round or its time.
    fn spoil(&mut self, out: DraftOut) -> (Option<u32>, Delivery) {
        let Some(body) = out.body else { return (None, Delivery::Never) };
        let is_spoilt = match self.mood {
            Mood::Fine => false,
            Mood::Moody => self.rng.chance(200),
            Mood::Mad => self.rng.chance(800),
            Mood::Frozen => return (None, Delivery::Never),
        };
        if !is_spoilt {
            return (None, Delivery::Now(body));
        }
        match self.rng.within(0..=5) {
            0 => (None, Delivery::After(self.rng.millis(1..=3000), body)),
            1 => (None, Delivery::Twice(body)),
            2 => (Some(out.round.wrapping_add(self.rng.within(0..=4)).wrapping_sub(2)), Delivery::Now(body)),
            3 => (None, Delivery::Now(Body::Need(Need { from: self.rng.within(0..=60) }))),
            4 => (None, Delivery::Now(Body::Error(item_error(Reason::Busy, "no room today")))),
            _ => (None, Delivery::Now(self.garble(body))),
        }
    }

    fn garble(&mut self, body: Body) -> Body {
        let Body::Proposal(mut proposal) = body else { return body };
        match self.rng.within(0..=5) {
            0 => proposal.base_len = proposal.base_len.wrapping_add(self.rng.within(0..=4)).wrapping_sub(2),
            1 => {
                let beyond = VOCAB + self.rng.within(0..=9);
                proposal.tokens.iter_mut().take(1).for_each(|token| *token = beyond);
            }
            2 => proposal.parents = proposal.tokens.iter().map(|_| self.rng.within(0..=3)).collect(),
            3 => proposal.tokens.extend((0..self.rng.within(1..=70)).map(|n| n % VOCAB)),
            4 => proposal.tokens.truncate(self.rng.within(0..=1) as usize),
            _ => {
                let wrong = self.rng.within(0..=VOCAB - 1);
                if let Some(token) = proposal.tokens.last_mut() {
                    *token = wrong;
                }
            }
        }
        Body::Proposal(proposal)
    }
}

#[tonic::async_trait]
impl Draft for OracleDraft {
    type RoundsStream = ReceiverStream<Result<DraftReply, Status>>;

    async fn describe(&self, _: Request<v1::DescribeDraftRequest>) -> Result<Response<DraftCard>, Status> {
        let state = self.lock();
        let lease = |(name, attached): (&String, &Attached)| TargetLease {
            address: name.clone(),
            attached: true,
            epoch: attached.epoch,
            fingerprint: attached.fingerprint.clone(),
            ..Default::default()
        };
        Ok(Response::new(DraftCard {
            protocol_version: PROTOCOL_VERSION,
            name: "oracle".to_owned(),
            max_draft_tokens: MAX_DRAFT,
            targets: state.attached.iter().map(lease).collect(),
            ..Default::default()
        }))
    }

    async fn rounds(
        &self,
        request: Request<Streaming<DraftFrame>>,
    ) -> Result<Response<Self::RoundsStream>, Status> {
        let mut frames = request.into_inner();
        let first = frames.message().await?.unwrap_or_default();
        let (hello, lost) = self.admit(first.hello)?;
        let (replies, receiver) = mpsc::channel(256);
        let (epoch, boot) = (hello.epoch, hello.boot_id);
        let _ = replies.try_send(Ok(DraftReply { hello: Some(hello), outs: Vec::new() }));
        let stream = {
            let mut state = self.lock();
            state.streams += 1;
            state.streams
        };
        tokio::spawn(self.clone().converse(frames, (epoch, boot, stream), replies, lost));
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    async fn round(&self, _: Request<DraftFrame>) -> Result<Response<DraftReply>, Status> {
        Err(refuse(Reason::Unsupported, "not in the mesh"))
    }

    async fn drain(&self, _: Request<v1::DrainRequest>) -> Result<Response<v1::DrainReply>, Status> {
        Err(refuse(Reason::Unsupported, "not in the mesh"))
    }
}
