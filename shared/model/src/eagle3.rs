//! The EAGLE-3 head: one decoder layer over `[norm(embed(token)) | norm(feature)]`, with its own cache.
//!
//! Slot `j` holds token `j + 1` and the feature of position `j`, rotates by position `j` and predicts token `j + 2`.

use std::ops::Range;
use std::sync::Arc;

use candle_core::Tensor;
use eyrie_checkpoint::{DraftCheckpoint, DraftConfig, EmbedSource, HeadSource};
use eyrie_kernels::{Backend, Embedding, GqaSpec, Linear, Mlp, RmsNorm, Rope, RopeStyle, gqa};

use crate::cache::DraftCache;
use crate::error::{ModelError, Result};
use crate::loader::rope_spec;
use crate::pages::SeqTable;
use crate::rows::{Block, LogitRows, RowPlan, Shape};
use crate::shared_weights::SharedWeights;
use crate::types::{Aux, CaptureSet, DraftState, Feature};

/// The rows of one sequence in a draft forward; `F` is [`Feature`] for an extend, [`DraftState`] for a step.
#[derive(Debug)]
pub struct DraftRows<'a, F> {
    /// The sequence's draft pages, reserved up to `base_slot + tokens.len()`.
    pub table: &'a SeqTable,
    /// Slot of the first row; rows take consecutive slots.
    pub base_slot: u32,
    /// Absolute position of slot 0: 0, unless the draft joined the sequence late.
    pub origin: u32,
    /// The token of slot `j` is the sequence's token `j + 1`.
    pub tokens: &'a [u32],
    /// A row a token.
    pub feature: &'a F,
    /// `None`: a chain, every row sees all slots before it. Otherwise a tree over the committed slots: node 0 (the
    /// root) is the last committed slot, node `i` is slot `table.len() - 1 + i`, and `parents[i]` is the node of node
    /// `i + 1`'s parent. It covers the nodes of earlier levels and this call's rows.
    pub parents: Option<&'a [u16]>,
}

/// What a draft forward returns.
#[derive(Debug)]
pub struct DraftOut {
    /// Pre-norm output of every row.
    pub states: DraftState,
    /// Rows of `states` of each sequence.
    pub rows: Vec<Range<usize>>,
    /// `[n, Vd]` f32 over draft ids: an extend's last row of each sequence, every row of a step.
    pub logits: Tensor,
    /// Rows of `logits` of each sequence.
    pub logit_rows: Vec<Range<usize>>,
}

/// The tensors of a draft's own files, packed once whatever the number of targets it drafts for.
#[derive(Debug)]
pub struct HeadWeights {
    config: DraftConfig,
    backend: Backend,
    target_ids: Option<Vec<u32>>,
    /// `None`: the target's.
    embed: Option<Arc<Embedding>>,
    fc: Linear,
    layer: DraftLayer,
    norm: RmsNorm,
    /// `None`: the target's.
    head: Option<Arc<Linear>>,
}

/// An EAGLE-3 draft head over the embedding and head of one target.
#[derive(Debug)]
pub struct Eagle3Head {
    own: Arc<HeadWeights>,
    capture: CaptureSet,
    embed: Arc<Embedding>,
    head: Arc<Linear>,
}

#[derive(Debug)]
struct DraftLayer {
    token_norm: RmsNorm,
    feature_norm: RmsNorm,
    q: Linear,
    k: Linear,
    v: Linear,
    o: Linear,
    attention: GqaSpec,
    norm_before_residual: bool,
    mlp_norm: RmsNorm,
    mlp: Mlp,
}

impl HeadWeights {
    /// Where they were loaded to.
    pub fn backend(&self) -> &Backend {
        &self.backend
    }

