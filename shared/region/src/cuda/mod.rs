//! Memory of an NVIDIA GPU, shared between processes.
//!
//! Compiled into every build: the driver is looked for at run time, and where there is none each entry says so in one
//! line ([`CudaError::NoDriver`]). Every type here owns what it frees; nothing wraps foreign memory in something whose
//! drop frees it. No call uses the default stream.

mod buffer;
mod error;
mod gpu;
mod ipc;
mod rows;
mod stream;
mod uuid;
mod vmm;

pub use buffer::DeviceBuffer;
pub use error::CudaError;
pub use gpu::Gpu;
pub use ipc::{ImportedIpc, Ipc, IpcBuilder, IpcHandle};
pub use rows::{DeviceBlock, DeviceRows};
pub use stream::{Stream, StreamId};
pub use uuid::{GpuUuid, InvalidUuid};
pub use vmm::{ImportedVmm, Vmm, VmmBuilder};
