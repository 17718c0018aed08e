//! Every kernel against a naive float64 reference, and every kernel bit-equal across instruction sets,
//! thread counts, batch widths and chunkings.

#![expect(clippy::unwrap_used, clippy::panic, reason = "test code outside #[test] functions")]

mod attention;
mod common;
mod linear;
mod moe;
mod rows;
mod sequences;
