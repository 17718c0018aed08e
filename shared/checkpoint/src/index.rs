use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::ops::Range;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use eyrie_region::{FileMap, Region};
use serde_json::Value;

use crate::header::{self, HeaderError};
use crate::json::{self, Fields};
use crate::{CheckpointError, Dtype, Result};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Where one tensor lies.
#[derive(Debug, Clone)]
pub struct TensorEntry {
    /// Name as on disk.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions, outermost first; empty for a scalar.
    pub shape: Vec<usize>,
    /// Bytes within its shard's file.
    pub range: Range<usize>,
    shard: usize,
}

impl TensorEntry {
    /// Stored size in bytes.
    pub fn bytes(&self) -> u64 {
        self.range.len() as u64
    }
}

#[derive(Debug)]
struct Shard {
    path: PathBuf,
    map: Arc<dyn Region>,
}

/// Every tensor of a folder of safetensors files, proven to lie inside its file; no tensor data is read.
#[derive(Debug)]
pub struct TensorIndex {
    dir: PathBuf,
    shards: Vec<Shard>,
    entries: Vec<TensorEntry>,
    by_name: HashMap<String, usize>,
}

impl TensorIndex {
    /// Opens `model.safetensors.index.json` with its shards, or a lone `model.safetensors`.
    ///
    /// Fails, naming file and tensor, on a missing, truncated or overlong shard, on a header whose tensors do not
    /// tile the file, on duplicate names, and on any difference between the index and the shards.
    pub fn open(dir: &Path) -> Result<Self> {
        let index_path = dir.join(INDEX);
        match json::read_optional(&index_path)? {
            Some(value) => Self::open_sharded(dir, &index_path, &value),
            None if dir.join(SINGLE).is_file() => Self::read_shards(dir, vec![SINGLE.to_owned()]),
            None => Err(Self::no_weights(dir)),
        }
    }

    fn no_weights(dir: &Path) -> CheckpointError {
        let entries = match fs::read_dir(dir) {
            Ok(entries) => entries,
            Err(source) => return CheckpointError::Io { path: dir.to_owned(), source },
        };
        let pickle = entries
            .filter_map(std::result::Result::ok)
            .map(|e| e.path())
            .find(|p| p.extension().is_some_and(|x| x == "bin" || x == "pt" || x == "pth"));
        match pickle {
            Some(path) => CheckpointError::File {
                path,
                problem: "pickled weights are never loaded: convert them to model.safetensors".to_owned(),
            },
            None => CheckpointError::File {
                path: dir.to_owned(),
                problem: format!("no weights: neither {INDEX} nor {SINGLE}"),
            },
        }
    }

    fn open_sharded(dir: &Path, index_path: &Path, value: &Value) -> Result<Self> {
        let root = Fields::of(index_path, "", value)?;
        let Some(Value::Object(weight_map)) = root.get("weight_map") else {
            return Err(root.refuse("weight_map", "must be an object from tensor names to shard files"));
        };
        let mut files = BTreeSet::new();
        for (name, file) in weight_map {
            let file = file.as_str().filter(|f| is_plain_name(f)).ok_or_else(|| CheckpointError::Tensor {
                path: index_path.to_owned(),
                tensor: name.clone(),
                problem: format!("weight_map entry {file} must be the name of a file in the same folder"),
            })?;
            files.insert(file.to_owned());
        }
        let index = Self::read_shards(dir, files.into_iter().collect())?;
        for (name, file) in weight_map {
            index.check_mapped(index_path, name, file.as_str().unwrap_or_default())?;
        }
        match index.entries.iter().find(|e| !weight_map.contains_key(&e.name)) {
            Some(e) => Err(index.refuse(e, format!("is not in the weight_map of {INDEX}"))),
            None => Ok(index),
        }
    }

    fn check_mapped(&self, index_path: &Path, name: &str, file: &str) -> Result<()> {
        let problem = match self.get(name) {
            None => format!("the weight_map places it in {file}, which does not hold it"),
            Some(e) if self.file(e).ends_with(file) => return Ok(()),
            Some(e) => format!("the weight_map places it in {file}, it is in {}", self.file(e).display()),
        };
        Err(CheckpointError::Tensor { path: index_path.to_owned(), tensor: name.to_owned(), problem })
    }

    fn read_shards(dir: &Path, files: Vec<String>) -> Result<Self> {
        let mut index =
            Self { dir: dir.to_owned(), shards: Vec::new(), entries: Vec::new(), by_name: HashMap::new() };
        for file in files {
            index.read_shard(dir.join(file))?;
        }
        Ok(index)
    }

