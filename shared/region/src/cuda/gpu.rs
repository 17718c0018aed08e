//! One GPU of this process and its primary context.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;
use std::marker::PhantomData;
use std::sync::{Arc, OnceLock};

use cudarc::driver::sys::{self, CUresult};

use super::{CudaError, GpuUuid};

/// Oldest driver that has every call made here.
const OLDEST_DRIVER: i32 = 12_000;

/// A GPU with its primary context retained, which is the one that all libraries of the process share.
pub struct Gpu {
    ordinal: usize,
    device: sys::CUdevice,
    context: sys::CUcontext,
    /// For copies between host and device. Not the default stream, which would wait for other streams.
    copies: sys::CUstream,
    uuid: GpuUuid,
    name: String,
    driver: i32,
}

// SAFETY: contexts and streams of the driver API may be used from any thread, and these handles are freed once, on drop.
unsafe impl Send for Gpu {}
// SAFETY: as above; the driver locks what it must.
unsafe impl Sync for Gpu {}

/// The primary context is current on this thread for as long as this lives.
pub(super) struct Entered<'a> {
    gpu: &'a Gpu,
    // The driver keeps a stack of contexts for each thread, so this must be dropped where it was made.
    _not_send: PhantomData<*const ()>,
}

impl Gpu {
    /// The GPU at `ordinal` among those that this process sees.
    ///
    /// # Errors
    /// [`CudaError::NoDriver`], [`CudaError::DriverTooOld`], [`CudaError::NoDevice`], or the driver's answer.
    pub fn open(ordinal: usize) -> Result<Arc<Self>, CudaError> {
        let driver = start()?;
        let count = count()?;
        if ordinal >= count {
            return Err(CudaError::NoDevice { ordinal, count });
        }
        Self::retain(ordinal, driver).map(Arc::new)
    }

    /// The GPU of that identity, whatever its ordinal is here.
    ///
    /// # Errors
    /// [`CudaError::NotVisible`], otherwise as [`open`](Self::open).
    pub fn by_uuid(uuid: GpuUuid) -> Result<Arc<Self>, CudaError> {
        let driver = start()?;
        let count = count()?;
        for ordinal in 0..count {
            if uuid_of(device_at(ordinal)?)? == uuid {
                return Self::retain(ordinal, driver).map(Arc::new);
            }
        }
        Err(CudaError::NotVisible { uuid, count })
    }

    fn retain(ordinal: usize, driver: i32) -> Result<Self, CudaError> {
        let device = device_at(ordinal)?;
        let uuid = uuid_of(device)?;
        let mut context = std::ptr::null_mut();
        // SAFETY: the device is one that the driver named, the out pointer lives through the call.
        let code = unsafe { sys::cuDevicePrimaryCtxRetain(&mut context, device) };
        check(uuid, "retain its primary context", code)?;
        let copies = std::ptr::null_mut();
        let mut gpu = Self { ordinal, device, context, copies, uuid, name: String::new(), driver };
        gpu.name = gpu.read_name()?;
        gpu.copies = gpu.new_stream()?;
        Ok(gpu)
    }

    /// Its place among the GPUs that this process sees.
    pub fn ordinal(&self) -> usize {
        self.ordinal
    }

    /// Its identity.
    pub fn uuid(&self) -> GpuUuid {
        self.uuid
    }

    /// Its model, as `NVIDIA H200`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The CUDA version that the driver supports, 1000 × major + 10 × minor.
    pub fn driver_version(&self) -> i32 {
        self.driver
    }

