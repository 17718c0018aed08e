//! The contract between a target model and speculative decoding, and the one way to load a target.

use std::ops::Range;

use candle_core::Tensor;
use eyrie_checkpoint::{Architecture, TargetCheckpoint, TargetConfig};
use eyrie_kernels::Backend;

use crate::cache::{Keep, LatentCache};
use crate::deepseek::DeepSeek;
use crate::error::Result;
use crate::kimi::KimiK25;
use crate::pages::SeqTable;
use crate::rows::SeqRows;
use crate::shared_weights::SharedWeights;
use crate::types::{Aux, CaptureSet, Progress};

/// Everything EAGLE-3 needs of a target. No method has a default: a model or wrapper that lacks one does not compile.
pub trait TargetModel: Send + std::fmt::Debug {
    /// The text model's config (never a multimodal wrapper's outer one).
    fn config(&self) -> &TargetConfig;

    /// The embedding and head, which the draft maps.
    fn embed_and_head(&self) -> &SharedWeights;

    /// Captures these residual streams in every later forward; errors when an id is over the layer count.
    fn set_capture(&mut self, capture: &CaptureSet) -> Result<()>;

    /// The capture set, `None` before [`set_capture`](Self::set_capture).
    fn capture(&self) -> Option<&CaptureSet>;

    /// A cache for `tokens` slots (rounded up to whole pages) in pages of `page_rows`; errors when either is 0 or the
    /// bytes cannot be addressed.
    fn new_cache(&self, tokens: usize, page_rows: usize) -> Result<LatentCache>;

    /// Runs all rows of `batch` in one pass and writes their latents into `cache`; tables are not changed.
    /// A row's result is bit-equal whatever rows run beside it and however its prefix was chunked. Errors on token
    /// ids outside the vocabulary, unreserved slots and malformed trees, before any row is computed.
    fn forward(&mut self, batch: &[SeqRows<'_>], cache: &mut LatentCache) -> Result<ForwardOut>;

    /// Keeps part of the rows of the last forward and commits them in `table`.
    fn rollback(&self, cache: &mut LatentCache, table: &mut SeqTable, keep: Keep<'_>) -> Result<()>;
}

/// What a target forward returns.
#[derive(Debug, Default)]
pub struct ForwardOut {
    /// `[n, V]` f32 for the `n` rows that asked for logits, in batch order; `None` when no row did.
    pub logits: Option<Tensor>,
    /// Rows of `logits` of each sequence.
    pub logit_rows: Vec<Range<usize>>,
    /// Captured streams of every row, `None` without a capture set.
    pub aux: Option<Aux>,
    /// Rows of `aux` (and of the batch) of each sequence.
    pub rows: Vec<Range<usize>>,
}

/// Loads the target in `checkpoint`, whatever its architecture. `shared` comes from [`SharedWeights::build`] over the
/// same checkpoint; `progress` is called after each packed layer part.
pub fn load_target(
    checkpoint: &TargetCheckpoint,
    shared: SharedWeights,
    backend: &Backend,
    progress: &mut dyn FnMut(Progress),
) -> Result<Box<dyn TargetModel>> {
    let text = DeepSeek::load(checkpoint, shared, backend, progress)?;
    Ok(match checkpoint.config().architecture {
        Architecture::DeepseekV2 | Architecture::DeepseekV3 => Box::new(text),
        Architecture::KimiK25 => Box::new(KimiK25::new(text)),
    })
}
