//! The embedding and the head in one region that target and draft both use where it lies.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use eyrie_checkpoint::{Bytes, Layout, TargetCheckpoint, WeightView, model_tensors};
use eyrie_kernels::{Backend, Embedding, Linear};
use eyrie_region::{
    ALIGN, CPU, DeviceSpanMut, Epoch, Gpu, Grant, GrantError, Ipc, IpcBuilder, Local, Memfd, MemfdBuilder,
    Region, RegionError, TensorGrant, Vmm, VmmBuilder,
};

use crate::error::{ModelError, Result};

/// Name of the embedding in a grant.
pub const EMBED: &str = "embed_tokens";
/// Name of the head in a grant.
pub const HEAD: &str = "lm_head";

/// Name of the memory, for messages.
const NAME: &str = "eyrie-shared-weights";

/// A granted layout: row-major.
const PLAIN: &str = "plain";
/// A granted layout: the kernels' tiles of 16 outputs.
const TILED: &str = "tile16";

/// What memory holds the shared weights. Memory of a GPU comes with the backend that computes there.
#[derive(Debug, Clone)]
pub enum Backing<'a> {
    /// A sealed memfd, exportable to other processes.
    Memfd,
    /// Memory of this process only.
    Local,
    /// Memory of a GPU, exportable to other processes by descriptor and read-only there.
    CudaVmm(Arc<Gpu>, &'a Backend),
    /// Memory of a GPU, exportable to other processes by handle and writable there.
    CudaIpc(Arc<Gpu>, &'a Backend),
}

/// Embedding `[V, H]` row-major as published, and head `[V, H]`, once in memory: on the CPU in its kernels' tiles (as
/// published when not bf16), on a GPU as published. Clones share it.
#[derive(Debug, Clone)]
pub struct SharedWeights {
    export: Export,
    grant: Grant,
    region: Arc<dyn Region>,
    embed: WeightView,
    head: WeightView,
}

/// What the memory is exported by.
#[derive(Debug, Clone)]
enum Export {
    /// Memory of this process, or of another that exports it.
    No,
    Memfd(Arc<Memfd>),
    Vmm(Arc<Vmm>),
    Ipc(Arc<Ipc>),
}

/// One tensor to be placed: its published view and the layout it gets in the region.
struct Placement {
    name: &'static str,
    view: WeightView,
    layout: Layout,
    offset: usize,
    bytes: usize,
}

impl SharedWeights {
    /// Copies embedding and head of `checkpoint` once, straight into memory of the wanted kind, or makes them there, seals
    /// it and checksums it. A tied head lies where the embedding does, unless its layout differs. `epoch` is the boot's.
    pub fn build(checkpoint: &TargetCheckpoint, backing: Backing<'_>, epoch: Epoch) -> Result<Self> {
        let tensors = model_tensors(checkpoint.config());
        let embed = checkpoint.linear(&tensors.embed.name)?;
        let head = checkpoint.linear(&tensors.head.name)?;
        let tiled = matches!(backing, Backing::Memfd | Backing::Local);
        let is_tied = tensors.head == tensors.embed;
        let embed = Placement::at(EMBED, embed, 0, false)?;
        let start = if is_tied && !tiled { embed.offset } else { embed.end() };
        let head = Placement::at(HEAD, head, start, tiled)?;
        let placed = [embed, head];
        let (region, export) = place(&placed, backing)?;
        Self::describe(region, export, placed, epoch)
    }

    /// Uses another process's shared weights where they are mapped. `region` is checked against every offset and
    /// checksum of `grant`; errors name the tensor or the epochs.
    pub fn import(region: Arc<dyn Region>, grant: &Grant, expected: Epoch) -> Result<Self> {
        grant.verify(region.as_ref(), expected)?;
        let embed = granted_view(&region, grant, EMBED)?;
        let head = granted_view(&region, grant, HEAD)?;
        Ok(Self { export: Export::No, grant: grant.clone(), region, embed, head })
    }

    fn describe(
        region: Arc<dyn Region>,
        export: Export,
        placed: [Placement; 2],
        epoch: Epoch,
    ) -> Result<Self> {
        let tensors =
            placed.iter().map(|tensor| tensor.grant(region.as_ref())).collect::<Result<Vec<_>, _>>()?;
        let grant = Grant {
            epoch,
            export_id: 1,
            kind: region.kind(),
            bytes: region.byte_len(),
            tensors,
            ring: None,
            ring_payload: None,
            device: region.device().map_or_else(|| CPU.to_owned(), |span| span.uuid.to_string()),
            ipc: match &export {
                Export::Ipc(memory) => Some(*memory.handle()),
                Export::No | Export::Memfd(_) | Export::Vmm(_) => None,
            },
        };
        let embed = granted_view(&region, &grant, EMBED)?;
        let head = granted_view(&region, &grant, HEAD)?;
        Ok(Self { export, grant, region, embed, head })
    }

    /// What an importer needs to map and verify these weights.
    pub fn grant(&self) -> &Grant {
        &self.grant
    }

    /// Embedding and head as granted tensors, with checksums.
    pub fn manifest(&self) -> &[TensorGrant] {
        &self.grant.tensors
    }

    /// The descriptor to pass to importers, if one stands for memory that this process exports.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        match &self.export {
            Export::Memfd(memory) => Some(memory.fd()),
            Export::Vmm(memory) => Some(memory.fd()),
            Export::No | Export::Ipc(_) => None,
        }
    }

    /// The memory both tensors lie in.
    pub fn region(&self) -> &Arc<dyn Region> {
        &self.region
    }

    /// Embedding `[V, H]`, row-major.
    pub fn embed_view(&self) -> &WeightView {
        &self.embed
    }

    /// Head `[V, H]`.
    pub fn head_view(&self) -> &WeightView {
        &self.head
    }

    /// Vocabulary size `V`.
    pub fn vocab(&self) -> usize {
        self.embed.shape[0]
    }

    /// Hidden size `Ht` of the target.
    pub fn hidden(&self) -> usize {
        self.embed.shape[1]
    }

    /// Identity of embedding and head, the same in every process and boot that serves this target.
    pub fn fingerprint(&self) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new();
        for tensor in &self.grant.tensors {
            for text in [&tensor.name, &tensor.layout, &tensor.dtype] {
                hasher.update(text.as_bytes()).update(b"\0");
            }
            for size in &tensor.shape {
                hasher.update(&size.to_le_bytes());
            }
            hasher.update(&tensor.checksum);
        }
        hasher.finalize().into()
    }

    pub(crate) fn embedding(&self, backend: &Backend) -> Result<Embedding> {
        Ok(Embedding::new(backend, &self.embed)?)
    }

    pub(crate) fn head(&self, backend: &Backend) -> Result<Linear> {
        let lies_ready = self.head.layout == Layout::Bf16Tile16 || self.region().device().is_some();
        Ok(if lies_ready { Linear::borrow(backend, &self.head)? } else { Linear::pack(backend, &self.head)? })
    }

    /// Errors unless the tensors are `[vocab, hidden]`.
    pub(crate) fn check(&self, vocab: usize, hidden: usize) -> Result<()> {
        let sizes = [
            ("embedding rows", vocab, self.embed.shape[0]),
            ("embedding width", hidden, self.embed.shape[1]),
            ("head rows", vocab, self.head.shape[0]),
            ("head width", hidden, self.head.shape[1]),
        ];
        match sizes.into_iter().find(|(_, expected, got)| expected != got) {
            Some((what, expected, got)) => Err(ModelError::Mismatch { what, expected, got }),
            None => Ok(()),
        }
    }
}