    /// Packs what the draft's files hold.
    pub fn load(checkpoint: &DraftCheckpoint, backend: &Backend) -> Result<Self> {
        let config = checkpoint.config().clone();
        let linear = |name: &str| -> Result<Linear> { Ok(Linear::pack(backend, &checkpoint.linear(name)?)?) };
        let norm = |name: &str| -> Result<RmsNorm> {
            Ok(RmsNorm::new(backend, checkpoint.vector(&format!("{name}.weight"))?, config.rms_norm_eps)?)
        };
        let embed = match checkpoint.embed_source() {
            EmbedSource::File => {
                Some(Arc::new(Embedding::new(backend, &checkpoint.linear("embed_tokens")?)?))
            }
            EmbedSource::Target => None,
        };
        let head = match checkpoint.head_source() {
            HeadSource::File => Some(Arc::new(linear("lm_head")?)),
            HeadSource::Target => None,
        };
        let fc = linear("fc")?;
        let target_ids = checkpoint.target_ids().map(<[u32]>::to_vec);
        let layer = DraftLayer::load(&config, &linear, &norm)?;
        let norm = norm("norm")?;
        Ok(Self { config, backend: backend.clone(), target_ids, embed, fc, layer, norm, head })
    }
}

impl Eagle3Head {
    /// [`HeadWeights::load`] and [`Eagle3Head::over`] in one.
    pub fn load(
        checkpoint: &DraftCheckpoint,
        capture: &CaptureSet,
        shared: &SharedWeights,
        backend: &Backend,
    ) -> Result<Self> {
        Self::over(Arc::new(HeadWeights::load(checkpoint, backend)?), capture, shared)
    }

    /// Puts a draft's own weights over a target's: the embedding and, for a draft that owns none, the head are
    /// `shared`'s and used where they lie. Errors when the pair disagrees on hidden size, vocabulary, or
    /// `capture.len() · Ht` and `fc`.
    pub fn over(own: Arc<HeadWeights>, capture: &CaptureSet, shared: &SharedWeights) -> Result<Self> {
        let config = &own.config;
        let embed = match &own.embed {
            Some(embed) => Arc::clone(embed),
            None => {
                require_equal("width of the borrowed embedding", config.hidden_size, shared.hidden())?;
                Arc::new(shared.embedding(&own.backend)?)
            }
        };
        let head = match &own.head {
            Some(head) => Arc::clone(head),
            None => {
                require_equal("width of the borrowed head", config.hidden_size, shared.hidden())?;
                require_equal("rows of the borrowed head", config.draft_vocab_size, shared.vocab())?;
                Arc::new(shared.head(&own.backend)?)
            }
        };
        require_equal("draft vocab_size", shared.vocab(), config.vocab_size)?;
        let aux_width = capture.ids().len() * shared.hidden();
        require_equal("fc input width", aux_width, own.fc.in_features())?;
        Ok(Self { own, capture: capture.clone(), embed, head })
    }

    /// The draft's config.
    pub fn config(&self) -> &DraftConfig {
        &self.own.config
    }

    /// Where it computes.
    pub fn backend(&self) -> &Backend {
        &self.own.backend
    }

    /// The target streams this head was trained on.
    pub fn capture(&self) -> &CaptureSet {
        &self.capture
    }

    /// Width of the target's captured rows, which `fc` takes.
    pub fn aux_width(&self) -> usize {
        self.own.fc.in_features()
    }

    /// Draft vocabulary `Vd`.
    pub fn draft_vocab(&self) -> usize {
        self.head.out_features()
    }

    /// Longest sequence the head was trained on. Positions beyond it work, but accept lengths drop.
    pub fn trained_len(&self) -> usize {
        self.own.config.max_position_embeddings
    }

    /// The target's id of a draft id; errors when it is not below `Vd`.
    pub fn to_target_id(&self, draft_id: u32) -> Result<u32> {
        let vocab = self.draft_vocab();
        if draft_id as usize >= vocab {
            return Err(ModelError::DraftId { vocab, id: draft_id });
        }
        Ok(self.own.target_ids.as_ref().map_or(draft_id, |ids| ids[draft_id as usize]))
    }

    /// A cache for `tokens` slots (rounded up to whole pages) in pages of `page_rows`; errors when either is 0 or the
    /// bytes cannot be addressed.
    pub fn new_cache(&self, tokens: usize, page_rows: usize) -> Result<DraftCache> {
        DraftCache::new(&self.own.backend, 1, tokens, page_rows, self.own.layer.attention.cache_width())
    }

