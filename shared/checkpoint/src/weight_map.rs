use std::collections::HashMap;
use std::fmt;
use std::path::{Component, Path};

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};

use crate::{CheckpointError, Result};

/// The `weight_map` of an index file: names with the position of their shard in `files`.
///
/// Kept as pairs, so that the index can see a name that stands twice, and without a JSON tree, which would cost a
/// tenth of a second in a large checkpoint.
#[derive(Debug, Default)]
pub(crate) struct WeightMap {
    pub(crate) files: Vec<String>,
    pub(crate) tensors: Vec<(String, usize)>,
}

impl WeightMap {
    pub(crate) fn parse(path: &Path, bytes: &[u8]) -> Result<Self> {
        #[derive(Deserialize)]
        struct Index {
            weight_map: WeightMap,
        }
        match serde_json::from_slice::<Index>(bytes) {
            Ok(index) => Ok(index.weight_map),
            Err(e) => Err(CheckpointError::Json { path: path.to_owned(), message: e.to_string() }),
        }
    }
}

impl<'de> Deserialize<'de> for WeightMap {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Pairs;
        impl<'de> Visitor<'de> for Pairs {
            type Value = WeightMap;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("weight_map as an object from tensor names to shard files")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<WeightMap, A::Error> {
                let mut found = WeightMap::default();
                let mut positions: HashMap<String, usize> = HashMap::new();
                while let Some(name) = map.next_key::<String>()? {
                    let file: String = map
                        .next_value()
                        .map_err(|e| A::Error::custom(format_args!("weight_map, tensor {name}: {e}")))?;
                    if !is_plain_name(&file) {
                        return Err(A::Error::custom(format_args!(
                            "weight_map, tensor {name}: {file:?} must be the name of a file in the same folder"
                        )));
                    }
                    let at = *positions.entry(file).or_insert_with_key(|file| {
                        found.files.push(file.clone());
                        found.files.len() - 1
                    });
                    found.tensors.push((name, at));
                }
                Ok(found)
            }
        }
        deserializer.deserialize_map(Pairs)
    }
}

fn is_plain_name(file: &str) -> bool {
    let mut parts = Path::new(file).components();
    matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None))
}
