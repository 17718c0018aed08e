//! DeepSeek-V2/V3, Kimi-K2/K2.5 and EAGLE-3 heads over paged caches.
//!
//! [`TargetModel`] is everything speculative decoding asks of a target; [`Eagle3Head`] is the draft. Both take ragged
//! rows of many sequences, write into a paged cache addressed by [`SeqTable`]s, and keep what was accepted.
#![forbid(unsafe_code)]

mod attention;
mod cache;
mod deepseek;
mod eagle3;
mod error;
mod kimi;
mod loader;
mod moe;
mod pages;
mod prefix;
mod rows;
mod shared_weights;
mod target;
mod types;

pub use cache::{DraftCache, Keep, LatentCache};
pub use deepseek::DeepSeek;
pub use eagle3::{DraftOut, DraftRows, Eagle3Head, HeadWeights};
pub use error::{ModelError, Result};
pub use kimi::KimiK25;
pub use pages::{OutOfPages, PageAllocator, PageCopy, SeqTable};
pub use rows::{LogitRows, SeqRows};
pub use shared_weights::{Backing, EMBED, HEAD, SharedWeights};
pub use target::{ForwardOut, TargetModel, load_target};
pub use types::{Aux, CaptureSet, DraftState, Feature, LayerRoutes, Progress, Trace};
