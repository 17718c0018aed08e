use std::collections::HashMap;
use std::sync::Arc;

use eyrie_service::Drain;
use eyrie_wire::v1::draft_item::Op;
use eyrie_wire::v1::draft_out::Body;
use eyrie_wire::v1::draft_server::{Draft, DraftServer};
use eyrie_wire::v1::*;
use eyrie_wire::{Address, Reason, item_error, refuse};
use parking_lot::Mutex;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::service::Routes;
use tonic::{Request, Response, Status, Streaming};

use super::{Events, next_token, serve};

/// Which of the proposed tokens are right.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Rule {
    Right,
    /// The first `n` are right.
    First(u32),
    /// Right in every other position of the sequence.
    Sometimes,
}

/// How the draft behaves.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Mood {
    Fine,
    /// Takes everything in and says nothing until it thaws.
    Frozen,
    /// More tokens than asked for.
    TooMany,
    /// Ids beyond the vocabulary.
    BadIds,
    /// A tree where a chain was asked for.
    BadParents,
    /// The base of another round.
    WrongBase,
    /// Refuses every proposal.
    Refusing,
    /// Acts as if no Propose had ever reached it.
    Unasked,
}

struct Inner {
    epoch: u64,
    seed: u64,
    rule: Rule,
    mood: watch::Sender<Mood>,
    kick: watch::Sender<u32>,
    events: Events<Body>,
    proposes: Events<Propose>,
    closes: Events<u64>,
    streams: Events<u64>,
    fingerprint: Mutex<String>,
    limit: u32,
}

/// A running fake draft; it knows the same arithmetic as the target.
pub(crate) struct FakeDraft {
    inner: Arc<Inner>,
    drain: Drain,
}

impl FakeDraft {
    pub(crate) async fn start(address: &Address, epoch: u64, rule: Rule) -> Self {
        Self::start_limited(address, epoch, rule, 16).await
    }

    /// One that proposes at most `limit` tokens.
    pub(crate) async fn start_limited(address: &Address, epoch: u64, rule: Rule, limit: u32) -> Self {
        let inner = Arc::new(Inner {
            epoch,
            limit,
            seed: 5,
            rule,
            mood: watch::channel(Mood::Fine).0,
            kick: watch::channel(0).0,
            events: Events::default(),
            proposes: Events::default(),
            closes: Events::default(),
            streams: Events::default(),
            fingerprint: Mutex::new("f00d".to_owned()),
        });
        let service = DraftServer::new(Service(Arc::clone(&inner)));
        let drain = serve(address, Routes::new(service)).await;
        Self { inner, drain }
    }

    /// Replies, in order.
    pub(crate) fn replies(&self) -> &Events<Body> {
        &self.inner.events
    }

    pub(crate) fn proposes(&self) -> &Events<Propose> {
        &self.inner.proposes
    }

    pub(crate) fn closes(&self) -> &Events<u64> {
        &self.inner.closes
    }

    /// Boot ids of the streams that were opened.
    pub(crate) fn streams(&self) -> &Events<u64> {
        &self.inner.streams
    }

    pub(crate) fn set(&self, mood: Mood) {
        self.inner.mood.send_replace(mood);
    }

    /// Ends every stream; what the draft had is gone.
    pub(crate) fn break_streams(&self) {
        self.inner.kick.send_modify(|n| *n += 1);
    }

    pub(crate) async fn stop(self) {
        self.break_streams();
        self.drain.stop();
        assert!(self.drain.join(super::PATIENCE).await);
    }
}

impl Drop for FakeDraft {
    fn drop(&mut self) {
        self.drain.stop();
    }
}

struct Service(Arc<Inner>);

#[derive(Default)]
struct Cache {
    tokens: Vec<u32>,
    have: u32,
}

impl Cache {
    /// The draft's duty as the contract has it; the reply's body.
    fn take(&mut self, propose: &Propose, inner: &Inner) -> Body {
        let Propose { base_len, token_from, tokens, features, k, start, .. } = propose;
        assert_eq!(token_from + tokens.len() as u32, base_len + 1, "tokens reach to base_len");
        let known = self.tokens.len() as u32;
        if *token_from > known {
            return Body::Need(Need { from: known });
        }
        self.tokens.truncate(*token_from as usize);
        self.tokens.extend_from_slice(tokens);
        self.have = self.have.min(*base_len).max(*start);
        for part in features {
            if part.first <= self.have {
                self.have = self.have.max(part.first + part.rows);
            }
        }
        if self.have < *base_len {
            return Body::Need(Need { from: self.have });
        }
        let mut prefix = self.tokens.clone();
        let mut proposed = Vec::new();
        for i in 0..*k {
            let mut token = next_token(&prefix, inner.seed);
            let right = match inner.rule {
                Rule::Right => true,
                Rule::First(n) => i < n,
                Rule::Sometimes => !prefix.len().is_multiple_of(2),
            };
            if !right {
                token = 10 + (token + 1) % 900;
            }
            prefix.push(token);
            proposed.push(token);
        }
        Body::Proposal(Proposal { base_len: *base_len, tokens: proposed, parents: vec![] })
    }
}