    /// Bytes free now, of all processes, and in total.
    ///
    /// # Errors
    /// The driver's answer.
    pub fn memory(&self) -> Result<(u64, u64), CudaError> {
        let _entered = self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: a context is current, the out pointers live through the call.
        let code = unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) };
        self.check("read its free memory", code)?;
        Ok((free as u64, total as u64))
    }

    /// Makes the primary context current on this thread.
    pub(super) fn enter(&self) -> Result<Entered<'_>, CudaError> {
        // SAFETY: the context is retained for as long as `self` lives.
        self.check("enter its context", unsafe { sys::cuCtxPushCurrent_v2(self.context) })?;
        Ok(Entered { gpu: self, _not_send: PhantomData })
    }

    pub(super) fn device(&self) -> sys::CUdevice {
        self.device
    }

    pub(super) fn check(&self, action: &'static str, code: CUresult) -> Result<(), CudaError> {
        check(self.uuid, action, code)
    }

    /// As [`check`](Self::check) for an allocation of `bytes`: memory that ran out is told beside what was free.
    pub(super) fn check_room(
        &self,
        name: &str,
        bytes: u64,
        action: &'static str,
        code: CUresult,
    ) -> Result<(), CudaError> {
        match code {
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                let free = self.memory().map_or(0, |(free, _)| free);
                Err(CudaError::OutOfMemory { name: name.to_owned(), gpu: self.uuid, bytes, free })
            }
            code => self.check(action, code),
        }
    }

    /// Logs what a drop could not do; there is nobody to return it to.
    pub(super) fn report(&self, action: &'static str, code: CUresult) {
        if let Err(error) = self.check(action, code) {
            tracing::error!("{error}");
        }
    }

    /// Waits for all work of this process on the GPU, before memory goes that some of it may use. What it failed of is
    /// for those to hear who asked for it.
    pub(super) fn settle(&self) {
        // SAFETY: a context is current, or the call fails.
        let _ = unsafe { sys::cuCtxSynchronize() };
    }

    pub(super) fn attribute(&self, attribute: sys::CUdevice_attribute) -> Result<i32, CudaError> {
        let mut value = 0;
        // SAFETY: the device is one that the driver named, the out pointer lives through the call.
        let code = unsafe { sys::cuDeviceGetAttribute(&mut value, attribute, self.device) };
        self.check("read what it supports", code)?;
        Ok(value)
    }

    /// A stream that does not wait for the default stream.
    pub(super) fn new_stream(&self) -> Result<sys::CUstream, CudaError> {
        let _entered = self.enter()?;
        let mut stream = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: a context is current, the out pointer lives through the call.
        self.check("make a stream", unsafe { sys::cuStreamCreate(&mut stream, flags) })?;
        Ok(stream)
    }

    /// Copies device bytes from `from` on into `out`, and waits.
    ///
    /// # Safety
    /// `from` must start `out.len()` bytes of device memory that stay mapped meanwhile.
    pub(super) unsafe fn copy_to_host(&self, from: u64, out: &mut [u8]) -> Result<(), CudaError> {
        let _entered = self.enter()?;
        let to = out.as_mut_ptr().cast::<c_void>();
        // SAFETY: the caller's word for the device side; the host side is borrowed until the wait below has returned.
        let code = unsafe { sys::cuMemcpyDtoHAsync_v2(to, from, out.len(), self.copies) };
        self.finish("copy to the host", code)
    }

    /// Copies `bytes` to device memory from `to` on, and waits.
    ///
    /// # Safety
    /// `to` must start `bytes.len()` writable bytes of device memory that nobody else touches meanwhile.
    pub(super) unsafe fn copy_from_host(&self, to: u64, bytes: &[u8]) -> Result<(), CudaError> {
        let _entered = self.enter()?;
        let from = bytes.as_ptr().cast::<c_void>();
        // SAFETY: as in `copy_to_host`.
        let code = unsafe { sys::cuMemcpyHtoDAsync_v2(to, from, bytes.len(), self.copies) };
        self.finish("copy from the host", code)
    }

    /// Fills device memory with zeros, and waits.
    ///
    /// # Safety
    /// As [`copy_from_host`](Self::copy_from_host) for `len` bytes.
    pub(super) unsafe fn zero(&self, to: u64, len: u64) -> Result<(), CudaError> {
        let _entered = self.enter()?;
        // SAFETY: the caller's word.
        let code = unsafe { sys::cuMemsetD8Async(to, 0, len as usize, self.copies) };
        self.finish("clear its memory", code)
    }

    /// Waits for the copy that was begun with the answer `begun`; also after a failure, since host memory is borrowed.
    fn finish(&self, action: &'static str, begun: CUresult) -> Result<(), CudaError> {
        // SAFETY: the stream is this value's own and a context is current.
        let waited = unsafe { sys::cuStreamSynchronize(self.copies) };
        self.check(action, begun)?;
        self.check(action, waited)
    }

    fn read_name(&self) -> Result<String, CudaError> {
        let mut text: [c_char; 256] = [0; 256];
        // SAFETY: the buffer is as long as is said.
        let code = unsafe { sys::cuDeviceGetName(text.as_mut_ptr(), text.len() as c_int - 1, self.device) };
        self.check("read its name", code)?;
        // SAFETY: the last byte was out of the driver's reach and is zero.
        Ok(unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned())
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        if !self.copies.is_null()
            && let Ok(_entered) = self.enter()
        {
            // SAFETY: the stream is this value's own; its copies were all waited for.
            self.report("destroy a stream", unsafe { sys::cuStreamDestroy_v2(self.copies) });
        }
        // SAFETY: retained once by this value.
        self.report("release its context", unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) });
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let mut popped = std::ptr::null_mut();
        // SAFETY: pushed by `Gpu::enter` on this thread.
        self.gpu.report("leave its context", unsafe { sys::cuCtxPopCurrent_v2(&mut popped) });
    }
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { ordinal, uuid, name, .. } = self;
        f.debug_struct("Gpu")
            .field("ordinal", ordinal)
            .field("uuid", uuid)
            .field("name", name)
            .finish_non_exhaustive()
    }
}

