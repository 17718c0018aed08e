//! The client API: admission in front, the session behind, one stream for both kinds of reply.

use std::sync::Arc;
use std::time::Duration;

use eyrie_wire::v1::generation_server::Generation;
use eyrie_wire::v1::{
    DetokenizeReply, DetokenizeRequest, GenerateReply, GenerateRequest, GetModelRequest, Model,
    TokenizeReply, TokenizeRequest,
};
use eyrie_wire::{MAX_VERIFY_ROWS, Reason, refuse};
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};
use tokio::time::Instant;
use tonic::metadata::MetadataMap;
use tonic::{Request, Response, Status};

use crate::catalog::Served;
use crate::gateway::{Gateway, random};
use crate::link::State;
use crate::output::Output;
use crate::reply::Reply;
use crate::session::Session;
use crate::stats::add;
use crate::validate::{Admitted, Defaults, admit, check_ids};

/// Chunks that a client has not read yet; then its own sequence waits.
const UNREAD_CHUNKS: usize = 16;

/// Longest [`margin`] before a client's timeout.
const TIMEOUT_MARGIN: Duration = Duration::from_millis(50);

/// The service.
#[derive(Debug)]
pub(crate) struct Api {
    gateway: Arc<Gateway>,
}

impl Api {
    pub(crate) fn new(gateway: Arc<Gateway>) -> Self {
        Self { gateway }
    }

    /// What the target serves now, waiting for one that is away.
    async fn served(&self, deadline: Option<Instant>) -> Result<Arc<Served>, Status> {
        let patience = Instant::now() + self.gateway.options.target_timeout;
        let until = deadline.map_or(patience, |deadline| deadline.min(patience));
        Ok(self.gateway.target_up(until).await?.served)
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
        let deadline = deadline(request.metadata())?;
        let served = self.served(deadline).await?;
        let defaults = Defaults {
            request_id: self.gateway.mint_id(),
            seed: random().map_err(|e| refuse(Reason::Internal, format!("no random numbers: {e}")))?,
            max_prompt_bytes: self.gateway.options.max_prompt_bytes,
            draft_limit: self.gateway.draft_limit(),
        };
        let prepared = prepare(request.into_inner(), Arc::clone(&served), defaults);
        let (admitted, output) = match deadline {
            Some(deadline) => tokio::time::timeout_at(deadline, prepared).await.unwrap_or_else(|_| {
                Err(refuse(Reason::Deadline, "the deadline passed before the prompt was encoded"))
            })?,
            None => prepared.await?,
        };
        let (chunks, unread) = mpsc::channel(UNREAD_CHUNKS);
        let (end, ended) = oneshot::channel();
        let fingerprint = served.card.fingerprint.clone();
        let session = Session::new(Arc::clone(&self.gateway), admitted, fingerprint, output, chunks);
        self.gateway.drain.spawn(async move {
            let _ = end.send(Box::pin(session.run(deadline)).await);
            drop(place);
        });
        Ok(Reply::new(unread, ended))
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
            max_draft_tokens: self.gateway.draft_limit().unwrap_or(rows - 1).min(rows - 1),
            eos_ids: card.eos_ids.clone(),
            pid: std::process::id(),
            ..Default::default()
        };
        match self.gateway.draft.as_ref().map(|link| link.state()) {
            None => model.not_speculating_because = "no draft is configured".to_owned(),
            Some(State::Down(why)) => model.not_speculating_because = why.to_string(),
            Some(State::Suspect(ready)) => {
                model.draft_name = ready.card.name.clone();
                model.not_speculating_because =
                    "the draft missed its deadline and is silent since".to_owned();
            }
            Some(State::Up(ready)) => {
                model.speculating = true;
                model.draft_name = ready.card.name.clone();
                model.shared_bytes = ready.card.mapped_bytes;
                model.shared_kind = ready.card.mapped_kind.clone();
            }
        }
        model
    }
}

/// Validation and tokenising, off the reactor: a long text takes milliseconds to encode.
async fn prepare(
    request: GenerateRequest,
    served: Arc<Served>,
    defaults: Defaults,
) -> Result<(Admitted, Output), Status> {
    let prepared = tokio::task::spawn_blocking(move || {
        let admitted = admit(request, &served, defaults)?;
        let tokenizer = served.tokenizer().ok();
        let prompt_tokens = admitted.prompt.len() as u32;
        let output = Output::try_new(tokenizer, admitted.stop.clone(), admitted.trace, prompt_tokens)
            .map_err(|e| refuse(Reason::InvalidArgument, e.to_string()))?;
        Ok((admitted, output))
    });
    prepared.await.unwrap_or_else(|_| Err(refuse(Reason::Internal, "the tokenizer failed")))
}