impl Placement {
    /// Places `view` at the first aligned offset from `start`, in tiles if it is bf16 and `tiled` is wanted.
    fn at(name: &'static str, view: WeightView, start: usize, tiled: bool) -> Result<Self> {
        let (layout, bytes) = match view.layout {
            Layout::Bf16 if tiled => (Layout::Bf16Tile16, Linear::tile_bytes(view.shape)),
            Layout::F32 | Layout::F16 | Layout::Bf16 => (view.layout, view.data.len()),
            other => return Err(ModelError::Unsupported { what: name, value: other.to_string() }),
        };
        Ok(Self { name, view, layout, offset: start.next_multiple_of(ALIGN), bytes })
    }

    fn end(&self) -> usize {
        self.offset + self.bytes
    }

    fn write(&self, region: &mut [u8]) -> Result<()> {
        let target = &mut region[self.offset..self.offset + self.bytes];
        match self.layout {
            Layout::Bf16Tile16 => Linear::write_tiles(&self.view, target)?,
            _ => self.view.data.write(target)?,
        }
        Ok(())
    }

    fn grant(&self, region: &dyn Region) -> Result<TensorGrant, GrantError> {
        let shape = self.view.shape.map(|size| size as u64);
        // Tiles are granted with the shape they encode, which needs no more bytes than they have.
        let dtype = self.view.layout.to_string();
        let mut tensor = TensorGrant::row_major(region, self.name, &dtype, &shape, self.offset as u64)?;
        if self.layout == Layout::Bf16Tile16 {
            tensor.layout = TILED.to_owned();
            tensor.bytes = self.bytes as u64;
            tensor.checksum = tensor.hash(region)?;
        }
        Ok(tensor)
    }
}

