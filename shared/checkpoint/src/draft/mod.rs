//! EAGLE-3 drafts: typed config, tensors under one spelling, and where embedding and head come from.

mod config;
mod vocab;

use std::collections::HashMap;
use std::path::{Path, PathBuf};

pub use config::{DraftConfig, WrittenAuxIds};

use crate::target::{expect_float, float_view};
use crate::{CheckpointError, ModelSource, Result, TensorEntry, TensorIndex, WeightView};

/// Whose output head the draft uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeadSource {
    /// Its own `lm_head`.
    File,
    /// The target's, which needs equal width and vocabulary.
    Target,
}

/// Whose token embedding the draft uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EmbedSource {
    /// Its own `embed_tokens`.
    File,
    /// The target's, which needs equal width and vocabulary.
    Target,
}

/// An EAGLE-3 draft whose every tensor is accounted for; only `d2t` and `t2d` have been read.
#[derive(Debug)]
pub struct DraftCheckpoint {
    config: DraftConfig,
    index: TensorIndex,
    /// Index positions by canonical name.
    names: HashMap<String, usize>,
    target_ids: Option<Vec<u32>>,
    embed: EmbedSource,
    head: HeadSource,
}

impl DraftCheckpoint {
    /// Reads config, headers and the vocabulary map.
    ///
    /// Fails with the first tensor that is missing, unexpected, or of the wrong shape, dtype or content.
    pub fn open(dir: &Path) -> Result<Self> {
        Self::accounted(dir, DraftConfig::from_dir(dir)?, TensorIndex::open(dir)?)
    }

    /// The draft of `source`: a folder's, or one whose tensors are made up, which has neither an embedding nor a head.
    ///
    /// # Errors
    /// As [`open`](Self::open), and a specification that stands for no draft.
    pub fn from_source(source: &ModelSource) -> Result<Self> {
        let spec = match source {
            ModelSource::Folder(dir) => return Self::open(dir),
            ModelSource::Synth(spec) => spec,
        };
        let config = DraftConfig::from_source(source)?;
        let entry = |(name, shape)| TensorEntry::made(name, spec.float(), shape);
        let entries = required(&config).into_iter().map(entry).collect();
        let dir = PathBuf::from(source.to_string());
        let index = TensorIndex::made(dir.clone(), spec.seed(), entries);
        Self::accounted(&dir, config, index)
    }

    fn accounted(dir: &Path, config: DraftConfig, index: TensorIndex) -> Result<Self> {
        match Self::survey(config, index) {
            (Some(checkpoint), problems) if problems.is_empty() => Ok(checkpoint),
            (_, problems) => Err(problems.into_iter().next().unwrap_or_else(|| CheckpointError::File {
                path: dir.to_owned(),
                problem: "the draft could not be read".to_owned(),
            })),
        }
    }

    /// Accounts for every tensor and returns all problems.
    pub(crate) fn survey(config: DraftConfig, index: TensorIndex) -> (Option<Self>, Vec<CheckpointError>) {
        let mut problems = Vec::new();
        let names = canonical_names(&index, &mut problems);
        let entry = |name: &str| names.get(name).map(|&i: &usize| &index.entries()[i]);
        for (name, shape) in required(&config) {
            problems.extend(match entry(&name) {
                Some(found) => expect_float(&index, found, &shape).err(),
                None => Some(index.missing(&name, &format!("float {shape:?}"))),
            });
        }
        let embed = embed_source(&config, &index, entry("embed_tokens.weight"));
        let head = head_source(&config, &index, entry("lm_head.weight"));
        let ids = vocab::read_map(&index, &config, entry("d2t"), entry("t2d"));
        problems.extend(unexpected(&config, &index, &names));
        let sources = match (embed, head, ids) {
            (Ok(embed), Ok(head), Ok(ids)) => Some((embed, head, ids)),
            (embed, head, ids) => {
                problems.extend([embed.err(), head.err(), ids.err()].into_iter().flatten());
                None
            }
        };
        let checkpoint =
            sources.map(|(embed, head, target_ids)| Self { config, index, names, target_ids, embed, head });
        (checkpoint, problems)
    }

    /// The typed config.
    pub fn config(&self) -> &DraftConfig {
        &self.config
    }

    /// The tensors as on disk.
    pub fn index(&self) -> &TensorIndex {
        &self.index
    }

    /// Target id of every draft id, ascending; `None` when draft ids are target ids.
    pub fn target_ids(&self) -> Option<&[u32]> {
        self.target_ids.as_deref()
    }

    /// Whose embedding to use.
    pub fn embed_source(&self) -> EmbedSource {
        self.embed
    }

    /// Whose head to use.
    pub fn head_source(&self) -> HeadSource {
        self.head
    }

    fn entry(&self, name: &str) -> Result<&TensorEntry> {
        match self.names.get(name) {
            Some(&i) => Ok(&self.index.entries()[i]),
            None => Err(self.index.missing(name, "a draft tensor")),
        }
    }

    /// A weight matrix by module: `fc`, `lm_head`, `embed_tokens`, or within the layer such as
    /// `midlayer.self_attn.q_proj`, whichever alias the file uses.
    pub fn linear(&self, name: &str) -> Result<WeightView> {
        float_view(&self.index, self.entry(&format!("{name}.weight"))?)
    }