    fn read_shard(&mut self, path: PathBuf) -> Result<()> {
        let metadata =
            fs::metadata(&path).map_err(|source| CheckpointError::Io { path: path.clone(), source })?;
        if metadata.len() == 0 {
            return Err(CheckpointError::File { path, problem: "truncated: the file is empty".to_owned() });
        }
        let map: Arc<dyn Region> = Arc::new(FileMap::open(&path)?);
        let found = header::parse(map.bytes()).map_err(|e| match e {
            HeaderError::File(problem) => CheckpointError::File { path: path.clone(), problem },
            HeaderError::Tensor { tensor, problem } => {
                CheckpointError::Tensor { path: path.clone(), tensor, problem }
            }
        })?;
        let shard = self.shards.len();
        self.shards.push(Shard { path, map });
        self.by_name.reserve(found.len());
        for e in found {
            if let Some(earlier) = self.by_name.insert(e.name.clone(), self.entries.len()) {
                return Err(CheckpointError::Tensor {
                    path: self.shards[shard].path.clone(),
                    tensor: e.name,
                    problem: format!("is also in {}", self.file(&self.entries[earlier]).display()),
                });
            }
            let header::HeaderEntry { name, dtype, shape, range } = e;
            self.entries.push(TensorEntry { name, dtype, shape, range, shard });
        }
        Ok(())
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Every tensor, shard by shard in header order.
    pub fn entries(&self) -> &[TensorEntry] {
        &self.entries
    }

    /// The tensor of that name on disk.
    pub fn get(&self, name: &str) -> Option<&TensorEntry> {
        self.position(name).map(|i| &self.entries[i])
    }

    pub(crate) fn position(&self, name: &str) -> Option<usize> {
        self.by_name.get(name).copied()
    }

    /// The file that holds a tensor of this index.
    pub fn file(&self, entry: &TensorEntry) -> &Path {
        &self.shards[entry.shard].path
    }

    /// The mapped file that holds a tensor of this index.
    pub fn region(&self, entry: &TensorEntry) -> Arc<dyn Region> {
        Arc::clone(&self.shards[entry.shard].map)
    }

    /// The stored bytes of a tensor of this index; reading them may fault the pages in.
    pub fn data(&self, entry: &TensorEntry) -> &[u8] {
        &self.shards[entry.shard].map.bytes()[entry.range.clone()]
    }

    /// A refusal that names the tensor and its file.
    pub(crate) fn refuse(&self, entry: &TensorEntry, problem: impl Into<String>) -> CheckpointError {
        CheckpointError::Tensor {
            path: self.file(entry).to_owned(),
            tensor: entry.name.clone(),
            problem: problem.into(),
        }
    }

    /// The refusal of an absent tensor.
    pub(crate) fn missing(&self, name: &str, wanted: &str) -> CheckpointError {
        CheckpointError::Tensor {
            path: self.dir.clone(),
            tensor: name.to_owned(),
            problem: format!("is missing, expected {wanted}"),
        }
    }

    /// Reads a vector of floats, widened to float32. Fails if the tensor is not one-dimensional float.
    pub fn read_vector(&self, entry: &TensorEntry) -> Result<Vec<f32>> {
        let data = self.data(entry);
        match (entry.dtype, entry.shape.as_slice()) {
            (Dtype::F32, [_]) => Ok(read_le(data, f32::from_le_bytes)),
            (Dtype::F16, [_]) => Ok(read_le(data, |b| half::f16::from_le_bytes(b).to_f32())),
            (Dtype::BF16, [_]) => Ok(read_le(data, |b| half::bf16::from_le_bytes(b).to_f32())),
            (dtype, shape) => {
                Err(self.refuse(entry, format!("{dtype} {shape:?}, expected a vector of F32, F16 or BF16")))
            }
        }
    }

    /// Reads a vector of integers. Fails if the tensor is not one-dimensional I32 or I64.
    pub(crate) fn read_integers(&self, entry: &TensorEntry) -> Result<Vec<i64>> {
        let data = self.data(entry);
        match (entry.dtype, entry.shape.as_slice()) {
            (Dtype::I32, [_]) => Ok(read_le(data, |b| i64::from(i32::from_le_bytes(b)))),
            (Dtype::I64, [_]) => Ok(read_le(data, i64::from_le_bytes)),
            (dtype, shape) => {
                Err(self.refuse(entry, format!("{dtype} {shape:?}, expected a vector of I32 or I64")))
            }
        }
    }
}

fn is_plain_name(file: &str) -> bool {
    let mut parts = Path::new(file).components();
    matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None))
}

fn read_le<const N: usize, T>(data: &[u8], decode: impl Fn([u8; N]) -> T) -> Vec<T> {
    data.as_chunks::<N>().0.iter().map(|&chunk| decode(chunk)).collect()
}
