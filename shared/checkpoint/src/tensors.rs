//! The one list of a target's tensors: the account checks a folder against it, the model loads from it.

use crate::TargetConfig;

/// A weight matrix: name without the `.weight` suffix, which differs per layout, and logical shape.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinearSpec {
    /// Canonical module name, without any wrapper prefix.
    pub name: String,
    /// Output features, input features.
    pub shape: [usize; 2],
    /// Whether a quantised layout may stand in for a float one.
    pub quantisable: bool,
}

/// A vector of floats: full tensor name and length.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VectorSpec {
    /// Canonical tensor name, without any wrapper prefix.
    pub name: String,
    /// Elements.
    pub len: usize,
}

/// A gated MLP.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MlpTensors {
    /// Gate projection.
    pub gate: LinearSpec,
    /// Up projection.
    pub up: LinearSpec,
    /// Down projection.
    pub down: LinearSpec,
}

/// How queries are made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum QueryTensors {
    /// One full projection.
    Full(LinearSpec),
    /// Through a normalised low-rank bottleneck.
    LowRank {
        /// Down projection.
        a: LinearSpec,
        /// Norm of the bottleneck.
        norm: VectorSpec,
        /// Up projection.
        b: LinearSpec,
    },
}

/// Multi-head latent attention.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttentionTensors {
    /// Query path; rows per head are `[nope | rope]`.
    pub query: QueryTensors,
    /// Rows are `[latent | rope key]`.
    pub kv_a: LinearSpec,
    /// Norm of the latent.
    pub kv_a_norm: VectorSpec,
    /// Rows per head are `[nope key | value]`.
    pub kv_b: LinearSpec,
    /// Output projection.
    pub o: LinearSpec,
}

/// A mixture of experts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MoeTensors {
    /// Router.
    pub router: LinearSpec,
    /// Bias added to scores for choosing only; `noaux_tc` has one.
    pub router_bias: Option<VectorSpec>,
    /// Routed experts.
    pub experts: Vec<MlpTensors>,
    /// The shared experts as one MLP.
    pub shared: Option<MlpTensors>,
}

/// The feed-forward half of a layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FfnTensors {
    /// One MLP for every token.
    Dense(MlpTensors),
    /// Routed experts.
    Moe(MoeTensors),
}

/// Every tensor of one decoder layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerTensors {
    /// Norm before attention.
    pub input_norm: VectorSpec,
    /// Attention.
    pub attention: AttentionTensors,
    /// Norm before the feed-forward half.
    pub post_attention_norm: VectorSpec,
    /// Feed-forward half.
    pub ffn: FfnTensors,
}

/// The tensors outside the layers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelTensors {
    /// Token embedding.
    pub embed: LinearSpec,
    /// Norm before the head.
    pub norm: VectorSpec,
    /// Output head; the embedding itself when tied.
    pub head: LinearSpec,
}

