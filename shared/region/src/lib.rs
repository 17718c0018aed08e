//! Memory shared between processes: sealed memfds, mapped files, device memory, leases, epochs and the feature ring.
//!
//! The exporter owns a region and describes it in a [`Grant`]; descriptors travel through an [`FdDoor`]; the
//! importer maps them read-only and verifies the grant before it reads a byte. Synchronous throughout: callers
//! that live in an async runtime run [`FdDoor::fetch`] and [`Grant::verify`] on a blocking thread.

mod cuda;
mod door;
mod epoch;
mod error;
mod fdpass;
mod file;
mod grant;
mod import;
mod lease;
mod ledger;
mod local;
mod memfd;
mod memory;
mod region;
mod resident;
mod ring;
mod usage;

pub use cuda::{
    CudaError, DeviceBlock, DeviceBuffer, DeviceRows, Gpu, GpuUuid, ImportedIpc, ImportedVmm, InvalidUuid,
    Ipc, IpcBuilder, IpcHandle, Stream, StreamId, Vmm, VmmBuilder,
};
pub use door::{DoorError, FdDoor, SocketFile, Token};
pub use epoch::Epoch;
pub use error::RegionError;
pub use fdpass::{FdPassError, MAX_FDS};
pub use file::FileMap;
pub use grant::{CPU, Grant, GrantError, TensorGrant};
pub use import::{Import, ImportError, ImportedRing};
pub use lease::{Lease, LeaseId, LeaseTable};
pub use ledger::{Importer, Ledger};
pub use local::Local;
pub use memfd::{ImportedMemfd, Memfd, MemfdBuilder};
pub use memory::{available_memory, check_memory, share_heap, trim_heap};
pub use region::{ALIGN, DeviceSpan, DeviceSpanMut, Region, RegionKind, UnknownKind, align_up};
pub use resident::Resident;
pub use ring::{
    DeviceRingGeometry, DeviceRingReader, DeviceRingWriter, ImportedPayload, RingError, RingGeometry,
    RingMemory, RingPayload, RingReader, RingWriter, SlotPart, SlotRef,
};
pub use usage::{MappingUsage, mapping_usage};
