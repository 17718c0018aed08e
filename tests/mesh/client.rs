//! A client: one request, and what is held against the reply.

use eyrie_wire::PeerChannel;
use eyrie_wire::v1::generation_client::GenerationClient;
use eyrie_wire::v1::{FinishReason, Finished, GenerateChunk};
use tokio::time::sleep;
use tonic::{Request, Status};

use crate::scenario::Ask;

/// How a request ended.
#[derive(Debug)]
pub(crate) enum Ending {
    Finished(Finished),
    Failed(Status),
    /// The client went away.
    Left,
}

#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) tokens: Vec<u32>,
    pub(crate) ending: Ending,
}

/// Sends the request and reads until it ends.
pub(crate) async fn ask(channel: PeerChannel, ask: &Ask) -> Result<Reply, String> {
    let mut tokens = Vec::new();
    let mut request = Request::new(ask.request.clone());
    if let Some(deadline) = ask.deadline {
        request.set_timeout(deadline);
    }
    let mut chunks = match GenerationClient::new(channel).generate_stream(request).await {
        Ok(reply) => reply.into_inner(),
        Err(status) => return Ok(Reply { tokens, ending: Ending::Failed(status) }),
    };
    let mut read = 0;
    let mut finished = None;
    loop {
        if ask.leaves_after == Some(read) {
            return Ok(Reply { tokens, ending: Ending::Left });
        }
        let chunk = match chunks.message().await {
            Ok(Some(chunk)) => chunk,
            Ok(None) => break,
            Err(status) => return Ok(Reply { tokens, ending: Ending::Failed(status) }),
        };
        if finished.is_some() {
            return Err("a chunk after the last one".to_owned());
        }
        check(&chunk, read == 0)?;
        read += 1;
        tokens.extend(chunk.token_ids);
        finished = chunk.finished;
        sleep(ask.reads_in).await;
    }
    let finished = finished.ok_or("the stream ended well without its last chunk")?;
    Ok(Reply { tokens, ending: Ending::Finished(finished) })
}

fn check(chunk: &GenerateChunk, is_first: bool) -> Result<(), String> {
    if chunk.started.is_some() != is_first {
        return Err("Started belongs to the first chunk alone".to_owned());
    }
    let emitted: usize = chunk.rounds.iter().map(|round| round.emitted.len()).sum();
    if chunk.accepted as usize > chunk.token_ids.len() || emitted > chunk.token_ids.len() {
        return Err(format!("a chunk says more than it carries: {chunk:?}"));
    }
    Ok(())
}

impl Reply {
    /// P1, P2 and P3 for one request; `allows` tells the codes that it may end with.
    pub(crate) fn check(&self, ask: &Ask, allows: impl Fn(tonic::Code) -> bool) -> Result<(), String> {
        let plain = &ask.plain;
        if !plain.tokens.starts_with(&self.tokens) {
            return Err(format!("P1: tokens {:?}, plain {:?}", self.tokens, plain.tokens));
        }
        match &self.ending {
            Ending::Left => Ok(()),
            Ending::Failed(status) if allows(status.code()) => Ok(()),
            Ending::Failed(status) => {
                let (code, line) = (status.code(), status.message());
                Err(format!("P3: ended after {} tokens with {code:?}: {line}", self.tokens.len()))
            }
            Ending::Finished(_) if self.tokens != plain.tokens => {
                Err(format!("P3: ended well with {} of {} tokens", self.tokens.len(), plain.tokens.len()))
            }
            Ending::Finished(finished) => check_end(finished, plain.finish, self.tokens.len()),
        }
    }
}

fn check_end(finished: &Finished, wanted: FinishReason, tokens: usize) -> Result<(), String> {
    if finished.reason() != wanted {
        return Err(format!("finish {:?}, plain {wanted:?}", finished.reason()));
    }
    let usage = finished.usage.clone().unwrap_or_default();
    if usage.completion_tokens as usize != tokens || usage.accepted_tokens > usage.drafted_tokens {
        return Err(format!("usage does not add up: {usage:?} for {tokens} tokens"));
    }
    Ok(())
}
