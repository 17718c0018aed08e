//! Between the gateway and the draft.

use std::pin::Pin;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use eyrie_wire::v1::draft_client::DraftClient;
use eyrie_wire::v1::draft_out::Body;
use eyrie_wire::v1::draft_server::{Draft, DraftServer};
use eyrie_wire::v1::{
    DescribeDraftRequest, DraftCard, DraftFrame, DraftOut, DraftReply, DrainReply, DrainRequest, Proposal,
};
use eyrie_wire::{MAX_MESSAGE, Reason, connect, refuse};
use tokio_stream::{Stream, StreamExt};
use tonic::service::Routes;
use tonic::transport::Channel;
use tonic::{Request, Response, Status, Streaming};

use super::{Deed, Tasks, cut, padding};

/// What is done to every frame of the streams between gateway and draft.
#[derive(Debug, Clone, Copy)]
pub enum DraftFault {
    /// Nothing.
    None,
    /// Proposed tokens are replaced.
    Tokens(fn(u32) -> u32),
    /// Proposals are for the next base_len.
    WrongBase,
    /// Replies are for the next round.
    WrongRound,
    /// Replies come this much later.
    Slow(Duration),
    /// Replies are lost.
    Swallow,
    /// Replies come twice.
    Twice,
    /// A reply comes when the next one does.
    Late,
    /// Two replies come in the wrong order.
    Swapped,
    /// Questions reach the draft twice.
    AskedTwice,
    /// The stream ends at the next reply.
    Break,
    /// The draft says at the next reply that it is attached to another boot of the target.
    Stale,
    /// The next reply carries this many bytes more, for a sequence that nobody has.
    Padded(usize),
}

/// Stands in for the draft.
#[derive(Debug, Clone)]
pub struct DraftProxy(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    to: String,
    fault: Mutex<DraftFault>,
    injected: AtomicU32,
    streams: AtomicU32,
    tasks: Tasks,
}

impl DraftProxy {
    /// Listens at `from` and passes on to the draft at `to`, which need not be there yet.
    pub async fn start(from: &str, to: &str) -> Self {
        let (to, fault) = (to.to_owned(), Mutex::new(DraftFault::None));
        let (injected, streams, tasks) = (AtomicU32::new(0), AtomicU32::new(0), Tasks::default());
        let proxy = Self(Arc::new(Shared { to, fault, injected, streams, tasks }));
        let server = DraftServer::new(proxy.clone()).max_decoding_message_size(MAX_MESSAGE);
        proxy.0.tasks.serve(from, Routes::new(server)).await;
        proxy
    }

    /// Does this to all frames from now on.
    pub fn set(&self, fault: DraftFault) {
        *self.0.fault.lock().expect("never poisoned") = fault;
    }

    /// How often a fault was done since this was last asked.
    pub fn injected(&self) -> u32 {
        self.0.injected.swap(0, Relaxed)
    }

    /// Rounds streams that were made.
    pub fn streams(&self) -> u32 {
        self.0.streams.load(Relaxed)
    }

    fn inject<M>(&self, deed: Deed<M>) -> Deed<M> {
        self.0.injected.fetch_add(1, Relaxed);
        deed
    }

    fn fault(&self) -> DraftFault {
        *self.0.fault.lock().expect("never poisoned")
    }

    async fn client(&self) -> Result<DraftClient<Channel>, Status> {
        let channel = connect(&self.0.to.parse()?).await?;
        Ok(DraftClient::new(channel).max_decoding_message_size(MAX_MESSAGE))
    }

    fn ask(&self, frame: DraftFrame) -> Deed<DraftFrame> {
        // A second hello would end the stream.
        match self.fault() {
            DraftFault::AskedTwice if frame.hello.is_none() => {
                self.inject(Deed::pass([frame.clone(), frame]))
            }
            _ => Deed::pass([frame]),
        }
    }

    fn reply(&self, mut reply: DraftReply, held: &mut Option<DraftReply>) -> Deed<DraftReply> {
        if reply.hello.is_some() {
            return Deed::pass([reply]);
        }
        let fault = self.fault();
        match fault {
            DraftFault::Tokens(_) | DraftFault::WrongBase => {
                let spoilt = proposals(&mut reply).map(|proposal| spoil(proposal, fault)).count();
                self.0.injected.fetch_add(spoilt as u32, Relaxed);
            }
            DraftFault::WrongRound => {
                reply.outs.iter_mut().for_each(|out| out.round += 1);
                return self.inject(Deed::pass([reply]));
            }
            DraftFault::Slow(after) => return self.inject(Deed { after, ..Deed::pass([reply]) }),
            DraftFault::Swallow => return self.inject(Deed::pass([])),
            DraftFault::Twice => return self.inject(Deed::pass([reply.clone(), reply])),
            DraftFault::Late => return self.inject(Deed::pass(held.replace(reply))),
            DraftFault::Swapped => {
                return match held.take() {
                    Some(first) => self.inject(Deed::pass([reply, first])),
                    None => {
                        *held = Some(reply);
                        Deed::pass([])
                    }
                };
            }
            DraftFault::Break | DraftFault::Stale => {
                self.set(DraftFault::None);
                let stale = || refuse(Reason::StaleEpoch, "said by the proxy");
                let status = if matches!(fault, DraftFault::Stale) { stale() } else { cut() };
                return self.inject(Deed { breaks: Some(status), ..Deed::pass([]) });
            }
            DraftFault::Padded(bytes) => {
                self.set(DraftFault::None);
                let body = Some(Body::Error(padding(bytes)));
                reply.outs.push(DraftOut { seq: u64::MAX, round: 0, body });
                return self.inject(Deed::pass([reply]));
            }
            DraftFault::None | DraftFault::AskedTwice => {}
        }
        Deed::pass(held.take().into_iter().chain([reply]))
    }
}

fn proposals(reply: &mut DraftReply) -> impl Iterator<Item = &mut Proposal> {
    reply.outs.iter_mut().filter_map(|out| match &mut out.body {
        Some(Body::Proposal(proposal)) => Some(proposal),
        _ => None,
    })
}

fn spoil(proposal: &mut Proposal, fault: DraftFault) {
    match fault {
        DraftFault::Tokens(other) => proposal.tokens.iter_mut().for_each(|token| *token = other(*token)),
        _ => proposal.base_len += 1,
    }
}

#[tonic::async_trait]
impl Draft for DraftProxy {
    type RoundsStream = Pin<Box<dyn Stream<Item = Result<DraftReply, Status>> + Send>>;

    async fn describe(&self, request: Request<DescribeDraftRequest>) -> Result<Response<DraftCard>, Status> {
        self.client().await?.describe(request).await
    }

    async fn rounds(
        &self,
        request: Request<Streaming<DraftFrame>>,
    ) -> Result<Response<Self::RoundsStream>, Status> {
        let (asking, replying) = (self.clone(), self.clone());
        self.0.streams.fetch_add(1, Relaxed);
        let frames = self.0.tasks.relay(request.into_inner(), move |frame| asking.ask(frame));
        let replies = self.client().await?.rounds(frames.map_while(Result::ok)).await?.into_inner();
        let mut held = None;
        let replies = self.0.tasks.relay(replies, move |reply| replying.reply(reply, &mut held));
        Ok(Response::new(Box::pin(replies)))
    }

    async fn round(&self, request: Request<DraftFrame>) -> Result<Response<DraftReply>, Status> {
        self.client().await?.round(request).await
    }

    async fn drain(&self, request: Request<DrainRequest>) -> Result<Response<DrainReply>, Status> {
        self.client().await?.drain(request).await
    }
}
