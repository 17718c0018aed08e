//! Kimi-K2.5: a multimodal wrapper around a DeepSeek-V3 text model. Every method of the contract is the inner
//! model's, so nothing a draft needs can be missing from the wrapper.

use eyrie_checkpoint::TargetConfig;

use crate::cache::{Keep, LatentCache};
use crate::deepseek::DeepSeek;
use crate::error::Result;
use crate::pages::SeqTable;
use crate::rows::SeqRows;
use crate::shared_weights::SharedWeights;
use crate::target::{ForwardOut, TargetModel};
use crate::types::CaptureSet;

/// `KimiK25ForConditionalGeneration`, text only.
#[derive(Debug)]
pub struct KimiK25(DeepSeek);

impl KimiK25 {
    /// Wraps the model under `language_model.`.
    pub fn new(language_model: DeepSeek) -> Self {
        Self(language_model)
    }

    /// The wrapped text model.
    pub fn language_model(&mut self) -> &mut DeepSeek {
        &mut self.0
    }
}

impl TargetModel for KimiK25 {
    fn config(&self) -> &TargetConfig {
        self.0.config()
    }

    fn embed_and_head(&self) -> &SharedWeights {
        self.0.embed_and_head()
    }

    fn set_capture(&mut self, capture: &CaptureSet) -> Result<()> {
        self.0.set_capture(capture)
    }

    fn capture(&self) -> Option<&CaptureSet> {
        self.0.capture()
    }

    fn new_cache(&self, tokens: usize, page_rows: usize) -> Result<LatentCache> {
        self.0.new_cache(tokens, page_rows)
    }

    fn forward(&mut self, batch: &[SeqRows<'_>], cache: &mut LatentCache) -> Result<ForwardOut> {
        self.0.forward(batch, cache)
    }

    fn rollback(&self, cache: &mut LatentCache, table: &mut SeqTable, keep: Keep<'_>) -> Result<()> {
        self.0.rollback(cache, table, keep)
    }
}