/// A matrix or a vector, for walking a whole model.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Spec<'a> {
    Linear(&'a LinearSpec),
    Vector(&'a VectorSpec),
}

fn linear(name: String, out: usize, input: usize) -> LinearSpec {
    LinearSpec { name, shape: [out, input], quantisable: true }
}

fn float_only(name: String, out: usize, input: usize) -> LinearSpec {
    LinearSpec { quantisable: false, ..linear(name, out, input) }
}

fn norm(module: String, len: usize) -> VectorSpec {
    VectorSpec { name: module + ".weight", len }
}

fn mlp(prefix: &str, hidden: usize, inner: usize) -> MlpTensors {
    MlpTensors {
        gate: linear(format!("{prefix}.gate_proj"), inner, hidden),
        up: linear(format!("{prefix}.up_proj"), inner, hidden),
        down: linear(format!("{prefix}.down_proj"), hidden, inner),
    }
}

/// The tensors outside the layers.
pub fn model_tensors(config: &TargetConfig) -> ModelTensors {
    let (vocab, hidden) = (config.vocab_size, config.hidden_size);
    let embed = float_only("model.embed_tokens".to_owned(), vocab, hidden);
    let head = match config.tie_word_embeddings {
        true => embed.clone(),
        false => float_only("lm_head".to_owned(), vocab, hidden),
    };
    ModelTensors { embed, norm: norm("model.norm".to_owned(), hidden), head }
}

/// The tensors of decoder layer `layer`, which must be below `num_hidden_layers`.
pub fn layer_tensors(config: &TargetConfig, layer: usize) -> LayerTensors {
    let p = format!("model.layers.{layer}");
    let hidden = config.hidden_size;
    LayerTensors {
        input_norm: norm(format!("{p}.input_layernorm"), hidden),
        attention: attention(config, &format!("{p}.self_attn")),
        post_attention_norm: norm(format!("{p}.post_attention_layernorm"), hidden),
        ffn: ffn(config, layer, &format!("{p}.mlp")),
    }
}

fn attention(config: &TargetConfig, p: &str) -> AttentionTensors {
    let (hidden, heads, latent) = (config.hidden_size, config.num_attention_heads, config.kv_lora_rank);
    let q_out = heads * config.qk_head_dim();
    let query = match config.q_lora_rank {
        None => QueryTensors::Full(linear(format!("{p}.q_proj"), q_out, hidden)),
        Some(rank) => QueryTensors::LowRank {
            a: linear(format!("{p}.q_a_proj"), rank, hidden),
            norm: norm(format!("{p}.q_a_layernorm"), rank),
            b: linear(format!("{p}.q_b_proj"), q_out, rank),
        },
    };
    let kv_out = heads * (config.qk_nope_head_dim + config.v_head_dim);
    AttentionTensors {
        query,
        kv_a: linear(format!("{p}.kv_a_proj_with_mqa"), latent + config.qk_rope_head_dim, hidden),
        kv_a_norm: norm(format!("{p}.kv_a_layernorm"), latent),
        kv_b: linear(format!("{p}.kv_b_proj"), kv_out, latent),
        o: linear(format!("{p}.o_proj"), hidden, heads * config.v_head_dim),
    }
}

fn ffn(config: &TargetConfig, layer: usize, p: &str) -> FfnTensors {
    let hidden = config.hidden_size;
    let Some(moe) = config.moe.as_ref().filter(|moe| moe.is_moe_layer(layer)) else {
        return FfnTensors::Dense(mlp(p, hidden, config.intermediate_size));
    };
    let inner = moe.moe_intermediate_size;
    FfnTensors::Moe(MoeTensors {
        router: float_only(format!("{p}.gate"), moe.n_routed_experts, hidden),
        router_bias: (moe.method == crate::TopkMethod::NoAuxTc).then(|| VectorSpec {
            name: format!("{p}.gate.e_score_correction_bias"),
            len: moe.n_routed_experts,
        }),
        experts: (0..moe.n_routed_experts).map(|e| mlp(&format!("{p}.experts.{e}"), hidden, inner)).collect(),
        shared: (moe.n_shared_experts > 0)
            .then(|| mlp(&format!("{p}.shared_experts"), hidden, moe.n_shared_experts * inner)),
    })
}

impl MlpTensors {
    fn visit<'a>(&'a self, visit: &mut impl FnMut(Spec<'a>)) {
        [&self.gate, &self.up, &self.down].into_iter().for_each(|l| visit(Spec::Linear(l)));
    }
}

impl ModelTensors {
    pub(crate) fn visit<'a>(&'a self, visit: &mut impl FnMut(Spec<'a>)) {
        visit(Spec::Linear(&self.embed));
        visit(Spec::Vector(&self.norm));
        if self.head != self.embed {
            visit(Spec::Linear(&self.head));
        }
    }
}

impl LayerTensors {
    pub(crate) fn visit<'a>(&'a self, visit: &mut impl FnMut(Spec<'a>)) {
        visit(Spec::Vector(&self.input_norm));
        let attention = &self.attention;
        match &attention.query {
            QueryTensors::Full(q) => visit(Spec::Linear(q)),
            QueryTensors::LowRank { a, norm, b } => {
                visit(Spec::Linear(a));
                visit(Spec::Vector(norm));
                visit(Spec::Linear(b));
            }
        }
        visit(Spec::Linear(&attention.kv_a));
        visit(Spec::Vector(&attention.kv_a_norm));
        visit(Spec::Linear(&attention.kv_b));
        visit(Spec::Linear(&attention.o));
        visit(Spec::Vector(&self.post_attention_norm));
        match &self.ffn {
            FfnTensors::Dense(mlp) => mlp.visit(visit),
            FfnTensors::Moe(moe) => {
                visit(Spec::Linear(&moe.router));
                moe.router_bias.iter().for_each(|bias| visit(Spec::Vector(bias)));
                moe.experts.iter().for_each(|expert| expert.visit(visit));
                moe.shared.iter().for_each(|shared| shared.visit(visit));
            }
        }
    }
}
