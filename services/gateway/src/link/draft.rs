//! The draft's side of the link: it counts only while attached to the very boot of the target that
//! this gateway is connected to, because feature references name slots of that boot's ring.

use std::sync::Arc;

use eyrie_wire::v1::draft_client::DraftClient;
use eyrie_wire::v1::draft_item::Op;
use eyrie_wire::v1::{
    CloseDraft, DescribeDraftRequest, DraftCard, DraftFrame, DraftItem, DraftOut, DraftReply,
};
use eyrie_wire::{Address, MAX_MESSAGE, Reason, refuse};
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use super::peer::{Connection, FRAMES, Peer, check_hello, hello, in_time};
use super::{State, TargetReady};

/// The draft that is connected.
#[derive(Debug, Clone)]
pub(crate) struct DraftReady {
    /// Boot of the target that it is attached to.
    pub(crate) epoch: u64,
    pub(crate) card: Arc<DraftCard>,
}

/// How the draft is reached, for the sequences of one target.
#[derive(Debug)]
pub(crate) struct DraftPeer {
    address: Address,
    boot_id: u64,
    target_address: Address,
    target: watch::Receiver<State<TargetReady>>,
}

impl DraftPeer {
    pub(crate) fn new(
        address: Address,
        boot_id: u64,
        target_address: Address,
        target: watch::Receiver<State<TargetReady>>,
    ) -> Self {
        Self { address, boot_id, target_address, target }
    }

    /// The target's epoch and fingerprint, once it is connected.
    async fn attached_to(&self) -> Result<(u64, String), Status> {
        let mut target = self.target.clone();
        let up = target.wait_for(|state| state.connected().is_some()).await;
        let ready = up.ok().and_then(|state| state.connected().cloned());
        let ready = ready.ok_or_else(|| refuse(Reason::Draining, "the gateway stops"))?;
        Ok((ready.epoch, ready.served.card.fingerprint.clone()))
    }
}

/// One line of why this draft cannot serve this target yet.
fn check_card(card: &DraftCard, epoch: u64, fingerprint: &str) -> Result<(), Status> {
    if !card.attached {
        let line = format!("the draft is not attached: {}", card.not_attached_because);
        return Err(refuse(Reason::Loading, line));
    }
    if card.epoch != epoch {
        let line = format!("the draft is attached to epoch {:016x}, the target is {epoch:016x}", card.epoch);
        return Err(refuse(Reason::StaleEpoch, line));
    }
    if card.fingerprint != fingerprint {
        let line =
            format!("the draft is attached to model {}, the target serves {fingerprint}", card.fingerprint);
        return Err(refuse(Reason::StaleEpoch, line));
    }
    Ok(())
}

impl Peer for DraftPeer {
    const NAME: &'static str = "draft";
    type Op = Op;
    type Item = DraftItem;
    type Out = DraftOut;
    type Frame = DraftFrame;
    type Reply = DraftReply;
    type Ready = DraftReady;

    fn name(&self) -> String {
        format!("draft {} of target {}", self.address, self.target_address)
    }

    async fn connect(&self) -> Result<Connection<Self>, Status> {
        let (epoch, fingerprint) = self.attached_to().await?;
        let channel = eyrie_wire::connect(&self.address).await?;
        let mut client = DraftClient::new(channel)
            .max_decoding_message_size(MAX_MESSAGE)
            .max_encoding_message_size(MAX_MESSAGE);
        let described = in_time("describe the draft", client.describe(DescribeDraftRequest {}));
        let card = described.await?.into_inner();
        check_card(&card, epoch, &fingerprint)?;
        let (frames, outgoing) = mpsc::channel(FRAMES);
        let first = DraftFrame { hello: Some(hello(self.boot_id, epoch, &fingerprint)), items: Vec::new() };
        // The channel is empty: the first frame always fits.
        let _ = frames.try_send(first);
        let rounds = client.rounds(ReceiverStream::new(outgoing));
        let mut replies = in_time("open rounds at the draft", rounds).await?.into_inner();
        let greeting = in_time("the draft's hello", replies.message()).await?;
        check_hello(Self::NAME, greeting.and_then(|reply| reply.hello), epoch)?;
        Ok(Connection { frames, replies, ready: DraftReady { epoch, card: Arc::new(card) } })
    }

    async fn obsolete(&self, ready: &DraftReady) -> String {
        let mut target = self.target.clone();
        let epoch = ready.epoch;
        let moved_on =
            |state: &State<TargetReady>| state.connected().is_some_and(|target| target.epoch != epoch);
        match target.wait_for(moved_on).await {
            Ok(_) => "the target has restarted".to_owned(),
            Err(_) => "the gateway stops".to_owned(),
        }
    }

    fn item(seq: u64, op: Op) -> DraftItem {
        DraftItem { seq, op: Some(op) }
    }

    fn close() -> Op {
        Op::Close(CloseDraft {})
    }

    /// An item that asks nothing is refused, by the same engine that proposes and in its turn.
    fn probe() -> Option<DraftItem> {
        Some(DraftItem { seq: 0, op: None })
    }

    fn item_seq(item: &DraftItem) -> u64 {
        item.seq
    }

    fn item_bytes(item: &DraftItem) -> usize {
        match &item.op {
            Some(Op::Propose(propose)) => 64 + 4 * propose.tokens.len() + 32 * propose.features.len(),
            Some(Op::Close(_)) | None => 64,
        }
    }

    fn frame(items: Vec<DraftItem>) -> DraftFrame {
        DraftFrame { hello: None, items }
    }

    fn outs(reply: DraftReply) -> Vec<DraftOut> {
        reply.outs
    }

    fn out_seq(out: &DraftOut) -> u64 {
        out.seq
    }
}
