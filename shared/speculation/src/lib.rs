//! Pure logic of lossless speculative decoding: draft trees, sample-then-match verification, the
//! counter-based random numbers and sampling filters behind it, stop rules, acceptance statistics.
//! No tensors, no IO, no async: every function is a pure function of its arguments.
#![forbid(unsafe_code)]

mod acceptance;
mod proposal;
mod rng;
mod sampling;
mod stop;
mod tree;
mod verify;

pub use acceptance::Acceptance;
pub use proposal::{MAX_NODES, Proposal, ProposalError};
pub use rng::uniform;
pub use sampling::{GREEDY_BELOW, ParamsError, SampleError, Sampler, SamplingParams};
pub use stop::{Admitted, Finish, StopRules};
pub use tree::{BeamNode, GrowError, MAX_TOP_K, ShapeError, TreeGrower, TreeShape};
pub use verify::{Verdict, verify};
