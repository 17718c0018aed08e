//! What requests leave behind: nothing.

use std::time::{Duration, Instant};

use eyrie_wire::v1::draft_client::DraftClient;
use eyrie_wire::v1::generation_client::GenerationClient;
use eyrie_wire::v1::target_client::TargetClient;
use eyrie_wire::v1::{
    DescribeDraftRequest, DescribeRequest, DraftCard, GetModelRequest, LoadReport, LoadRequest, ModelCard,
};
use tonic::Status;

use crate::fleet::PATIENCE;

/// How busy the target is.
///
/// # Errors
/// It does not answer.
pub async fn load(target: &str) -> Result<LoadReport, Status> {
    let channel = eyrie_wire::connect(&target.parse().expect("an address")).await?;
    Ok(TargetClient::new(channel).load(LoadRequest {}).await?.into_inner())
}

/// What the target says about itself.
///
/// # Errors
/// It does not answer.
pub async fn target_card(target: &str) -> Result<ModelCard, Status> {
    let channel = eyrie_wire::connect(&target.parse().expect("an address")).await?;
    Ok(TargetClient::new(channel).describe(DescribeRequest {}).await?.into_inner())
}

/// What the draft says about itself.
///
/// # Errors
/// It does not answer.
pub async fn draft_card(draft: &str) -> Result<DraftCard, Status> {
    let channel = eyrie_wire::connect(&draft.parse().expect("an address")).await?;
    Ok(DraftClient::new(channel).describe(DescribeDraftRequest {}).await?.into_inner())
}

/// Sequences that the gateway has at its peers.
async fn at_peers(gateway: &str) -> Result<u32, Status> {
    let channel = eyrie_wire::connect(&gateway.parse().expect("an address")).await?;
    let model = GenerationClient::new(channel).get_model(GetModelRequest {}).await?.into_inner();
    Ok(model.peers.iter().map(|peer| peer.sequences).sum())
}

/// What sequences and peers hold.
#[derive(Debug, Default, PartialEq, Eq)]
struct Held {
    running: u32,
    waiting: u32,
    kv_used: u64,
    aux_bytes: u64,
    /// Rounds streams at the target: one a gateway.
    streams: u32,
    /// Leases at the target: one an attached draft.
    leases: u32,
    draft_sequences: u32,
    /// As the gateway counts them, at every peer.
    gateway_sequences: u32,
}

impl Held {
    async fn at(gateway: &str, target: &str, draft: Option<&str>) -> Result<Self, Status> {
        let LoadReport { running, waiting, kv_used, aux_bytes, streams, leases, .. } = load(target).await?;
        let draft_sequences = match draft {
            Some(draft) => draft_card(draft).await?.targets.iter().map(|lease| lease.sequences).sum(),
            None => 0,
        };
        let gateway_sequences = at_peers(gateway).await?;
        Ok(Self { running, waiting, kv_used, aux_bytes, streams, leases, draft_sequences, gateway_sequences })
    }
}

/// Waits until nothing of any request is left at a gateway, and at the target and the draft that serve it alone: no
/// sequence, page or feature row but what the prefix cache keeps, and no stream or lease of a peer that is gone.
pub async fn at_rest(gateway: &str, target: &str, draft: Option<&str>) {
    let rest = Held { streams: 1, leases: u32::from(draft.is_some()), ..Held::default() };
    let started = Instant::now();
    loop {
        let held = Held::at(gateway, target, draft).await;
        if held.as_ref().is_ok_and(|held| *held == rest) {
            return;
        }
        assert!(started.elapsed() < PATIENCE, "expected {rest:?}, still {held:?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
