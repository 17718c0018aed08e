use std::path::PathBuf;
use std::time::Duration;

use eyrie_checkpoint::ModelSource;
use eyrie_kernels::{Activations, Isa, Processor};
use eyrie_region::RegionKind;
use eyrie_wire::{Address, MAX_VERIFY_ROWS};

use crate::TargetError;

/// Tokens that the KV cache holds at least: a prompt of one token, one more token, and a verify.
pub(crate) const LEAST_KV_TOKENS: usize = 2 + MAX_VERIFY_ROWS;

/// How to serve a target.
#[derive(Debug, Clone)]
pub struct TargetOptions {
    /// The checkpoint.
    pub model: ModelSource,
    /// Where to listen.
    pub listen: Address,
    /// Prompt and generated tokens together; default and limit: the model's `max_position_embeddings`.
    pub context: Option<u32>,
    /// Tokens that the KV cache holds, over all sequences.
    pub kv_tokens: usize,
    /// Bytes of the KV cache which may keep pages that no sequence holds, for prompts that begin alike; 0 keeps none.
    /// Default: as much as is free.
    pub prefix_cache_bytes: Option<u64>,
    /// Threads of a step; default: one per core.
    pub threads: Option<usize>,
    /// Rows of a step that prompts may use, less what rounds use.
    pub prefill_chunk: usize,
    /// Sequences that hold KV pages at the same time; more wait.
    pub max_sequences: usize,
    /// Size of the feature ring; default: two prompt chunks, and four rounds of every sequence.
    pub ring_bytes: Option<u64>,
    /// Memory for feature rows of live sequences and of the prefix cache, which a draft that lacks them asks for.
    pub aux_cache_bytes: u64,
    /// Canonical ids of the residual streams to capture (i enters layer i); empty captures none. Default: {2, n/2, n-3}.
    pub capture: Option<Vec<u32>>,
    /// Instruction set of the kernels; default: the best of this machine. Results do not depend on it.
    pub isa: Option<Isa>,
    /// Where to compute.
    pub processor: Processor,
    /// Numbers of activations and KV cache; default: the processor's usual ones.
    pub activations: Option<Activations>,
    /// How a GPU's memory is shared with drafts, `cuda_vmm` (default) or `cuda_ipc`.
    pub sharing: Option<RegionKind>,
    /// Folder for the socket that hands out descriptors when `listen` is TCP; default: `XDG_RUNTIME_DIR`, else the
    /// temporary folder.
    pub runtime_dir: Option<PathBuf>,
    /// How long running sequences may go on once a drain begins that names no time of its own.
    pub drain_grace: Duration,
}

impl TargetOptions {
    /// The defaults for serving `model` on `listen`.
    pub fn new(model: impl Into<ModelSource>, listen: Address) -> Self {
        Self {
            model: model.into(),
            listen,
            context: None,
            kv_tokens: 16 * 1024,
            prefix_cache_bytes: None,
            threads: None,
            prefill_chunk: 256,
            max_sequences: 64,
            ring_bytes: None,
            aux_cache_bytes: 256 << 20,
            capture: None,
            isa: None,
            processor: Processor::Cpu,
            activations: None,
            sharing: None,
            runtime_dir: None,
            drain_grace: Duration::from_secs(30),
        }
    }

    /// Checks what can be checked without the model.
    pub(crate) fn check(&self) -> Result<(), TargetError> {
        let within = |option, value: usize, least: usize, most: usize| match (least..=most).contains(&value) {
            true => Ok(()),
            false => Err(refuse(option, format!("between {least} and {most}"), value)),
        };
        within("prefill-chunk", self.prefill_chunk, 1, 1 << 16)?;
        within("max-sequences", self.max_sequences, 1, 1 << 16)?;
        within("kv-tokens", self.kv_tokens, LEAST_KV_TOKENS, 1 << 30)?;
        within("threads", self.threads.unwrap_or(1), 1, 1024)
    }
}

pub(crate) fn refuse(
    option: &'static str,
    limit: impl Into<String>,
    given: impl std::fmt::Display,
) -> TargetError {
    TargetError::Option { option, limit: limit.into(), given: given.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_out_of_range_are_named() {
        let good = TargetOptions::new("m", Address::Tcp("127.0.0.1:0".to_owned()));
        assert!(good.check().is_ok());
        for (options, line) in [
            (
                TargetOptions { prefill_chunk: 0, ..good.clone() },
                "option prefill-chunk must be between 1 and 65536, given 0",
            ),
            (
                TargetOptions { kv_tokens: 1, ..good.clone() },
                "option kv-tokens must be between 66 and 1073741824, given 1",
            ),
            (
                TargetOptions { threads: Some(0), ..good.clone() },
                "option threads must be between 1 and 1024, given 0",
            ),
        ] {
            assert_eq!(options.check().unwrap_err().to_string(), line);
        }
    }
}
