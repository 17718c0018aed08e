//! Does the head fit what the target grants? Decided from numbers alone, before any memory is mapped.

use eyrie_checkpoint::{AuxConvention, AuxIds, AuxIdsError, DraftConfig, aux_ids};
use eyrie_wire::PROTOCOL_VERSION;
use eyrie_wire::v1::{LeaseGrant, ModelCard};

/// Why head and target do not go together.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Mismatch {
    #[error("the target speaks protocol version {given}, this draft {PROTOCOL_VERSION}")]
    Protocol { given: u32 },
    #[error("the target captures no auxiliary states: start it with the head's capture set {wanted:?}")]
    NoCapture { wanted: Vec<usize> },
    #[error("the target captures aux layers {given:?}, the head needs {wanted:?} ({rule})")]
    AuxLayers { wanted: Vec<usize>, given: Vec<u32>, rule: String },
    #[error(transparent)]
    AuxIds(#[from] AuxIdsError),
    #[error("{field}: the target has {target}, the head was made for {head}")]
    Size { field: &'static str, target: u64, head: u64 },
    #[error("the grant is of epoch {grant:016x}, the target's card says {card:016x}")]
    Epoch { grant: u64, card: u64 },
    #[error("the grant is of model {grant}, the target's card says {card}")]
    Fingerprint { grant: String, card: String },
    #[error("the target's context_length must be at least 2, given {given}")]
    Context { given: u32 },
}

/// Checks the grant against the target's card and the head; returns the aux ids with the rule that gave them.
pub(crate) fn check(
    grant: &LeaseGrant,
    card: &ModelCard,
    head: &DraftConfig,
    convention: Option<AuxConvention>,
) -> Result<AuxIds, Mismatch> {
    if card.protocol_version != PROTOCOL_VERSION {
        return Err(Mismatch::Protocol { given: card.protocol_version });
    }
    if grant.epoch != card.epoch {
        return Err(Mismatch::Epoch { grant: grant.epoch, card: card.epoch });
    }
    if grant.fingerprint != card.fingerprint {
        let (grant, card) = (grant.fingerprint.clone(), card.fingerprint.clone());
        return Err(Mismatch::Fingerprint { grant, card });
    }
    let equal = |field, target: u32, head: usize| {
        let (target, head) = (u64::from(target), head as u64);
        if target == head { Ok(()) } else { Err(Mismatch::Size { field, target, head }) }
    };
    equal("hidden_size", grant.hidden_size, head.target_hidden_size)?;
    equal("vocab_size", grant.vocab_size, head.vocab_size)?;
    if grant.context_length < 2 {
        return Err(Mismatch::Context { given: grant.context_length });
    }
    let ids = aux_ids(head, grant.layers as usize, convention)?;
    let Some(ring) = &grant.ring else {
        return Err(Mismatch::NoCapture { wanted: ids.canonical });
    };
    if !grant.aux_layers.iter().map(|&id| id as usize).eq(ids.canonical.iter().copied()) {
        let AuxIds { canonical, rule } = ids;
        return Err(Mismatch::AuxLayers { wanted: canonical, given: grant.aux_layers.clone(), rule });
    }
    equal("values of a captured row", ring.row_width, ids.canonical.len() * head.target_hidden_size)?;
    Ok(ids)
}
