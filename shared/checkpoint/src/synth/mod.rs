//! Models whose weights come from a seed: a specification such as `kimi-k2:layers=8,seed=3` stands for a folder.

mod fill;
mod shapes;
mod tensors;

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use serde_json::{Map, Value, json};

pub use fill::{Fill, Numbers};
pub(crate) use tensors::{numbers_of, target_entries};

use crate::Dtype;
use shapes::{Shape, packed_experts};

/// The name under which a head's own sizes are given.
const HEAD: &str = "eagle3";

/// A size that may be set: its name, the field of config.json that this is, and the largest value. Beyond that no model is
/// known by far, and the list of its tensors alone would take gigabytes.
type Key = (&'static str, &'static str, u64);

/// What may be set of a target.
const TARGET_KEYS: [Key; 12] = [
    ("layers", "num_hidden_layers", 256),
    ("dense-layers", "first_k_dense_replace", 256),
    ("experts", "n_routed_experts", MOST_EXPERTS),
    ("active-experts", "num_experts_per_tok", MOST_EXPERTS),
    ("shared-experts", "n_shared_experts", 64),
    ("expert-width", "moe_intermediate_size", MOST_WIDTH),
    ("groups", "n_group", MOST_EXPERTS),
    ("hidden", HIDDEN, MOST_WIDTH),
    ("heads", "num_attention_heads", MOST_HEADS),
    ("width", "intermediate_size", MOST_WIDTH),
    ("vocab", VOCAB, MOST_TOKENS),
    ("context", CONTEXT, MOST_POSITIONS),
];

/// The same of a head that is given by its own sizes.
const HEAD_KEYS: [Key; 8] = [
    ("hidden", HIDDEN, MOST_WIDTH),
    ("heads", "num_attention_heads", MOST_HEADS),
    ("kv-heads", "num_key_value_heads", MOST_HEADS),
    ("head-dim", "head_dim", 1024),
    ("width", "intermediate_size", MOST_WIDTH),
    ("vocab", VOCAB, MOST_TOKENS),
    ("aux", "num_aux_hidden_states", 64),
    ("context", CONTEXT, MOST_POSITIONS),
];

const MOST_EXPERTS: u64 = 512;
const MOST_WIDTH: u64 = 1 << 17;
const MOST_HEADS: u64 = 1024;
const MOST_TOKENS: u64 = 1 << 20;
const MOST_POSITIONS: u64 = 1 << 22;

const HIDDEN: &str = "hidden_size";
const VOCAB: &str = "vocab_size";
const CONTEXT: &str = "max_position_embeddings";

/// How weights are encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SynthFormat {
    /// All in bfloat16.
    Bf16,
    /// All in float32.
    F32,
    /// Routed experts in INT4 with a scale for every 32 inputs, all else in bfloat16.
    Int4,
}

/// As it is given on a command line.
impl fmt::Display for SynthFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bf16 => "bf16",
            Self::F32 => "f32",
            Self::Int4 => "int4",
        })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Target(Shape),
    Head,
}

/// A model made from a seed: `NAME[:key=value,...]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SynthSpec {
    kind: Kind,
    seed: u64,
    format: SynthFormat,
    /// What was set, as it was given.
    set: Vec<(&'static str, &'static str, u64)>,
    text: String,
}

/// A specification that stands for no model.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("synth: {what} must be {limit}, given {given:?}")]
pub struct SynthError {
    what: String,
    limit: String,
    given: String,
}

fn refuse(what: impl Into<String>, limit: impl Into<String>, given: &str) -> SynthError {
    SynthError { what: what.into(), limit: limit.into(), given: given.to_owned() }
}

impl FromStr for SynthSpec {
    type Err = SynthError;

    fn from_str(text: &str) -> Result<Self, SynthError> {
        let (name, settings) = text.split_once(':').unwrap_or((text, ""));
        let shape = Shape::ALL.into_iter().find(|shape| shape.name() == name);
        let kind = match shape {
            Some(shape) => Kind::Target(shape),
            None if name == HEAD => Kind::Head,
            None => {
                let names: Vec<_> = Shape::ALL.into_iter().map(Shape::name).collect();
                return Err(refuse(
                    "the name",
                    format!("one of {}, {HEAD} for a head", names.join(", ")),
                    name,
                ));
            }
        };
        let format = match shape {
            Some(shape) if shape.is_packed() => SynthFormat::Int4,
            _ => SynthFormat::Bf16,
        };
        let mut spec = Self { kind, seed: 1, format, set: Vec::new(), text: text.to_owned() };
        let mut known = Vec::new();
        for setting in settings.split(',').filter(|setting| !setting.is_empty()) {
            let key = spec.set(setting)?;
            if known.contains(&key) {
                return Err(refuse(key, "set once", setting));
            }
            known.push(key);
        }
        Ok(spec)
    }
}

