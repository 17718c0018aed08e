//! What differs between the streams to the target and to the draft.

use std::future::Future;
use std::time::Duration;

use eyrie_wire::v1::Hello;
use eyrie_wire::{PROTOCOL_VERSION, Reason, refuse};
use tokio::sync::mpsc;
use tonic::{Status, Streaming};

/// Longest wait for one answer while a stream is being made.
const HANDSHAKE: Duration = Duration::from_secs(5);

/// Frames handed to the transport that it has not sent yet.
pub(super) const FRAMES: usize = 4;

/// A service that speaks Rounds.
pub(crate) trait Peer: Send + Sync + Sized + 'static {
    /// For messages: "target" or "draft".
    const NAME: &'static str;
    /// What one item asks.
    type Op: Send + 'static;
    type Item: Send + 'static;
    type Out: Send + 'static;
    type Frame: Send + 'static;
    type Reply: Send + 'static;
    /// What is known once the stream is up.
    type Ready: Clone + Send + Sync + 'static;

    /// Which one it is, for logs.
    fn name(&self) -> String;

    /// Makes the stream, both Hellos exchanged.
    fn connect(&self) -> impl Future<Output = Result<Connection<Self>, Status>> + Send;

    /// Resolves, with the reason, when a stream that works has to be made again nevertheless.
    fn obsolete(&self, ready: &Self::Ready) -> impl Future<Output = String> + Send;

    fn item(seq: u64, op: Self::Op) -> Self::Item;
    fn close() -> Self::Op;
    /// An item that a peer able to serve rounds answers, with no effect on any sequence, where there is one.
    fn probe() -> Option<Self::Item>;
    fn item_seq(item: &Self::Item) -> u64;
    /// About how many bytes the item takes in a frame.
    fn item_bytes(item: &Self::Item) -> usize;
    fn frame(items: Vec<Self::Item>) -> Self::Frame;
    fn outs(reply: Self::Reply) -> Vec<Self::Out>;
    fn out_seq(out: &Self::Out) -> u64;
}

/// A stream that is up.
pub(crate) struct Connection<P: Peer> {
    pub(super) frames: mpsc::Sender<P::Frame>,
    pub(super) replies: Streaming<P::Reply>,
    pub(super) ready: P::Ready,
}

/// Our first message.
pub(super) fn hello(boot_id: u64, epoch: u64, fingerprint: &str) -> Hello {
    Hello { protocol_version: PROTOCOL_VERSION, boot_id, epoch, fingerprint: fingerprint.to_owned() }
}

/// Checks the peer's first message.
pub(super) fn check_hello(peer: &str, hello: Option<Hello>, epoch: u64) -> Result<(), Status> {
    let Some(hello) = hello else {
        return Err(refuse(Reason::ProtocolVersion, format!("the {peer}'s first frame carries no hello")));
    };
    if hello.protocol_version != PROTOCOL_VERSION {
        let given = hello.protocol_version;
        let line = format!("the {peer} speaks protocol version {given}, this gateway {PROTOCOL_VERSION}");
        return Err(refuse(Reason::ProtocolVersion, line));
    }
    if hello.epoch != epoch {
        let line = format!("the {peer} answers for epoch {:016x}, expected {epoch:016x}", hello.epoch);
        return Err(refuse(Reason::StaleEpoch, line));
    }
    Ok(())
}

/// `answer`, but not later than a handshake may take.
pub(super) async fn in_time<T>(
    what: &str,
    answer: impl Future<Output = Result<T, Status>> + Send,
) -> Result<T, Status> {
    tokio::time::timeout(HANDSHAKE, answer).await.unwrap_or_else(|_| {
        let line = format!("{what}: no answer within {} s", HANDSHAKE.as_secs());
        Err(refuse(Reason::Unreachable, line))
    })
}
