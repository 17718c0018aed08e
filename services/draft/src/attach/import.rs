//! From a grant to a head that runs on the target's memory. Blocking: it maps, checksums and packs.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::Duration;

use eyrie_checkpoint::{AuxIds, DraftCheckpoint};
use eyrie_kernels::Cpu;
use eyrie_model::{CaptureSet, Eagle3Head, ModelError, SharedWeights};
use eyrie_region::{DoorError, FdDoor, ImportedMemfd, Region, RegionError, RingError, RingReader, Token};
use eyrie_wire::v1::LeaseGrant;
use eyrie_wire::{GrantMessageError, grant_from_wire};

use crate::engine::Attachment;

/// How long the target's door may take to hand out the descriptors.
const DOOR_TIMEOUT: Duration = Duration::from_secs(5);

/// Slots a page of the draft's cache.
const PAGE_ROWS: usize = 32;

/// Why a grant that fits could not be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ImportError {
    #[error("grant: token must be 32 bytes, given {given}")]
    Token { given: usize },
    #[error("grant: no feature ring")]
    NoRing,
    #[error(transparent)]
    Grant(#[from] GrantMessageError),
    #[error("grant: descriptors must be [weights, ring], given {given}")]
    Descriptors { given: usize },
    #[error(transparent)]
    Door(#[from] DoorError),
    #[error("shared weights: {0}")]
    Region(#[from] RegionError),
    #[error("feature ring: {0}")]
    Ring(#[from] RingError),
    #[error(transparent)]
    Model(#[from] ModelError),
}

/// A head over mapped weights, ready for the engine.
#[derive(Debug)]
pub(crate) struct Imported {
    pub(crate) attachment: Attachment,
    pub(crate) mapped: Weak<dyn Region>,
    pub(crate) mapped_bytes: u64,
}

/// Fetches the descriptors of `grant`, maps and verifies them, and loads the head over them.
pub(crate) fn import(
    grant: &LeaseGrant,
    checkpoint: &DraftCheckpoint,
    aux: &AuxIds,
    cpu: &Cpu,
    cache_tokens: usize,
) -> Result<Imported, ImportError> {
    let token =
        Token::try_from(grant.token.as_ref()).map_err(|_| ImportError::Token { given: grant.token.len() })?;
    let granted = grant_from_wire(grant)?;
    let epoch = granted.epoch;
    let geometry = granted.ring.ok_or(ImportError::NoRing)?;
    let [weights, ring] = descriptors(FdDoor::fetch(Path::new(&grant.door), &token, DOOR_TIMEOUT)?)?;
    let region: Arc<dyn Region> = Arc::new(ImportedMemfd::import(weights, granted.bytes)?);
    let ring = RingReader::open(ring, geometry, epoch)?;
    let mapped = Arc::downgrade(&region);
    let shared = SharedWeights::import(region, &granted, epoch)?;
    let capture = CaptureSet::new(&aux.canonical, grant.layers as usize)?;
    let head = Eagle3Head::load(checkpoint, &capture, &shared, cpu)?;
    let cache = head.new_cache(cache_tokens, PAGE_ROWS)?;
    let (context, vocab) = (grant.context_length as usize, grant.vocab_size as usize);
    let attachment = Attachment { epoch: grant.epoch, head, cache, ring, context, vocab };
    Ok(Imported { attachment, mapped, mapped_bytes: granted.bytes })
}

fn descriptors(fds: Vec<OwnedFd>) -> Result<[OwnedFd; 2], ImportError> {
    fds.try_into().map_err(|fds: Vec<OwnedFd>| ImportError::Descriptors { given: fds.len() })
}
