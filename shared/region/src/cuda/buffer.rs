//! Device memory from the driver's plain allocator.

use std::sync::Arc;

use cudarc::driver::sys;

use super::Gpu;
use crate::region::within;
use crate::{DeviceSpan, RegionError};

/// Zeroed device memory of this process, freed on drop. Not from a stream-ordered pool, whose memory cannot be exported.
#[derive(Debug)]
pub struct DeviceBuffer {
    gpu: Arc<Gpu>,
    ptr: u64,
    len: u64,
}

impl DeviceBuffer {
    /// `len` zero bytes; `name` is for messages.
    ///
    /// # Errors
    /// [`RegionError::Empty`], [`CudaError::OutOfMemory`](super::CudaError::OutOfMemory), or the driver's answer.
    pub fn zeroed(gpu: &Arc<Gpu>, name: &str, len: u64) -> Result<Self, RegionError> {
        if len == 0 {
            return Err(RegionError::Empty { name: name.to_owned() });
        }
        let mut ptr = 0;
        {
            let _entered = gpu.enter()?;
            // SAFETY: a context is current, the out pointer lives through the call.
            let code = unsafe { sys::cuMemAlloc_v2(&mut ptr, len as usize) };
            gpu.check_room(name, len, "allocate memory", code)?;
        }
        let buffer = Self { gpu: Arc::clone(gpu), ptr, len };
        // SAFETY: allocated above, of that length and known to nobody else.
        unsafe { gpu.zero(ptr, len)? };
        Ok(buffer)
    }

    /// The GPU it lies on.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// Where it lies.
    pub fn span(&self) -> DeviceSpan {
        DeviceSpan { ptr: self.ptr, len: self.len, ordinal: self.gpu.ordinal(), uuid: self.gpu.uuid() }
    }

    /// Copies `bytes` to `offset`, and waits.
    ///
    /// # Errors
    /// [`RegionError::Bounds`], or the driver's answer.
    pub fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), RegionError> {
        let at = within(self.len, offset, bytes.len() as u64)?;
        // SAFETY: within this value's own memory, which is borrowed exclusively.
        unsafe { self.gpu.copy_from_host(self.ptr + at.start, bytes) }?;
        Ok(())
    }

    /// Copies the bytes from `offset` on to `out`, and waits.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), RegionError> {
        let at = within(self.len, offset, out.len() as u64)?;
        // SAFETY: within this value's own memory.
        unsafe { self.gpu.copy_to_host(self.ptr + at.start, out) }?;
        Ok(())
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        let Ok(_entered) = self.gpu.enter() else { return };
        self.gpu.settle();
        // SAFETY: allocated by this value, and nothing uses it any more.
        self.gpu.report("free memory", unsafe { sys::cuMemFree_v2(self.ptr) });
    }
}
