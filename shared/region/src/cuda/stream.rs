//! A queue of device work that copies are put into and waited for.

use std::fmt;
use std::sync::Arc;

use cudarc::driver::{CudaStream, sys};

use super::{CudaError, DeviceRows, Gpu};

/// A stream with an event of its own: one wait for all copies begun so far.
pub struct Stream {
    gpu: Arc<Gpu>,
    raw: Raw,
    event: sys::CUevent,
}

/// Which stream it is, for work that must come in one order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamId(usize);

impl StreamId {
    /// Of the stream that an engine computes on.
    pub fn of_engine(stream: &CudaStream) -> Self {
        Self(stream.cu_stream() as usize)
    }

    /// No stream's, for tests without a GPU.
    #[cfg(test)]
    pub(crate) fn none() -> Self {
        Self(0)
    }
}

enum Raw {
    Own(sys::CUstream),
    Engine(Arc<CudaStream>),
}

// SAFETY: streams and events of the driver API may be used from any thread, and each is freed once, by its owner.
unsafe impl Send for Stream {}
// SAFETY: as above; the driver locks what it must.
unsafe impl Sync for Stream {}

impl Stream {
    /// A new stream that does not wait for the default stream.
    ///
    /// # Errors
    /// The driver's answer.
    pub fn new(gpu: &Arc<Gpu>) -> Result<Self, CudaError> {
        let raw = Raw::Own(gpu.new_stream()?);
        Self::with_event(gpu, raw)
    }

    /// The stream that an engine computes on: what is begun here waits for what it began before.
    ///
    /// # Errors
    /// [`CudaError::OtherDevice`], or the driver's answer.
    pub fn of_engine(gpu: &Arc<Gpu>, stream: Arc<CudaStream>) -> Result<Self, CudaError> {
        let (stream_ordinal, memory) = (stream.context().ordinal(), gpu.ordinal());
        if stream_ordinal != memory {
            return Err(CudaError::OtherDevice { stream: stream_ordinal, memory });
        }
        Self::with_event(gpu, Raw::Engine(stream))
    }

    fn with_event(gpu: &Arc<Gpu>, raw: Raw) -> Result<Self, CudaError> {
        let mut stream = Self { gpu: Arc::clone(gpu), raw, event: std::ptr::null_mut() };
        let _entered = gpu.enter()?;
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: a context is current, the out pointer lives through the call.
        gpu.check("make an event", unsafe { sys::cuEventCreate(&mut stream.event, flags) })?;
        Ok(stream)
    }

    /// The GPU it works on.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// Which stream it is: equal for all that stand for one engine's.
    pub fn id(&self) -> StreamId {
        StreamId(self.raw() as usize)
    }

    /// Errors unless what `rows` hold is in the order of this stream.
    pub(crate) fn check(&self, rows: &DeviceRows<'_>) -> Result<(), CudaError> {
        if rows.order() == self.id() { Ok(()) } else { Err(CudaError::OtherStream) }
    }

    fn raw(&self) -> sys::CUstream {
        match &self.raw {
            Raw::Own(stream) => *stream,
            Raw::Engine(stream) => stream.cu_stream(),
        }
    }

    /// Begins to copy `bytes` bytes within the device.
    ///
    /// # Safety
    /// Both ranges must be device memory, `to` writable and untouched by others, until [`wait`](Self::wait) has returned.
    pub(crate) unsafe fn begin_copy(&self, to: u64, from: u64, bytes: u64) -> Result<(), CudaError> {
        let _entered = self.gpu.enter()?;
        // SAFETY: the caller's word.
        let code = unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, bytes as usize, self.raw()) };
        self.gpu.check("copy within its memory", code)
    }

    /// Blocks until everything begun so far has completed.
    ///
    /// # Errors
    /// The driver's answer, which may be about any earlier work of the stream.
    pub fn wait(&self) -> Result<(), CudaError> {
        let _entered = self.gpu.enter()?;
        // SAFETY: event and stream are alive and of the context that is current.
        self.gpu.check("record an event", unsafe { sys::cuEventRecord(self.event, self.raw()) })?;
        // SAFETY: as above.
        self.gpu.check("wait for its stream", unsafe { sys::cuEventSynchronize(self.event) })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let Ok(_entered) = self.gpu.enter() else { return };
        if !self.event.is_null() {
            // SAFETY: this value's own event.
            self.gpu.report("destroy an event", unsafe { sys::cuEventDestroy_v2(self.event) });
        }
        if let Raw::Own(stream) = self.raw {
            // SAFETY: this value's own stream; work in it goes on and the driver frees it afterwards.
            self.gpu.report("destroy a stream", unsafe { sys::cuStreamDestroy_v2(stream) });
        }
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let own = matches!(self.raw, Raw::Own(_));
        f.debug_struct("Stream").field("gpu", &self.gpu.uuid()).field("own", &own).finish_non_exhaustive()
    }
}
