//! `config.json` of the target families, typed and with every default filled in.

mod moe;
mod quant;
mod rope;

use std::path::{Path, PathBuf};

use serde_json::Value;

pub use moe::{MoeConfig, Scoring, TopkMethod};
pub use quant::QuantFormat;
pub use rope::{RopeConfig, Yarn};

use crate::json::{self, Fields};
use crate::{ModelSource, Result};

pub(crate) const MAX_WIDTH: usize = 1 << 22;
pub(crate) const MAX_POSITIONS: usize = 1 << 28;
pub(crate) const MAX_LAYERS: usize = 1024;
const MAX_EXPERTS: usize = 8192;
const CONFIG: &str = "config.json";

/// The model class a checkpoint was saved from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Architecture {
    /// DeepSeek-V2, V2.5, V2-Lite, Coder-V2.
    DeepseekV2,
    /// DeepSeek-V3, R1, Kimi-K2.
    DeepseekV3,
    /// Kimi-K2.5: a DeepSeek-V3 text model inside a vision wrapper.
    KimiK25,
}

impl Architecture {
    /// What precedes the text model's tensor names on disk.
    pub(crate) fn tensor_prefix(self) -> &'static str {
        match self {
            Self::DeepseekV2 | Self::DeepseekV3 => "",
            Self::KimiK25 => "language_model.",
        }
    }
}

/// The two generations of defaults.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Family {
    V2,
    V3,
}

/// What a target checkpoint's config says about its text model.
#[derive(Debug, Clone, PartialEq)]
pub struct TargetConfig {
    /// Model class.
    pub architecture: Architecture,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Decoder layers, without multi-token-prediction layers.
    pub num_hidden_layers: usize,
    /// Attention heads.
    pub num_attention_heads: usize,
    /// Rows of the embedding and of the head.
    pub vocab_size: usize,
    /// Rank of the query compression; `None` for one full query projection.
    pub q_lora_rank: Option<usize>,
    /// Width of the cached latent.
    pub kv_lora_rank: usize,
    /// Per-head query and key width without position.
    pub qk_nope_head_dim: usize,
    /// Query and key width with rotary position; the key's is shared by all heads.
    pub qk_rope_head_dim: usize,
    /// Per-head value width.
    pub v_head_dim: usize,
    /// Inner width of the dense MLP.
    pub intermediate_size: usize,
    /// Mixture-of-experts layers; `None` for a dense model.
    pub moe: Option<MoeConfig>,
    /// Epsilon of the layer norms and the final norm.
    pub rms_norm_eps: f64,
    /// Epsilon of `q_a_layernorm` and `kv_a_layernorm`, which the published models build without the config's.
    pub latent_norm_eps: f64,
    /// Rotary position embedding.
    pub rope: RopeConfig,
    /// Context limit in tokens, already including any extension.
    pub max_position_embeddings: usize,
    /// First token of a sequence.
    pub bos_token_id: Option<u32>,
    /// Tokens that end a sequence: the union of every file that names some, ascending.
    pub eos_token_ids: Vec<u32>,
    /// Whether the head is the embedding.
    pub tie_word_embeddings: bool,
    /// Declared weight format.
    pub quantisation: QuantFormat,
}

/// Defaults that no request could use would refuse every request that leaves them unset.
fn check_sampling(generation: &Fields<'_>) -> Result<()> {
    let ranges = [
        ("temperature", 0.0..=100.0, "between 0 and 100"),
        ("top_p", f64::EPSILON..=1.0, "above 0 and at most 1"),
    ];
    for (key, range, limit) in ranges {
        let Some(value) = generation.get(key) else { continue };
        if !value.as_f64().is_some_and(|n| range.contains(&n)) {
            return Err(generation.refuse(key, format!("must be {limit}")));
        }
    }
    Ok(())
}

