//! The draft's side of the link: it counts only while attached to the very boot of the target that
//! this gateway is connected to, because feature references name slots of that boot's ring.

use std::sync::Arc;

use eyrie_wire::v1::draft_client::DraftClient;
use eyrie_wire::v1::draft_item::Op;
use eyrie_wire::v1::{
    CloseDraft, DescribeDraftRequest, DraftCard, DraftFrame, DraftItem, DraftOut, DraftReply, TargetLease,
};
use eyrie_wire::{Address, Dialer, MAX_MESSAGE, Reason, refuse};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use super::peer::{Connection, FRAMES, Peer, check_hello, hello, in_time};
use super::{State, TargetReady, Watched};

/// The draft that is connected.
#[derive(Debug, Clone)]
pub(crate) struct DraftReady {
    pub(crate) card: Arc<DraftCard>,
    /// What it holds of our target.
    pub(crate) lease: Arc<TargetLease>,
}

/// How the draft is reached, for the sequences of one target.
#[derive(Debug)]
pub(crate) struct DraftPeer {
    dialer: Dialer,
    address: Address,
    boot_id: u64,
    target_address: Address,
    target: Watched<State<TargetReady>>,
}

impl DraftPeer {
    pub(crate) fn new(
        dialer: Dialer,
        address: Address,
        boot_id: u64,
        target_address: Address,
        target: Watched<State<TargetReady>>,
    ) -> Self {
        Self { dialer, address, boot_id, target_address, target }
    }

    /// The target, once it is connected.
    async fn attached_to(&self) -> TargetReady {
        self.target.wait_for(|state| state.connected().cloned()).await
    }
}

/// What this draft holds of this target, or one line of why it cannot serve it yet.
fn lease_of(card: &DraftCard, epoch: u64, fingerprint: &str) -> Result<TargetLease, Status> {
    let attached = || card.targets.iter().filter(|lease| lease.attached);
    let Some(lease) = attached().find(|lease| lease.epoch == epoch) else {
        if attached().next().is_none() {
            let why: Vec<_> = card.targets.iter().map(|lease| lease.because.as_str()).collect();
            let line = format!("the draft is not attached: {}", why.join("; "));
            return Err(refuse(Reason::Loading, line));
        }
        let epochs: Vec<_> = attached().map(|lease| format!("{:016x}", lease.epoch)).collect();
        let epochs = epochs.join(", ");
        let line = format!("the draft is attached to epoch {epochs}, the target is {epoch:016x}");
        return Err(refuse(Reason::StaleEpoch, line));
    };
    if lease.fingerprint != fingerprint {
        let line =
            format!("the draft is attached to model {}, the target serves {fingerprint}", lease.fingerprint);
        return Err(refuse(Reason::StaleEpoch, line));
    }
    Ok(lease.clone())
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
        let TargetReady { epoch, served } = self.attached_to().await;
        let fingerprint = &served.card.fingerprint;
        let channel = self.dialer.connect(&self.address).await?;
        let mut client = DraftClient::new(channel)
            .max_decoding_message_size(MAX_MESSAGE)
            .max_encoding_message_size(MAX_MESSAGE);
        let (frames, outgoing) = mpsc::channel(FRAMES);
        let first = DraftFrame { hello: Some(hello(self.boot_id, epoch, fingerprint)), items: Vec::new() };
        // The channel is empty: the first frame always fits.
        let _ = frames.try_send(first);
        let rounds = client.rounds(ReceiverStream::new(outgoing));
        let mut replies = in_time("open rounds at the draft", rounds).await?.into_inner();
        let greeting = in_time("the draft's hello", replies.message()).await?;
        check_hello(Self::NAME, greeting.and_then(|reply| reply.hello), epoch)?;
        // Only now: the draft measures its memory for it, and one that is attached to other targets refuses the hello.
        let described = in_time("describe the draft", client.describe(DescribeDraftRequest {}));
        let card = described.await?.into_inner();
        let lease = lease_of(&card, epoch, fingerprint)?;
        Ok(Connection { frames, replies, ready: DraftReady { card: Arc::new(card), lease: Arc::new(lease) } })
    }

    async fn obsolete(&self, ready: &DraftReady) -> String {
        let other = |target: &&TargetReady| target.epoch != ready.lease.epoch;
        self.target.wait_for(|state| state.connected().filter(other).map(drop)).await;
        "the target has restarted".to_owned()
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
