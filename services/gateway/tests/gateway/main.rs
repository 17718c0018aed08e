//! The gateway between a fake target and a fake draft, over real sockets.
#![expect(clippy::disallowed_methods, reason = "fakes end with the test")]

mod client;
mod faults;
mod fake;
mod replies;