/// When the client's `grpc-timeout` ends the request.
fn deadline(metadata: &MetadataMap) -> Result<Option<Instant>, Status> {
    let timeout = client_timeout(metadata)?;
    Ok(timeout.and_then(|timeout| Instant::now().checked_add(timeout - margin(timeout))))
}

/// The client's `grpc-timeout`.
fn client_timeout(metadata: &MetadataMap) -> Result<Option<Duration>, Status> {
    let Some(value) = metadata.get("grpc-timeout") else { return Ok(None) };
    let timeout = value.to_str().ok().and_then(parse_timeout).ok_or_else(|| {
        let line = format!("grpc-timeout must be up to 8 digits and one of HMSmun, given {value:?}");
        refuse(Reason::InvalidArgument, line)
    })?;
    Ok(Some(timeout))
}

/// How much earlier than the client's own timeout a request is ended: the answer still has to arrive, and the
/// transport ends a unary call at that time with a status that says nothing.
fn margin(timeout: Duration) -> Duration {
    (timeout / 10).min(TIMEOUT_MARGIN)
}

fn parse_timeout(value: &str) -> Option<Duration> {
    let (digits, unit) = value.split_at_checked(value.len().checked_sub(1)?)?;
    if digits.len() > 8 || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let n: u64 = digits.parse().ok()?;
    match unit {
        "H" => Some(Duration::from_secs(n * 3600)),
        "M" => Some(Duration::from_secs(n * 60)),
        "S" => Some(Duration::from_secs(n)),
        "m" => Some(Duration::from_millis(n)),
        "u" => Some(Duration::from_micros(n)),
        "n" => Some(Duration::from_nanos(n)),
        _ => None,
    }
}

#[tonic::async_trait]
impl Generation for Api {
    async fn generate(&self, request: Request<GenerateRequest>) -> Result<Response<GenerateReply>, Status> {
        let timeout = client_timeout(request.metadata())?;
        let whole = Box::pin(async { self.start(request).await?.collect().await });
        let reply = match timeout {
            // The session ends earlier and says more, but on a busy machine its word may come too late.
            Some(timeout) => tokio::time::timeout(timeout - margin(timeout) / 2, whole)
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
        let served = self.served(deadline(request.metadata())?).await?;
        let TokenizeRequest { text, add_special } = request.into_inner();
        let limit = self.gateway.options.max_prompt_bytes;
        if text.len() > limit {
            let line = format!("text must have at most {limit} bytes, given {}", text.len());
            return Err(refuse(Reason::InvalidArgument, line));
        }
        let encoded = tokio::task::spawn_blocking(move || {
            let ids = served.tokenizer()?.encode(&text, add_special);
            ids.map_err(|e| refuse(Reason::InvalidArgument, format!("text: {e}")))
        });
        let ids = encoded.await.unwrap_or_else(|_| Err(refuse(Reason::Internal, "the tokenizer failed")))?;
        Ok(Response::new(TokenizeReply { ids }))
    }

    async fn detokenize(
        &self,
        request: Request<DetokenizeRequest>,
    ) -> Result<Response<DetokenizeReply>, Status> {
        let served = self.served(deadline(request.metadata())?).await?;
        let DetokenizeRequest { ids, keep_special } = request.into_inner();
        check_ids("ids", &ids, served.card.vocab_size)?;
        let text = served.tokenizer()?.decode(&ids, !keep_special);
        let text = text.map_err(|e| refuse(Reason::TokenRange, format!("ids: {e}")))?;
        Ok(Response::new(DetokenizeReply { text }))
    }

    async fn get_model(&self, request: Request<GetModelRequest>) -> Result<Response<Model>, Status> {
        let served = self.served(deadline(request.metadata())?).await?;
        Ok(Response::new(self.model(&served)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_parse_as_the_protocol_spells_them() {
        assert_eq!(parse_timeout("1H"), Some(Duration::from_secs(3600)));
        assert_eq!(parse_timeout("2M"), Some(Duration::from_secs(120)));
        assert_eq!(parse_timeout("99999999S"), Some(Duration::from_secs(99_999_999)));
        assert_eq!(parse_timeout("250m"), Some(Duration::from_millis(250)));
        assert_eq!(parse_timeout("7u"), Some(Duration::from_micros(7)));
        assert_eq!(parse_timeout("7n"), Some(Duration::from_nanos(7)));
        for bad in ["", "S", "1", "1x", "-1S", "+1S", "100000000S", "1é"] {
            assert_eq!(parse_timeout(bad), None, "{bad}");
        }
    }
}