impl fmt::Display for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.name, self.uuid)
    }
}

/// Finds and starts the driver; returns the CUDA version it supports. Cheap once it has succeeded.
fn start() -> Result<i32, CudaError> {
    if !has_driver() {
        return Err(CudaError::NoDriver);
    }
    let mut found = 0;
    // SAFETY: the library is there, and this call is older than any version that could be.
    driver(unsafe { sys::cuDriverGetVersion(&mut found) })?;
    // Before any other call: the bindings panic at one that the library lacks.
    if found < OLDEST_DRIVER {
        return Err(CudaError::DriverTooOld { needed: OLDEST_DRIVER, found });
    }
    // SAFETY: may be called any number of times, from any thread.
    driver(unsafe { sys::cuInit(0) })?;
    Ok(found)
}

fn has_driver() -> bool {
    static FOUND: OnceLock<bool> = OnceLock::new();
    let load = |name: &CStr| {
        // SAFETY: loading the driver runs its initialisers, which is what any CUDA program does. It stays loaded.
        !unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_LAZY) }.is_null()
    };
    *FOUND.get_or_init(|| load(c"libcuda.so.1") || load(c"libcuda.so"))
}

fn count() -> Result<usize, CudaError> {
    let mut count = 0;
    // SAFETY: the driver has started, the out pointer lives through the call.
    driver(unsafe { sys::cuDeviceGetCount(&mut count) })?;
    Ok(usize::try_from(count).unwrap_or(0))
}

fn device_at(ordinal: usize) -> Result<sys::CUdevice, CudaError> {
    let mut device = 0;
    // SAFETY: as in `count`; the driver refuses ordinals it does not have.
    driver(unsafe { sys::cuDeviceGet(&mut device, ordinal as c_int) })?;
    Ok(device)
}

fn uuid_of(device: sys::CUdevice) -> Result<GpuUuid, CudaError> {
    let mut uuid = sys::CUuuid { bytes: [0; 16] };
    // SAFETY: the device is one that the driver named, the out pointer lives through the call.
    driver(unsafe { sys::cuDeviceGetUuid_v2(&mut uuid, device) })?;
    Ok(GpuUuid::from(uuid.bytes.map(|byte| byte as u8)))
}

fn driver(code: CUresult) -> Result<(), CudaError> {
    match code {
        CUresult::CUDA_SUCCESS => Ok(()),
        code => Err(CudaError::Driver { code }),
    }
}

fn check(gpu: GpuUuid, action: &'static str, code: CUresult) -> Result<(), CudaError> {
    match code {
        CUresult::CUDA_SUCCESS => Ok(()),
        code => Err(CudaError::Call { gpu, action, code }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Without a driver each way in says so; on a machine that has one this is for `tests/cuda.rs` to show.
    #[test]
    fn a_machine_without_a_driver_says_so() {
        if has_driver() {
            return;
        }
        for error in [Gpu::open(0).unwrap_err(), Gpu::by_uuid(GpuUuid::from([1; 16])).unwrap_err()] {
            assert_eq!(error, CudaError::NoDriver);
            assert_eq!(error.to_string(), "no CUDA driver (libcuda.so.1)");
        }
    }
}