    /// A vector such as `midlayer.hidden_norm.weight`, widened to float32.
    pub fn vector(&self, name: &str) -> Result<Vec<f32>> {
        self.index.read_vector(self.entry(name)?)
    }
}

/// Names and shapes of the tensors every draft of this kind has.
fn required(c: &DraftConfig) -> Vec<(String, Vec<usize>)> {
    let (h, q, kv) = (c.hidden_size, c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim);
    let inner = c.intermediate_size;
    [
        ("fc", vec![h, c.num_aux_hidden_states * c.target_hidden_size]),
        ("midlayer.hidden_norm", vec![h]),
        ("midlayer.input_layernorm", vec![h]),
        ("midlayer.self_attn.q_proj", vec![q, 2 * h]),
        ("midlayer.self_attn.k_proj", vec![kv, 2 * h]),
        ("midlayer.self_attn.v_proj", vec![kv, 2 * h]),
        ("midlayer.self_attn.o_proj", vec![h, q]),
        ("midlayer.post_attention_layernorm", vec![h]),
        ("midlayer.mlp.gate_proj", vec![inner, h]),
        ("midlayer.mlp.up_proj", vec![inner, h]),
        ("midlayer.mlp.down_proj", vec![h, inner]),
        ("norm", vec![h]),
    ]
    .into_iter()
    .map(|(module, shape)| (format!("{module}.weight"), shape))
    .collect()
}

fn canonical(name: &str) -> String {
    let name = name.strip_prefix("model.").unwrap_or(name);
    match (name, name.strip_prefix("layers.0.")) {
        (_, Some(rest)) => format!("midlayer.{rest}"),
        ("draft_id_to_target_id", _) => "d2t".to_owned(),
        _ => name.to_owned(),
    }
}

fn canonical_names(index: &TensorIndex, problems: &mut Vec<CheckpointError>) -> HashMap<String, usize> {
    let mut names = HashMap::with_capacity(index.entries().len());
    for (i, entry) in index.entries().iter().enumerate() {
        if let Some(earlier) = names.insert(canonical(&entry.name), i) {
            let other: &TensorEntry = &index.entries()[earlier];
            problems.push(index.refuse(entry, format!("is another spelling of {}", other.name)));
        }
    }
    names
}

fn unexpected(
    config: &DraftConfig,
    index: &TensorIndex,
    names: &HashMap<String, usize>,
) -> Vec<CheckpointError> {
    let known: Vec<String> = required(config).into_iter().map(|(name, _)| name).collect();
    let optional = ["embed_tokens.weight", "lm_head.weight", "d2t", "t2d"];
    let mut found: Vec<(&String, &usize)> = names
        .iter()
        .filter(|(name, _)| !known.contains(name) && !optional.contains(&name.as_str()))
        .collect();
    found.sort_unstable_by_key(|(_, at)| **at);
    found.into_iter().map(|(name, &at)| index.refuse(&index.entries()[at], why_unexpected(name))).collect()
}

fn why_unexpected(name: &str) -> &'static str {
    match name {
        n if n.starts_with("fc_norm.") || n.starts_with("aux_norm_") => {
            "norms before fc are not supported yet"
        }
        "input_norm.weight" => "a norm before fc is not supported yet",
        "mask_hidden" => "parallel drafting is not supported",
        n if n.starts_with("layers.") => "only drafts of 1 layer are supported",
        n if n.contains("kv_a_proj_with_mqa") || n.contains("q_a_proj") => {
            "drafts with latent attention are not supported yet"
        }
        n if n.ends_with(".bias") => "biases are not supported yet",
        n if n.contains("_scale") || n.ends_with("weight_packed") => "quantised drafts are not supported yet",
        _ => "is unexpected: an EAGLE-3 draft of this layout has no such tensor",
    }
}

fn embed_source(c: &DraftConfig, index: &TensorIndex, entry: Option<&TensorEntry>) -> Result<EmbedSource> {
    let shape = [c.vocab_size, c.hidden_size];
    match entry {
        Some(entry) => expect_float(index, entry, &shape).map(|()| EmbedSource::File),
        None if c.target_hidden_size == c.hidden_size => Ok(EmbedSource::Target),
        None => {
            let (h, t) = (c.hidden_size, c.target_hidden_size);
            let wanted = format!(
                "float {shape:?}: hidden_size = {h} differs from target_hidden_size = {t}, so it cannot be borrowed"
            );
            Err(index.missing("embed_tokens.weight", &wanted))
        }
    }
}

fn head_source(c: &DraftConfig, index: &TensorIndex, entry: Option<&TensorEntry>) -> Result<HeadSource> {
    let shape = [c.draft_vocab_size, c.hidden_size];
    match entry {
        Some(entry) => expect_float(index, entry, &shape).map(|()| HeadSource::File),
        None if c.draft_vocab_size == c.vocab_size && c.target_hidden_size == c.hidden_size => {
            Ok(HeadSource::Target)
        }
        None => {
            let wanted = format!(
                "float {shape:?}: the target's head can only be borrowed with equal vocabulary ({}) and width ({})",
                c.vocab_size, c.target_hidden_size
            );
            Err(index.missing("lm_head.weight", &wanted))
        }
    }
}
