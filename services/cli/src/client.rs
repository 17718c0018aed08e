//! The client side of `eyrie.v1.Generation`, as the commands use it.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use anyhow::Context;
use eyrie_wire::v1::generation_client::GenerationClient;
use eyrie_wire::v1::speculation::Mode;
use eyrie_wire::v1::{
    FinishReason, GenerateChunk, GenerateRequest, Round, Speculation, TokenIds, Usage, generate_request,
};
use eyrie_wire::{Address, MAX_MESSAGE, reason_of};
use tonic::transport::Channel;

/// A connected client.
pub(crate) type Client = GenerationClient<Channel>;

/// Connects to a gateway.
pub(crate) async fn connect(address: &Address) -> anyhow::Result<Client> {
    let channel = eyrie_wire::connect(address).await.map_err(status_line)?;
    Ok(GenerationClient::new(channel)
        .max_decoding_message_size(MAX_MESSAGE)
        .max_encoding_message_size(MAX_MESSAGE))
}

/// A status as the one line that a person reads.
pub(crate) fn status_line(status: tonic::Status) -> anyhow::Error {
    let reason = reason_of(&status).unwrap_or_else(|| format!("{:?}", status.code()));
    anyhow::anyhow!("{} [{reason}]", status.message())
}

/// How a run is to be drafted.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Drafting {
    Plain,
    Chain(u32),
}

/// A greedy request with a fixed length, for demo and bench.
pub(crate) fn greedy(prompt: &str, max_tokens: u32, drafting: Drafting) -> GenerateRequest {
    let (mode, max_draft_tokens) = match drafting {
        Drafting::Plain => (Mode::Off, None),
        Drafting::Chain(k) => (Mode::Auto, Some(k)),
    };
    GenerateRequest {
        prompt: Some(generate_request::Prompt::Text(prompt.to_owned())),
        max_tokens: Some(max_tokens),
        temperature: Some(0.0),
        ignore_eos: true,
        speculation: Some(Speculation { mode: mode as i32, max_draft_tokens, tree: None, trace: false }),
        ..Default::default()
    }
}

/// For runs that nobody watches.
pub(crate) fn unseen(_: &GenerateChunk) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// Ids as a prompt.
pub(crate) fn id_prompt(ids: Vec<u32>) -> generate_request::Prompt {
    generate_request::Prompt::Ids(TokenIds { ids })
}

/// Everything a stream brought.
#[derive(Debug, Default)]
pub(crate) struct Completion {
    pub(crate) prompt_ids: Vec<u32>,
    pub(crate) token_ids: Vec<u32>,
    pub(crate) text: String,
    pub(crate) finish: FinishReason,
    pub(crate) usage: Usage,
    pub(crate) rounds: Vec<Round>,
    pub(crate) seed: u64,
    /// From the first token to the last.
    pub(crate) decoding: Duration,
    /// From the request to the first token.
    pub(crate) first_token: Duration,
}

impl Completion {
    /// Tokens a second after the first token; none when they all came at once.
    pub(crate) fn rate(&self) -> Option<f64> {
        let tokens = self.token_ids.len().saturating_sub(1);
        (self.decoding > Duration::from_millis(1)).then(|| tokens as f64 / self.decoding.as_secs_f64())
    }

    /// Tokens a round, the target's own included; the first token belongs to no round.
    pub(crate) fn tokens_a_round(&self) -> f64 {
        self.token_ids.len().saturating_sub(1) as f64 / f64::from(self.usage.rounds.max(1))
    }
}

/// The middle value, or the mean of the two in the middle; 0 of nothing.
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let (low, high) = (values.len().saturating_sub(1) / 2, values.len() / 2);
    match (values.get(low), values.get(high)) {
        (Some(low), Some(high)) => (low + high) / 2.0,
        _ => 0.0,
    }
}

/// Runs a request to its end, handing each chunk to `show`; a break ends it early, with what came so far.
pub(crate) async fn run(
    client: &mut Client,
    request: GenerateRequest,
    mut show: impl FnMut(&GenerateChunk) -> ControlFlow<()>,
) -> anyhow::Result<Completion> {
    let sent = Instant::now();
    let mut stream = client.generate_stream(request).await.map_err(status_line)?.into_inner();
    let mut done = Completion::default();
    let mut first = None;
    while let Some(chunk) = stream.message().await.map_err(status_line)? {
        if !chunk.token_ids.is_empty() {
            let now = Instant::now();
            let start = *first.get_or_insert(now);
            done.first_token = start - sent;
            done.decoding = now - start;
        }
        let go_on = show(&chunk);
        if let Some(started) = chunk.started {
            done.prompt_ids = started.prompt_ids;
            done.seed = started.seed;
        }
        done.token_ids.extend(chunk.token_ids);
        done.text.push_str(&chunk.text);
        done.rounds.extend(chunk.rounds);
        if let Some(finished) = chunk.finished {
            done.finish = finished.reason();
            done.usage = finished.usage.context("the gateway sent no usage with the last chunk")?;
            return Ok(done);
        }
        if go_on.is_break() {
            return Ok(done);
        }
    }
    anyhow::bail!("the stream ended without a finish after {} tokens", done.token_ids.len())
}
