//! Between the gateway and the target.

use std::pin::Pin;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use eyrie_wire::v1::target_client::TargetClient;
use eyrie_wire::v1::target_item::Op;
use eyrie_wire::v1::target_out::Body;
use eyrie_wire::v1::target_server::{Target, TargetServer};
use eyrie_wire::v1::*;
use eyrie_wire::{MAX_MESSAGE, connect};
use tokio::sync::watch;
use tokio_stream::{Stream, StreamExt};
use tonic::service::Routes;
use tonic::transport::Channel;
use tonic::{Request, Response, Status, Streaming};

use super::{Deed, Tasks, cut, padding};

/// What is done to the streams between gateway and target.
#[derive(Debug, Clone, Copy)]
pub enum TargetFault {
    /// Nothing.
    None,
    /// Every question reaches the target twice.
    AskedTwice,
    /// Each Verify reaches the target once more behind the one that follows it.
    AskedLate,
    /// Every reply comes twice.
    Twice,
    /// Each reply comes once more behind the one that follows it.
    Late,
    /// The stream ends once, in place of the answer to an Open.
    BreakAtOpen,
    /// The stream ends once, behind the reply that is this many away.
    BreakAfter(u32),
    /// Replies come this much later.
    Slow(Duration),
    /// The next reply carries this many bytes more, for a sequence that nobody has.
    Padded(usize),
}

/// What has passed since the proxy was started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Passed {
    /// Features messages of prompt chunks, from the target.
    pub chunks: u32,
    /// Committed messages, from the target.
    pub commits: u32,
    /// Close items, to the target.
    pub closes: u32,
}

/// Stands in for the target.
#[derive(Debug, Clone)]
pub struct TargetProxy(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    to: String,
    fault: Mutex<TargetFault>,
    injected: AtomicU32,
    streams: AtomicU32,
    passed: watch::Sender<Passed>,
    tasks: Tasks,
}

type Replies<M> = Pin<Box<dyn Stream<Item = Result<M, Status>> + Send>>;

impl TargetProxy {
    /// Listens at `from` and passes on to the target at `to`, which need not be there yet.
    pub async fn start(from: &str, to: &str) -> Self {
        let (to, fault) = (to.to_owned(), Mutex::new(TargetFault::None));
        let passed = watch::Sender::new(Passed::default());
        let (injected, streams, tasks) = (AtomicU32::new(0), AtomicU32::new(0), Tasks::default());
        let proxy = Self(Arc::new(Shared { to, fault, injected, streams, passed, tasks }));
        let server = TargetServer::new(proxy.clone()).max_decoding_message_size(MAX_MESSAGE);
        proxy.0.tasks.serve(from, Routes::new(server)).await;
        proxy
    }

    /// Does this to all frames from now on.
    pub fn set(&self, fault: TargetFault) {
        *self.0.fault.lock().expect("never poisoned") = fault;
    }

