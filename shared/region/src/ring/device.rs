//! A ring whose rows lie on a GPU: the stamps stay in host memory, copies go from device memory to device memory, and a
//! batch of them is waited for once.

mod protocol;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use self::protocol::{CopyQueue, Publisher, Subscriber};
use super::block::{Block, Layout};
use super::{RingError, RingGeometry, SlotRef};
use crate::{
    CudaError, DeviceBuffer, DeviceRows, DeviceSpan, Epoch, Gpu, ImportedIpc, ImportedVmm, IpcBuilder,
    IpcHandle, Region, RegionError, RegionKind, Stream, VmmBuilder, align_up,
};

/// Size of a ring on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceRingGeometry {
    /// Slots, rows a slot and values a row.
    pub ring: RingGeometry,
    /// Bytes of a value: 2 (bf16) or 4 (f32).
    pub value_bytes: u32,
}

/// What a grant says of a ring's rows on a device, beside the ring's geometry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingPayload {
    /// As in [`DeviceRingGeometry`].
    pub value_bytes: u32,
    /// What opens the rows where no descriptor does.
    pub ipc: Option<IpcHandle>,
}

impl DeviceRingGeometry {
    /// Bytes of the ring's descriptor: header and stamps.
    ///
    /// # Errors
    /// [`RingError::Geometry`] and [`RingError::ValueBytes`].
    pub fn control_len(&self) -> Result<u64, RingError> {
        Ok(self.layout()?.len)
    }

    /// Bytes of device memory for the rows.
    ///
    /// # Errors
    /// As [`control_len`](Self::control_len).
    pub fn payload_len(&self) -> Result<u64, RingError> {
        self.layout()?;
        let len = self.padded_slot().and_then(|slot| slot.checked_mul(self.ring.slots.into()));
        len.filter(|&len| isize::try_from(len).is_ok()).ok_or_else(|| self.ring.refused())
    }

    /// Bytes of a row.
    pub fn row_bytes(&self) -> u64 {
        u64::from(self.ring.row_width) * u64::from(self.value_bytes)
    }

    fn padded_slot(&self) -> Option<u64> {
        align_up(self.row_bytes().checked_mul(self.ring.slot_rows.into())?)
    }

    /// Where a row lies in the payload; slot and row must be the ring's.
    fn at(&self, slot: u32, row: u64) -> u64 {
        u64::from(slot) * self.padded_slot().unwrap_or(0) + row * self.row_bytes()
    }

    fn layout(&self) -> Result<Layout, RingError> {
        match self.value_bytes {
            2 | 4 => Layout::of_stamps(self.ring, self.value_bytes),
            given => Err(RingError::ValueBytes { given }),
        }
    }
}

/// Exported device memory that the exporter goes on writing.
#[derive(Debug)]
pub enum RingMemory {
    /// Behind a descriptor.
    Vmm(VmmBuilder),
    /// Behind a handle.
    Ipc(IpcBuilder),
}

impl RingMemory {
    /// Memory for the rows of a ring of `geometry`, shared by `kind`.
    ///
    /// # Errors
    /// [`RegionError::NotOnDevice`] for a kind of host memory, a geometry's, or why the memory could not be had.
    pub fn new(gpu: &Arc<Gpu>, kind: RegionKind, geometry: DeviceRingGeometry) -> Result<Self, RingError> {
        const NAME: &str = "feature ring";
        let len = geometry.payload_len()?;
        Ok(match kind {
            RegionKind::CudaVmm => Self::Vmm(VmmBuilder::new(gpu, NAME, len)?),
            RegionKind::CudaIpc => Self::Ipc(IpcBuilder::new(gpu, NAME, len)?),
            kind => return Err(RegionError::NotOnDevice { kind }.into()),
        })
    }

    fn span(&self) -> DeviceSpan {
        match self {
            Self::Vmm(memory) => memory.span(),
            Self::Ipc(memory) => memory.span(),
        }
    }

    /// The descriptor to be passed to importers, if one stands for the memory.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Vmm(memory) => Some(memory.fd()),
            Self::Ipc(_) => None,
        }
    }

    /// The handle to be told to importers, if one stands for the memory.
    pub fn handle(&self) -> Option<IpcHandle> {
        match self {
            Self::Vmm(_) => None,
            Self::Ipc(memory) => Some(*memory.handle()),
        }
    }
}

/// The exporter's end of a ring on a device.
#[derive(Debug)]
pub struct DeviceRingWriter {
    into: IntoPayload,
    ring: Publisher,
    fd: OwnedFd,
    epoch: Epoch,
}

