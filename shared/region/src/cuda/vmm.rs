//! Device memory behind a file descriptor: the importer's mapping is read-only.

use std::ffi::{c_int, c_void};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use cudarc::driver::sys::{self, CUdevice_attribute as Attribute, CUmemAccess_flags as Access};
use rustix::io::FdFlags;

use super::{CudaError, Gpu};
use crate::region::within;
use crate::{DeviceSpan, DeviceSpanMut, Region, RegionError, RegionKind};

const MEANS: &str = "file descriptors (virtual memory management)";
const POSIX_FD: sys::CUmemAllocationHandleType =
    sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// Exportable device memory while it is being filled, or for as long as it has a writer.
#[derive(Debug)]
pub struct VmmBuilder {
    memory: Mapped,
    fd: OwnedFd,
}

/// Exported device memory in the process that made it.
#[derive(Debug)]
pub struct Vmm {
    memory: Mapped,
    fd: OwnedFd,
}

/// Device memory in a process that was given its descriptor: read-only there, a kernel that writes it faults. On drop it
/// is unmapped, its addresses are freed, and the memory is let go, in that order.
#[derive(Debug)]
pub struct ImportedVmm {
    memory: Mapped,
}

/// A physical allocation, mapped at addresses of its own. Made in steps: a drop takes back those that were made.
#[derive(Debug)]
struct Mapped {
    gpu: Arc<Gpu>,
    handle: sys::CUmemGenericAllocationHandle,
    /// Bytes of use; `padded` is what the driver deals in.
    len: u64,
    padded: u64,
    /// Zero until the addresses are reserved.
    ptr: u64,
    is_mapped: bool,
}

impl VmmBuilder {
    /// Zeroed device memory of `len` bytes that a descriptor stands for; `name` is for messages.
    ///
    /// # Errors
    /// [`CudaError::Unsupported`], [`CudaError::OutOfMemory`], [`RegionError::Empty`], or the driver's answer.
    pub fn new(gpu: &Arc<Gpu>, name: &str, len: u64) -> Result<Self, RegionError> {
        if len == 0 {
            return Err(RegionError::Empty { name: name.to_owned() });
        }
        let padded = padded(gpu, len)?;
        let _entered = gpu.enter()?;
        let mut handle = 0;
        // SAFETY: the properties and the out pointer live through the call.
        let code = unsafe { sys::cuMemCreate(&mut handle, padded as usize, &properties(gpu), 0) };
        gpu.check_room(name, padded, "create exportable memory", code)?;
        let mut memory = Mapped::unmapped(gpu, handle, len, padded);
        memory.map(Access::CU_MEM_ACCESS_FLAGS_PROT_READWRITE)?;
        let fd = memory.export()?;
        // SAFETY: mapped above, writable and known to nobody else.
        unsafe { gpu.zero(memory.ptr, padded)? };
        Ok(Self { memory, fd })
    }

    /// Copies `bytes` to `offset`, and waits.
    ///
    /// # Errors
    /// [`RegionError::Bounds`], or the driver's answer.
    pub fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), RegionError> {
        let at = within(self.memory.len, offset, bytes.len() as u64)?;
        // SAFETY: within this value's own memory, which is borrowed exclusively; importers only read.
        unsafe { self.memory.gpu.copy_from_host(self.memory.ptr + at.start, bytes) }?;
        Ok(())
    }

    /// Where it lies.
    pub fn span(&self) -> DeviceSpan {
        self.memory.span()
    }

    /// The same, for kernels to write before the memory is sealed.
    pub fn span_mut(&mut self) -> DeviceSpanMut<'_> {
        DeviceSpanMut::new(self.span())
    }

    /// The descriptor, to be passed to importers.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Ends the writing: this process, too, maps it read-only from here on. A driver that cannot change a mapping's access
    /// leaves it writable here; no importer's is.
    ///
    /// # Errors
    /// The driver's answer to work that still had to be waited for.
    pub fn seal(self) -> Result<Vmm, RegionError> {
        let Self { memory, fd } = self;
        let entered = memory.gpu.enter()?;
        // SAFETY: a context is current.
        memory.gpu.check("finish filling memory", unsafe { sys::cuCtxSynchronize() })?;
        if let Err(error) = memory.set_access(Access::CU_MEM_ACCESS_FLAGS_PROT_READ) {
            tracing::warn!("exported memory stays writable in this process: {error}");
        }
        drop(entered);
        Ok(Vmm { memory, fd })
    }
}

impl Vmm {
    /// The descriptor, to be passed to importers.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// The GPU it lies on.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.memory.gpu
    }
}

impl ImportedVmm {
    /// Maps the memory behind `fd` read-only on `gpu`. The descriptor is closed once it is mapped.
    ///
    /// # Errors
    /// [`CudaError::Unsupported`], or the driver's answer: to a descriptor that is not of such memory, is of another GPU, or
    /// has fewer bytes than `len`.
    pub fn import(gpu: &Arc<Gpu>, fd: OwnedFd, len: u64) -> Result<Self, RegionError> {
        if len == 0 {
            return Err(RegionError::Empty { name: "imported device memory".to_owned() });
        }
        let padded = padded(gpu, len)?;
        let _entered = gpu.enter()?;
        let mut handle = 0;
        // The driver takes the number itself in the place of a pointer.
        let number = fd.as_raw_fd() as usize as *mut c_void;
        // SAFETY: the descriptor is open through the call, which does not keep it; the out pointer lives through it.
        let code = unsafe { sys::cuMemImportFromShareableHandle(&mut handle, number, POSIX_FD) };
        gpu.check("import memory by its descriptor", code)?;
        let mut memory = Mapped::unmapped(gpu, handle, len, padded);
        memory.map(Access::CU_MEM_ACCESS_FLAGS_PROT_READ)?;
        Ok(Self { memory })
    }

