//! The client API: admission in front, the session behind, one stream for both kinds of reply.

use std::sync::Arc;

use eyrie_wire::v1::generate_request::Prompt;
use eyrie_wire::v1::generation_server::Generation;
use eyrie_wire::v1::{
    DetokenizeReply, DetokenizeRequest, GenerateReply, GenerateRequest, GetModelRequest, Model,
    TokenizeReply, TokenizeRequest,
};
use eyrie_wire::{MAX_VERIFY_ROWS, Reason, refuse};
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};
use tokio::time::{Instant, timeout_at};
use tonic::{Request, Response, Status};

use crate::catalog::Served;
use crate::deadline::Deadline;
use crate::gateway::{Gateway, random};
use crate::output::Output;
use crate::reply::Reply;
use crate::session::Session;
use crate::stats::add;
use crate::validate::{Admitted, Defaults, admit, check_ids};

/// Ids of one Detokenize at most: more than any context holds.
const MAX_DETOKENIZE: usize = 1 << 20;
/// Chunks that a client has not read yet; then its own sequence waits.
const UNREAD_CHUNKS: usize = 16;

/// The service.
#[derive(Debug)]
pub(crate) struct Api {
    gateway: Arc<Gateway>,
}

impl Api {
    pub(crate) fn new(gateway: Arc<Gateway>) -> Self {
        Self { gateway }
    }

    /// What the targets serve now, waiting for one while none is there.
    async fn served(&self, deadline: Option<Deadline>) -> Result<Arc<Served>, Status> {
        let patience = Instant::now() + self.gateway.options.target_timeout;
        let until = deadline.map_or(patience, |deadline| deadline.work.min(patience));
        self.gateway.pool.served(until).await
    }

    /// Takes a place before anything is awaited, so that a burst cannot pass the limit together.
    fn take_place(&self) -> Result<OwnedSemaphorePermit, Status> {
        let gateway = &self.gateway;
        if gateway.drain.is_draining() {
            return Err(refuse(Reason::Draining, "the gateway drains: no new requests"));
        }
        Arc::clone(&gateway.streams).try_acquire_owned().map_err(|_| {
            let limit = gateway.options.max_streams;
            refuse(Reason::Busy, format!("{limit} requests run already, limit {limit}"))
        })
    }

    async fn start(&self, request: Request<GenerateRequest>) -> Result<Reply, Status> {
        let stats = &self.gateway.stats;
        add(&stats.requests, 1);
        let started = self.admit_and_spawn(request).await;
        if started.is_err() {
            add(&stats.refused, 1);
        }
        started
    }

    async fn admit_and_spawn(&self, request: Request<GenerateRequest>) -> Result<Reply, Status> {
        let place = self.take_place()?;
        let deadline = Deadline::of(request.extensions());
        let served = self.served(deadline).await?;
        let defaults = Defaults {
            request_id: self.gateway.mint_id(),
            seed: random().map_err(|e| refuse(Reason::Internal, format!("no random numbers: {e}")))?,
            max_prompt_bytes: self.gateway.options.max_prompt_bytes,
            draft_limit: self.gateway.pool.draft_limit(),
        };
        let prepared = self.prepare(request.into_inner(), Arc::clone(&served), defaults, deadline);
        let (admitted, output) = prepared.await.map_err(|status| self.gateway.pool.judged(status, false))?;
        let (chunks, unread) = mpsc::channel(UNREAD_CHUNKS);
        let (end, ended) = oneshot::channel();
        let fingerprint = served.card.fingerprint.clone();
        let session = Session::new(Arc::clone(&self.gateway), admitted, fingerprint, output, chunks);
        self.gateway.drain.spawn(async move {
            let _ = end.send(Box::pin(session.run(deadline.map(|deadline| deadline.work))).await);
            drop(place);
        });
        Ok(Reply::new(unread, ended))
    }

    /// Validation and tokenising. A text is encoded off the reactor: a long one takes milliseconds.
    async fn prepare(
        &self,
        request: GenerateRequest,
        served: Arc<Served>,
        defaults: Defaults,
        deadline: Option<Deadline>,
    ) -> Result<(Admitted, Output), Status> {
        if let Some(Prompt::Ids(_)) = request.prompt {
            return prepare_now(request, &served, defaults);
        }
        self.off_reactor(deadline, move || prepare_now(request, &served, defaults)).await
    }

    /// Runs `work` on a blocking thread, once one is left for it.
    async fn off_reactor<T: Send + 'static>(
        &self,
        deadline: Option<Deadline>,
        work: impl FnOnce() -> Result<T, Status> + Send + 'static,
    ) -> Result<T, Status> {
        let failed = || refuse(Reason::Internal, "the tokenizer failed");
        let encoders = Arc::clone(&self.gateway.encoders);
        let done = async {
            let permit = encoders.acquire_owned().await.map_err(|_| failed())?;
            let run = move || {
                // Given back by the thread, not by a client that leaves.
                let _permit = permit;
                work()
            };
            tokio::task::spawn_blocking(run).await.unwrap_or_else(|_| Err(failed()))
        };
        let Some(deadline) = deadline else { return done.await };
        timeout_at(deadline.work, done).await.unwrap_or_else(|_| {
            Err(refuse(Reason::Deadline, "the deadline passed before the tokenizer was done"))
        })
    }

    fn model(&self, served: &Served) -> Model {
        let card = &served.card;
        let rows = card.max_verify_rows.clamp(1, MAX_VERIFY_ROWS as u32);
        let mut model = Model {
            name: card.name.clone(),
            architecture: card.architecture.clone(),
            fingerprint: card.fingerprint.clone(),
            vocab_size: card.vocab_size,
            context_length: card.context_length,
            max_draft_tokens: self.gateway.pool.draft_limit().unwrap_or(rows - 1).min(rows - 1),
            eos_ids: card.eos_ids.clone(),
            pid: std::process::id(),
            ..Default::default()
        };
        self.gateway.pool.describe(&mut model);
        model
    }
}