impl SynthSpec {
    fn keys(&self) -> &'static [Key] {
        match self.kind {
            Kind::Target(_) => &TARGET_KEYS,
            Kind::Head => &HEAD_KEYS,
        }
    }

    /// Takes a setting in; which key it sets.
    fn set<'a>(&mut self, setting: &'a str) -> Result<&'a str, SynthError> {
        let (key, value) =
            setting.split_once('=').ok_or_else(|| refuse("a setting", "key=value", setting))?;
        let number = || value.parse::<u64>().map_err(|_| refuse(key, "a whole number", value));
        match (key, self.keys().iter().find(|(known, ..)| *known == key)) {
            ("seed", _) => self.seed = number()?,
            ("format", _) => self.format = self.format_of(value)?,
            (_, Some(&(key, field, most))) => match number()? {
                number if number <= most => self.set.push((key, field, number)),
                _ => return Err(refuse(key, format!("at most {most}"), value)),
            },
            (_, None) => {
                let known: Vec<_> =
                    self.keys().iter().map(|(key, ..)| *key).chain(["format", "seed"]).collect();
                return Err(refuse("a key", format!("one of {}", known.join(", ")), key));
            }
        }
        Ok(key)
    }

    fn format_of(&self, value: &str) -> Result<SynthFormat, SynthError> {
        match (value, self.kind) {
            ("bf16", _) => Ok(SynthFormat::Bf16),
            ("f32", _) => Ok(SynthFormat::F32),
            ("int4", Kind::Target(_)) => Ok(SynthFormat::Int4),
            (_, Kind::Target(_)) => Err(refuse("format", "bf16, f32 or int4 (experts)", value)),
            (_, Kind::Head) => Err(refuse("format", "bf16 or f32", value)),
        }
    }

    /// What the generator starts from.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// For people: `synth kimi-k2 layers 8 int4 seed 3`.
    pub fn label(&self) -> String {
        let name = match self.kind {
            Kind::Target(shape) => shape.name(),
            Kind::Head => HEAD,
        };
        let set: String = self.set.iter().map(|(key, _, value)| format!(" {key} {value}")).collect();
        format!("synth {name}{set} {} seed {}", self.format, self.seed)
    }

    /// The config.json of this target, and a path that names it in errors.
    ///
    /// # Errors
    /// The specification is a head's.
    pub fn target_config(&self) -> Result<(PathBuf, String), SynthError> {
        let Kind::Target(shape) = self.kind else {
            return Err(refuse("the name of a target", "another, since this is a head", HEAD));
        };
        let mut config = shape.target();
        if self.format == SynthFormat::Int4 {
            config.insert("quantization_config".to_owned(), packed_experts());
        }
        self.apply(&mut config);
        Ok((self.path(), text(config)))
    }

    /// The config.json of a head that fits this target, or that has these sizes, and a path that names it in errors.
    ///
    /// # Errors
    /// A target whose layers are too few to take features of.
    pub fn draft_config(&self) -> Result<(PathBuf, String), SynthError> {
        let mut config = match self.kind {
            Kind::Target(shape) => {
                let mut target = shape.target();
                self.apply(&mut target);
                let mut config = shape.head();
                for field in [HIDDEN, VOCAB, CONTEXT] {
                    config.insert(field.to_owned(), target[field].clone());
                }
                let layers = target["num_hidden_layers"].as_u64().unwrap_or(0);
                if let Some(ids) = written_aux_ids(layers)? {
                    config
                        .insert("eagle_config".to_owned(), json!({"eagle_aux_hidden_state_layer_ids": ids}));
                }
                config
            }
            Kind::Head => {
                let mut config = Shape::KimiK2.head();
                for field in [HIDDEN, VOCAB, CONTEXT] {
                    config.insert(field.to_owned(), Shape::KimiK2.target()[field].clone());
                }
                self.apply(&mut config);
                config
            }
        };
        config.insert("torch_dtype".to_owned(), self.float().to_string().into());
        Ok((self.path(), text(config)))
    }

    fn apply(&self, config: &mut Map<String, Value>) {
        for &(_, field, value) in &self.set {
            config.insert(field.to_owned(), value.into());
        }
    }

    fn path(&self) -> PathBuf {
        PathBuf::from(format!("synth:{}/config.json", self.text))
    }

    /// The type of what is not packed.
    pub(crate) fn float(&self) -> Dtype {
        match self.format {
            SynthFormat::F32 => Dtype::F32,
            SynthFormat::Bf16 | SynthFormat::Int4 => Dtype::Bf16,
        }
    }

    /// Whether routed experts are INT4.
    pub(crate) fn packs_experts(&self) -> bool {
        self.format == SynthFormat::Int4
    }
}

/// As it is given on a command line.
impl fmt::Display for SynthSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// The layers that a head for a shallow target is fed from, as files write them: after a layer. `None` where the usual
/// ones are there.
fn written_aux_ids(layers: u64) -> Result<Option<[u64; 3]>, SynthError> {
    match layers {
        7.. => Ok(None),
        3.. => Ok(Some([0, layers / 2, layers - 1])),
        _ => Err(refuse("layers", "at least 3 for a head", &layers.to_string())),
    }
}

fn text(config: Map<String, Value>) -> String {
    format!("{:#}\n", Value::Object(config))
}
