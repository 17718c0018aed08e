//! The target's side of the link: describe, fetch the files clients need, open Rounds.

use std::sync::Arc;

use eyrie_wire::v1::target_client::TargetClient;
use eyrie_wire::v1::target_item::Op;
use eyrie_wire::v1::{
    Close, DescribeRequest, LoadReport, LoadRequest, LoadState, ModelCard, TargetFrame, TargetItem,
    TargetOut, TargetReply,
};
use eyrie_wire::{Address, Dialer, MAX_MESSAGE, PeerChannel, Reason, refuse};
use parking_lot::Mutex;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use super::peer::{Connection, FRAMES, Peer, check_hello, hello, in_time};
use crate::catalog::{self, Served};

/// The target that is connected: one boot of it, and what it serves.
#[derive(Debug, Clone)]
pub(crate) struct TargetReady {
    pub(crate) epoch: u64,
    pub(crate) served: Arc<Served>,
}

/// How the target is reached.
#[derive(Debug)]
pub(crate) struct TargetPeer {
    dialer: Dialer,
    address: Address,
    boot_id: u64,
    /// What any target served last: the same files need not be read again, nor held twice.
    last: Arc<Mutex<Option<Arc<Served>>>>,
}

impl TargetPeer {
    pub(crate) fn new(
        dialer: Dialer,
        address: Address,
        boot_id: u64,
        last: Arc<Mutex<Option<Arc<Served>>>>,
    ) -> Self {
        Self { dialer, address, boot_id, last }
    }

    pub(crate) fn address(&self) -> &Address {
        &self.address
    }

    async fn served(
        &self,
        client: &mut TargetClient<PeerChannel>,
        card: ModelCard,
    ) -> Result<Arc<Served>, Status> {
        let last = self.last.lock().clone();
        let served = Arc::new(catalog::fetch(client, card, last.as_deref()).await?);
        *self.last.lock() = Some(Arc::clone(&served));
        Ok(served)
    }
}

/// How busy the target at `address` is, asked over a connection of its own: a stream that is stuck says nothing
/// about its peer.
pub(crate) async fn target_load(dialer: &Dialer, address: &Address) -> Result<LoadReport, Status> {
    load_of(&mut TargetClient::new(dialer.connect(address).await?)).await
}

/// How busy the target of `client` is.
pub(crate) async fn load_of(client: &mut TargetClient<PeerChannel>) -> Result<LoadReport, Status> {
    let load = in_time("ask for the target's load", client.load(LoadRequest {})).await?;
    Ok(load.into_inner())
}

impl Peer for TargetPeer {
    const NAME: &'static str = "target";
    type Op = Op;
    type Item = TargetItem;
    type Out = TargetOut;
    type Frame = TargetFrame;
    type Reply = TargetReply;
    type Ready = TargetReady;

    fn name(&self) -> String {
        format!("target {}", self.address)
    }

    async fn connect(&self) -> Result<Connection<Self>, Status> {
        let channel = self.dialer.connect(&self.address).await?;
        let mut client = TargetClient::new(channel)
            .max_decoding_message_size(MAX_MESSAGE)
            .max_encoding_message_size(MAX_MESSAGE);
        let card = in_time("describe the target", client.describe(DescribeRequest {})).await?.into_inner();
        match card.state() {
            LoadState::Serving => {}
            LoadState::Draining => return Err(refuse(Reason::Draining, "the target drains")),
            LoadState::Loading | LoadState::Unspecified => {
                let (read, all) = (card.loaded_bytes, card.total_bytes);
                let line = format!("the target loads: {} of {} MiB", read >> 20, all >> 20);
                return Err(refuse(Reason::Loading, line));
            }
        }
        let epoch = card.epoch;
        let served = self.served(&mut client, card).await?;
        let (frames, outgoing) = mpsc::channel(FRAMES);
        let first = TargetFrame {
            hello: Some(hello(self.boot_id, epoch, &served.card.fingerprint)),
            items: Vec::new(),
        };
        // The channel is empty: the first frame always fits.
        let _ = frames.try_send(first);
        let rounds = client.rounds(ReceiverStream::new(outgoing));
        let mut replies = in_time("open rounds at the target", rounds).await?.into_inner();
        let greeting = in_time("the target's hello", replies.message()).await?;
        check_hello(Self::NAME, greeting.and_then(|reply| reply.hello), epoch)?;
        Ok(Connection { frames, replies, ready: TargetReady { epoch, served } })
    }

    async fn obsolete(&self, _: &TargetReady) -> String {
        std::future::pending().await
    }

    fn item(seq: u64, op: Op) -> TargetItem {
        TargetItem { seq, op: Some(op) }
    }

    fn close() -> Op {
        Op::Close(Close {})
    }

    /// Only a step clears a target that is suspected of computing nothing.
    fn probe() -> Option<TargetItem> {
        None
    }

    fn item_seq(item: &TargetItem) -> u64 {
        item.seq
    }

    fn item_bytes(item: &TargetItem) -> usize {
        let tokens = match &item.op {
            Some(Op::Open(open)) => open.tokens.len(),
            Some(Op::Verify(verify)) => verify.tokens.len() * 2,
            Some(Op::Close(_) | Op::FetchFeatures(_) | Op::Revoke(_)) | None => 0,
        };
        64 + 4 * tokens
    }

    fn frame(items: Vec<TargetItem>) -> TargetFrame {
        TargetFrame { hello: None, items }
    }

    fn outs(reply: TargetReply) -> Vec<TargetOut> {
        reply.outs
    }

    fn out_seq(out: &TargetOut) -> u64 {
        out.seq
    }
}
