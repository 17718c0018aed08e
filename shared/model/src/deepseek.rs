//! DeepSeek-V2 and V3 (and Kimi-K2): one pre-norm decoder, driven by its config.
//!
//! `h += attention(norm(h)); h += feed_forward(norm(h))` a layer, then `norm(h) · lm_headᵀ`.

use std::sync::Arc;

use candle_core::Tensor;
use eyrie_checkpoint::{LayerTensors, TargetCheckpoint, TargetConfig, layer_tensors, model_tensors};
use eyrie_kernels::{Backend, Embedding, Linear, PagedRows, RmsNorm, Rope, RopeStyle, Rows};

use crate::attention::Attention;
use crate::cache::{Keep, LatentCache};
use crate::error::{ModelError, Result};
use crate::loader::{Loader, rope_spec};
use crate::moe::FeedForward;
use crate::pages::SeqTable;
use crate::rows::{Block, RowPlan, SeqRows, Shape, check_parents};
use crate::shared_weights::SharedWeights;
use crate::target::{ForwardOut, TargetModel};
use crate::types::{Aux, CaptureSet, LayerRoutes, Progress, Trace};

#[derive(Debug)]
struct Layer {
    attention_norm: RmsNorm,
    attention: Attention,
    ffn_norm: RmsNorm,
    ffn: FeedForward,
}

/// A DeepSeek-V2/V3 text model.
#[derive(Debug)]
pub struct DeepSeek {
    backend: Backend,
    config: TargetConfig,
    shared: SharedWeights,
    embed: Embedding,
    layers: Vec<Layer>,
    norm: RmsNorm,
    head: Linear,
    capture: Option<CaptureSet>,
}

