//! What the service says about itself.

use std::path::Path;
use std::sync::Arc;

use eyrie_checkpoint::{DraftCheckpoint, EmbedSource};
use eyrie_region::mapping_usage;
use eyrie_wire::PROTOCOL_VERSION;
use eyrie_wire::v1::DraftCard;

use crate::DraftOptions;
use crate::state::Lease;

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
            name: folder_name(&options.model_dir),
            architecture: ARCHITECTURE.to_owned(),
            draft_vocab_size: config.draft_vocab_size as u32,
            trained_length: config.max_position_embeddings as u32,
            max_draft_tokens: options.max_draft_tokens as u32,
            own_bytes: own_bytes(checkpoint),
        }
    }

    /// The card under a lease, or without one and why. Reads `/proc/self/smaps`: blocking.
    pub(crate) fn card(self, lease: Result<Arc<Lease>, String>, sequences: u32) -> DraftCard {
        let mut card = DraftCard {
            protocol_version: PROTOCOL_VERSION,
            name: self.name,
            architecture: self.architecture,
            draft_vocab_size: self.draft_vocab_size,
            trained_length: self.trained_length,
            max_draft_tokens: self.max_draft_tokens,
            own_bytes: self.own_bytes,
            sequences,
            pid: std::process::id(),
            ..Default::default()
        };
        let lease = match lease {
            Ok(lease) => lease,
            Err(because) => {
                card.not_attached_because = because;
                return card;
            }
        };
        card.attached = true;
        card.epoch = lease.epoch;
        card.fingerprint = lease.fingerprint.clone();
        card.aux_rule = lease.aux_rule.clone();
        // A head that owns both tables lets the mapping go.
        if let Some(region) = lease.mapped.upgrade() {
            card.mapped_bytes = lease.mapped_bytes;
            card.mapped_kind = region.kind().to_string();
            match mapping_usage(region.as_ref()) {
                Ok(usage) => card.mapped_private_dirty = usage.private_dirty,
                Err(error) => tracing::warn!("mapped memory cannot be accounted for: {error}"),
            }
        }
        card
    }
}

fn folder_name(dir: &Path) -> String {
    let absolute = dir.canonicalize();
    let dir = absolute.as_deref().unwrap_or(dir);
    dir.file_name().unwrap_or(dir.as_os_str()).to_string_lossy().into_owned()
}

/// Bytes of the head's tensors in this process; an embedding in the file is not loaded where the target's is used.
fn own_bytes(checkpoint: &DraftCheckpoint) -> u64 {
    let shares_embed = checkpoint.embed_source() == EmbedSource::Target;
    let own = checkpoint.index().entries().iter();
    own.filter(|tensor| !(shares_embed && tensor.name.ends_with("embed_tokens.weight")))
        .map(|t| t.bytes())
        .sum()
}
