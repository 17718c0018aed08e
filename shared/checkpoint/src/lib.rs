//! What a checkpoint says: config, tensor index, layouts and pair checks; no arithmetic beyond making weights up.
//!
//! Opening reads headers only: weights stay in the mapped files, or in their seed, until a kernel asks for them.
#![forbid(unsafe_code)]

mod aux_ids;
mod bytes;
mod config;
mod draft;
mod error;
mod header;
mod index;
mod json;
mod layout;
pub mod pair;
mod source;
mod synth;
mod target;
mod tensors;
mod weight_map;

pub use aux_ids::{AuxConvention, AuxIds, AuxIdsError, aux_ids};
pub use bytes::Bytes;
pub use config::{Architecture, MoeConfig, QuantFormat, RopeConfig, Scoring, TargetConfig, TopkMethod, Yarn};
pub use draft::{DraftCheckpoint, DraftConfig, EmbedSource, HeadSource, WrittenAuxIds};
pub use error::CheckpointError;
pub use header::Dtype;
pub use index::{TensorEntry, TensorIndex};
pub use layout::{Layout, ScaleView, WeightView};
pub use source::ModelSource;
pub use synth::{Fill, Numbers, SynthError, SynthFormat, SynthSpec};
pub use target::{Account, RuleTotal, SkipRule, TargetCheckpoint};
pub use tensors::{
    AttentionTensors, FfnTensors, LayerTensors, LinearSpec, MlpTensors, ModelTensors, MoeTensors,
    QueryTensors, VectorSpec, layer_tensors, model_tensors,
};

/// Result of reading a checkpoint.
pub type Result<T, E = CheckpointError> = std::result::Result<T, E>;