impl DeepSeek {
    /// Packs the weights of `checkpoint` in their published precision. The embedding and head are used where they
    /// lie in `shared` and not read again. `progress` counts checkpoint bytes.
    pub fn load(
        checkpoint: &TargetCheckpoint,
        shared: SharedWeights,
        backend: &Backend,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Self> {
        Self::load_as(checkpoint.config().clone(), checkpoint, shared, backend, progress)
    }

    /// As [`load`](Self::load), reading the weights under `config` instead of the checkpoint's own: for trying
    /// what a changed constant does to the output.
    pub fn load_as(
        config: TargetConfig,
        checkpoint: &TargetCheckpoint,
        shared: SharedWeights,
        backend: &Backend,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Self> {
        shared.check(config.vocab_size, config.hidden_size)?;
        let mut loader = Loader::new(checkpoint, backend, progress)?;
        let rope = rope_spec(&config.rope, config.qk_rope_head_dim, RopeStyle::Interleaved);
        let rope = Arc::new(Rope::new(rope)?);
        let mut layers = Vec::with_capacity(config.num_hidden_layers);
        for index in 0..config.num_hidden_layers {
            layers.push(Layer::load(&mut loader, &config, &rope, &layer_tensors(&config, index))?);
        }
        let norm = loader.norm(&model_tensors(&config).norm, config.rms_norm_eps)?;
        let (embed, head) = (shared.embedding(backend)?, shared.head(backend)?);
        Ok(Self { backend: backend.clone(), config, shared, embed, layers, norm, head, capture: None })
    }

    /// [`TargetModel::forward`], recording into `trace` what was computed on the way.
    pub fn forward_traced(
        &mut self,
        batch: &[SeqRows<'_>],
        cache: &mut LatentCache,
        mut trace: Option<&mut Trace>,
    ) -> Result<ForwardOut> {
        if batch.is_empty() {
            return Ok(ForwardOut::default());
        }
        let plan = self.plan(batch, cache)?;
        let tokens: Vec<u32> = batch.iter().flat_map(|rows| rows.tokens).copied().collect();
        let mut captured = Captured::new(self.capture.as_ref());
        let mut h = self.embed.lookup(&tokens)?;
        for (index, layer) in self.layers.iter().enumerate() {
            captured.stream(index, &h);
            if let Some(trace) = trace.as_deref_mut() {
                trace.resid.push(h.clone());
            }
            h = layer.forward(
                &self.backend,
                index,
                &h,
                cache.layer(index),
                &plan.layout,
                trace.as_deref_mut(),
            )?;
        }
        captured.stream(self.layers.len(), &h);
        if let Some(trace) = trace {
            trace.resid.push(h.clone());
        }
        let logits = match plan.wants_logits() {
            true => Some(self.head.forward_f32(&self.norm.forward(&plan.select(&self.backend, &h)?)?)?),
            false => None,
        };
        let aux = captured.into_aux(&self.backend, self.config.hidden_size)?;
        Ok(ForwardOut { logits, logit_rows: plan.logit_rows, aux, rows: plan.rows })
    }

    fn plan(&self, batch: &[SeqRows<'_>], cache: &LatentCache) -> Result<RowPlan> {
        if cache.layers() != self.layers.len() {
            return Err(ModelError::Mismatch {
                what: "cache layers",
                expected: self.layers.len(),
                got: cache.layers(),
            });
        }
        for (sequence, rows) in batch.iter().enumerate() {
            let refuse = |reason: String| Err(ModelError::Rows { sequence, reason });
            let vocab = self.config.vocab_size;
            if let Some(&id) = rows.tokens.iter().find(|&&id| id as usize >= vocab) {
                return refuse(format!("token ids must be below the vocabulary of {vocab}, got {id}"));
            }
            if let Some(parents) = rows.parents {
                check_parents(sequence, parents, rows.tokens.len())?;
            }
        }
        let trees: Vec<_> = batch.iter().map(|rows| rows.parents.map(tree_parent)).collect();
        let blocks: Vec<Block<'_>> = std::iter::zip(batch, &trees)
            .map(|(rows, tree)| Block {
                table: rows.table,
                committed: rows.base_len,
                first_slot: rows.base_len,
                rows: rows.tokens.len(),
                origin: 0,
                shape: tree.as_ref().map_or(Shape::Chain, |parent| Shape::Tree(parent)),
                logits: rows.logits,
            })
            .collect();
        RowPlan::build(&self.backend, &blocks, cache.page_rows())
    }
}

fn tree_parent(parents: &[u16]) -> impl Fn(usize) -> Option<usize> + '_ {
    move |node| node.checked_sub(1).and_then(|row| parents.get(row)).map(|&parent| usize::from(parent))
}

impl Layer {
    fn load(
        loader: &mut Loader<'_>,
        config: &TargetConfig,
        rope: &Arc<Rope>,
        tensors: &LayerTensors,
    ) -> Result<Self> {
        let eps = config.rms_norm_eps;
        Ok(Self {
            attention_norm: loader.norm(&tensors.input_norm, eps)?,
            attention: Attention::load(loader, config, rope, &tensors.attention)?,
            ffn_norm: loader.norm(&tensors.post_attention_norm, eps)?,
            ffn: FeedForward::load(loader, config, &tensors.ffn)?,
        })
    }

    fn forward(
        &self,
        backend: &Backend,
        index: usize,
        h: &Tensor,
        cache: &mut PagedRows,
        rows: &Rows,
        trace: Option<&mut Trace>,
    ) -> Result<Tensor> {
        let attended = self.attention.forward(&self.attention_norm.forward(h)?, cache, rows)?;
        let h = backend.add(h, &attended)?;
        let x = self.ffn_norm.forward(&h)?;
        let (y, routing) = self.ffn.forward(&x)?;
        if let (Some(trace), Some(routing)) = (trace, routing) {
            trace.routes.push(LayerRoutes { layer: index, input: x, routes: routing.to_host()? });
        }
        Ok(backend.add(&h, &y)?)
    }
}

/// Residual streams kept on the way through the layers.
struct Captured<'a> {
    ids: &'a [usize],
    streams: Vec<Tensor>,
}

impl<'a> Captured<'a> {
    fn new(set: Option<&'a CaptureSet>) -> Self {
        Self { ids: set.map_or(&[], CaptureSet::ids), streams: Vec::new() }
    }

    fn stream(&mut self, id: usize, h: &Tensor) {
        if self.ids.contains(&id) {
            self.streams.push(h.clone());
        }
    }

    fn into_aux(self, backend: &Backend, hidden: usize) -> Result<Option<Aux>> {
        if self.streams.is_empty() {
            return Ok(None);
        }
        let streams: Vec<&Tensor> = self.streams.iter().collect();
        Ok(Some(Aux::new(backend.beside(&streams)?, self.ids.len() * hidden)?))
    }
}

impl TargetModel for DeepSeek {
    fn config(&self) -> &TargetConfig {
        &self.config
    }

    fn embed_and_head(&self) -> &SharedWeights {
        &self.shared
    }

    fn set_capture(&mut self, capture: &CaptureSet) -> Result<()> {
        self.capture = Some(CaptureSet::new(capture.ids(), self.layers.len())?);
        Ok(())
    }

    fn capture(&self) -> Option<&CaptureSet> {
        self.capture.as_ref()
    }

    fn new_cache(&self, tokens: usize, page_rows: usize) -> Result<LatentCache> {
        LatentCache::new(
            &self.backend,
            self.layers.len(),
            tokens,
            page_rows,
            LatentCache::width(&self.config),
        )
    }

    fn forward(&mut self, batch: &[SeqRows<'_>], cache: &mut LatentCache) -> Result<ForwardOut> {
        self.forward_traced(batch, cache, None)
    }

    fn rollback(&self, cache: &mut LatentCache, table: &mut SeqTable, keep: Keep<'_>) -> Result<()> {
        cache.keep(table, keep)
    }
}
