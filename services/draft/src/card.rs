//! What the service says about itself.

use std::sync::atomic::Ordering::Relaxed;

use eyrie_checkpoint::{DraftCheckpoint, EmbedSource};
use eyrie_region::mapping_usage;
use eyrie_wire::v1::{DraftCard, TargetLease};
use eyrie_wire::{Address, PROTOCOL_VERSION};

use crate::DraftOptions;
use crate::state::{Memory, Standing};

/// The one kind of head that loads, whatever name its file gives it.
const ARCHITECTURE: &str = "eagle3-llama";

/// The part of the card that the head's files decide.
#[derive(Debug, Clone)]
pub(crate) struct HeadCard {
    name: String,
    architecture: String,
    draft_vocab_size: u32,
    trained_length: u32,
    max_draft_tokens: u32,
    own_bytes: u64,
}

impl HeadCard {
    pub(crate) fn new(options: &DraftOptions, checkpoint: &DraftCheckpoint) -> Self {
        let config = checkpoint.config();
        Self {
            name: options.model.name(),
            architecture: ARCHITECTURE.to_owned(),
            draft_vocab_size: config.draft_vocab_size as u32,
            trained_length: config.max_position_embeddings as u32,
            max_draft_tokens: options.max_draft_tokens as u32,
            own_bytes: own_bytes(checkpoint),
        }
    }

    /// The card with what is held of each target. Reads `/proc/self/smaps`: blocking.
    pub(crate) fn card(self, targets: Vec<(Address, Standing)>) -> DraftCard {
        DraftCard {
            protocol_version: PROTOCOL_VERSION,
            name: self.name,
            architecture: self.architecture,
            draft_vocab_size: self.draft_vocab_size,
            trained_length: self.trained_length,
            max_draft_tokens: self.max_draft_tokens,
            own_bytes: self.own_bytes,
            pid: std::process::id(),
            targets: targets.into_iter().map(target_lease).collect(),
        }
    }
}

fn target_lease((address, standing): (Address, Standing)) -> TargetLease {
    let address = address.to_string();
    let lease = match standing {
        Ok(lease) => lease,
        Err(because) => return TargetLease { address, because, ..Default::default() },
    };
    let mut told = TargetLease {
        address,
        attached: true,
        epoch: lease.epoch,
        fingerprint: lease.fingerprint.clone(),
        sequences: lease.sequences.load(Relaxed),
        aux_rule: lease.aux_rule.clone(),
        ..Default::default()
    };
    match &lease.memory {
        Memory::Copied { bytes } => {
            told.kind = "copy".to_owned();
            told.copied_bytes = *bytes;
        }
        Memory::Mapped { region, bytes, kind } => {
            told.kind = kind.to_string();
            // A head that owns both tables lets the mapping go.
            if let Some(region) = region.upgrade() {
                told.mapped_bytes = *bytes;
                match mapping_usage(region.as_ref()) {
                    Ok(usage) => told.mapped_private_dirty = usage.private_dirty,
                    // The kernel's account has no pages of a device.
                    Err(_) if region.host().is_none() => {}
                    Err(error) => tracing::warn!("mapped memory cannot be accounted for: {error}"),
                }
            }
        }
    }
    told
}

/// Bytes of the head's tensors in this process; an embedding in the file is not loaded where the target's is used.
fn own_bytes(checkpoint: &DraftCheckpoint) -> u64 {
    let shares_embed = checkpoint.embed_source() == EmbedSource::Target;
    let own = checkpoint.index().entries().iter();
    own.filter(|tensor| !(shares_embed && tensor.name.ends_with("embed_tokens.weight")))
        .map(|t| t.bytes())
        .sum()
}
