//! The target service as its peers meet it: a real server on a unix socket, the demo model, a gRPC client.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test that cannot go on has failed")]

mod admission;
mod copies;
mod features;
mod harness;
mod lifecycle;
mod numbers;
mod preemption;
mod prefix;
mod protocol;
mod tokens;