    fn fault(&self) -> TargetFault {
        *self.0.fault.lock().expect("never poisoned")
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

    /// Waits until what has passed is `enough`.
    pub async fn passed(&self, enough: impl FnMut(&Passed) -> bool) -> Passed {
        let mut passed = self.0.passed.subscribe();
        let waiting = tokio::time::timeout(crate::fleet::PATIENCE, passed.wait_for(enough)).await;
        *waiting.expect("it passes in time").expect("the proxy lives")
    }

    async fn client(&self) -> Result<TargetClient<Channel>, Status> {
        let channel = connect(&self.0.to.parse()?).await?;
        Ok(TargetClient::new(channel).max_decoding_message_size(MAX_MESSAGE))
    }

    fn ask(&self, frame: TargetFrame, before: &mut Vec<TargetItem>) -> Deed<TargetFrame> {
        let closes = frame.items.iter().filter(|item| matches!(item.op, Some(Op::Close(_)))).count();
        self.0.passed.send_modify(|passed| passed.closes += closes as u32);
        if frame.hello.is_some() {
            return Deed::pass([frame]);
        }
        let verifies = frame.items.iter().filter(|item| matches!(item.op, Some(Op::Verify(_)))).cloned();
        let before = std::mem::replace(before, verifies.collect());
        match self.fault() {
            TargetFault::AskedTwice => self.inject(Deed::pass([frame.clone(), frame])),
            TargetFault::AskedLate if !before.is_empty() => {
                self.inject(Deed::pass([frame, TargetFrame { hello: None, items: before }]))
            }
            _ => Deed::pass([frame]),
        }
    }

    fn count(&self, reply: &TargetReply) {
        self.0.passed.send_modify(|passed| {
            for out in &reply.outs {
                match &out.body {
                    Some(Body::Committed(_)) => passed.commits += 1,
                    Some(Body::Features(features)) if !features.fetched => passed.chunks += 1,
                    _ => {}
                }
            }
        });
    }

    fn reply(&self, mut reply: TargetReply, before: &mut Option<TargetReply>) -> Deed<TargetReply> {
        self.count(&reply);
        if reply.hello.is_some() {
            return Deed::pass([reply]);
        }
        let before = before.replace(reply.clone());
        match self.fault() {
            TargetFault::Twice => self.inject(Deed::pass([reply.clone(), reply])),
            TargetFault::Late if before.is_some() => {
                self.inject(Deed::pass([reply].into_iter().chain(before)))
            }
            TargetFault::BreakAtOpen if reply.outs.iter().any(opens) => {
                self.set(TargetFault::None);
                self.inject(Deed { breaks: Some(cut()), ..Deed::pass([]) })
            }
            TargetFault::BreakAfter(0) => {
                self.set(TargetFault::None);
                self.inject(Deed { breaks: Some(cut()), ..Deed::pass([reply]) })
            }
            TargetFault::BreakAfter(replies) => {
                self.set(TargetFault::BreakAfter(replies - 1));
                Deed::pass([reply])
            }
            TargetFault::Slow(after) => self.inject(Deed { after, ..Deed::pass([reply]) }),
            TargetFault::Padded(bytes) => {
                self.set(TargetFault::None);
                reply.outs.push(TargetOut { seq: u64::MAX, body: Some(Body::Error(padding(bytes))) });
                self.inject(Deed::pass([reply]))
            }
            _ => Deed::pass([reply]),
        }
    }
}

fn opens(out: &TargetOut) -> bool {
    matches!(&out.body, Some(Body::Committed(committed)) if committed.round == 0)
}

/// What only drafts and people ask for.
fn not_passed_on<T>() -> Result<Response<T>, Status> {
    Err(Status::unimplemented("the proxy passes on what gateways ask for"))
}

#[tonic::async_trait]
impl Target for TargetProxy {
    type AttachStream = Replies<LeaseGrant>;
    type RoundsStream = Replies<TargetReply>;
    type ReadFileStream = Streaming<FileChunk>;
    type ReadSharedStream = Replies<FileChunk>;

    async fn describe(&self, request: Request<DescribeRequest>) -> Result<Response<ModelCard>, Status> {
        self.client().await?.describe(request).await
    }

    async fn rounds(
        &self,
        request: Request<Streaming<TargetFrame>>,
    ) -> Result<Response<Self::RoundsStream>, Status> {
        let (asking, replying) = (self.clone(), self.clone());
        let (mut asked, mut replied) = (Vec::new(), None);
        self.0.streams.fetch_add(1, Relaxed);
        let frames = self.0.tasks.relay(request.into_inner(), move |frame| asking.ask(frame, &mut asked));
        let replies = self.client().await?.rounds(frames.map_while(Result::ok)).await?.into_inner();
        let replies = self.0.tasks.relay(replies, move |reply| replying.reply(reply, &mut replied));
        Ok(Response::new(Box::pin(replies)))
    }

    async fn load(&self, request: Request<LoadRequest>) -> Result<Response<LoadReport>, Status> {
        self.client().await?.load(request).await
    }

    async fn read_file(
        &self,
        request: Request<ReadFileRequest>,
    ) -> Result<Response<Self::ReadFileStream>, Status> {
        self.client().await?.read_file(request).await
    }

    async fn round(&self, _: Request<TargetFrame>) -> Result<Response<TargetReply>, Status> {
        not_passed_on()
    }

    async fn drain(&self, _: Request<DrainRequest>) -> Result<Response<DrainReply>, Status> {
        not_passed_on()
    }

    async fn attach(
        &self,
        _: Request<Streaming<LeaseFrame>>,
    ) -> Result<Response<Self::AttachStream>, Status> {
        not_passed_on()
    }

    async fn read_shared(
        &self,
        _: Request<ReadSharedRequest>,
    ) -> Result<Response<Self::ReadSharedStream>, Status> {
        not_passed_on()
    }

    async fn read_features(
        &self,
        _: Request<ReadFeaturesRequest>,
    ) -> Result<Response<ReadFeaturesReply>, Status> {
        not_passed_on()
    }
}
