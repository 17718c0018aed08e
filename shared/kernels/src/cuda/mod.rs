//! The CUDA backend: one GPU, one stream, one module of kernels.
//!
//! Everything of an engine runs on the backend's own stream, never on the default one, so kernels, copies and frees are
//! ordered by being submitted; a [`Cuda`] belongs to the one thread that submits. The `.cu` file of each kernel lies
//! beside the Rust that launches it.

mod attention;
mod fill;
mod heads;
mod launch;
mod linear;
mod memory;
mod moe;
mod paged;
mod router;
mod rows;
mod tensors;

use std::sync::Arc;

use candle_core::{CudaDevice, Device};
use cudarc::driver::{CudaContext, CudaModule, CudaStream, DriverError, result, sys};
use cudarc::nvrtc::Ptx;

pub(crate) use heads::{Angles, MlaWeights, gqa};
pub(crate) use linear::Linear;
pub(crate) use moe::{Experts, Mlp};
pub(crate) use paged::{PagedRows, Rows};
pub(crate) use router::{Router, Routes};
pub(crate) use rows::{Embedding, RmsNorm};

use crate::device::Activations;
use crate::error::{KernelError, Result};
use launch::{Functions, Grid, THREADS};
use linear::{Product, Weight};
use memory::{Buffer, Operand, Output};

static MODULE: &[u8] = include_bytes!(env!("EYRIE_CUDA_MODULE"));
/// Compute capabilities that the module has code for, as `90,100`.
const CAPABILITIES: &str = env!("EYRIE_CUDA_CAPABILITIES");
/// Version of CUDA that this was built with, as the driver counts them.
const NEEDED_DRIVER: i32 = 13000;

/// How a [`Cuda`] computes.
#[derive(Debug, Clone, Copy)]
pub struct CudaOptions {
    /// Number of the GPU.
    pub ordinal: usize,
    /// Numbers of activations and caches.
    pub activations: Activations,
}

/// One GPU, shared by everything built on it.
#[derive(Debug, Clone)]
pub struct Cuda(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    ordinal: usize,
    capability: String,
    activations: Activations,
    device: CudaDevice,
    stream: Arc<CudaStream>,
    functions: Functions,
    /// [`Self::device`] as tensors name it.
    tensors: Device,
}

/// A driver's error as an error of `what`.
fn failed(what: &'static str) -> impl Fn(DriverError) -> KernelError {
    move |error| KernelError::Cuda { what, code: format!("{:?}", error.0) }
}

impl Cuda {
    /// Takes a GPU into use: a stream of its own, the kernels loaded, freed memory kept for reuse.
    ///
    /// # Errors
    /// No driver or one too old, no such GPU, or one that the kernels were not compiled for.
    pub fn open(options: CudaOptions) -> Result<Cuda> {
        let CudaOptions { ordinal, activations } = options;
        // Held until the device holds it too: a GPU's context is torn down with its last user.
        let _context = check(ordinal).map_err(|reason| KernelError::Gpu { ordinal, reason })?;
        let device = CudaDevice::new_with_stream(ordinal)?;
        // SAFETY: all work is submitted to this one stream, so nothing needs events to be ordered.
        unsafe { device.disable_event_tracking() };
        let stream = device.cuda_stream();
        keep_freed_memory(stream.context()).map_err(failed("memory pool"))?;
        let module = load(stream.context())?;
        let functions = Functions::new(module);
        let tensors = Device::Cuda(device.clone());
        let (major, minor) = stream.context().compute_capability().map_err(failed("compute capability"))?;
        let capability = format!("{major}.{minor}");
        Ok(Cuda(Arc::new(Inner { ordinal, capability, activations, device, stream, functions, tensors })))
    }

    /// Number of the GPU.
    pub fn ordinal(&self) -> usize {
        self.0.ordinal
    }

    /// Compute capability, as 9.0: exponentials are those of the hardware, so other capabilities may round otherwise.
    pub(crate) fn capability(&self) -> &str {
        &self.0.capability
    }

    /// Numbers of activations and caches.
    pub fn numbers(&self) -> Activations {
        self.0.activations
    }

