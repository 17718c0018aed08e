use std::borrow::Cow;
use std::collections::HashMap;
use std::fs;
use std::io::ErrorKind;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use eyrie_region::FileMap;

use crate::header::{self, HeaderEntry, HeaderError};
use crate::synth::numbers_of;
use crate::weight_map::WeightMap;
use crate::{Bytes, CheckpointError, Dtype, Fill, Result, json};

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
    /// Bytes within its shard's file; from 0 on where there is no file.
    pub range: Range<usize>,
    shard: usize,
}

impl TensorEntry {
    /// A tensor of no file.
    pub(crate) fn made(name: String, dtype: Dtype, shape: Vec<usize>) -> Self {
        let bytes = shape.iter().product::<usize>() * dtype.size();
        Self { name, dtype, shape, range: 0..bytes, shard: 0 }
    }

    /// Stored size in bytes.
    pub fn bytes(&self) -> u64 {
        self.range.len() as u64
    }
}

#[derive(Debug)]
struct Shard {
    path: PathBuf,
    map: Arc<FileMap>,
}

/// Where the bytes of all tensors come from.
#[derive(Debug)]
enum Origin {
    Files(Vec<Shard>),
    Seed(u64),
}

/// Every tensor of a folder of safetensors files, proven to lie inside its file, or of a seed; no tensor data is read.
#[derive(Debug)]
pub struct TensorIndex {
    /// The folder, or what stands for one in messages.
    dir: PathBuf,
    origin: Origin,
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
        match json::read_bytes(&index_path) {
            Ok(bytes) => Self::open_sharded(dir, &index_path, &WeightMap::parse(&index_path, &bytes)?),
            Err(e) if e.kind() != ErrorKind::NotFound => {
                Err(CheckpointError::Io { path: index_path, source: e })
            }
            Err(_) if dir.join(SINGLE).is_file() => Self::read_shards(dir, vec![dir.join(SINGLE)]),
            Err(_) => Err(Self::no_weights(dir)),
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

    /// A shard that the index does not name is left over from another save, or the index is.
    fn stray_shard(dir: &Path, map: &WeightMap) -> Option<PathBuf> {
        let is_shard = |name: &str| name.starts_with("model-") && name.ends_with(".safetensors");
        let names = fs::read_dir(dir).ok()?.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        names.filter(|name| is_shard(name) && !map.files.contains(name)).map(|name| dir.join(name)).min()
    }

    fn open_sharded(dir: &Path, index_path: &Path, map: &WeightMap) -> Result<Self> {
        if let Some(path) = Self::stray_shard(dir, map) {
            let problem = format!("is not in the weight_map of {INDEX}: remove it or mend the index");
            return Err(CheckpointError::File { path, problem });
        }
        let index = Self::read_shards(dir, map.files.iter().map(|file| dir.join(file)).collect())?;
        let mut mapped = vec![false; index.entries.len()];
        for (name, file) in &map.tensors {
            let problem = match index.position(name) {
                Some(at) if index.entries[at].shard != *file => {
                    let found = index.file(&index.entries[at]).display();
                    format!("the weight_map places it in {}, it is in {found}", map.files[*file])
                }
                Some(at) if std::mem::replace(&mut mapped[at], true) => {
                    "appears twice in the weight_map".to_owned()
                }
                Some(_) => continue,
                None => format!("the weight_map places it in {}, which does not hold it", map.files[*file]),
            };
            return Err(CheckpointError::Tensor {
                path: index_path.to_owned(),
                tensor: name.clone(),
                problem,
            });
        }
        match index.entries.iter().zip(mapped).find(|(_, mapped)| !mapped) {
            Some((e, _)) => Err(index.refuse(e, format!("is not in the weight_map of {INDEX}"))),
            None => Ok(index),
        }
    }

    fn read_shards(dir: &Path, files: Vec<PathBuf>) -> Result<Self> {
        let (mut shards, mut headers) = (Vec::new(), Vec::new());
        for read in read_headers(files) {
            let (shard, entries) = read?;
            shards.push(shard);
            headers.push(entries);
        }
        let mut index = Self {
            dir: dir.to_owned(),
            origin: Origin::Files(shards),
            entries: Vec::new(),
            by_name: HashMap::new(),
        };
        headers.into_iter().enumerate().try_for_each(|(at, entries)| index.add_shard(at, entries))?;
        Ok(index)
    }

    /// The tensors `entries`, made from `seed`; `dir` names them in messages.
    pub(crate) fn made(dir: PathBuf, seed: u64, entries: Vec<TensorEntry>) -> Self {
        let by_name = entries.iter().enumerate().map(|(at, entry)| (entry.name.clone(), at)).collect();
        Self { dir, origin: Origin::Seed(seed), entries, by_name }
    }

    fn add_shard(&mut self, at: usize, entries: Vec<HeaderEntry>) -> Result<()> {
        self.by_name.reserve(entries.len());
        for HeaderEntry { name, dtype, shape, range } in entries {
            let entry = TensorEntry { name, dtype, shape, range, shard: at };
            if let Some(earlier) = self.by_name.insert(entry.name.clone(), self.entries.len()) {
                let earlier = &self.entries[earlier];
                let problem = if earlier.shard == at {
                    "appears twice in the header".to_owned()
                } else {
                    format!("is also in {}", self.file(earlier).display())
                };
                return Err(self.refuse(&entry, problem));
            }
            self.entries.push(entry);
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

    /// The file that holds a tensor of this index, or what stands for one in messages.
    pub fn file(&self, entry: &TensorEntry) -> &Path {
        match &self.origin {
            Origin::Files(shards) => &shards[entry.shard].path,
            Origin::Seed(_) => &self.dir,
        }
    }

    /// All bytes of the file that holds a tensor of this index; `None` where there is no file.
    pub fn file_bytes(&self, entry: &TensorEntry) -> Option<&[u8]> {
        match &self.origin {
            Origin::Files(shards) => Some(shards[entry.shard].map.bytes()),
            Origin::Seed(_) => None,
        }
    }

    /// What the tensors are made from, where they lie in no file.
    pub fn seed(&self) -> Option<u64> {
        match self.origin {
            Origin::Files(_) => None,
            Origin::Seed(seed) => Some(seed),
        }
    }

    /// Where the bytes of a tensor of this index come from.
    pub fn bytes(&self, entry: &TensorEntry) -> Bytes {
        match &self.origin {
            Origin::Files(shards) => {
                Bytes::Mapped { region: shards[entry.shard].map.clone(), range: entry.range.clone() }
            }
            Origin::Seed(seed) => Bytes::Made(self.fill(*seed, entry)),
        }
    }

    /// The bytes of a tensor of this index; reading them may fault the pages in.
    pub fn data(&self, entry: &TensorEntry) -> Cow<'_, [u8]> {
        match &self.origin {
            Origin::Files(shards) => Cow::Borrowed(&shards[entry.shard].map.bytes()[entry.range.clone()]),
            Origin::Seed(seed) => {
                let mut bytes = vec![0; entry.range.len()];
                self.fill(*seed, entry).write(&mut bytes);
                Cow::Owned(bytes)
            }
        }
    }

    fn fill(&self, seed: u64, entry: &TensorEntry) -> Fill {
        Fill::new(seed, &entry.name, numbers_of(entry), entry.shape.iter().product())
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

    /// Reads all elements of a float tensor, widened to float32, in row-major order. Fails on other dtypes.
    pub fn read_floats(&self, entry: &TensorEntry) -> Result<Vec<f32>> {
        let data = &self.data(entry);
        match entry.dtype {
            Dtype::F32 => Ok(read_le(data, f32::from_le_bytes)),
            Dtype::F16 => Ok(read_le(data, |b| half::f16::from_le_bytes(b).to_f32())),
            Dtype::Bf16 => Ok(read_le(data, |b| half::bf16::from_le_bytes(b).to_f32())),
            dtype => Err(self.refuse(entry, format!("{dtype}, expected F32, F16 or BF16"))),
        }
    }

    /// Reads all elements of an integer tensor in row-major order. Fails on dtypes other than I32 and I64.
    pub fn read_integers(&self, entry: &TensorEntry) -> Result<Vec<i64>> {
        let data = &self.data(entry);
        match entry.dtype {
            Dtype::I32 => Ok(read_le(data, |b| i64::from(i32::from_le_bytes(b)))),
            Dtype::I64 => Ok(read_le(data, i64::from_le_bytes)),
            dtype => Err(self.refuse(entry, format!("{dtype}, expected I32 or I64"))),
        }
    }

    /// [`Self::read_floats`] of a one-dimensional tensor. Fails on any other rank.
    pub(crate) fn read_vector(&self, entry: &TensorEntry) -> Result<Vec<f32>> {
        match entry.shape.as_slice() {
            [_] => self.read_floats(entry),
            shape => Err(self.refuse(entry, format!("shape {shape:?}, expected a vector"))),
        }
    }
}

/// Maps the files and parses their headers, on as many threads as there are cores: a checkpoint of hundreds of
/// thousands of tensors has tens of megabytes of headers.
fn read_headers(files: Vec<PathBuf>) -> Vec<Result<(Shard, Vec<HeaderEntry>)>> {
    let threads = thread::available_parallelism().map_or(1, usize::from).min(files.len().max(1));
    let queue = Mutex::new(files.into_iter().enumerate());
    let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).next();
    let work = || {
        let mut done = Vec::new();
        while let Some((at, path)) = next() {
            done.push((at, read_header(path)));
        }
        done
    };
    let mut all = thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
        let mut all = work();
        all.extend(
            others.into_iter().flat_map(|t| t.join().unwrap_or_else(|e| std::panic::resume_unwind(e))),
        );
        all
    });
    all.sort_unstable_by_key(|(at, _)| *at);
    all.into_iter().map(|(_, read)| read).collect()
}

fn read_header(path: PathBuf) -> Result<(Shard, Vec<HeaderEntry>)> {
    let metadata =
        fs::metadata(&path).map_err(|source| CheckpointError::Io { path: path.clone(), source })?;
    if metadata.len() == 0 {
        return Err(CheckpointError::File { path, problem: "truncated: the file is empty".to_owned() });
    }
    let map = Arc::new(FileMap::open(&path)?);
    match header::parse(map.bytes()) {
        Ok(entries) => Ok((Shard { path, map }, entries)),
        Err(HeaderError::File(problem)) => Err(CheckpointError::File { path, problem }),
        Err(HeaderError::Tensor { tensor, problem }) => {
            Err(CheckpointError::Tensor { path, tensor, problem })
        }
    }
}

fn read_le<const N: usize, T>(data: &[u8], decode: impl Fn([u8; N]) -> T) -> Vec<T> {
    data.as_chunks::<N>().0.iter().map(|&chunk| decode(chunk)).collect()
}
