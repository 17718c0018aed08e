use std::{fs, io, path::Path};

use crate::TextError;

pub(crate) const TOKENIZER_JSON: &str = "tokenizer.json";
pub(crate) const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
/// Largest file read (bytes); the tokenizers of the served models are below 16 MiB.
const MAX_FILE: u64 = 256 << 20;
const TIKTOKEN_MODEL: &str = "tiktoken.model";

/// The contents of a model's tokenizer files, as read from a folder or received over the wire.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TokenizerFiles {
    /// tokenizer.json.
    pub tokenizer_json: Vec<u8>,
    /// tokenizer_config.json, where the model has one.
    pub tokenizer_config: Option<Vec<u8>>,
}

impl TokenizerFiles {
    /// Reads the files of a model folder.
    ///
    /// # Errors
    /// No tokenizer.json (the line says so if there is a tiktoken.model, which is not served), or a
    /// file that cannot be read, is no regular file, or is larger than 256 MiB.
    pub fn read(dir: &Path) -> Result<Self, TextError> {
        let Some(tokenizer_json) = read(&dir.join(TOKENIZER_JSON))? else {
            let hint = if dir.join(TIKTOKEN_MODEL).exists() {
                "; its tiktoken.model is a format that is not served yet"
            } else {
                ""
            };
            return Err(TextError::Missing { dir: dir.display().to_string(), hint });
        };
        let tokenizer_config = read(&dir.join(TOKENIZER_CONFIG))?;
        Ok(Self { tokenizer_json, tokenizer_config })
    }
}

fn read(path: &Path) -> Result<Option<Vec<u8>>, TextError> {
    match read_bounded(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(TextError::Read { path: path.display().to_string(), reason: error.to_string() }),
    }
}

/// The bytes of a regular file of bounded size. Its kind is looked at first: opening a pipe would block for ever.
fn read_bounded(path: &Path) -> io::Result<Vec<u8>> {
    let meta = fs::metadata(path)?;
    if !meta.is_file() {
        return Err(io::Error::other("not a regular file"));
    }
    if meta.len() > MAX_FILE {
        let size = format!("{} bytes, limit {MAX_FILE}", meta.len());
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, size));
    }
    fs::read(path)
}