    /// The device of this backend's tensors.
    pub fn device(&self) -> &Device {
        &self.0.tensors
    }

    /// The stream that everything runs on.
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.0.stream
    }

    /// Waits until everything submitted is done.
    ///
    /// # Errors
    /// A kernel or copy before failed.
    pub fn synchronize(&self) -> Result<()> {
        self.stream().synchronize().map_err(failed("synchronize"))
    }

    /// Free bytes and all bytes of the GPU; memory kept for reuse counts as used.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn memory(&self) -> Result<(usize, usize)> {
        self.stream().context().mem_get_info().map_err(failed("memory"))
    }

    /// Makes the GPU's context current on this thread, as every call of the driver needs it.
    fn bind(&self, what: &'static str) -> Result<()> {
        self.stream().context().bind_to_thread().map_err(failed(what))
    }

    /// Whether both are the same backend.
    fn is(&self, other: &Cuda) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    fn candle(&self) -> &CudaDevice {
        &self.0.device
    }
}

/// The context of GPU `ordinal`, or why it cannot be used.
fn check(ordinal: usize) -> std::result::Result<Arc<CudaContext>, String> {
    let reason = |error: DriverError| match error.0 {
        sys::CUresult::CUDA_ERROR_NO_DEVICE => "no GPU is visible to the CUDA driver".to_owned(),
        sys::CUresult::CUDA_ERROR_STUB_LIBRARY => {
            "libcuda.so.1 is the toolkit's stub, not a driver".to_owned()
        }
        code => format!("the CUDA driver does not start: {code:?}"),
    };
    result::init().map_err(reason)?;
    let mut version = 0;
    // SAFETY: the pointer is to an integer of this frame.
    unsafe { sys::cuDriverGetVersion(&raw mut version) }.result().map_err(reason)?;
    if version < NEEDED_DRIVER {
        let text = |v: i32| format!("{}.{}", v / 1000, v % 1000 / 10);
        return Err(format!("the driver supports CUDA {}, limit {}", text(version), text(NEEDED_DRIVER)));
    }
    let count = result::device::get_count().map_err(reason)?;
    if ordinal >= count as usize {
        return Err(format!("there is no such GPU, limit below {count}"));
    }
    let context = CudaContext::new(ordinal).map_err(reason)?;
    let (major, minor) = context.compute_capability().map_err(reason)?;
    if !covered(major, minor) {
        let name = context.name().unwrap_or_default();
        return Err(format!("{name} has compute capability {major}.{minor}, kernels are for {CAPABILITIES}"));
    }
    Ok(context)
}

/// Code for X.y runs on X.z from z = y on.
fn covered(major: i32, minor: i32) -> bool {
    let codes = CAPABILITIES.split(',').filter_map(|code| code.trim().parse::<i32>().ok());
    codes.into_iter().any(|code| code / 10 == major && code % 10 <= minor)
}

/// Lets the pool keep what is freed: without that every synchronisation gives it back to the driver.
fn keep_freed_memory(context: &CudaContext) -> std::result::Result<(), DriverError> {
    let mut all = u64::MAX;
    // SAFETY: the context's device is valid, and this attribute is one 64-bit number, copied by the call.
    unsafe {
        let pool = result::device::get_mem_pool(context.cu_device())?;
        let threshold = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        sys::cuMemPoolSetAttribute(pool, threshold, (&raw mut all).cast()).result()
    }
}

fn load(context: &Arc<CudaContext>) -> Result<Arc<CudaModule>> {
    context.load_module(Ptx::from_binary(MODULE.to_vec())).map_err(failed("loading the kernels"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_runs_on_later_minor_versions_of_its_major() {
        let [major, minor] =
            [CAPABILITIES, CAPABILITIES].map(|c| c.split(',').next().unwrap().parse::<i32>().unwrap());
        assert!(covered(major / 10, minor % 10));
        assert!(covered(major / 10, minor % 10 + 1));
        assert!(!covered(major / 10 - 1, 9) || CAPABILITIES.contains(','));
        assert!(!covered(99, 0));
    }
}
