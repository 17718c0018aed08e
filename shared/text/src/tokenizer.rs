use std::{fmt, path::Path, sync::Arc};

use serde_json::Value;
use tokenizers::DecoderWrapper;

use crate::{
    Detokenizer, TextError, TokenizerFiles, bytelevel,
    files::{TOKENIZER_CONFIG, TOKENIZER_JSON},
};

/// Far above any vocabulary; a stray id must not become a table of gigabytes.
const MAX_VOCAB: usize = 1 << 22;

/// A loaded byte-level tokenizer; clones share it.
#[derive(Clone)]
pub struct Tokenizer(Arc<Inner>);

struct Inner {
    codec: tokenizers::Tokenizer,
    entries: Vec<Option<Entry>>,
    size: usize,
    prefix: Option<u32>,
    suffix: Option<u32>,
    longest: Option<usize>,
}

struct Entry {
    bytes: Box<[u8]>,
    special: bool,
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer").field("vocab_size", &self.vocab_size()).finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// A tokenizer from its files' contents.
    ///
    /// Truncation and padding set in tokenizer.json are ignored: a prompt is never cut silently.
    /// `add_bos_token` and `add_eos_token` of tokenizer_config.json hold unless tokenizer.json's
    /// post-processor adds special tokens itself.
    ///
    /// # Errors
    /// A file that does not parse, a decoder other than `ByteLevel`, an id beyond 2²², an added
    /// token whose id leaves a gap, or a tokenizer_config.json that adds a token the vocabulary lacks.
    pub fn from_files(files: &TokenizerFiles) -> Result<Self, TextError> {
        let mut codec = tokenizers::Tokenizer::from_bytes(&files.tokenizer_json)
            .map_err(|error| malformed(TOKENIZER_JSON, error))?;
        codec.with_padding(None);
        codec.with_truncation(None).map_err(|error| malformed(TOKENIZER_JSON, error))?;
        require_byte_level(&codec)?;
        require_published_ids(&files.tokenizer_json, &codec)?;
        let entries = entries(&codec)?;
        let (prefix, suffix) = match &files.tokenizer_config {
            Some(config) if !adds_specials(&codec)? => edges(config, &codec)?,
            _ => (None, None),
        };
        // A normalizer may shorten a text.
        let exact = codec.get_normalizer().is_none();
        let longest = entries.iter().flatten().map(|entry| entry.bytes.len()).max().filter(|_| exact);
        Ok(Self(Arc::new(Inner { size: entries.len(), codec, entries, prefix, suffix, longest })))
    }

    /// A tokenizer from a model folder.
    ///
    /// # Errors
    /// As [`TokenizerFiles::read`] and [`Tokenizer::from_files`].
    pub fn from_dir(dir: &Path) -> Result<Self, TextError> {
        Self::from_files(&TokenizerFiles::read(dir)?)
    }

    /// The ids of `text`; with `add_special`, inside the special tokens the model's files ask for.
    /// Special tokens spelled out in `text` are encoded as such either way.
    ///
    /// # Errors
    /// A text the tokenizer's model refuses.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, TextError> {
        let Inner { codec, prefix, suffix, .. } = &*self.0;
        let encoding = codec
            .encode_fast(text, add_special)
            .map_err(|error| TextError::Encode { bytes: text.len(), reason: error.to_string() })?;
        if !add_special || (prefix.is_none() && suffix.is_none()) {
            return Ok(encoding.get_ids().to_vec());
        }
        let inner = encoding.get_ids().iter().copied();
        Ok(prefix.iter().copied().chain(inner).chain(suffix.iter().copied()).collect())
    }

    /// The fewest tokens that a text of `bytes` bytes can have: as many as if each were the longest there is.
    #[must_use]
    pub fn least_tokens(&self, bytes: usize) -> usize {
        self.0.longest.map_or(0, |longest| bytes.div_ceil(longest.max(1)))
    }

    /// The text of `ids`; bytes that are not UTF-8 become U+FFFD. With `skip_special`, special
    /// tokens have no text.
    ///
    /// # Errors
    /// An id without a token.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, TextError> {
        let mut stream = self.detokenizer(skip_special);
        let mut text = String::new();
        for &id in ids {
            text += &stream.push(id)?;
        }
        text += &stream.flush();
        Ok(text)
    }

    /// An incremental decoder; see [`Tokenizer::decode`] for `skip_special`.
    #[must_use]
    pub fn detokenizer(&self, skip_special: bool) -> Detokenizer {
        Detokenizer::new(self.clone(), skip_special)
    }

    /// One more than the greatest token id. A model's logits may be wider (padding).
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.0.size
    }

    /// The bytes token `id` stands for.
    ///
    /// # Errors
    /// An id without a token.
    pub fn token_bytes(&self, id: u32) -> Result<&[u8], TextError> {
        self.entry(id).map(|entry| &*entry.bytes)
    }

    /// Whether token `id` is marked special.
    ///
    /// # Errors
    /// An id without a token.
    pub fn is_special(&self, id: u32) -> Result<bool, TextError> {
        self.entry(id).map(|entry| entry.special)
    }

    fn entry(&self, id: u32) -> Result<&Entry, TextError> {
        match self.0.entries.get(id as usize) {
            Some(Some(entry)) => Ok(entry),
            Some(None) => Err(TextError::Unassigned { id }),
            None => Err(TextError::UnknownId { id, size: self.0.size }),
        }
    }
}

