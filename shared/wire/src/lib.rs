//! The gRPC contract: generated messages, and the one way this project builds channels, servers and statuses.
//!
//! This is the only crate that knows prost. `proto/eyrie/v1` has the contract in words.
#![forbid(unsafe_code)]

mod address;
mod dialer;
mod frame;
mod grant;
mod status;
mod transport;

pub use address::{Address, AddressError};
pub use dialer::{Dial, Dialer, Dialing, PeerChannel, in_process};
pub use frame::{
    MAX_FRAME_ITEMS, check_fingerprint, check_frame, check_hello, check_items, check_version, first_frame,
};
pub use grant::{GrantMessageError, grant_from_wire, grant_to_wire, ring_to_wire, slots_per_read};
/// Encoding of the generated messages, for those who deal in bytes.
pub use prost::Message;
pub use status::{Reason, item_error, reason_of, refuse, retry_after, status_of, with_reason};
pub use transport::{Incoming, Listener, channel, connect, server};

/// Generated messages, clients and servers of package `eyrie.v1`.
#[expect(
    missing_docs,
    clippy::all,
    clippy::allow_attributes,
    clippy::allow_attributes_without_reason,
    reason = "generated code; the .proto files carry the documentation"
)]
pub mod v1 {
    tonic::include_proto!("eyrie.v1");
}

/// Encoded descriptor set of the package, for server reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/eyrie.v1.fds"));

/// Version of the Rounds frame protocol, carried in every `Hello`.
pub const PROTOCOL_VERSION: u32 = 1;

/// Largest message, both ways, on every connection (bytes).
pub const MAX_MESSAGE: usize = 32 << 20;

/// Largest verify width: rows of one `Verify`, root included.
pub const MAX_VERIFY_ROWS: usize = 64;