    /// `fc` over captured rows: `[R, A·Ht]` to `[R, H]`.
    pub fn fuse(&self, aux: &Aux) -> Result<Feature> {
        Feature::new(self.own.fc.forward(aux.tensor())?, self.own.config.hidden_size)
    }

    /// Writes slots whose features came from the target; `base_slot` must not leave a gap after the committed slots.
    /// Logits are those of each sequence's last row. Commit with [`DraftCache::keep`].
    pub fn extend(&mut self, cache: &mut DraftCache, batch: &[DraftRows<'_, Feature>]) -> Result<DraftOut> {
        for (sequence, rows) in batch.iter().enumerate() {
            let (slot, len) = (rows.base_slot, rows.table.len());
            if slot > len {
                let reason =
                    format!("an extend must start within the {len} committed slots, got slot {slot}");
                return Err(ModelError::Rows { sequence, reason });
            }
            if rows.parents.is_some() {
                let reason = "an extend takes a chain, got tree parents".to_owned();
                return Err(ModelError::Rows { sequence, reason });
            }
        }
        self.forward(cache, batch, Feature::tensor, LogitRows::Last)
    }

    /// Drafts onwards from the head's own states in scratch slots behind the committed ones; logits of every row.
    pub fn step(&mut self, cache: &mut DraftCache, batch: &[DraftRows<'_, DraftState>]) -> Result<DraftOut> {
        for (sequence, rows) in batch.iter().enumerate() {
            let (slot, len) = (rows.base_slot, rows.table.len());
            if slot < len || len == 0 {
                let reason = format!(
                    "a step must start behind the {len} committed slots, at least 1, got slot {slot}"
                );
                return Err(ModelError::Rows { sequence, reason });
            }
        }
        self.forward(cache, batch, DraftState::tensor, LogitRows::All)
    }

    fn forward<F>(
        &mut self,
        cache: &mut DraftCache,
        batch: &[DraftRows<'_, F>],
        tensor: impl Fn(&F) -> &Tensor,
        logits: LogitRows,
    ) -> Result<DraftOut> {
        if batch.is_empty() {
            let reason = "a draft batch needs at least one sequence, got 0".to_owned();
            return Err(ModelError::Rows { sequence: 0, reason });
        }
        let plan = self.plan(cache, batch, &tensor, logits)?;
        let tokens: Vec<u32> = batch.iter().flat_map(|rows| rows.tokens).copied().collect();
        let features: Vec<&Tensor> = batch.iter().map(|rows| tensor(rows.feature)).collect();
        let backend = &self.own.backend;
        let feature = backend.below(&features)?;
        let token = self.embed.lookup(&tokens)?;
        let state = self.own.layer.forward(backend, &token, &feature, cache, &plan)?;
        let mut logits = self.head.forward_f32(&self.own.norm.forward(&plan.select(backend, &state)?)?)?;
        if self.own.config.logit_scale != 1.0 {
            logits = backend.scale(&logits, self.own.config.logit_scale)?;
        }
        let states = DraftState::new(state, self.own.config.hidden_size)?;
        Ok(DraftOut { states, rows: plan.rows, logits, logit_rows: plan.logit_rows })
    }

    fn plan<F>(
        &self,
        cache: &DraftCache,
        batch: &[DraftRows<'_, F>],
        tensor: impl Fn(&F) -> &Tensor,
        logits: LogitRows,
    ) -> Result<RowPlan> {
        for (sequence, rows) in batch.iter().enumerate() {
            rows.check(tensor(rows.feature), self.own.config.hidden_size, self.own.config.vocab_size)
                .map_err(|reason| ModelError::Rows { sequence, reason })?;
        }
        let trees: Vec<_> = batch.iter().map(|rows| rows.parents.map(tree_parent)).collect();
        let blocks: Vec<Block<'_>> = std::iter::zip(batch, &trees)
            .map(|(rows, tree)| Block {
                table: rows.table,
                committed: rows.table.len().min(rows.base_slot),
                first_slot: rows.base_slot,
                rows: rows.tokens.len(),
                origin: rows.origin,
                shape: tree.as_ref().map_or(Shape::Chain, |parent| Shape::Tree(parent)),
                logits,
            })
            .collect();
        RowPlan::build(&self.own.backend, &blocks, cache.page_rows())
    }
}

/// Scratch entry `e` is node `e + 1`; a node whose parent is the root hangs on the committed slots.
fn tree_parent(parents: &[u16]) -> impl Fn(usize) -> Option<usize> + '_ {
    move |entry| parents.get(entry).and_then(|&parent| usize::from(parent).checked_sub(1))
}

fn require_equal(what: &'static str, expected: usize, got: usize) -> Result<()> {
    if expected == got { Ok(()) } else { Err(ModelError::Mismatch { what, expected, got }) }
}

impl<F> DraftRows<'_, F> {
    fn check(&self, feature: &Tensor, hidden: usize, vocab: usize) -> Result<(), String> {
        let rows = self.tokens.len();
        if feature.dims() != [rows, hidden] {
            return Err(format!("features must be [{rows}, {hidden}], got {:?}", feature.dims()));
        }
        if let Some(&id) = self.tokens.iter().find(|&&id| id as usize >= vocab) {
            return Err(format!("token ids must be below the vocabulary of {vocab}, got {id}"));
        }
        let Some(parents) = self.parents else { return Ok(()) };
        let nodes = (self.base_slot - self.table.len().min(self.base_slot)) as usize + rows;
        if parents.len() < nodes {
            return Err(format!("{nodes} tree nodes need a parent each, got {}", parents.len()));
        }
        match parents.iter().enumerate().find(|&(i, &parent)| usize::from(parent) > i) {
            Some((i, parent)) => Err(format!("parent of node {} must be at most {i}, got {parent}", i + 1)),
            None => Ok(()),
        }
    }
}

impl DraftLayer {
    fn load(
        config: &DraftConfig,
        linear: &dyn Fn(&str) -> Result<Linear>,
        norm: &dyn Fn(&str) -> Result<RmsNorm>,
    ) -> Result<Self> {
        let rope = Arc::new(Rope::new(rope_spec(&config.rope, config.head_dim, RopeStyle::HalfSplit))?);
        Ok(Self {
            token_norm: norm("midlayer.input_layernorm")?,
            feature_norm: norm("midlayer.hidden_norm")?,
            q: linear("midlayer.self_attn.q_proj")?,
            k: linear("midlayer.self_attn.k_proj")?,
            v: linear("midlayer.self_attn.v_proj")?,
            o: linear("midlayer.self_attn.o_proj")?,
            attention: GqaSpec {
                heads: config.num_attention_heads,
                kv_heads: config.num_key_value_heads,
                head_dim: config.head_dim,
                rope,
            },
            norm_before_residual: config.norm_before_residual,
            mlp_norm: norm("midlayer.post_attention_layernorm")?,
            mlp: Mlp::new(
                linear("midlayer.mlp.gate_proj")?,
                linear("midlayer.mlp.up_proj")?,
                linear("midlayer.mlp.down_proj")?,
            )?,
        })
    }

    /// Pre-norm output `[R, H]` of the rows; `token` and `feature` are `[R, H]`.
    fn forward(
        &self,
        backend: &Backend,
        token: &Tensor,
        feature: &Tensor,
        cache: &mut DraftCache,
        plan: &RowPlan,
    ) -> Result<Tensor> {
        let normed = self.feature_norm.forward(feature)?;
        let residual = if self.norm_before_residual { &normed } else { feature };
        let u = backend.beside(&[&self.token_norm.forward(token)?, &normed])?;
        let (q, k, v) = (self.q.forward(&u)?, self.k.forward(&u)?, self.v.forward(&u)?);
        let heads = gqa(backend, &self.attention, &q, &k, &v, cache.layer(0), &plan.layout)?;
        let h = backend.add(residual, &self.o.forward(&heads)?)?;
        let y = self.mlp.forward(&self.mlp_norm.forward(&h)?)?;
        Ok(backend.add(&h, &y)?)
    }
}
