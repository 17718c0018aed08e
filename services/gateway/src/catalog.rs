//! What the target serves, as clients need it: its card and its tokenizer, fetched over the wire and
//! checked against the hashes of the card, so that the gateway needs no model files.

use std::collections::HashMap;
use std::time::Duration;

use eyrie_text::{Tokenizer, TokenizerFiles};
use eyrie_wire::v1::target_client::TargetClient;
use eyrie_wire::v1::{FileInfo, ModelCard, ReadFileRequest};
use eyrie_wire::{PeerChannel, Reason, refuse};
use tonic::Status;

const TOKENIZER_JSON: &str = "tokenizer.json";
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
/// Largest file that is fetched (bytes); the tokenizers of the served models are below 16 MiB.
const MAX_FILE: u64 = 256 << 20;
/// Longest wait for the next piece of a file.
const CHUNK_TIMEOUT: Duration = Duration::from_secs(5);

/// One model as served by one boot of the target.
#[derive(Debug)]
pub(crate) struct Served {
    pub(crate) card: ModelCard,
    /// The tokenizer, or one line of why there is none: token ids can be served without.
    tokenizer: Result<Tokenizer, String>,
}

impl Served {
    #[cfg(test)]
    pub(crate) fn without_text(card: ModelCard) -> Self {
        Self { card, tokenizer: Err("none in this test".to_owned()) }
    }

    /// The tokenizer.
    ///
    /// # Errors
    /// UNSUPPORTED with the reason when the model's tokenizer cannot be read.
    pub(crate) fn tokenizer(&self) -> Result<&Tokenizer, Status> {
        self.tokenizer
            .as_ref()
            .map_err(|why| refuse(Reason::Unsupported, format!("text is not available: {why}")))
    }
}

/// Fetches what `card` lists, reusing the tokenizer of `last` when its files are the same.
///
/// # Errors
/// A file that does not arrive whole, or with another hash than the card says.
pub(crate) async fn fetch(
    client: &mut TargetClient<PeerChannel>,
    card: ModelCard,
    last: Option<&Served>,
) -> Result<Served, Status> {
    if let Some(last) = last.filter(|last| tokenizer_files(&last.card) == tokenizer_files(&card)) {
        return Ok(Served { card, tokenizer: last.tokenizer.clone() });
    }
    let mut contents = HashMap::new();
    for file in tokenizer_files(&card) {
        contents.insert(file.name.as_str(), read(client, file).await?);
    }
    let config = contents.remove(TOKENIZER_CONFIG);
    let tokenizer = match contents.remove(TOKENIZER_JSON) {
        Some(tokenizer_json) => parse(TokenizerFiles { tokenizer_json, tokenizer_config: config }).await,
        None => Err(format!("model {} has no {TOKENIZER_JSON}", card.name)),
    };
    if let Err(why) = &tokenizer {
        tracing::warn!("text requests will be refused: {why}");
    }
    Ok(Served { card, tokenizer })
}

fn tokenizer_files(card: &ModelCard) -> Vec<&FileInfo> {
    let wanted = |file: &&FileInfo| [TOKENIZER_JSON, TOKENIZER_CONFIG].contains(&file.name.as_str());
    card.files.iter().filter(wanted).collect()
}

/// Large tokenizers take a second to build.
async fn parse(files: TokenizerFiles) -> Result<Tokenizer, String> {
    match tokio::task::spawn_blocking(move || Tokenizer::from_files(&files)).await {
        Ok(parsed) => parsed.map_err(|e| e.to_string()),
        Err(_) => Err(format!("{TOKENIZER_JSON}: the parser failed")),
    }
}

async fn read(client: &mut TargetClient<PeerChannel>, file: &FileInfo) -> Result<Vec<u8>, Status> {
    let fail = |what: String| refuse(Reason::Unreachable, format!("{} of the target: {what}", file.name));
    if file.bytes > MAX_FILE {
        return Err(fail(format!("{} bytes, limit {MAX_FILE}", file.bytes)));
    }
    let late = |_| fail(format!("nothing arrived for {} s", CHUNK_TIMEOUT.as_secs()));
    let request = ReadFileRequest { name: file.name.clone() };
    let opened = tokio::time::timeout(CHUNK_TIMEOUT, client.read_file(request)).await.map_err(late)?;
    let mut chunks = opened?.into_inner();
    let mut contents = Vec::new();
    while let Some(chunk) = tokio::time::timeout(CHUNK_TIMEOUT, chunks.message()).await.map_err(late)?? {
        contents.extend_from_slice(&chunk.data);
        if contents.len() as u64 > file.bytes {
            break;
        }
    }
    if contents.len() as u64 != file.bytes {
        return Err(fail(format!("{} bytes arrived, the card says {}", contents.len(), file.bytes)));
    }
    let hash = blake3::hash(&contents).to_hex();
    if hash.as_str() != file.blake3 {
        return Err(fail(format!("blake3 {hash}, the card says {}", file.blake3)));
    }
    Ok(contents)
}
