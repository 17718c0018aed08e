//! The target service as its peers meet it: a real server on a unix socket, the demo model, a gRPC client.

mod features;
mod harness;
mod lifecycle;
mod protocol;
mod tokens;
