//! The gateway between a fake target and a fake draft, over real sockets.
#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a failure here is a failed test")]
#![expect(clippy::disallowed_methods, reason = "tasks end with the test's runtime")]

mod client;
mod fake;
mod faults;
mod pools;
mod replies;
