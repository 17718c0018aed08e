//! The gateway service: client API, sessions, round clock and failure policy.
//!
//! It holds no model: the target's card and tokenizer come over the wire, and compute is never batched
//! here, only frames are.
#![forbid(unsafe_code)]

mod api;
mod catalog;
mod deadline;
mod draft_side;
mod gateway;
mod link;
mod options;
mod output;
mod policy;
mod pool;
mod reply;
mod round;
mod sequence;
mod session;
#[doc(hidden)]
pub mod sim;
mod stats;
mod validate;

pub use gateway::{GatewayError, Ready, run};
pub use options::{GatewayOptions, OptionError};