impl DeviceRingWriter {
    /// Makes an empty ring over `memory`. Rows are copied on `stream`, on which they are also computed.
    ///
    /// # Errors
    /// A geometry's, [`RegionError::Length`] where `memory` is of another, [`CudaError::OtherDevice`], or why the memory for
    /// the stamps could not be had.
    pub fn create(
        memory: RingMemory,
        geometry: DeviceRingGeometry,
        epoch: Epoch,
        stream: Stream,
    ) -> Result<Self, RingError> {
        check_payload(memory.span(), geometry, &stream)?;
        let (fd, block) = Block::create("eyrie-ring", geometry.layout()?, epoch)?;
        let into = IntoPayload { memory: Arc::new(memory), stream };
        Ok(Self { into, ring: Publisher::new(block, geometry), fd, epoch })
    }

    /// The descriptor of header and stamps, to be passed to readers.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// The memory of the rows.
    pub fn memory(&self) -> &RingMemory {
        &self.into.memory
    }

    /// Its size.
    pub fn geometry(&self) -> DeviceRingGeometry {
        self.ring.geometry()
    }

    /// The boot it belongs to.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// The stream that rows are copied on.
    pub fn stream(&self) -> &Stream {
        &self.into.stream
    }

    /// What a grant says of the rows.
    pub fn payload(&self) -> RingPayload {
        RingPayload { value_bytes: self.geometry().value_bytes, ipc: self.memory().handle() }
    }

    /// Copies each of `batch` over the oldest publication and waits once for all copies; only then can any be read. Never
    /// waits for a reader.
    ///
    /// # Errors
    /// [`RingError::DeviceRows`], [`RingError::RowBytes`], [`RingError::Batch`] and [`CudaError::OtherStream`], with nothing
    /// changed; the driver's answer, and then none of the slots can be read.
    pub fn publish(&mut self, batch: &[DeviceRows<'_>]) -> Result<Vec<SlotRef>, RingError> {
        let in_order = batch.iter().try_for_each(|rows| self.into.stream.check(rows));
        in_order.map_err(RegionError::from)?;
        self.ring.publish(&self.into, batch)
    }

    /// A reader in this process, with room for `room` rows at a time, or one slot if that is more. It copies on `stream`.
    ///
    /// # Errors
    /// As [`DeviceRingReader::open`].
    pub fn reader(&self, room: u64, stream: Stream) -> Result<DeviceRingReader, RingError> {
        let fd = self.fd.try_clone().map_err(|e| RingError::Region(RegionError::Descriptor(e)))?;
        let payload = Payload::Own(Arc::clone(&self.into.memory));
        DeviceRingReader::over(fd, payload, self.geometry(), self.epoch, room, stream)
    }
}

/// Rows wanted of a publication.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotPart {
    /// The publication.
    pub published: SlotRef,
    /// First row wanted.
    pub first: u32,
    /// Rows wanted.
    pub rows: u32,
}

/// An importer's end of a ring on a device.
///
/// The mapping of the rows goes before that of the stamps: by the latter an exporter that starts anew tells whether this
/// process has let go (see [`Ledger`](crate::Ledger)).
#[derive(Debug)]
pub struct DeviceRingReader {
    from: FromPayload,
    ring: Subscriber,
}

impl DeviceRingReader {
    /// Opens the ring whose header and stamps are behind `fd` and whose rows are `payload`. It has room for `room` rows at a
    /// time, or one slot if that is more, and copies on `stream`.
    ///
    /// # Errors
    /// As [`RingReader::open`](super::RingReader::open); [`RegionError::Length`] where the payload is of another geometry,
    /// [`CudaError::OtherDevice`], or why the room could not be had.
    pub fn open(
        fd: OwnedFd,
        payload: impl Into<ImportedPayload>,
        geometry: DeviceRingGeometry,
        epoch: Epoch,
        room: u64,
        stream: Stream,
    ) -> Result<Self, RingError> {
        Self::over(fd, payload.into().0, geometry, epoch, room, stream)
    }

    fn over(
        fd: OwnedFd,
        payload: Payload,
        geometry: DeviceRingGeometry,
        epoch: Epoch,
        room: u64,
        stream: Stream,
    ) -> Result<Self, RingError> {
        check_payload(payload.span()?, geometry, &stream)?;
        let block = Block::open(fd, geometry.layout()?, epoch)?;
        let room = room.max(geometry.ring.slot_rows.into());
        let bytes = room.checked_mul(geometry.row_bytes()).ok_or_else(|| geometry.ring.refused())?;
        let staging = DeviceBuffer::zeroed(stream.gpu(), "rows read of the feature ring", bytes)?;
        let from = FromPayload { stream, staging, payload };
        Ok(Self { from, ring: Subscriber::new(block, geometry, room) })
    }

    /// Its size.
    pub fn geometry(&self) -> DeviceRingGeometry {
        self.ring.geometry()
    }

