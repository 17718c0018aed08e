use std::path::Path;

use serde_json::Value;

use crate::config::{MAX_LAYERS, MAX_POSITIONS, MAX_WIDTH, read_config_json};
use crate::json::{self, Fields};
use crate::{ModelSource, Result, RopeConfig};

const MAX_AUX: usize = 64;

/// Aux layer ids as the file spells them; what they mean is decided by [`crate::aux_ids`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WrittenAuxIds {
    /// The file names none.
    Absent,
    /// Inside `eagle_config`, as SpecForge and ModelOpt write them.
    Nested(Vec<usize>),
    /// At the top level, as speculators writes them.
    TopLevel(Vec<usize>),
}

/// What an EAGLE-3 draft's config says.
#[derive(Debug, Clone, PartialEq)]
pub struct DraftConfig {
    /// Width of the draft's residual stream.
    pub hidden_size: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key and value heads; divides the query heads.
    pub num_key_value_heads: usize,
    /// Width of one head, independent of `hidden_size / heads`.
    pub head_dim: usize,
    /// Inner width of the MLP.
    pub intermediate_size: usize,
    /// Rows of the embedding: the target's vocabulary.
    pub vocab_size: usize,
    /// Rows of the draft's head; equals `vocab_size` when the file names none.
    pub draft_vocab_size: usize,
    /// Width of one aux hidden state.
    pub target_hidden_size: usize,
    /// Aux hidden states fused into one feature.
    pub num_aux_hidden_states: usize,
    /// Aux layer ids as written.
    pub written_aux_ids: WrittenAuxIds,
    /// Epsilon of every norm.
    pub rms_norm_eps: f64,
    /// Half-split rotary position embedding.
    pub rope: RopeConfig,
    /// Trained context in tokens; a limit of quality only, positions are computed on demand.
    pub max_position_embeddings: usize,
    /// Whether the residual is taken after `hidden_norm`.
    pub norm_before_residual: bool,
    /// Multiplies the draft logits.
    pub logit_scale: f64,
}

impl DraftConfig {
    /// Reads `config.json` of a Llama-style draft in the SafeAILab or SpecForge layout.
    ///
    /// Fails on the first field that is missing, out of range, or of a variant that cannot be run.
    pub fn from_dir(dir: &Path) -> Result<Self> {
        let (path, value) = read_config_json(dir)?;
        Self::from_value(&path, &value)
    }

    /// That of a folder, or of a head that is made up.
    ///
    /// # Errors
    /// As [`from_dir`](Self::from_dir), and a specification that stands for no head.
    pub fn from_source(source: &ModelSource) -> Result<Self> {
        match source {
            ModelSource::Folder(dir) => Self::from_dir(dir),
            ModelSource::Synth(spec) => {
                let (path, text) = spec.draft_config()?;
                Self::from_json(&path, &text)
            }
        }
    }

    /// Reads the text of a `config.json`; `path` only names it in errors.
    pub fn from_json(path: &Path, text: &str) -> Result<Self> {
        Self::from_value(path, &json::parse(path, text.as_bytes())?)
    }

    fn from_value(path: &Path, value: &Value) -> Result<Self> {
        let f = Fields::of(path, "", value)?;
        refuse_other_layouts(&f)?;
        refuse_variants(&f)?;
        let eagle = f.get("eagle_config").map(|e| Fields::of(path, "eagle_config", e)).transpose()?;
        if let Some(eagle) = &eagle {
            refuse_eagle_variants(eagle)?;
        }
        let written_aux_ids = read_aux_ids(&f, eagle.as_ref())?;
        let hidden = f.size("hidden_size", MAX_WIDTH)?;
        let heads = f.size("num_attention_heads", MAX_WIDTH)?;
        let vocab = f.size("vocab_size", MAX_WIDTH)?;
        let draft_vocab = f.opt_size("draft_vocab_size", MAX_WIDTH)?.unwrap_or(vocab);
        if draft_vocab > vocab {
            return Err(f.refuse("draft_vocab_size", format!("must be at most vocab_size = {vocab}")));
        }
        Ok(Self {
            hidden_size: hidden,
            num_attention_heads: heads,
            num_key_value_heads: read_kv_heads(&f, heads)?,
            head_dim: read_head_dim(&f, hidden, heads)?,
            intermediate_size: f.size("intermediate_size", MAX_WIDTH)?,
            vocab_size: vocab,
            draft_vocab_size: draft_vocab,
            target_hidden_size: f.opt_size("target_hidden_size", MAX_WIDTH)?.unwrap_or(hidden),
            num_aux_hidden_states: read_aux_count(&f, &written_aux_ids)?,
            written_aux_ids,
            rms_norm_eps: f.positive("rms_norm_eps", 1e-6)?,
            rope: RopeConfig::read(&f, "")?,
            max_position_embeddings: f.size("max_position_embeddings", MAX_POSITIONS)?,
            norm_before_residual: f.flag("norm_before_residual", false)?,
            logit_scale: f.positive("logit_scale", 1.0)?,
        })
    }
}

