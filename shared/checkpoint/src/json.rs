use std::fs;
use std::io;
use std::path::Path;

use serde_json::{Map, Value};

use crate::{CheckpointError, Result};

/// Largest number a config may hold: it is multiplied in float32, whose range ends at 3.4e38.
const LARGEST: f64 = 1e30;

/// Largest JSON file read: many times the index of the largest published checkpoint.
const MAX_BYTES: u64 = 256 << 20;

/// The bytes of a regular file of bounded size. Its kind is looked at first: opening a pipe would block for ever.
pub(crate) fn read_bytes(path: &Path) -> io::Result<Vec<u8>> {
    let meta = fs::metadata(path)?;
    if !meta.is_file() {
        return Err(io::Error::other("not a regular file"));
    }
    if meta.len() > MAX_BYTES {
        let size = format!("{} bytes, limit {MAX_BYTES}", meta.len());
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, size));
    }
    fs::read(path)
}

/// Reads a JSON file; `None` when it does not exist.
pub(crate) fn read_optional(path: &Path) -> Result<Option<Value>> {
    match read_bytes(path) {
        Ok(bytes) => parse(path, &bytes).map(Some),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(CheckpointError::Io { path: path.to_owned(), source }),
    }
}

/// Reads a JSON file that must exist.
pub(crate) fn read(path: &Path) -> Result<Value> {
    let bytes = read_bytes(path).map_err(|source| CheckpointError::Io { path: path.to_owned(), source })?;
    parse(path, &bytes)
}

pub(crate) fn parse(path: &Path, bytes: &[u8]) -> Result<Value> {
    serde_json::from_slice(bytes)
        .map_err(|e| CheckpointError::Json { path: path.to_owned(), message: e.to_string() })
}

/// One JSON object of a file, with the dotted path that leads to it, so that every refusal names its field.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fields<'a> {
    path: &'a Path,
    prefix: &'a str,
    map: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    /// Looks at `value` as an object; `prefix` is its dotted path, empty for the file's root.
    pub(crate) fn of(path: &'a Path, prefix: &'a str, value: &'a Value) -> Result<Self> {
        match value.as_object() {
            Some(map) => Ok(Self { path, prefix, map }),
            None => Err(CheckpointError::Field {
                path: path.to_owned(),
                field: if prefix.is_empty() { "the file".to_owned() } else { prefix.to_owned() },
                value: brief(value),
                limit: "must be an object".to_owned(),
            }),
        }
    }

    pub(crate) fn path(&self) -> &'a Path {
        self.path
    }

    fn dotted(&self, key: &str) -> String {
        if self.prefix.is_empty() { key.to_owned() } else { format!("{}.{key}", self.prefix) }
    }

    /// The value of a key; `None` when absent or null, which mean the same in published configs.
    pub(crate) fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|v| !v.is_null())
    }

    /// The refusal of a key's present value.
    pub(crate) fn refuse(&self, key: &str, limit: impl Into<String>) -> CheckpointError {
        let value = self.map.get(key).map_or_else(|| "absent".to_owned(), brief);
        CheckpointError::Field {
            path: self.path.to_owned(),
            field: self.dotted(key),
            value,
            limit: limit.into(),
        }
    }

    pub(crate) fn missing(&self, key: &str) -> CheckpointError {
        CheckpointError::MissingField { path: self.path.to_owned(), field: self.dotted(key) }
    }

    /// An integer in `1..=max`, required.
    pub(crate) fn size(&self, key: &str, max: usize) -> Result<usize> {
        self.opt_size(key, max)?.ok_or_else(|| self.missing(key))
    }

    /// An integer in `1..=max`.
    pub(crate) fn opt_size(&self, key: &str, max: usize) -> Result<Option<usize>> {
        self.opt_count(key, max)?
            .map(|n| if n == 0 { Err(self.refuse(key, format!("must be 1..={max}"))) } else { Ok(n) })
            .transpose()
    }

    /// An integer in `0..=max`.
    pub(crate) fn opt_count(&self, key: &str, max: usize) -> Result<Option<usize>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|&n| n <= max) {
            Some(n) => Ok(Some(n)),
            None => Err(self.refuse(key, format!("must be an integer in 0..={max}"))),
        }
    }

    /// A number above zero that float32 arithmetic can bear.
    pub(crate) fn positive(&self, key: &str, default: f64) -> Result<f64> {
        Ok(self.opt_positive(key)?.unwrap_or(default))
    }

    /// The same, if there.
    pub(crate) fn opt_positive(&self, key: &str) -> Result<Option<f64>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_f64().filter(|n| *n > 0.0 && *n <= LARGEST) {
            Some(n) => Ok(Some(n)),
            None => Err(self.refuse(key, "must be a number above 0 and at most 1e30")),
        }
    }

    /// A number of at least zero that float32 arithmetic can bear.
    pub(crate) fn non_negative(&self, key: &str, default: f64) -> Result<f64> {
        let Some(value) = self.get(key) else { return Ok(default) };
        match value.as_f64().filter(|n| (0.0..=LARGEST).contains(n)) {
            Some(n) => Ok(n),
            None => Err(self.refuse(key, "must be a number of at least 0 and at most 1e30")),
        }
    }

    pub(crate) fn flag(&self, key: &str, default: bool) -> Result<bool> {
        match self.get(key) {
            None => Ok(default),
            Some(Value::Bool(b)) => Ok(*b),
            Some(_) => Err(self.refuse(key, "must be true or false")),
        }
    }

    pub(crate) fn text(&self, key: &str) -> Result<Option<&'a str>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(s)) => Ok(Some(s)),
            Some(_) => Err(self.refuse(key, "must be a string")),
        }
    }

    /// Refuses a flag that is set, saying why.
    pub(crate) fn must_be_off(&self, key: &str, why: &str) -> Result<()> {
        if self.flag(key, false)? { Err(self.refuse(key, why)) } else { Ok(()) }
    }

    /// Refuses a key that is there at all, saying why.
    pub(crate) fn must_be_absent(&self, key: &str, why: &str) -> Result<()> {
        if self.get(key).is_some() { Err(self.refuse(key, why)) } else { Ok(()) }
    }

    /// Token ids written as one integer or as a list; empty when absent.
    pub(crate) fn token_ids(&self, key: &str) -> Result<Vec<u32>> {
        self.ids(key, "token")
    }

    /// As [`token_ids`](Self::token_ids), for ids of another `kind`.
    pub(crate) fn ids(&self, key: &str, kind: &str) -> Result<Vec<u32>> {
        let id = |v: &Value| v.as_u64().and_then(|n| u32::try_from(n).ok());
        let ids = match self.get(key) {
            None => Some(Vec::new()),
            Some(Value::Array(list)) => list.iter().map(id).collect(),
            Some(one) => id(one).map(|n| vec![n]),
        };
        ids.ok_or_else(|| self.refuse(key, format!("must be a {kind} id or a list of {kind} ids")))
    }
}

/// A value short enough for one line of an error.
fn brief(value: &Value) -> String {
    const LONGEST: usize = 120;
    let text = value.to_string();
    match text.char_indices().nth(LONGEST) {
        Some((cut, _)) => format!("{}…", &text[..cut]),
        None => text,
    }
}
