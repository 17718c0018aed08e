//! The configs that a specification starts from.

use serde_json::{Map, Value, json};

/// A model by name, with what an EAGLE-3 head for it is like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shape {
    DeepseekV2Lite,
    DeepseekV3,
    KimiK2,
    Mini,
}

impl Shape {
    pub(super) const ALL: [Self; 4] = [Self::DeepseekV2Lite, Self::DeepseekV3, Self::KimiK2, Self::Mini];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::DeepseekV2Lite => "deepseek-v2-lite",
            Self::DeepseekV3 => "deepseek-v3",
            Self::KimiK2 => "kimi-k2",
            Self::Mini => "mini",
        }
    }

    /// Whether its published experts are INT4.
    pub(super) fn is_packed(self) -> bool {
        matches!(self, Self::KimiK2 | Self::Mini)
    }

    /// The published config, without ids of tokens: nothing but its limits ends a sequence.
    pub(super) fn target(self) -> Map<String, Value> {
        object(match self {
            Self::DeepseekV2Lite => deepseek_v2_lite(),
            Self::DeepseekV3 => deepseek_v3(),
            Self::KimiK2 => kimi_k2(),
            Self::Mini => mini(),
        })
    }

    /// The layer of a head that fits it: what does not follow from the target.
    pub(super) fn head(self) -> Map<String, Value> {
        let (heads, kv_heads, head_dim, inner) = match self {
            Self::DeepseekV2Lite => (16, 4, 128, 10_944),
            Self::DeepseekV3 => (56, 8, 128, 40_960),
            Self::KimiK2 => (64, 8, 128, 18_432),
            Self::Mini => (6, 2, 64, 1024),
        };
        object(json!({
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "intermediate_size": inner,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10_000.0
        }))
    }
}

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}

/// Experts in INT4 g32 as Kimi-K2.5 stores them, all else float.
pub(super) fn packed_experts() -> Value {
    let weights =
        json!({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": true});
    json!({
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"]
    })
}

fn yarn(factor: u32, mscale: f64) -> Value {
    json!({
        "type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": mscale,
        "mscale_all_dim": mscale
    })
}

fn deepseek_v2_lite() -> Value {
    json!({
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "vocab_size": 102_400,
        "hidden_size": 2048,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "q_lora_rank": null,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "intermediate_size": 10_944,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "scoring_func": "softmax",
        "topk_method": "greedy",
        "norm_topk_prob": false,
        "routed_scaling_factor": 1.0,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000,
        "rope_scaling": yarn(40, 0.707),
        "max_position_embeddings": 163_840
    })
}

fn deepseek_v3() -> Value {
    json!({
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": 129_280,
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "intermediate_size": 18_432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": true,
        "routed_scaling_factor": 2.5,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000,
        "rope_scaling": yarn(40, 1.0),
        "max_position_embeddings": 163_840
    })
}

/// The text model of Kimi-K2.5.
fn kimi_k2() -> Value {
    json!({
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "vocab_size": 163_840,
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_attention_heads": 64,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "intermediate_size": 18_432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 384,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": true,
        "routed_scaling_factor": 2.827,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50_000,
        "rope_scaling": yarn(64, 1.0),
        "max_position_embeddings": 262_144
    })
}

/// The bundled target.
fn mini() -> Value {
    json!({
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": 4096,
        "hidden_size": 384,
        "num_hidden_layers": 8,
        "num_attention_heads": 6,
        "q_lora_rank": 192,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "intermediate_size": 1024,
        "moe_intermediate_size": 128,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "n_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": true,
        "routed_scaling_factor": 2.0,
        "rms_norm_eps": 1e-6,
        "rope_theta": 50_000,
        "max_position_embeddings": 4096
    })
}
