//! Rounds streams to a target and to a draft, as a gateway opens them.

use std::collections::VecDeque;
use std::time::Duration;

use anyhow::Context;
use eyrie_wire::v1::draft_client::DraftClient;
use eyrie_wire::v1::target_client::TargetClient;
use eyrie_wire::v1::{
    DescribeRequest, DraftFrame, DraftItem, DraftOut, DraftReply, Hello, ItemError, ModelCard, TargetFrame,
    TargetItem, TargetOut, TargetReply,
};
use eyrie_wire::{Address, MAX_MESSAGE, PROTOCOL_VERSION};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

/// No step takes this long unless the service hangs.
const PATIENCE: Duration = Duration::from_secs(120);
/// Frames that the transport has not sent yet.
const FRAMES: usize = 4;

/// One stream: frames of items out, replies of outs in.
pub(super) struct Lane<F, R, O> {
    name: &'static str,
    frames: mpsc::Sender<F>,
    replies: Streaming<R>,
    /// Heard and not yet asked for.
    heard: VecDeque<O>,
    outs: fn(R) -> Vec<O>,
}

pub(super) type TargetLane = Lane<TargetFrame, TargetReply, TargetOut>;
pub(super) type DraftLane = Lane<DraftFrame, DraftReply, DraftOut>;

/// The target at `address`, and what it says of itself.
pub(super) async fn target(address: &Address, boot_id: u64) -> anyhow::Result<(TargetLane, ModelCard)> {
    let by = format!("target at {address}");
    let channel = eyrie_wire::connect(address).await.map_err(said(&by))?;
    let mut client = TargetClient::new(channel).max_decoding_message_size(MAX_MESSAGE);
    let card = client.describe(DescribeRequest {}).await.map_err(said(&by))?.into_inner();
    let (frames, outgoing) = mpsc::channel(FRAMES);
    let hello = Some(hello(boot_id, &card));
    frames.send(TargetFrame { hello, items: Vec::new() }).await.context("opening rounds at the target")?;
    let replies = client.rounds(ReceiverStream::new(outgoing)).await.map_err(said(&by))?.into_inner();
    let outs = |reply: TargetReply| reply.outs;
    Ok((Lane { name: "target", frames, replies, heard: VecDeque::new(), outs }, card))
}

/// The draft at `address`, for sequences of the target of `card`.
pub(super) async fn draft(address: &Address, boot_id: u64, card: &ModelCard) -> anyhow::Result<DraftLane> {
    let by = format!("draft at {address}");
    let channel = eyrie_wire::connect(address).await.map_err(said(&by))?;
    let mut client = DraftClient::new(channel).max_decoding_message_size(MAX_MESSAGE);
    let (frames, outgoing) = mpsc::channel(FRAMES);
    let hello = Some(hello(boot_id, card));
    frames.send(DraftFrame { hello, items: Vec::new() }).await.context("opening rounds at the draft")?;
    let replies = client.rounds(ReceiverStream::new(outgoing)).await.map_err(said(&by))?.into_inner();
    let outs = |reply: DraftReply| reply.outs;
    Ok(Lane { name: "draft", frames, replies, heard: VecDeque::new(), outs })
}

fn hello(boot_id: u64, card: &ModelCard) -> Hello {
    let (epoch, fingerprint) = (card.epoch, card.fingerprint.clone());
    Hello { protocol_version: PROTOCOL_VERSION, boot_id, epoch, fingerprint }
}

impl TargetLane {
    pub(super) async fn send(&self, items: Vec<TargetItem>) -> anyhow::Result<()> {
        self.frame(TargetFrame { hello: None, items }).await
    }
}

impl DraftLane {
    pub(super) async fn send(&self, items: Vec<DraftItem>) -> anyhow::Result<()> {
        self.frame(DraftFrame { hello: None, items }).await
    }
}

impl<F, R, O> Lane<F, R, O> {
    async fn frame(&self, frame: F) -> anyhow::Result<()> {
        self.frames.send(frame).await.map_err(|_| anyhow::anyhow!("the {} stopped reading", self.name))
    }

    /// The next answer to any item.
    pub(super) async fn next(&mut self) -> anyhow::Result<O> {
        loop {
            if let Some(out) = self.heard.pop_front() {
                return Ok(out);
            }
            let reply = tokio::time::timeout(PATIENCE, self.replies.message()).await;
            let silent = || format!("the {} said nothing for {} s", self.name, PATIENCE.as_secs());
            let reply = reply.with_context(silent)?.map_err(said(self.name))?;
            let reply = reply.with_context(|| format!("the {} closed the stream", self.name))?;
            self.heard.extend((self.outs)(reply));
        }
    }

    /// An answer that ends the measurement.
    pub(super) fn refused(&self, error: &ItemError) -> anyhow::Error {
        anyhow::anyhow!("{}: {}: {}", self.name, error.reason, error.message)
    }
}

/// Whose words they are, in one line.
fn said(by: &str) -> impl Fn(Status) -> anyhow::Error + '_ {
    move |status| anyhow::anyhow!("{by}: {}", status.message())
}