fn prepare_now(
    request: GenerateRequest,
    served: &Served,
    defaults: Defaults,
) -> Result<(Admitted, Output), Status> {
    let admitted = admit(request, served, defaults)?;
    let tokenizer = served.tokenizer().ok();
    let prompt_tokens = admitted.prompt.len() as u32;
    let output = Output::try_new(tokenizer, admitted.stop.clone(), admitted.trace, prompt_tokens)
        .map_err(|e| refuse(Reason::InvalidArgument, e.to_string()))?;
    Ok((admitted, output))
}

#[tonic::async_trait]
impl Generation for Api {
    async fn generate(&self, request: Request<GenerateRequest>) -> Result<Response<GenerateReply>, Status> {
        let deadline = Deadline::of(request.extensions());
        let whole = Box::pin(async { self.start(request).await?.collect().await });
        let reply = match deadline {
            // The session ends earlier and says more, but on a busy machine its word may come too late.
            Some(deadline) => timeout_at(deadline.answer, whole)
                .await
                .unwrap_or_else(|_| Err(refuse(Reason::Deadline, "the deadline passed"))),
            None => whole.await,
        };
        Ok(Response::new(reply?))
    }

    type GenerateStreamStream = Reply;

    async fn generate_stream(&self, request: Request<GenerateRequest>) -> Result<Response<Reply>, Status> {
        Ok(Response::new(self.start(request).await?))
    }

    async fn tokenize(&self, request: Request<TokenizeRequest>) -> Result<Response<TokenizeReply>, Status> {
        let deadline = Deadline::of(request.extensions());
        let served = self.served(deadline).await?;
        let TokenizeRequest { text, add_special } = request.into_inner();
        let limit = self.gateway.options.max_prompt_bytes;
        if text.len() > limit {
            let line = format!("text must have at most {limit} bytes, given {}", text.len());
            return Err(refuse(Reason::InvalidArgument, line));
        }
        let encoded = self.off_reactor(deadline, move || {
            let ids = served.tokenizer()?.encode(&text, add_special);
            ids.map_err(|e| refuse(Reason::InvalidArgument, format!("text: {e}")))
        });
        Ok(Response::new(TokenizeReply { ids: encoded.await? }))
    }

    async fn detokenize(
        &self,
        request: Request<DetokenizeRequest>,
    ) -> Result<Response<DetokenizeReply>, Status> {
        let deadline = Deadline::of(request.extensions());
        let served = self.served(deadline).await?;
        let DetokenizeRequest { ids, keep_special } = request.into_inner();
        if ids.len() > MAX_DETOKENIZE {
            let line = format!("ids must have at most {MAX_DETOKENIZE} ids, given {}", ids.len());
            return Err(refuse(Reason::InvalidArgument, line));
        }
        check_ids("ids", &ids, served.card.vocab_size)?;
        let decoded = self.off_reactor(deadline, move || {
            let text = served.tokenizer()?.decode(&ids, !keep_special);
            text.map_err(|e| refuse(Reason::TokenRange, format!("ids: {e}")))
        });
        Ok(Response::new(DetokenizeReply { text: decoded.await? }))
    }

    async fn get_model(&self, request: Request<GetModelRequest>) -> Result<Response<Model>, Status> {
        let served = self.served(Deadline::of(request.extensions())).await?;
        Ok(Response::new(self.model(&served)))
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::task::{Context, Waker};

    use eyrie_service::Drain;
    use eyrie_wire::{Address, Dialer};
    use tokio::task::spawn_blocking;

    use super::*;
    use crate::GatewayOptions;

    async fn texts_wait() {
        let options = GatewayOptions::new(Address::Tcp("127.0.0.1:0".to_owned()), [], []);
        let api = Api::new(Gateway::start(options, Dialer::default(), 1, Drain::new()));
        let encoders = &api.gateway.encoders;
        let all = encoders.available_permits();
        let mut context = Context::from_waker(Waker::noop());

        let others = encoders.acquire_many(all as u32).await.unwrap();
        let ran = Arc::new(AtomicBool::new(false));
        let runs = Arc::clone(&ran);
        let mut waits = pin!(api.off_reactor(None, move || {
            runs.store(true, Ordering::Relaxed);
            Ok(())
        }));
        assert!(waits.as_mut().poll(&mut context).is_pending());
        spawn_blocking(|| ()).await.unwrap();
        assert!(!ran.load(Ordering::Relaxed), "a thread was taken before its turn");
        drop(others);
        waits.await.unwrap();
        assert!(ran.load(Ordering::Relaxed));

        let (done, wait) = std::sync::mpsc::sync_channel(1);
        let mut left = Box::pin(api.off_reactor(None, move || {
            let _ = wait.recv();
            Ok(())
        }));
        assert!(left.as_mut().poll(&mut context).is_pending());
        drop(left);
        assert_eq!(encoders.available_permits(), all - 1, "its thread still works");
        done.send(()).unwrap();
        spawn_blocking(|| ()).await.unwrap();
        assert_eq!(encoders.available_permits(), all);
    }

    #[test]
    fn a_text_waits_for_its_turn_and_keeps_it_though_its_client_leaves() {
        // One thread takes what it is given in order.
        let runtime = tokio::runtime::Builder::new_current_thread().max_blocking_threads(1).build();
        runtime.unwrap().block_on(texts_wait());
    }
}
