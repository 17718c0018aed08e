//! Device memory behind a 64-byte handle, for hosts that cannot pass descriptors. The importer's mapping is writable.

use std::fmt;
use std::sync::Arc;

use cudarc::driver::sys;

use super::{DeviceBuffer, Gpu};
use crate::region::within;
use crate::{DeviceSpan, DeviceSpanMut, Region, RegionError, RegionKind};

/// The driver's unit of plain memory. Memory of whole units shares none with another allocation, which a handle of one
/// would give away with it.
const UNIT: u64 = 2 << 20;

/// What opens exported memory in another process of this host.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct IpcHandle {
    /// The driver's name of an allocation.
    pub handle: [u8; 64],
    /// Bytes from the allocation's start to the memory meant.
    pub offset: u64,
}

/// Exportable device memory while it is being filled, or for as long as it has a writer.
#[derive(Debug)]
pub struct IpcBuilder {
    memory: DeviceBuffer,
    len: u64,
    handle: IpcHandle,
}

/// Exported device memory in the process that made it.
#[derive(Debug)]
pub struct Ipc(IpcBuilder);

/// Device memory that another process exported by handle. Closed on drop.
///
/// The driver maps it writable: a stray write of this process changes the exporter's memory.
#[derive(Debug)]
pub struct ImportedIpc {
    gpu: Arc<Gpu>,
    base: u64,
    offset: u64,
    len: u64,
}

impl IpcBuilder {
    /// Zeroed device memory of `len` bytes that a handle stands for; `name` is for messages.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`](super::CudaError::OutOfMemory), [`RegionError::Empty`], or the driver's answer.
    pub fn new(gpu: &Arc<Gpu>, name: &str, len: u64) -> Result<Self, RegionError> {
        let padded = len.checked_next_multiple_of(UNIT);
        let padded = padded.ok_or(RegionError::Bounds { offset: 0, bytes: len, limit: u64::MAX })?;
        let memory = DeviceBuffer::zeroed(gpu, name, padded)?;
        let handle = handle_of(&memory)?;
        Ok(Self { memory, len, handle })
    }

    /// Copies `bytes` to `offset`, and waits.
    ///
    /// # Errors
    /// [`RegionError::Bounds`], or the driver's answer.
    pub fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), RegionError> {
        within(self.len, offset, bytes.len() as u64)?;
        self.memory.write(offset, bytes)
    }

    /// Where it lies.
    pub fn span(&self) -> DeviceSpan {
        DeviceSpan { len: self.len, ..self.memory.span() }
    }

    /// The same, for kernels to write before the memory is sealed.
    pub fn span_mut(&mut self) -> DeviceSpanMut<'_> {
        DeviceSpanMut::new(self.span())
    }

    /// The handle, to be told to importers.
    pub fn handle(&self) -> &IpcHandle {
        &self.handle
    }

    /// Ends the writing by this process. Importers map it writable all the same.
    pub fn seal(self) -> Ipc {
        Ipc(self)
    }
}

impl Ipc {
    /// The handle, to be told to importers.
    pub fn handle(&self) -> &IpcHandle {
        self.0.handle()
    }

    /// The GPU it lies on.
    pub fn gpu(&self) -> &Arc<Gpu> {
        self.0.memory.gpu()
    }
}

impl ImportedIpc {
    /// Opens the `len` bytes that `handle` stands for on `gpu`, which must be the exporter's.
    ///
    /// # Errors
    /// [`RegionError::WritableIpc`] unless `allow_writable`; [`RegionError::Length`] where the allocation ends before `len`
    /// bytes; otherwise the driver's answer, as to a handle of this very process, which cannot be opened in it.
    pub fn open(
        gpu: &Arc<Gpu>,
        handle: &IpcHandle,
        len: u64,
        allow_writable: bool,
    ) -> Result<Self, RegionError> {
        if !allow_writable {
            return Err(RegionError::WritableIpc);
        }
        let _entered = gpu.enter()?;
        let raw = sys::CUipcMemHandle { reserved: handle.handle.map(|byte| byte as std::ffi::c_char) };
        let flags = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let mut base = 0;
        // SAFETY: a context is current, the out pointer lives through the call; the driver refuses bytes that name nothing.
        let code = unsafe { sys::cuIpcOpenMemHandle_v2(&mut base, raw, flags) };
        gpu.check("open memory by its handle", code)?;
        let opened = Self { gpu: Arc::clone(gpu), base, offset: handle.offset, len };
        let (_, found) = allocation_of(gpu, base)?;
        if within(found, handle.offset, len).is_err() {
            return Err(RegionError::Length { expected: handle.offset.saturating_add(len), found });
        }
        Ok(opened)
    }

    /// The GPU it lies on.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    fn span(&self) -> DeviceSpan {
        let ptr = self.base + self.offset;
        DeviceSpan { ptr, len: self.len, ordinal: self.gpu.ordinal(), uuid: self.gpu.uuid() }
    }
}

impl Drop for ImportedIpc {
    fn drop(&mut self) {
        let Ok(_entered) = self.gpu.enter() else { return };
        self.gpu.settle();
        // SAFETY: opened once for this value, and nothing uses it any more.
        self.gpu.report("close memory", unsafe { sys::cuIpcCloseMemHandle(self.base) });
    }
}

impl Region for Ipc {
    fn host(&self) -> Option<&[u8]> {
        None
    }

    fn device(&self) -> Option<DeviceSpan> {
        Some(self.0.span())
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), RegionError> {
        within(self.0.len, offset, out.len() as u64)?;
        self.0.memory.read(offset, out)
    }

    fn kind(&self) -> RegionKind {
        RegionKind::CudaIpc
    }
}

impl Region for ImportedIpc {
    fn host(&self) -> Option<&[u8]> {
        None
    }

    fn device(&self) -> Option<DeviceSpan> {
        Some(self.span())
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), RegionError> {
        let at = within(self.len, offset, out.len() as u64)?;
        // SAFETY: within memory that stays open while `self` is borrowed.
        unsafe { self.gpu.copy_to_host(self.span().ptr + at.start, out) }?;
        Ok(())
    }

    fn kind(&self) -> RegionKind {
        RegionKind::CudaIpc
    }
}

impl fmt::Debug for IpcHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IpcHandle").field("offset", &self.offset).finish_non_exhaustive()
    }
}

/// Handles name whole allocations, so what is told is where in one the memory lies.
fn handle_of(memory: &DeviceBuffer) -> Result<IpcHandle, RegionError> {
    let (gpu, ptr) = (memory.gpu(), memory.span().ptr);
    let _entered = gpu.enter()?;
    let (base, _) = allocation_of(gpu, ptr)?;
    let mut raw = sys::CUipcMemHandle { reserved: [0; 64] };
    // SAFETY: the memory is alive, the out pointer lives through the call.
    gpu.check("make a handle of memory", unsafe { sys::cuIpcGetMemHandle(&mut raw, ptr) })?;
    Ok(IpcHandle { handle: raw.reserved.map(|byte| byte as u8), offset: ptr - base })
}

/// Start and size of the allocation that `ptr` lies in. The context must be current.
fn allocation_of(gpu: &Gpu, ptr: u64) -> Result<(u64, u64), RegionError> {
    let (mut base, mut size) = (0, 0);
    // SAFETY: the out pointers live through the call, which fails for an address of no allocation.
    let code = unsafe { sys::cuMemGetAddressRange_v2(&mut base, &mut size, ptr) };
    gpu.check("find the allocation of memory", code)?;
    Ok((base, size as u64))
}
