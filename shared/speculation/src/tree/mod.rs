//! Dynamic draft trees (EAGLE-2): their shape, and growing one from a draft's top-k probabilities.

mod grower;
mod shape;

pub use grower::{BeamNode, GrowError, TreeGrower};
pub use shape::{MAX_TOP_K, ShapeError, TreeShape};