impl TargetConfig {
    /// Reads `config.json` and, when there, `generation_config.json` and `hf_quant_config.json`.
    ///
    /// Fails on the first field that is missing, out of range or not supported.
    pub fn from_dir(dir: &Path) -> Result<Self> {
        let (path, value) = read_config_json(dir)?;
        let mut config = Self::from_value(&path, &value)?;
        if config.quantisation == QuantFormat::None {
            config.quantisation = QuantFormat::read_separate(dir)?;
        }
        let generation_path = dir.join("generation_config.json");
        if let Some(value) = json::read_optional(&generation_path)? {
            let generation = Fields::of(&generation_path, "", &value)?;
            config.add_eos(&generation)?;
            check_sampling(&generation)?;
        }
        Ok(config)
    }

    /// That of a folder, or of a model that is made up.
    ///
    /// # Errors
    /// As [`from_dir`](Self::from_dir), and a specification that stands for no target.
    pub fn from_source(source: &ModelSource) -> Result<Self> {
        match source {
            ModelSource::Folder(dir) => Self::from_dir(dir),
            ModelSource::Synth(spec) => {
                let (path, text) = spec.target_config()?;
                Self::from_json(&path, &text)
            }
        }
    }

    /// Reads the text of a `config.json`; `path` only names it in errors.
    pub fn from_json(path: &Path, text: &str) -> Result<Self> {
        Self::from_value(path, &json::parse(path, text.as_bytes())?)
    }

    fn from_value(path: &Path, value: &Value) -> Result<Self> {
        let root = Fields::of(path, "", value)?;
        let architecture = read_architecture(&root)?;
        let (prefix, text) = match architecture {
            Architecture::KimiK25 => {
                let inner = root.get("text_config").ok_or_else(|| root.missing("text_config"))?;
                ("text_config", Fields::of(path, "text_config", inner)?)
            }
            Architecture::DeepseekV2 | Architecture::DeepseekV3 => ("", root),
        };
        check_model_type(&text, architecture)?;
        refuse_unsupported(&text)?;
        let mut config = Self::read_text(&text, prefix, architecture)?;
        config.tie_word_embeddings =
            text.flag("tie_word_embeddings", false)? || root.flag("tie_word_embeddings", false)?;
        config.quantisation = QuantFormat::read(&root, &text, prefix)?;
        config.bos_token_id = match text.token_ids("bos_token_id")?.first() {
            Some(&id) => Some(id),
            None => root.token_ids("bos_token_id")?.first().copied(),
        };
        config.add_eos(&text)?;
        config.add_eos(&root)?;
        Ok(config)
    }

    fn read_text(f: &Fields<'_>, prefix: &str, architecture: Architecture) -> Result<Self> {
        let family = if architecture == Architecture::DeepseekV2 { Family::V2 } else { Family::V3 };
        let heads = f.size("num_attention_heads", MAX_WIDTH)?;
        if f.opt_size("num_key_value_heads", MAX_WIDTH)?.is_some_and(|kv| kv != heads) {
            let limit = format!("latent attention needs num_attention_heads = {heads}");
            return Err(f.refuse("num_key_value_heads", limit));
        }
        let rope_dim = f.size("qk_rope_head_dim", MAX_WIDTH)?;
        if !rope_dim.is_multiple_of(2) {
            return Err(f.refuse("qk_rope_head_dim", "must be even"));
        }
        Ok(Self {
            architecture,
            hidden_size: f.size("hidden_size", MAX_WIDTH)?,
            num_hidden_layers: f.size("num_hidden_layers", MAX_LAYERS)?,
            num_attention_heads: heads,
            vocab_size: f.size("vocab_size", MAX_WIDTH)?,
            q_lora_rank: f.opt_size("q_lora_rank", MAX_WIDTH)?,
            kv_lora_rank: f.size("kv_lora_rank", MAX_WIDTH)?,
            qk_nope_head_dim: f.size("qk_nope_head_dim", MAX_WIDTH)?,
            qk_rope_head_dim: rope_dim,
            v_head_dim: f.size("v_head_dim", MAX_WIDTH)?,
            intermediate_size: f.size("intermediate_size", MAX_WIDTH)?,
            moe: MoeConfig::read(f, family)?,
            rms_norm_eps: f.positive("rms_norm_eps", 1e-6)?,
            latent_norm_eps: 1e-6,
            rope: RopeConfig::read(f, prefix)?,
            max_position_embeddings: context(f)?,
            bos_token_id: None,
            eos_token_ids: Vec::new(),
            tie_word_embeddings: false,
            quantisation: QuantFormat::None,
        })
    }

