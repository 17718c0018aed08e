//! Leases on the shared memory: one for each open Attach stream.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use eyrie_region::{FdDoor, Importer, LeaseId, RegionKind, Token};
use eyrie_service::Drain;
use eyrie_wire::v1::{LeaseFrame, LeaseGrant};
use eyrie_wire::{Reason, check_version, first_frame, grant_to_wire, refuse, ring_to_wire};
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

use super::Service;
use crate::engine::Exports;
use crate::state::State;

/// Longest holder name, in characters.
const MAX_HOLDER: usize = 64;

/// A lease that ends, with its offer at the door, when dropped.
struct Held {
    state: Arc<State>,
    drain: Drain,
    id: LeaseId,
    /// `None` in a remote lease.
    offer: Option<Token>,
}

impl Drop for Held {
    fn drop(&mut self) {
        if let (Some(token), Some(door)) = (&self.offer, self.state.door()) {
            door.revoke(token);
        }
        self.state.leases.drop_lease(self.id);
        let (state, id) = (Arc::clone(&self.state), self.id);
        // A task of the service, so that a stop waits for it.
        self.drain.spawn(async move { off_the_runtime(move || state.importers.left(id)).await });
    }
}

impl Service {
    /// Grants a lease, which takes up `room`, and holds it until the importer ends its half of the stream. At a stop this
    /// half ends first, which asks the importer to unmap; a remote holder has nothing mapped and is not waited for.
    pub(super) fn lease(
        self,
        mut frames: Streaming<LeaseFrame>,
        room: OwnedSemaphorePermit,
    ) -> super::Replies<LeaseGrant> {
        let (grants, receiver) = mpsc::channel(1);
        let drain = self.drain.clone();
        drain.spawn(async move {
            let _room = room;
            let held = match self.grant(&mut frames).await {
                Ok((grant, held)) => {
                    let _ = grants.send(Ok(grant)).await;
                    held
                }
                Err(status) => {
                    let _ = grants.send(Err(status)).await;
                    return;
                }
            };
            let ended = async { while let Ok(Some(_)) = frames.message().await {} };
            tokio::pin!(ended);
            tokio::select! {
                () = &mut ended => {}
                () = grants.closed() => {}
                () = self.drain.stopped() => {
                    drop(grants);
                    if held.offer.is_some() {
                        ended.await;
                    }
                }
            }
            tracing::info!(lease = held.id.get(), "lease ended");
        });
        Box::pin(ReceiverStream::new(receiver))
    }

    async fn grant(&self, frames: &mut Streaming<LeaseFrame>) -> Result<(LeaseGrant, Held), Status> {
        let first = first_frame(frames).await?;
        let first = first.ok_or_else(|| refuse(Reason::InvalidArgument, "a lease frame must come first"))?;
        check_version("protocol_version", first.protocol_version)?;
        check_holder(&first.holder)?;
        let (Some(exports), Some(door)) = (self.state.exports(), self.state.door()) else {
            return Err(refuse(Reason::Unreachable, "the model is loading or the target is stopping"));
        };
        if !first.remote {
            check_kinds(exports.grant.kind, &first.kinds)?;
        }
        tracing::info!(holder = first.holder, pid = first.pid, remote = first.remote, "lease granted");
        self.state.gauges.draft_attached();
        let id = self.state.leases.grant(first.holder.clone(), first.pid, first.remote);
        let (state, drain) = (Arc::clone(&self.state), self.drain.clone());
        let mut held = Held { state, drain, id, offer: None };
        if !first.remote {
            let token = self.offer(exports, &door, id, first).await;
            held.offer = Some(token.map_err(|e| refuse(Reason::Internal, format!("granting a lease: {e}")))?);
        }
        let grant = &exports.grant;
        let reply = LeaseGrant {
            lease_id: id.get(),
            epoch: self.state.epoch.get(),
            fingerprint: self.state.fingerprint().to_owned(),
            door: held.offer.map_or_else(String::new, |_| door.path().to_string_lossy().into_owned()),
            token: held.offer.map_or_else(Vec::new, |token| token.as_bytes().to_vec()).into(),
            weights: Some(grant_to_wire(grant)),
            ring: ring_to_wire(grant),
            aux_layers: self.state.plan.capture.clone(),
            hidden_size: self.state.hidden_size(),
            vocab_size: self.state.plan.vocab,
            context_length: self.state.plan.context,
            layers: self.state.layers(),
        };
        Ok((reply, held))
    }

    /// Lets the holder fetch the descriptors, which the ledger knows of before it can.
    async fn offer(
        &self,
        exports: &Exports,
        door: &FdDoor,
        id: LeaseId,
        holder: LeaseFrame,
    ) -> Result<Token, Box<dyn std::error::Error>> {
        let token = Token::random()?;
        let importer = Importer::new(holder.pid, holder.holder, &exports.fds)?;
        let state = Arc::clone(&self.state);
        off_the_runtime(move || state.importers.entered(id, importer)).await;
        let fds: Result<Vec<OwnedFd>, _> = exports.fds.iter().map(OwnedFd::try_clone).collect();
        door.offer(token, fds?)?;
        Ok(token)
    }
}

/// Does what reads and writes files where it holds nobody up.
async fn off_the_runtime(work: impl FnOnce() + Send + 'static) {
    // Fails only as the runtime ends.
    let _ = tokio::task::spawn_blocking(work).await;
}

/// Memory of a kind that the holder does not map would be mapped in vain, or against its will.
fn check_kinds(kind: RegionKind, accepted: &[String]) -> Result<(), Status> {
    if accepted.is_empty() || accepted.iter().any(|accepted| accepted == kind.as_str()) {
        return Ok(());
    }
    // Kinds that this target does not know are not repeated: they may be anything.
    let known: Vec<&str> =
        accepted.iter().filter_map(|name| name.parse::<RegionKind>().ok()).map(RegionKind::as_str).collect();
    let advice = match kind {
        RegionKind::CudaIpc => {
            "start the draft with --allow-writable-ipc, or the target with --share cuda_vmm"
        }
        _ => "run target and draft on the same device, or the draft with --shared-weights target",
    };
    let message = format!("memory is shared by {kind}, the holder maps {}: {advice}", known.join(", "));
    Err(refuse(Reason::Unsupported, message))
}

/// The name goes to terminals and logs of others.
fn check_holder(holder: &str) -> Result<(), Status> {
    let printable = |c: char| c == ' ' || c.is_ascii_graphic();
    let refuse = |given: String| {
        let message = format!("holder must be 1 to {MAX_HOLDER} printable ASCII characters, given {given}");
        Err(refuse(Reason::InvalidArgument, message))
    };
    match holder.len() {
        0 => refuse("none".to_owned()),
        length if length > MAX_HOLDER => refuse(format!("{length} bytes")),
        _ if !holder.chars().all(printable) => refuse(format!("{holder:?}")),
        _ => Ok(()),
    }
}
