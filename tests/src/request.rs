//! Requests to a gateway, with every round traced.

use eyrie_wire::v1::generation_client::GenerationClient;
use eyrie_wire::v1::speculation::Mode;
use eyrie_wire::v1::{
    FinishReason, GenerateChunk, GenerateRequest, Round, Speculation, TokenIds, TreeShape, Usage,
    generate_request,
};
use tonic::transport::Channel;
use tonic::{Status, Streaming};

/// Connects to a gateway.
pub async fn client(endpoint: &str) -> GenerationClient<Channel> {
    let address = endpoint.parse().expect("an address");
    GenerationClient::new(eyrie_wire::connect(&address).await.expect("the gateway answers"))
}

/// A request in the making; greedy, plain and without stops unless told otherwise.
#[derive(Debug, Clone)]
pub struct Asked(pub GenerateRequest);

/// `tokens` greedy tokens after `prompt`, traced, the end-of-sequence id ignored.
pub fn ask(prompt: &[u32], tokens: u32) -> Asked {
    Asked(GenerateRequest {
        prompt: Some(generate_request::Prompt::Ids(TokenIds { ids: prompt.to_vec() })),
        max_tokens: Some(tokens),
        temperature: Some(0.0),
        ignore_eos: true,
        speculation: Some(Speculation {
            mode: Mode::Off as i32,
            max_draft_tokens: None,
            tree: None,
            trace: true,
        }),
        ..Default::default()
    })
}

impl Asked {
    /// Draft exactly `k` tokens a round.
    pub fn chain(mut self, k: u32) -> Self {
        let speculation = self.0.speculation.get_or_insert_default();
        speculation.mode = Mode::Auto as i32;
        speculation.max_draft_tokens = Some(k);
        self
    }

    /// Draft exactly this tree a round.
    pub fn tree(mut self, top_k: u32, levels: u32, nodes: u32) -> Self {
        let speculation = self.0.speculation.get_or_insert_default();
        speculation.mode = Mode::Auto as i32;
        speculation.tree = Some(TreeShape { top_k, levels, nodes });
        self
    }

    /// Let the gateway choose how much to draft.
    pub fn auto(mut self) -> Self {
        self.0.speculation.get_or_insert_default().mode = Mode::Auto as i32;
        self
    }

    /// Sample at this temperature with this seed.
    pub fn sampled(mut self, temperature: f32, seed: u64) -> Self {
        self.0.temperature = Some(temperature);
        self.0.seed = Some(seed);
        self
    }

    /// Runs to the end.
    ///
    /// # Errors
    /// The status the gateway gave.
    pub async fn run(&self, client: &mut GenerationClient<Channel>) -> Result<Outcome, Status> {
        collect(client.generate_stream(self.0.clone()).await?.into_inner(), |_| {}).await
    }
}

/// What a stream brought.
#[derive(Debug, Clone, Default)]
pub struct Outcome {
    /// Prompt as the gateway encoded it.
    pub prompt_ids: Vec<u32>,
    /// Generated ids.
    pub ids: Vec<u32>,
    /// Generated text.
    pub text: String,
    /// Why it ended.
    pub finish: FinishReason,
    /// Counts.
    pub usage: Usage,
    /// Every round.
    pub rounds: Vec<Round>,
}

/// Reads a stream to its end, showing each chunk to `see`.
///
/// # Errors
/// The status that ended the stream.
pub async fn collect(
    mut stream: Streaming<GenerateChunk>,
    mut see: impl FnMut(&Outcome),
) -> Result<Outcome, Status> {
    let mut outcome = Outcome::default();
    while let Some(chunk) = stream.message().await? {
        if let Some(started) = chunk.started {
            outcome.prompt_ids = started.prompt_ids;
        }
        outcome.ids.extend(chunk.token_ids);
        outcome.text.push_str(&chunk.text);
        outcome.rounds.extend(chunk.rounds);
        if let Some(finished) = chunk.finished {
            outcome.finish = finished.reason();
            outcome.usage = finished.usage.unwrap_or_default();
        }
        see(&outcome);
    }
    Ok(outcome)
}