    /// Copies `parts` one behind the other to this reader's own memory and waits once for all copies. Each gets its own
    /// verdict: [`RingError::Stale`] where the writer has overtaken the copy, [`RingError::Reference`] for a reference that
    /// this ring never gave out. Where the rows of such a part would lie there is nothing of use; the others stay in place.
    ///
    /// # Errors
    /// [`RingError::Room`] for more rows than there is room for, or the driver's answer.
    pub fn read(&mut self, parts: &[SlotPart]) -> Result<Vec<Result<(), RingError>>, RingError> {
        self.ring.read(&self.from, parts)
    }

    /// The first `rows` rows of the last [`read`](Self::read), at most as many as there is room for. They stay until the
    /// next one, which is put behind what the stream already has to do.
    pub fn rows(&self, rows: u32) -> DeviceRows<'_> {
        let row_bytes = self.geometry().row_bytes();
        let held = self.from.staging.span().len / row_bytes;
        let rows = rows.min(u32::try_from(held).unwrap_or(u32::MAX));
        // SAFETY: so many rows lie in the staging memory, which this reader alone writes, on its stream, and which is freed
        // when the device is idle.
        unsafe { DeviceRows::new(self.from.staging.span().ptr, rows, row_bytes, self.from.stream.id()) }
    }

    /// Replaces `out` by all rows that `slot` holds under the stamp `generation`, however many these are, for another host.
    ///
    /// # Errors
    /// As [`RingReader::read_slot`](super::RingReader::read_slot), or the driver's answer. `out` is empty then.
    pub fn read_slot(&mut self, slot: u32, generation: u64, out: &mut Vec<u8>) -> Result<(), RingError> {
        out.clear();
        let rows = self.ring.read_slot(&self.from, slot, generation)?;
        out.resize((u64::from(rows) * self.geometry().row_bytes()) as usize, 0);
        let copied = self.from.staging.read(0, out).inspect_err(|_| out.clear());
        Ok(copied?)
    }
}

/// The rows of a ring in a process that imported them.
#[derive(Debug)]
pub struct ImportedPayload(Payload);

impl From<ImportedVmm> for ImportedPayload {
    fn from(memory: ImportedVmm) -> Self {
        Self(Payload::Imported(Box::new(memory)))
    }
}

impl From<ImportedIpc> for ImportedPayload {
    fn from(memory: ImportedIpc) -> Self {
        Self(Payload::Imported(Box::new(memory)))
    }
}

#[derive(Debug)]
enum Payload {
    Own(Arc<RingMemory>),
    Imported(Box<dyn Region>),
}

impl Payload {
    fn span(&self) -> Result<DeviceSpan, RegionError> {
        match self {
            Self::Own(memory) => Ok(memory.span()),
            Self::Imported(memory) => {
                memory.device().ok_or_else(|| RegionError::NotOnDevice { kind: memory.kind() })
            }
        }
    }
}

#[derive(Debug)]
struct IntoPayload {
    memory: Arc<RingMemory>,
    stream: Stream,
}

#[derive(Debug)]
struct FromPayload {
    stream: Stream,
    staging: DeviceBuffer,
    payload: Payload,
}

impl CopyQueue for IntoPayload {
    fn begin(&self, at: u64, from: u64, bytes: u64) -> Result<(), RegionError> {
        // SAFETY: `Publisher` asks for ranges within the payload, whose length was checked, and the rows are readable by
        // the word of whoever made the `DeviceRows`. No one else writes the payload; readers notice that it is written.
        unsafe { self.stream.begin_copy(self.memory.span().ptr + at, from, bytes) }?;
        Ok(())
    }

    fn wait(&self) -> Result<(), RegionError> {
        Ok(self.stream.wait()?)
    }
}

impl CopyQueue for FromPayload {
    fn begin(&self, at: u64, to: u64, bytes: u64) -> Result<(), RegionError> {
        let (from, to) = (self.payload.span()?.ptr + at, self.staging.span().ptr + to);
        // SAFETY: `Subscriber` asks for ranges within payload and room, whose lengths were checked. The staging memory is
        // this value's alone; what is copied of memory with a living writer is judged afterwards.
        unsafe { self.stream.begin_copy(to, from, bytes) }?;
        Ok(())
    }

    fn wait(&self) -> Result<(), RegionError> {
        Ok(self.stream.wait()?)
    }
}

fn check_payload(span: DeviceSpan, geometry: DeviceRingGeometry, stream: &Stream) -> Result<(), RingError> {
    let expected = geometry.payload_len()?;
    if span.len != expected {
        return Err(RegionError::Length { expected, found: span.len }.into());
    }
    if span.uuid != stream.gpu().uuid() {
        let (stream, memory) = (stream.gpu().ordinal(), span.ordinal);
        return Err(RegionError::from(CudaError::OtherDevice { stream, memory }).into());
    }
    Ok(())
}