fn malformed(file: &'static str, reason: impl fmt::Display) -> TextError {
    TextError::Malformed { file, reason: reason.to_string() }
}

/// Only there is a run's text the reading of its tokens' bytes, which streaming relies on.
fn require_byte_level(codec: &tokenizers::Tokenizer) -> Result<(), TextError> {
    let given = match codec.get_decoder() {
        Some(DecoderWrapper::ByteLevel(_)) => return Ok(()),
        Some(DecoderWrapper::BPE(_)) => "BPEDecoder",
        Some(DecoderWrapper::WordPiece(_)) => "WordPiece",
        Some(DecoderWrapper::Metaspace(_)) => "Metaspace",
        Some(DecoderWrapper::CTC(_)) => "CTC",
        Some(DecoderWrapper::Sequence(_)) => "Sequence",
        Some(DecoderWrapper::Replace(_)) => "Replace",
        Some(DecoderWrapper::Fuse(_)) => "Fuse",
        Some(DecoderWrapper::Strip(_)) => "Strip",
        Some(DecoderWrapper::ByteFallback(_)) => "ByteFallback",
        None => "null",
    };
    Err(TextError::Field {
        file: TOKENIZER_JSON,
        field: "decoder.type",
        limit: "ByteLevel".to_owned(),
        given: given.to_owned(),
    })
}

/// The tokenizers crate numbers added tokens that leave a gap after the vocabulary anew, and they
/// would then name other rows of the model's embedding.
fn require_published_ids(json: &[u8], codec: &tokenizers::Tokenizer) -> Result<(), TextError> {
    let json: Value = serde_json::from_slice(json).map_err(|error| malformed(TOKENIZER_JSON, error))?;
    for token in json["added_tokens"].as_array().into_iter().flatten() {
        let loaded = token["content"].as_str().and_then(|content| codec.token_to_id(content));
        if loaded.map(u64::from) != token["id"].as_u64() {
            return Err(TextError::Field {
                file: TOKENIZER_JSON,
                field: "added_tokens id",
                limit: format!(
                    "the next free id {} for {}, without a gap",
                    loaded.map_or_else(|| "of the vocabulary".to_owned(), |id| id.to_string()),
                    token["content"]
                ),
                given: token["id"].to_string(),
            });
        }
    }
    Ok(())
}

fn entries(codec: &tokenizers::Tokenizer) -> Result<Vec<Option<Entry>>, TextError> {
    let added = codec.get_added_tokens_decoder();
    let vocab = codec.get_vocab(true);
    let ids = vocab.values().chain(added.keys());
    let size = ids.max().map_or(0, |&greatest| greatest as usize + 1);
    if size > MAX_VOCAB {
        return Err(TextError::Field {
            file: TOKENIZER_JSON,
            field: "greatest token id",
            limit: format!("below {MAX_VOCAB}"),
            given: (size - 1).to_string(),
        });
    }
    let mut entries: Vec<Option<Entry>> = Vec::new();
    entries.resize_with(size, || None);
    for (token, id) in vocab {
        let bytes = bytelevel::bytes_of(&token).into_boxed_slice();
        entries[id as usize] = Some(Entry { bytes, special: false });
    }
    // An added token overrides a vocabulary entry with its id.
    for (id, token) in added {
        let bytes = bytelevel::bytes_of(&token.content).into_boxed_slice();
        entries[id as usize] = Some(Entry { bytes, special: token.special });
    }
    Ok(entries)
}

fn adds_specials(codec: &tokenizers::Tokenizer) -> Result<bool, TextError> {
    let empty = codec.encode_fast("", true).map_err(|error| malformed(TOKENIZER_JSON, error))?;
    Ok(!empty.is_empty())
}

/// The ids tokenizer_config.json puts before and after a text.
fn edges(config: &[u8], codec: &tokenizers::Tokenizer) -> Result<(Option<u32>, Option<u32>), TextError> {
    let config: Value = serde_json::from_slice(config).map_err(|error| malformed(TOKENIZER_CONFIG, error))?;
    let edge = |flag: &'static str, field: &'static str| {
        let refuse = |field, limit: &str, given: &Value| TextError::Field {
            file: TOKENIZER_CONFIG,
            field,
            limit: limit.to_owned(),
            given: given.to_string(),
        };
        match &config[flag] {
            Value::Null | Value::Bool(false) => return Ok(None),
            Value::Bool(true) => {}
            other => return Err(refuse(flag, "true or false", other)),
        }
        let token = &config[field];
        let content = token.as_str().or_else(|| token["content"].as_str());
        match content.and_then(|content| codec.token_to_id(content)) {
            Some(id) => Ok(Some(id)),
            None => Err(refuse(field, "a token of tokenizer.json, since it is added", token)),
        }
    };
    Ok((edge("add_bos_token", "bos_token")?, edge("add_eos_token", "eos_token")?))
}
