//! Edited copies of a checkpoint folder.

use std::collections::BTreeMap;
use std::path::Path;

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use tempfile::TempDir;

/// A tensor as stored.
pub(crate) struct Stored {
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) data: Vec<u8>,
}

impl Stored {
    /// The values of a bf16 tensor.
    pub(crate) fn widened(&self) -> Vec<f32> {
        assert_eq!(self.dtype, Dtype::BF16);
        let word = |w: &[u8]| f32::from_bits(u32::from(u16::from_le_bytes([w[0], w[1]])) << 16);
        self.data.chunks_exact(2).map(word).collect()
    }

    /// The same bf16 values stored as f32.
    pub(crate) fn as_f32(&self) -> Self {
        let data = self.widened().iter().flat_map(|x| x.to_le_bytes()).collect();
        Self { dtype: Dtype::F32, shape: self.shape.clone(), data }
    }
}

/// A one-file copy of the checkpoint in `from` after `edit` has seen its config and tensors.
pub(crate) fn rewrite(from: &Path, edit: impl FnOnce(&mut Value, &mut BTreeMap<String, Stored>)) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let mut tensors = BTreeMap::new();
    for entry in std::fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        if name.starts_with("model") && name.ends_with(".safetensors") {
            read(&std::fs::read(&path).unwrap(), &mut tensors);
        } else if name == "generation_config.json" {
            std::fs::copy(&path, dir.path().join(name)).unwrap();
        }
    }
    let mut config = serde_json::from_slice(&std::fs::read(from.join("config.json")).unwrap()).unwrap();
    edit(&mut config, &mut tensors);
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let views =
        tensors.iter().map(|(name, t)| (name, TensorView::new(t.dtype, t.shape.clone(), &t.data).unwrap()));
    safetensors::serialize_to_file(views, None, &dir.path().join("model.safetensors")).unwrap();
    dir
}

fn read(bytes: &[u8], into: &mut BTreeMap<String, Stored>) {
    for (name, view) in SafeTensors::deserialize(bytes).unwrap().iter() {
        let (dtype, shape, data) = (view.dtype(), view.shape().to_vec(), view.data().to_vec());
        into.insert(name.to_owned(), Stored { dtype, shape, data });
    }
}