/// Writes `placed`, in order of their offsets, into memory of the wanted kind and ends the writing.
fn place(placed: &[Placement; 2], backing: Backing<'_>) -> Result<(Arc<dyn Region>, Export)> {
    let total = placed[1].end();
    Ok(match backing {
        Backing::Local => {
            let mut local = Local::zeroed(total);
            placed.iter().try_for_each(|tensor| tensor.write(local.bytes_mut()))?;
            (Arc::new(local), Export::No)
        }
        Backing::Memfd => {
            let mut memfd = MemfdBuilder::new(NAME, total as u64)?;
            placed.iter().try_for_each(|tensor| tensor.write(memfd.bytes_mut()))?;
            let memfd = Arc::new(memfd.seal()?);
            (memfd.clone(), Export::Memfd(memfd))
        }
        Backing::CudaVmm(gpu, backend) => {
            let mut memory = VmmBuilder::new(&gpu, NAME, total as u64)?;
            write_on_gpu(placed, backend, &mut memory, VmmBuilder::write, VmmBuilder::span_mut)?;
            let memory = Arc::new(memory.seal()?);
            (memory.clone(), Export::Vmm(memory))
        }
        Backing::CudaIpc(gpu, backend) => {
            let mut memory = IpcBuilder::new(&gpu, NAME, total as u64)?;
            write_on_gpu(placed, backend, &mut memory, IpcBuilder::write, IpcBuilder::span_mut)?;
            let memory = Arc::new(memory.seal());
            (memory.clone(), Export::Ipc(memory))
        }
    })
}

/// Writes `placed` into memory of a GPU: `write` for what was read, `span_mut` for what is made there.
fn write_on_gpu<M>(
    placed: &[Placement; 2],
    backend: &Backend,
    memory: &mut M,
    write: fn(&mut M, u64, &[u8]) -> Result<(), RegionError>,
    span_mut: fn(&mut M) -> DeviceSpanMut<'_>,
) -> Result<()> {
    for Placement { view, offset, .. } in placed {
        match &view.data {
            Bytes::Mapped { .. } => write(memory, *offset as u64, &view.bytes()?)?,
            Bytes::Made(fill) => backend.fill(fill, &mut span_mut(memory), *offset as u64)?,
        }
    }
    Ok(())
}

/// The tensor `name` of a verified grant.
fn granted_view(region: &Arc<dyn Region>, grant: &Grant, name: &'static str) -> Result<WeightView> {
    let tensor = grant.tensor(name).ok_or(ModelError::NotGranted { export_id: grant.export_id, name })?;
    let layout = match (tensor.layout.as_str(), tensor.dtype.to_ascii_lowercase().as_str()) {
        (TILED, "bf16") => Layout::Bf16Tile16,
        (PLAIN, "bf16") => Layout::Bf16,
        (PLAIN, "f16") => Layout::F16,
        (PLAIN, "f32") => Layout::F32,
        (layout, dtype) => {
            return Err(ModelError::Unsupported { what: name, value: format!("layout {layout} of {dtype}") });
        }
    };
    let &[rows, width] = tensor.shape.as_slice() else {
        return Err(ModelError::Mismatch {
            what: "rank of a granted weight",
            expected: 2,
            got: tensor.shape.len(),
        });
    };
    // Kernels read row-major only. It also bounds the sizes below: a verified grant's strides stay within its bytes.
    if tensor.strides != [width, 1] {
        let value = format!("strides {:?} of shape {:?}", tensor.strides, tensor.shape);
        return Err(ModelError::Unsupported { what: name, value });
    }
    let shape = [rows as usize, width as usize];
    let bytes = match layout {
        Layout::Bf16Tile16 => Linear::tile_bytes(shape),
        Layout::F32 => shape[0] * shape[1] * 4,
        _ => shape[0] * shape[1] * 2,
    };
    let got = tensor.bytes as usize;
    if bytes != got {
        return Err(ModelError::Mismatch { what: "bytes of a granted weight", expected: bytes, got });
    }
    let range = tensor.offset as usize..tensor.offset as usize + bytes;
    let data = Bytes::Mapped { region: Arc::clone(region), range };
    Ok(WeightView { data, layout, shape, scales: None })
}
