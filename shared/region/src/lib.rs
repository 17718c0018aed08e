//! Memory shared between processes: sealed memfds, mapped files, leases, epochs and the feature ring.
//!
//! The exporter owns a region and describes it in a [`Grant`]; descriptors travel through an [`FdDoor`]; the
//! importer maps them read-only and verifies the grant before it reads a byte. Synchronous throughout: callers
//! that live in an async runtime run [`FdDoor::fetch`] and [`Grant::verify`] on a blocking thread.

mod door;
mod epoch;
mod error;
mod fdpass;
mod file;
mod grant;
mod lease;
mod ledger;
mod local;
mod memfd;
mod memory;
mod region;
mod resident;
mod ring;
mod usage;

pub use door::{DoorError, FdDoor, SocketFile, Token};
pub use epoch::Epoch;
pub use error::RegionError;
pub use fdpass::{FdPassError, MAX_FDS};
pub use file::FileMap;
pub use grant::{Grant, GrantError, TensorGrant};
pub use lease::{Lease, LeaseId, LeaseTable};
pub use ledger::{Importer, Ledger};
pub use local::Local;
pub use memfd::{ImportedMemfd, Memfd, MemfdBuilder};
pub use memory::{available_memory, check_memory, share_heap, trim_heap};
pub use region::{ALIGN, Region, RegionKind, UnknownKind, align_up};
pub use resident::Resident;
pub use ring::{RingError, RingGeometry, RingReader, RingWriter, SlotRef};
pub use usage::{MappingUsage, mapping_usage};