    fn add_eos(&mut self, f: &Fields<'_>) -> Result<()> {
        let key = "eos_token_id";
        for id in f.token_ids(key)? {
            if id as usize >= self.vocab_size {
                return Err(f.refuse(key, format!("must be below vocab_size = {}", self.vocab_size)));
            }
            if let Err(at) = self.eos_token_ids.binary_search(&id) {
                self.eos_token_ids.insert(at, id);
            }
        }
        Ok(())
    }

    /// Width of one head's query and key.
    pub(crate) fn qk_head_dim(&self) -> usize {
        self.qk_nope_head_dim + self.qk_rope_head_dim
    }

    /// Whether that layer's MLP is a mixture of experts.
    pub fn is_moe_layer(&self, layer: usize) -> bool {
        self.moe.as_ref().is_some_and(|moe| moe.is_moe_layer(layer))
    }
}

fn read_architecture(root: &Fields<'_>) -> Result<Architecture> {
    let key = "architectures";
    let name = root.get(key).ok_or_else(|| root.missing(key))?.get(0).and_then(Value::as_str);
    match name {
        Some("DeepseekV2ForCausalLM") => Ok(Architecture::DeepseekV2),
        Some("DeepseekV3ForCausalLM") => Ok(Architecture::DeepseekV3),
        Some("KimiK25ForConditionalGeneration" | "Kimi_K25ForConditionalGeneration") => {
            Ok(Architecture::KimiK25)
        }
        Some("DeepseekV32ForCausalLM") => Err(root.refuse(key, "sparse attention is not supported yet")),
        _ => Err(root.refuse(
            key,
            "supported: DeepseekV2ForCausalLM, DeepseekV3ForCausalLM, KimiK25ForConditionalGeneration",
        )),
    }
}

fn check_model_type(text: &Fields<'_>, architecture: Architecture) -> Result<()> {
    let allowed: &[&str] = match architecture {
        Architecture::DeepseekV2 => &["deepseek_v2"],
        Architecture::DeepseekV3 | Architecture::KimiK25 => &["deepseek_v3", "kimi_k2"],
    };
    match text.text("model_type")? {
        Some(found) if !allowed.contains(&found) => {
            Err(text.refuse("model_type", format!("must be {} for this architecture", allowed.join(" or "))))
        }
        _ => Ok(()),
    }
}

fn refuse_unsupported(f: &Fields<'_>) -> Result<()> {
    f.must_be_absent("index_topk", "sparse attention (DeepSeek-V3.2) is not supported yet")?;
    f.must_be_absent("linear_attn_config", "linear attention is not supported")?;
    f.must_be_off("mla_use_nope", "attention without rotary position is not supported")?;
    f.must_be_off("attention_bias", "attention biases are not supported")?;
    if !f.flag("rope_interleave", true)? {
        return Err(f.refuse("rope_interleave", "only interleaved rotary pairs are supported"));
    }
    match f.text("hidden_act")? {
        None | Some("silu") => Ok(()),
        Some(_) => Err(f.refuse("hidden_act", "only silu is supported")),
    }
}

/// The path of a folder's config and its parsed content.
pub(crate) fn read_config_json(dir: &Path) -> Result<(PathBuf, Value)> {
    let path = dir.join(CONFIG);
    let value = json::read(&path)?;
    Ok((path, value))
}

/// Positions, enough for a prompt and one more token.
fn context(f: &Fields<'_>) -> Result<usize> {
    let key = "max_position_embeddings";
    match f.size(key, MAX_POSITIONS)? {
        1 => Err(f.refuse(key, "must be at least 2: a prompt and one more token")),
        positions => Ok(positions),
    }
}
