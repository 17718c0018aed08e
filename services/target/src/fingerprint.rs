//! Identity of what is served, which a sequence that is opened again elsewhere must find there to go on with the same
//! tokens. Hashing all bytes of a large checkpoint would take longer than loading it, so most weights are sampled.

use std::path::Path;

use blake3::Hasher;
use eyrie_checkpoint::{TargetCheckpoint, TensorIndex};

/// Blocks sampled of a weights file, evenly spread, and their size in bytes.
const BLOCKS: usize = 16;
const BLOCK: usize = 4096;
/// Bytes sampled in the middle of each tensor that is not a routed expert's: a fine-tune may change these alone, and
/// in a file they are little beside the experts.
const MIDDLE: usize = 256;
/// Part of the name of every routed expert's tensor.
const EXPERTS: &str = ".experts.";

/// What else than the checkpoint goes into the fingerprint.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Parts<'a> {
    /// blake3 of `config.json`, in hex.
    pub(crate) config: &'a str,
    /// Canonical ids of the captured streams.
    pub(crate) capture: &'a [u32],
    /// Fingerprint of embedding and head.
    pub(crate) shared: [u8; 32],
    /// What may make other numbers, and so draw other tokens, of the same weights, as `Backend::arithmetic` tells.
    pub(crate) arithmetic: &'a str,
}

/// The fingerprint of `checkpoint` served with `parts`, in hex.
pub(crate) fn fingerprint(checkpoint: &TargetCheckpoint, parts: Parts<'_>) -> String {
    let mut hasher = Hasher::new();
    hasher.update(parts.config.as_bytes());
    for id in parts.capture {
        hasher.update(&id.to_le_bytes());
    }
    hasher.update(&parts.shared);
    hasher.update(parts.arithmetic.as_bytes());
    add_weights(&mut hasher, checkpoint.index());
    hasher.finalize().to_hex().to_string()
}

fn add_weights(hasher: &mut Hasher, index: &TensorIndex) {
    // All of the weights follow from it.
    if let Some(seed) = index.seed() {
        hasher.update(&seed.to_le_bytes());
    }
    let mut file: Option<&Path> = None;
    for entry in index.entries() {
        // Entries come file by file.
        if let Some(bytes) = index.file_bytes(entry)
            && file != Some(index.file(entry))
        {
            file = Some(index.file(entry));
            add_file(hasher, bytes);
        }
        hasher.update(entry.name.as_bytes()).update(entry.dtype.to_string().as_bytes());
        for &size in &entry.shape {
            hasher.update(&(size as u64).to_le_bytes());
        }
        if index.seed().is_none() && !entry.name.contains(EXPERTS) {
            let data = index.data(entry);
            let from = data.len().saturating_sub(MIDDLE) / 2;
            hasher.update(&data[from..data.len().min(from + MIDDLE)]);
        }
    }
}

fn add_file(hasher: &mut Hasher, bytes: &[u8]) {
    hasher.update(&(bytes.len() as u64).to_le_bytes());
    for from in block_starts(bytes.len()) {
        hasher.update(&bytes[from..bytes.len().min(from + BLOCK)]);
    }
}

/// Where the sampled blocks of a file of `length` bytes begin: the first at its start, the last at its end.
fn block_starts(length: usize) -> impl Iterator<Item = usize> {
    let room = length.saturating_sub(BLOCK);
    (0..BLOCKS).map(move |block| room / (BLOCKS - 1) * block + room % (BLOCKS - 1) * block / (BLOCKS - 1))
}

#[cfg(test)]
mod tests {
    use eyrie_model::{Backing, SharedWeights};
    use eyrie_region::Epoch;

    use super::*;

    fn demo() -> std::path::PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/demo/mini")
    }

    fn of(dir: &Path, config: &str, capture: &[u32]) -> String {
        let checkpoint = TargetCheckpoint::open(dir).unwrap();
        let shared = SharedWeights::build(&checkpoint, Backing::Local, Epoch::random().unwrap()).unwrap();
        let shared = shared.fingerprint();
        fingerprint(&checkpoint, Parts { config, capture, shared, arithmetic: "cpu f32" })
    }

    #[test]
    fn other_numbers_are_another_identity() {
        let checkpoint = TargetCheckpoint::open(&demo()).unwrap();
        let of = |arithmetic| {
            fingerprint(&checkpoint, Parts { config: "c", capture: &[2], shared: [0; 32], arithmetic })
        };
        assert_ne!(of("cpu f32"), of("cuda 9.0 f32"));
        assert_ne!(of("cuda 9.0 bf16"), of("cuda 9.0 f32"));
    }

    #[test]
    fn blocks_are_spread_from_the_first_byte_to_the_last() {
        let starts: Vec<usize> = block_starts(100_000).collect();
        assert_eq!((starts.len(), starts[0], starts[15]), (16, 0, 100_000 - BLOCK));
        assert!(starts.windows(2).all(|pair| (6393..=6394).contains(&(pair[1] - pair[0]))), "{starts:?}");
        assert!(block_starts(10).all(|start| start == 0));
    }

    #[test]
    fn models_of_one_shape_differ_by_their_weights() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["config.json", "generation_config.json", "tokenizer.json"] {
            std::fs::copy(demo().join(name), dir.path().join(name)).unwrap();
        }
        let weights = dir.path().join("model.safetensors");
        let original = std::fs::read(demo().join("model.safetensors")).unwrap();
        let changed = |at: usize| {
            let mut bytes = original.clone();
            bytes[at] ^= 1;
            std::fs::write(&weights, bytes).unwrap();
            of(dir.path(), "c", &[2])
        };
        let same = of(&demo(), "c", &[2]);
        std::fs::write(&weights, &original).unwrap();
        assert_eq!(of(dir.path(), "c", &[2]), same, "a copy is the same model");
        let index = TargetCheckpoint::open(&demo()).unwrap();
        let range = |name: &str| index.index().get(name).unwrap().range.clone();
        let embed = range("model.embed_tokens.weight");
        let attention = range("model.layers.3.self_attn.o_proj.weight");
        for (what, at) in [
            ("any byte of the embedding", embed.start + 12_345),
            ("the middle of an attention matrix", attention.start.midpoint(attention.end)),
            ("a block between the first and the last", block_starts(original.len()).nth(7).unwrap() + 9),
        ] {
            assert_ne!(changed(at), same, "{what}");
        }
        assert_ne!(of(&demo(), "d", &[2]), same, "the configuration");
        assert_ne!(of(&demo(), "c", &[3]), same, "the capture set");
    }
}
