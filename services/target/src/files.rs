//! The small files of the model folder that its clients need, so that they need no copy of the folder.

use std::path::{Path, PathBuf};

use bytes::Bytes;
use eyrie_checkpoint::{CheckpointError, ModelSource};
use eyrie_wire::v1::{FileInfo, GenerationDefaults};
use serde_json::Value;

use crate::TargetError;

const CONFIG: &str = "config.json";
const GENERATION_CONFIG: &str = "generation_config.json";
/// Names that may be served; a folder has some of them.
const SERVED: [&str; 6] = [
    CONFIG,
    GENERATION_CONFIG,
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "tiktoken.model",
];

/// Where a served file is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Place {
    At(PathBuf),
    /// It was made up, and is in no folder.
    Text(Bytes),
}

/// The files that are there, with length and hash as of the start.
#[derive(Debug)]
pub(crate) struct Files {
    /// The folder, or the whole config.json of a model that has none.
    source: Place,
    infos: Vec<FileInfo>,
    defaults: GenerationDefaults,
}

impl Files {
    /// Those of a model.
    pub(crate) fn of(model: &ModelSource) -> Result<Self, TargetError> {
        let spec = match model {
            ModelSource::Folder(dir) => return Self::scan(dir),
            ModelSource::Synth(spec) => spec,
        };
        let (_, config) = spec.target_config().map_err(CheckpointError::from)?;
        let infos = vec![info(CONFIG, config.as_bytes())];
        Ok(Self { source: Place::Text(config.into()), infos, defaults: GenerationDefaults::default() })
    }

    /// Reads and hashes the served files of `dir`.
    pub(crate) fn scan(dir: &Path) -> Result<Self, TargetError> {
        let mut infos = Vec::new();
        let mut defaults = GenerationDefaults::default();
        for name in SERVED {
            let path = dir.join(name);
            if !path.is_file() {
                continue;
            }
            let data = std::fs::read(&path).map_err(|source| TargetError::File { path, source })?;
            if name == GENERATION_CONFIG {
                defaults = generation_defaults(&data);
            }
            infos.push(info(name, &data));
        }
        Ok(Self { source: Place::At(dir.to_owned()), infos, defaults })
    }

    pub(crate) fn infos(&self) -> &[FileInfo] {
        &self.infos
    }

    /// blake3 of `config.json`, in hex; empty without one, which no checkpoint is.
    pub(crate) fn config_hash(&self) -> String {
        let config = self.infos.iter().find(|info| info.name == CONFIG);
        config.map(|info| info.blake3.clone()).unwrap_or_default()
    }

    /// Where a served file is; names that are not among [`infos`](Self::infos) have no place.
    pub(crate) fn find(&self, name: &str) -> Option<Place> {
        self.infos.iter().any(|info| info.name == name).then(|| match &self.source {
            Place::At(dir) => Place::At(dir.join(name)),
            text => text.clone(),
        })
    }

    /// How the model's authors sample from it.
    pub(crate) fn generation_defaults(&self) -> GenerationDefaults {
        self.defaults
    }
}

fn info(name: &str, data: &[u8]) -> FileInfo {
    let blake3 = blake3::hash(data).to_hex().to_string();
    FileInfo { name: name.to_owned(), bytes: data.len() as u64, blake3 }
}

/// What a `generation_config.json` says about sampling: nothing when it does not ask to sample. Its syntax was
/// checked with the checkpoint.
fn generation_defaults(text: &[u8]) -> GenerationDefaults {
    let config: Value = serde_json::from_slice(text).unwrap_or_default();
    if config.get("do_sample").and_then(Value::as_bool) == Some(false) {
        return GenerationDefaults::default();
    }
    let number = |key| config.get(key).and_then(Value::as_f64).map(|value| value as f32);
    let top_k = config.get("top_k").and_then(Value::as_u64).and_then(|k| u32::try_from(k).ok());
    GenerationDefaults { temperature: number("temperature"), top_p: number("top_p"), top_k }
}

#[cfg(test)]
mod tests {
    use eyrie_checkpoint::SynthSpec;

    use super::*;

    #[test]
    fn only_known_files_of_the_folder_are_served() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("config.json"), "{}").unwrap();
        std::fs::write(dir.path().join("secret.txt"), "x").unwrap();
        let files = Files::scan(dir.path()).unwrap();
        assert_eq!(files.infos().len(), 1);
        assert_eq!((files.infos()[0].bytes, files.infos()[0].blake3.len()), (2, 64));
        assert_eq!(files.find("config.json"), Some(Place::At(dir.path().join("config.json"))));
        for name in ["secret.txt", "tokenizer.json", "../config.json", ""] {
            assert_eq!(files.find(name), None, "{name}");
        }
    }

    #[test]
    fn a_made_up_model_has_a_config_and_nothing_else() {
        let spec: SynthSpec = "mini:layers=3".parse().unwrap();
        let files = Files::of(&spec.clone().into()).unwrap();
        let text = Bytes::from(spec.target_config().unwrap().1);
        assert_eq!(files.infos(), [info("config.json", &text)]);
        assert_eq!(files.config_hash(), blake3::hash(&text).to_hex().to_string());
        assert_eq!(
            (files.find("config.json"), files.find("tokenizer.json")),
            (Some(Place::Text(text)), None)
        );
    }

    #[test]
    fn sampling_defaults_come_from_the_generation_config() {
        let dir = tempfile::tempdir().unwrap();
        let defaults = |text: &str| {
            std::fs::write(dir.path().join("generation_config.json"), text).unwrap();
            Files::scan(dir.path()).unwrap().generation_defaults()
        };
        let sampled = defaults(r#"{"temperature": 0.5, "top_p": 0.75, "top_k": 7}"#);
        assert_eq!((sampled.temperature, sampled.top_p, sampled.top_k), (Some(0.5), Some(0.75), Some(7)));
        assert_eq!(defaults(r#"{"do_sample": false, "temperature": 0.5}"#), GenerationDefaults::default());
    }
}
