//! Embedding and head without shared memory: read from the target, or built from a folder of the same model.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use eyrie_checkpoint::{CheckpointError, TargetCheckpoint};
use eyrie_model::{Backing, ModelError, SharedWeights};
use eyrie_region::{CPU, Grant, MemfdBuilder, RegionError, RegionKind, TensorGrant};
use eyrie_wire::v1::target_client::TargetClient;
use eyrie_wire::v1::{FileChunk, ReadSharedRequest};
use tokio::sync::Mutex;
use tokio::task::{JoinError, spawn_blocking};
use tonic::transport::Channel;
use tonic::{Status, Streaming};

/// How long the target may take for the next chunk.
const CHUNK_TIMEOUT: Duration = Duration::from_secs(5);
/// How often the progress of a copy is logged.
const REPORT_EVERY: Duration = Duration::from_secs(2);

/// Why there is no copy.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CopyError {
    #[error("reading shared weights from the target: {}", .0.message())]
    Read(Status),
    #[error("reading shared weights from the target: no more bytes within {} s", CHUNK_TIMEOUT.as_secs())]
    Silent,
    #[error("reading shared weights from the target: it granted {granted} bytes and sent {sent}")]
    Length { granted: u64, sent: u64 },
    #[error("copy of shared weights: {0}")]
    Region(#[from] RegionError),
    #[error("copy of shared weights: {0}")]
    Model(#[from] ModelError),
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    #[error("{folder}: tensor {tensor} is not the target's: {what}")]
    OtherModel { folder: String, tensor: String, what: String },
    #[error("copying shared weights failed: {0}")]
    Task(#[from] JoinError),
}

impl From<Status> for CopyError {
    fn from(status: Status) -> Self {
        Self::Read(status)
    }
}

/// The private copy. It is kept for the next lease, and targets of the same model share it.
#[derive(Debug, Default)]
pub(crate) struct CopyStore(Mutex<Option<SharedWeights>>);

impl CopyStore {
    /// A copy of what `grant` describes, streamed from the target unless it is held already.
    pub(super) async fn read(
        &self,
        client: &mut TargetClient<Channel>,
        grant: &Grant,
    ) -> Result<SharedWeights, CopyError> {
        let mut held = self.0.lock().await;
        if let Some(copy) = held.as_ref().filter(|copy| differing(copy, grant).is_none()) {
            return Ok(copy.clone());
        }
        // Another model's: two would not be needed at the same time for longer than this takes.
        *held = None;
        let copy = stream(client, grant).await?;
        Ok(held.insert(copy).clone())
    }

    /// The same weights from the checkpoint in `folder`, refused where they are not what `grant` describes.
    pub(super) async fn build(&self, folder: &Path, grant: &Grant) -> Result<SharedWeights, CopyError> {
        let mut held = self.0.lock().await;
        let copy = match held.clone() {
            Some(copy) => copy,
            None => {
                let (path, epoch) = (folder.to_owned(), grant.epoch);
                let build = move || -> Result<_, CopyError> {
                    Ok(SharedWeights::build(&TargetCheckpoint::open(&path)?, Backing::Memfd, epoch)?)
                };
                held.insert(spawn_blocking(build).await??).clone()
            }
        };
        match differing(&copy, grant) {
            None => Ok(copy),
            Some((tensor, what)) => {
                Err(CopyError::OtherModel { folder: folder.display().to_string(), tensor, what })
            }
        }
    }
}

/// The first granted tensor that `copy` holds otherwise, and in what.
fn differing(copy: &SharedWeights, grant: &Grant) -> Option<(String, String)> {
    let differs = |wanted: &TensorGrant| {
        let Some(own) = copy.grant().tensor(&wanted.name) else {
            return Some("the copy has none of that name".to_owned());
        };
        let form = |t: &TensorGrant| format!("{} {} {:?}", t.dtype.to_ascii_lowercase(), t.layout, t.shape);
        if form(own) != form(wanted) {
            return Some(format!("it must be {}, given {}", form(wanted), form(own)));
        }
        (own.checksum != wanted.checksum).then(|| "its checksum differs".to_owned())
    };
    grant.tensors.iter().find_map(|wanted| Some((wanted.name.clone(), differs(wanted)?)))
}

async fn stream(client: &mut TargetClient<Channel>, grant: &Grant) -> Result<SharedWeights, CopyError> {
    let bytes = grant.bytes;
    tracing::info!(bytes, "copying embedding and head from the target");
    // Allocating takes the kernel as long as zeroing all pages does.
    let memory = spawn_blocking(move || MemfdBuilder::new("eyrie-weights-copy", bytes)).await??;
    let chunks = client.read_shared(ReadSharedRequest { epoch: grant.epoch.get() }).await?.into_inner();
    let memory = fill(memory, chunks, bytes).await?;
    // What lies on a GPU there is host memory here, and nothing is shared by a handle.
    let (kind, device) = (RegionKind::Memfd, CPU.to_owned());
    let grant = Grant { kind, device, ipc: None, ring_payload: None, ..grant.clone() };
    let verify = move || -> Result<_, CopyError> {
        let region = Arc::new(memory.seal()?);
        Ok(SharedWeights::import(region, &grant, grant.epoch)?)
    };
    spawn_blocking(verify).await?
}

async fn fill(
    mut memory: MemfdBuilder,
    mut chunks: Streaming<FileChunk>,
    bytes: u64,
) -> Result<MemfdBuilder, CopyError> {
    let (mut filled, mut reported) = (0, Instant::now());
    while let Some(chunk) = next(&mut chunks).await? {
        let end = filled + chunk.data.len();
        let Some(place) = memory.bytes_mut().get_mut(filled..end) else {
            return Err(CopyError::Length { granted: bytes, sent: end as u64 });
        };
        place.copy_from_slice(&chunk.data);
        filled = end;
        if reported.elapsed() >= REPORT_EVERY {
            reported = Instant::now();
            tracing::info!(copied_bytes = filled, bytes, "copying embedding and head");
        }
    }
    if filled as u64 == bytes {
        Ok(memory)
    } else {
        Err(CopyError::Length { granted: bytes, sent: filled as u64 })
    }
}

async fn next(chunks: &mut Streaming<FileChunk>) -> Result<Option<FileChunk>, CopyError> {
    let chunk = tokio::time::timeout(CHUNK_TIMEOUT, chunks.message()).await;
    Ok(chunk.map_err(|_| CopyError::Silent)??)
}