fn spoil(mood: Mood, body: Body) -> Body {
    match (mood, body) {
        (Mood::Refusing, _) => Body::Error(item_error(Reason::Unsupported, "not in the mood")),
        (Mood::TooMany, Body::Proposal(mut p)) => {
            p.tokens.push(11);
            Body::Proposal(p)
        }
        (Mood::BadIds, Body::Proposal(mut p)) => {
            p.tokens.fill(u32::MAX);
            Body::Proposal(p)
        }
        (Mood::BadParents, Body::Proposal(mut p)) => {
            p.parents = vec![9; p.tokens.len()];
            Body::Proposal(p)
        }
        (Mood::WrongBase, Body::Proposal(mut p)) => {
            p.base_len += 1;
            Body::Proposal(p)
        }
        (_, body) => body,
    }
}

#[tonic::async_trait]
impl Draft for Service {
    type RoundsStream = ReceiverStream<Result<DraftReply, Status>>;

    async fn describe(&self, _: Request<DescribeDraftRequest>) -> Result<Response<DraftCard>, Status> {
        let lease = TargetLease {
            attached: true,
            epoch: self.0.epoch,
            fingerprint: self.0.fingerprint.lock().clone(),
            mapped_bytes: 1 << 20,
            kind: "map".into(),
            ..Default::default()
        };
        Ok(Response::new(DraftCard {
            name: "echo".into(),
            max_draft_tokens: self.0.limit,
            targets: vec![lease],
            ..Default::default()
        }))
    }

    async fn rounds(
        &self,
        request: Request<Streaming<DraftFrame>>,
    ) -> Result<Response<Self::RoundsStream>, Status> {
        let (replies, stream) = mpsc::channel(64);
        let inner = Arc::clone(&self.0);
        let mut frames = request.into_inner();
        let mut kicked = inner.kick.subscribe();
        kicked.mark_unchanged();
        Drain::new().spawn(async move {
            let mut caches: HashMap<u64, Cache> = HashMap::new();
            let mut mood = inner.mood.subscribe();
            loop {
                let frame = tokio::select! {
                    _ = kicked.changed() => break,
                    frame = frames.message() => frame,
                };
                let Ok(Some(frame)) = frame else { break };
                if let Some(hello) = frame.hello.as_ref().filter(|hello| hello.epoch != inner.epoch) {
                    let line = format!("attached to epoch {:x}, given {:x}", inner.epoch, hello.epoch);
                    let _ = replies.send(Err(refuse(Reason::StaleEpoch, line))).await;
                    break;
                }
                let hello = frame.hello.map(|hello| {
                    inner.streams.push(hello.boot_id);
                    Hello { epoch: inner.epoch, ..hello }
                });
                let mut outs = Vec::new();
                for item in frame.items {
                    let Some(op) = item.op else {
                        let error = item_error(Reason::InvalidArgument, "asked nothing");
                        outs.push(DraftOut { seq: item.seq, round: 0, body: Some(Body::Error(error)) });
                        continue;
                    };
                    match op {
                        Op::Propose(propose) => {
                            inner.proposes.push(propose.clone());
                            if *mood.borrow() == Mood::Unasked {
                                continue;
                            }
                            let body = caches.entry(item.seq).or_default().take(&propose, &inner);
                            let body = spoil(*mood.borrow(), body);
                            outs.push(DraftOut { seq: item.seq, round: propose.round, body: Some(body) });
                        }
                        Op::Close(_) => {
                            caches.remove(&item.seq);
                            inner.closes.push(item.seq);
                        }
                    }
                }
                if hello.is_none() {
                    tokio::select! {
                        _ = kicked.changed() => break,
                        _ = mood.wait_for(|mood| *mood != Mood::Frozen) => {}
                    }
                }
                outs.iter().for_each(|out| inner.events.push(out.body.clone().unwrap()));
                let nothing = hello.is_none() && outs.is_empty();
                if !nothing && replies.send(Ok(DraftReply { hello, outs })).await.is_err() {
                    break;
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    async fn round(&self, _: Request<DraftFrame>) -> Result<Response<DraftReply>, Status> {
        Err(refuse(Reason::Unsupported, "streams only"))
    }

    async fn drain(&self, _: Request<DrainRequest>) -> Result<Response<DrainReply>, Status> {
        Ok(Response::new(DrainReply::default()))
    }
}