fn refuse_other_layouts(f: &Fields<'_>) -> Result<()> {
    f.must_be_absent("speculators_model_type", "the speculators layout is not supported yet")?;
    f.must_be_absent("transformer_layer_config", "the speculators layout is not supported yet")?;
    let key = "architectures";
    let name = f.get(key).ok_or_else(|| f.missing(key))?.get(0).and_then(Value::as_str);
    match name {
        Some("LlamaForCausalLMEagle3" | "Eagle3LlamaForCausalLM" | "LlamaForCausalLM") => {}
        Some(n) if n.starts_with("Eagle3Deepseek") => {
            return Err(f.refuse(key, "drafts with latent attention are not supported yet"));
        }
        Some(n) if n.starts_with("Deepseek") || n.starts_with("Kimi") => {
            return Err(f.refuse(key, "is a target, not an EAGLE-3 draft"));
        }
        _ => return Err(f.refuse(key, "supported drafts: LlamaForCausalLMEagle3, LlamaForCausalLM")),
    }
    match f.text("model_type")? {
        None | Some("llama") => Ok(()),
        Some(_) => Err(f.refuse("model_type", "only llama drafts are supported")),
    }
}

fn refuse_variants(f: &Fields<'_>) -> Result<()> {
    if f.opt_size("num_hidden_layers", MAX_LAYERS)?.is_some_and(|n| n != 1) {
        return Err(f.refuse("num_hidden_layers", "only drafts of 1 layer are supported"));
    }
    f.must_be_off("fc_norm", "norms before fc are not supported yet")?;
    f.must_be_off("use_aux_norm", "norms before fc are not supported yet")?;
    f.must_be_off("norm_before_fc", "a norm before fc is not supported yet")?;
    f.must_be_off("norm_output", "feeding back the normalised state is not supported yet")?;
    f.must_be_off("bias", "a bias on fc is not supported yet")?;
    f.must_be_off("attention_bias", "attention biases are not supported yet")?;
    f.must_be_off("tie_word_embeddings", "a head tied to the draft's embedding is not supported yet")?;
    f.must_be_absent("quantization_config", "quantised drafts are not supported yet")?;
    f.must_be_absent("pard_token", "parallel drafting is not supported")?;
    f.must_be_absent("mask_token_id", "parallel drafting is not supported")?;
    match f.text("hidden_act")? {
        None | Some("silu") => Ok(()),
        Some(_) => Err(f.refuse("hidden_act", "only silu is supported")),
    }
}

fn refuse_eagle_variants(eagle: &Fields<'_>) -> Result<()> {
    if !eagle.flag("use_aux_hidden_state", true)? {
        return Err(eagle.refuse("use_aux_hidden_state", "EAGLE-1 features are not supported"));
    }
    eagle.must_be_off("norm_before_fc", "a norm before fc is not supported yet")?;
    eagle.must_be_off("fc_norm", "norms before fc are not supported yet")?;
    eagle.must_be_off("eh_proj_before_attn", "a projection before attention is not supported")?;
    eagle.must_be_off("return_hidden_post_norm", "feeding back the normalised state is not supported yet")
}

fn read_kv_heads(f: &Fields<'_>, heads: usize) -> Result<usize> {
    let kv = f.opt_size("num_key_value_heads", MAX_WIDTH)?.unwrap_or(heads);
    if heads.is_multiple_of(kv) {
        return Ok(kv);
    }
    Err(f.refuse("num_key_value_heads", format!("must divide num_attention_heads = {heads}")))
}

fn read_head_dim(f: &Fields<'_>, hidden: usize, heads: usize) -> Result<usize> {
    let dim = match f.opt_size("head_dim", MAX_WIDTH)? {
        Some(dim) => dim,
        None if hidden.is_multiple_of(heads) => hidden / heads,
        None => {
            return Err(f.refuse("num_attention_heads", format!("must divide hidden_size = {hidden}")));
        }
    };
    if dim.is_multiple_of(2) { Ok(dim) } else { Err(f.refuse("head_dim", "must be even")) }
}

fn read_aux_ids(f: &Fields<'_>, eagle: Option<&Fields<'_>>) -> Result<WrittenAuxIds> {
    let key = "eagle_aux_hidden_state_layer_ids";
    if let Some(eagle) = eagle
        && eagle.get(key).is_some()
    {
        return Ok(WrittenAuxIds::Nested(layer_ids(eagle, key)?));
    }
    match f.get(key) {
        Some(_) => Ok(WrittenAuxIds::TopLevel(layer_ids(f, key)?)),
        None => Ok(WrittenAuxIds::Absent),
    }
}

fn layer_ids(f: &Fields<'_>, key: &str) -> Result<Vec<usize>> {
    let ids = f.ids(key, "layer")?;
    if ids.is_empty() || ids.len() > MAX_AUX {
        return Err(f.refuse(key, format!("must name 1..={MAX_AUX} layers")));
    }
    Ok(ids.into_iter().map(|id| id as usize).collect())
}

fn read_aux_count(f: &Fields<'_>, written: &WrittenAuxIds) -> Result<usize> {
    let key = "num_aux_hidden_states";
    let named = match written {
        WrittenAuxIds::Absent => None,
        WrittenAuxIds::Nested(ids) | WrittenAuxIds::TopLevel(ids) => Some(ids.len()),
    };
    match (f.opt_size(key, MAX_AUX)?, named) {
        (Some(count), Some(ids)) if count != ids => {
            Err(f.refuse(key, format!("must equal the {ids} aux layer ids")))
        }
        (count, ids) => Ok(ids.or(count).unwrap_or(3)),
    }
}