    /// The GPU it lies on.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.memory.gpu
    }
}

impl Region for Vmm {
    fn host(&self) -> Option<&[u8]> {
        None
    }

    fn device(&self) -> Option<DeviceSpan> {
        Some(self.memory.span())
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), RegionError> {
        self.memory.read(offset, out)
    }

    fn kind(&self) -> RegionKind {
        RegionKind::CudaVmm
    }
}

impl Region for ImportedVmm {
    fn host(&self) -> Option<&[u8]> {
        None
    }

    fn device(&self) -> Option<DeviceSpan> {
        Some(self.memory.span())
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), RegionError> {
        self.memory.read(offset, out)
    }

    fn kind(&self) -> RegionKind {
        RegionKind::CudaVmm
    }
}

impl Mapped {
    fn unmapped(gpu: &Arc<Gpu>, handle: sys::CUmemGenericAllocationHandle, len: u64, padded: u64) -> Self {
        Self { gpu: Arc::clone(gpu), handle, len, padded, ptr: 0, is_mapped: false }
    }

    /// The context must be current.
    fn map(&mut self, access: Access) -> Result<(), CudaError> {
        let size = self.padded as usize;
        // SAFETY: the out pointer lives through the call.
        let code = unsafe { sys::cuMemAddressReserve(&mut self.ptr, size, 0, 0, 0) };
        self.gpu.check("reserve addresses", code)?;
        // SAFETY: the addresses were reserved above and nothing is mapped there; the handle is this value's own.
        let code = unsafe { sys::cuMemMap(self.ptr, size, 0, self.handle, 0) };
        self.gpu.check("map memory (is it of this GPU, and as long as granted?)", code)?;
        self.is_mapped = true;
        self.set_access(access)
    }

    fn set_access(&self, flags: Access) -> Result<(), CudaError> {
        let access = sys::CUmemAccessDesc { location: location(&self.gpu), flags };
        // SAFETY: the range is mapped; the description lives through the call.
        let code = unsafe { sys::cuMemSetAccess(self.ptr, self.padded as usize, &access, 1) };
        self.gpu.check("set access to memory", code)
    }

    fn export(&self) -> Result<OwnedFd, RegionError> {
        let mut fd: c_int = -1;
        // SAFETY: for this type of handle the driver writes a descriptor's number to the out pointer.
        let code =
            unsafe { sys::cuMemExportToShareableHandle((&raw mut fd).cast(), self.handle, POSIX_FD, 0) };
        self.gpu.check("export memory as a descriptor", code)?;
        // SAFETY: the driver has opened it for the caller alone.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        rustix::io::fcntl_setfd(&fd, FdFlags::CLOEXEC).map_err(|e| RegionError::Descriptor(e.into()))?;
        Ok(fd)
    }

    fn span(&self) -> DeviceSpan {
        DeviceSpan { ptr: self.ptr, len: self.len, ordinal: self.gpu.ordinal(), uuid: self.gpu.uuid() }
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), RegionError> {
        let at = within(self.len, offset, out.len() as u64)?;
        // SAFETY: within memory that stays mapped while `self` is borrowed.
        unsafe { self.gpu.copy_to_host(self.ptr + at.start, out) }?;
        Ok(())
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        let Ok(_entered) = self.gpu.enter() else { return };
        let size = self.padded as usize;
        if self.is_mapped {
            self.gpu.settle();
            // SAFETY: mapped by this value, and nothing uses it any more.
            self.gpu.report("unmap memory", unsafe { sys::cuMemUnmap(self.ptr, size) });
        }
        if self.ptr != 0 {
            // SAFETY: reserved by this value and unmapped above.
            self.gpu.report("free addresses", unsafe { sys::cuMemAddressFree(self.ptr, size) });
        }
        // SAFETY: created or imported once for this value.
        self.gpu.report("let go of memory", unsafe { sys::cuMemRelease(self.handle) });
    }
}

/// `len` in whole units of the GPU's, 2 MiB on those known.
fn padded(gpu: &Gpu, len: u64) -> Result<u64, RegionError> {
    for needed in [
        Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED,
        Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
    ] {
        if gpu.attribute(needed)? == 0 {
            return Err(CudaError::Unsupported { gpu: gpu.uuid(), what: MEANS }.into());
        }
    }
    let mut unit = 0;
    let least = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
    // SAFETY: the properties and the out pointer live through the call.
    let code = unsafe { sys::cuMemGetAllocationGranularity(&mut unit, &properties(gpu), least) };
    gpu.check("read its unit of memory", code)?;
    let padded = len.checked_next_multiple_of(unit.max(1) as u64);
    padded.ok_or(RegionError::Bounds { offset: 0, bytes: len, limit: u64::MAX })
}

fn properties(gpu: &Gpu) -> sys::CUmemAllocationProp {
    sys::CUmemAllocationProp {
        type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: POSIX_FD,
        location: location(gpu),
        win32HandleMetaData: std::ptr::null_mut(),
        // SAFETY: a struct of integers, of which zero means nothing special.
        allocFlags: unsafe { std::mem::zeroed() },
    }
}

fn location(gpu: &Gpu) -> sys::CUmemLocation {
    let on_device = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE as u32;
    // SAFETY: two words in every version of the bindings; newer ones spell the second as a union around the same integer.
    // The first is a valid kind of location.
    unsafe { std::mem::transmute::<[u32; 2], sys::CUmemLocation>([on_device, gpu.device() as u32]) }
}
