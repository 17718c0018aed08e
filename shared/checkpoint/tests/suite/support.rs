//! Folders for tests: copies of the fixtures whose config and tensors can be bent out of shape.

use std::fs;
use std::path::{Path, PathBuf};

use eyrie_checkpoint::TensorIndex;
use serde_json::{Map, Value, json};

pub(crate) fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures").join(name)
}

pub(crate) fn demo(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/demo").join(name)
}

/// A tensor as a safetensors header spells it, with its bytes.
#[derive(Debug, Clone)]
pub(crate) struct Tensor {
    pub(crate) name: String,
    pub(crate) dtype: String,
    pub(crate) shape: Vec<usize>,
    pub(crate) data: Vec<u8>,
}

pub(crate) fn tensor(name: &str, dtype: &str, shape: &[usize], data: &[u8]) -> Tensor {
    Tensor { name: name.into(), dtype: dtype.into(), shape: shape.into(), data: data.into() }
}

pub(crate) fn zeros(name: &str, dtype: &str, shape: &[usize], size: usize) -> Tensor {
    tensor(name, dtype, shape, &vec![0; size * shape.iter().product::<usize>()])
}

pub(crate) fn safetensors(tensors: &[Tensor]) -> Vec<u8> {
    let (mut header, mut data) = (Map::new(), Vec::new());
    for t in tensors {
        let begin = data.len();
        data.extend_from_slice(&t.data);
        let entry = json!({"dtype": t.dtype, "shape": t.shape, "data_offsets": [begin, data.len()]});
        header.insert(t.name.clone(), entry);
    }
    with_header(&Value::Object(header).to_string(), &data)
}

pub(crate) fn with_header(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), data].concat()
}

/// A fixture in memory, written to a fresh folder when done with.
pub(crate) struct Folder {
    pub(crate) dir: tempfile::TempDir,
    pub(crate) config: Value,
    pub(crate) tensors: Vec<Tensor>,
}

impl Folder {
    pub(crate) fn copy(source: &Path) -> Self {
        let dir = tempfile::tempdir().unwrap();
        for file in ["tokenizer.json", "generation_config.json"] {
            if source.join(file).is_file() {
                fs::copy(source.join(file), dir.path().join(file)).unwrap();
            }
        }
        let config = serde_json::from_slice(&fs::read(source.join("config.json")).unwrap()).unwrap();
        let index = TensorIndex::open(source).unwrap();
        let tensors = index
            .entries()
            .iter()
            .map(|e| tensor(&e.name, &e.dtype.to_string(), &e.shape, &index.data(e)))
            .collect();
        Self { dir, config, tensors }
    }

    pub(crate) fn set(&mut self, pointer: &str, value: Value) {
        let (parent, key) = pointer.rsplit_once('/').unwrap();
        self.config.pointer_mut(parent).unwrap()[key] = value;
    }

    pub(crate) fn remove(&mut self, name: &str) {
        let before = self.tensors.len();
        self.tensors.retain(|t| t.name != name);
        assert_eq!(before, self.tensors.len() + 1, "{name} is not in the fixture");
    }

    pub(crate) fn get(&mut self, name: &str) -> &mut Tensor {
        self.tensors.iter_mut().find(|t| t.name == name).unwrap()
    }

    pub(crate) fn write(&self) -> &Path {
        let dir = self.dir.path();
        fs::write(dir.join("config.json"), self.config.to_string()).unwrap();
        fs::write(dir.join("model.safetensors"), safetensors(&self.tensors)).unwrap();
        dir
    }
}

/// Asserts that an error is one line that holds every part.
pub(crate) fn assert_line(error: impl std::fmt::Display, parts: &[&str]) {
    let line = error.to_string();
    assert!(!line.contains('\n'), "more than one line: {line}");
    for part in parts {
        assert!(line.contains(part), "{line:?} lacks {part:?}");
    }
}
