//! The target service: it owns the weights, the KV cache and the truth of every sequence.
//!
//! [`run`] listens at once and loads the model on the engine's own thread. Frames of gateways become commands in a
//! bounded mailbox; the engine steps over all sequences that are ready and puts replies on bounded streams.
#![forbid(unsafe_code)]

mod engine;
mod error;
#[cfg(test)]
mod fault_tests;
mod files;
mod fingerprint;
mod importers;
mod options;
mod plan;
mod rpc;
mod run;
#[doc(hidden)]
pub mod sim;
mod state;

pub use error::TargetError;
pub use options::TargetOptions;
pub use plan::Need;
pub use run::{Ready, run};
