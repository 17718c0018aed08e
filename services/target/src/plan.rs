//! The options resolved against the checkpoint's config: every size the engine will use.

use std::fmt;
use std::num::NonZeroUsize;

use eyrie_checkpoint::TargetConfig;
use eyrie_kernels::{Activations, Isa, Processor};
use eyrie_model::LatentCache;
use eyrie_region::{DeviceRingGeometry, RegionKind, RingError, RingGeometry};
use eyrie_wire::MAX_VERIFY_ROWS;

use crate::engine::{PAGE_ROWS, SLOT_ROWS};
use crate::options::{LEAST_KV_TOKENS, TargetOptions, refuse};
use crate::{TargetError, options};

/// A prompt of one token and one more.
const LEAST_CONTEXT: u32 = 2;
/// Prompt chunks that the ring holds at least.
const RING_CHUNKS: usize = 2;
/// Rounds of every sequence that a ring of default size holds.
const RING_ROUNDS: usize = 4;

/// Rows of a round as they usually are.
const USUAL_ROUND: usize = 4;
/// Values as wide as the residual stream that a step holds of a row.
const ROWS_BETWEEN: usize = 12;
/// What the experts' kernels take at most, and the driver for kernels and queues.
const GPU_SCRATCH: u64 = 512 << 20;

/// Bytes that serving needs. Drafted rounds are not cut to `prefill_chunk` rows, so a step may compute more rows than the
/// workspace is counted for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Need {
    weights: u64,
    kv: u64,
    /// The ring, and the rows kept beside it.
    features: u64,
    /// Of a GPU; what a step takes of the heap is not counted.
    workspace: Option<Workspace>,
}

/// What a step takes of a GPU beside what is there for good.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Workspace {
    bytes: u64,
    /// Rows of such a step.
    rows: usize,
}

/// Resolved sizes.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Plan {
    pub(crate) threads: usize,
    pub(crate) isa: Option<Isa>,
    pub(crate) processor: Processor,
    pub(crate) activations: Activations,
    /// How memory is shared with drafts.
    pub(crate) sharing: RegionKind,
    pub(crate) vocab: u32,
    pub(crate) context: u32,
    /// Whole pages.
    pub(crate) kv_tokens: usize,
    pub(crate) prefix_cache_bytes: Option<u64>,
    pub(crate) max_sequences: usize,
    pub(crate) prefill_chunk: usize,
    /// Canonical ids, strictly increasing; empty = no features.
    pub(crate) capture: Vec<u32>,
    /// Values of a feature row: the captured streams side by side.
    pub(crate) aux_width: u32,
    pub(crate) ring_slots: u32,
    pub(crate) aux_cache_bytes: u64,
}

impl Plan {
    /// Resolves `options` for a model of `config`.
    pub(crate) fn new(options: &TargetOptions, config: &TargetConfig) -> Result<Self, TargetError> {
        options.check()?;
        let capture = match &options.capture {
            Some(ids) => checked_capture(ids, config.num_hidden_layers)?,
            None => default_capture(config.num_hidden_layers),
        };
        let aux_width = (capture.len() * config.hidden_size) as u32;
        let activations = options.activations.unwrap_or(options.processor.usual());
        Ok(Self {
            threads: options
                .threads
                .unwrap_or_else(|| std::thread::available_parallelism().map_or(1, NonZeroUsize::get)),
            isa: options.isa,
            processor: options.processor,
            activations,
            sharing: sharing(options)?,
            vocab: config.vocab_size as u32,
            context: context(options, config)?,
            kv_tokens: options.kv_tokens.next_multiple_of(PAGE_ROWS),
            prefix_cache_bytes: options.prefix_cache_bytes,
            max_sequences: options.max_sequences,
            prefill_chunk: options.prefill_chunk,
            ring_slots: if capture.is_empty() { 0 } else { ring_slots(options, aux_width, activations)? },
            capture,
            aux_width,
            aux_cache_bytes: options.aux_cache_bytes,
        })
    }

    /// Refuses a model whose weights of `weights` bytes do not fit the `available` bytes of memory together with its caches,
    /// before anything is loaded; warns of a prefix cache that can hold nothing.
    pub(crate) fn check_memory(
        &self,
        config: &TargetConfig,
        weights: u64,
        available: u64,
    ) -> Result<Need, TargetError> {
        let token = LatentCache::token_bytes(config, self.activations);
        let need = self.need(config, weights)?;
        if need.total() > available {
            let left = available.saturating_sub(need.total() - need.kv);
            // Fewer pages may do, if they still hold a sequence.
            let most = left / token / PAGE_ROWS as u64 * PAGE_ROWS as u64;
            if most >= LEAST_KV_TOKENS as u64 {
                let limit = format!("at most {most}: a token needs {token} bytes, {left} are available");
                return Err(refuse("kv-tokens", limit, self.kv_tokens));
            }
            let place = self.processor.to_string();
            return Err(TargetError::Memory { place, need, available });
        }
        let page = token * PAGE_ROWS as u64;
        if let Some(bytes) = self.prefix_cache_bytes.filter(|bytes| (1..page).contains(bytes)) {
            tracing::warn!("--prefix-cache-bytes {bytes} keeps nothing: a page has {page} bytes");
        }
        Ok(need)
    }
}

impl Plan {
    /// What a model of `config` and `weights` bytes needs: at least that, since formats are widened where a processor has
    /// no kernel for them.
    fn need(&self, config: &TargetConfig, weights: u64) -> Result<Need, TargetError> {
        let features = match self.capture.is_empty() {
            true => 0,
            false => {
                let (numbers, width) = (self.activations, self.aux_width);
                let block = (PAGE_ROWS * width as usize * numbers.size()) as u64;
                let blocks = (self.kv_tokens / PAGE_ROWS + self.max_sequences) as u64;
                let kept = (self.aux_cache_bytes / block.max(1)).min(blocks) * block;
                ring_bytes(self.processor, numbers, self.ring_slots, width)? + kept
            }
        };
        Ok(Need {
            weights,
            kv: self.kv_tokens as u64 * LatentCache::token_bytes(config, self.activations),
            features,
            workspace: (self.processor != Processor::Cpu).then(|| self.workspace(config)),
        })
    }

    /// The rows between layers, their queries and the rounds' logits of a step with a full prompt chunk and either a usual
    /// round of every sequence or the longest round of one.
    fn workspace(&self, config: &TargetConfig) -> Workspace {
        let rounds = (self.max_sequences * USUAL_ROUND).max(MAX_VERIFY_ROWS);
        let rows = self.prefill_chunk + rounds;
        let queries = config.num_attention_heads * (config.kv_lora_rank + config.qk_rope_head_dim);
        let row = (queries + ROWS_BETWEEN * config.hidden_size) * size_of::<f32>();
        let logits = rounds * config.vocab_size * size_of::<f32>();
        Workspace { bytes: GPU_SCRATCH + (rows * row + logits) as u64, rows }
    }
}

impl Need {
    fn total(&self) -> u64 {
        self.weights + self.kv + self.features + self.workspace.map_or(0, |workspace| workspace.bytes)
    }
}

impl fmt::Display for Need {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { weights, kv, features, workspace } = self;
        let total = self.total();
        write!(
            f,
            "{total} bytes are needed at least (weights {weights}, KV cache {kv}, features {features}"
        )?;
        if let Some(Workspace { bytes, rows }) = workspace {
            write!(f, ", workspace {bytes} for steps of {rows} rows")?;
        }
        f.write_str(")")
    }
}

fn context(options: &TargetOptions, config: &TargetConfig) -> Result<u32, TargetError> {
    let limit = config.max_position_embeddings as u32;
    match options.context {
        None => Ok(limit),
        Some(given) if (LEAST_CONTEXT..=limit).contains(&given) => Ok(given),
        Some(given) => Err(refuse(
            "context",
            format!("between {LEAST_CONTEXT} and the model's max_position_embeddings = {limit}"),
            given,
        )),
    }
}

/// Early, middle and late, as EAGLE-3 heads are trained; a model too shallow for three distinct ids captures none.
fn default_capture(layers: usize) -> Vec<u32> {
    let ids = [2, layers / 2, layers.saturating_sub(3)];
    match ids.is_sorted_by(|a, b| a < b) {
        true => ids.iter().map(|&id| id as u32).collect(),
        false => {
            tracing::warn!(layers, "too few layers for the default capture set: drafts get no features");
            Vec::new()
        }
    }
}

fn checked_capture(ids: &[u32], layers: usize) -> Result<Vec<u32>, TargetError> {
    match ids.is_sorted_by(|a, b| a < b) && ids.iter().all(|&id| id as usize <= layers) {
        true => Ok(ids.to_vec()),
        false => {
            let limit = format!("strictly increasing ids of at most {layers}, the number of layers");
            Err(options::refuse("aux-layers", limit, format!("{ids:?}")))
        }
    }
}

fn sharing(options: &TargetOptions) -> Result<RegionKind, TargetError> {
    match (options.processor, options.sharing) {
        (Processor::Cpu, None) => Ok(RegionKind::Memfd),
        (Processor::Cpu, Some(kind)) => Err(refuse("share", "left out without --device cuda", kind)),
        (Processor::Cuda(_), None) => Ok(RegionKind::CudaVmm),
        (Processor::Cuda(_), Some(kind)) if kind.is_on_device() => Ok(kind),
        (Processor::Cuda(_), Some(kind)) => Err(refuse("share", "cuda_vmm or cuda_ipc", kind)),
    }
}

/// Bytes of a ring's rows where they lie, and on the CPU of its stamps.
fn ring_bytes(
    processor: Processor,
    numbers: Activations,
    slots: u32,
    row_width: u32,
) -> Result<u64, RingError> {
    let ring = RingGeometry { slots, slot_rows: SLOT_ROWS, row_width };
    match processor {
        Processor::Cpu => ring.byte_len(),
        Processor::Cuda(_) => DeviceRingGeometry { ring, value_bytes: numbers.size() as u32 }.payload_len(),
    }
}

fn ring_slots(options: &TargetOptions, row_width: u32, activations: Activations) -> Result<u32, TargetError> {
    let least = (RING_CHUNKS * options.prefill_chunk).div_ceil(SLOT_ROWS as usize);
    let bytes = |slots: u32| ring_bytes(options.processor, activations, slots, row_width);
    let Some(limit) = options.ring_bytes else {
        return Ok(least.max(RING_ROUNDS * options.max_sequences) as u32);
    };
    let one = bytes(2)? - bytes(1)?;
    let slots = u32::try_from(limit / one).unwrap_or(u32::MAX);
    if (slots as usize) < least {
        let limit_text = format!("at least {} for two prompt chunks", bytes(least as u32)?);
        return Err(refuse("ring-bytes", limit_text, limit));
    }
    Ok(slots)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use eyrie_kernels::KernelError;
    use eyrie_wire::Address;

    use super::*;

    fn config() -> TargetConfig {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/demo/mini");
        TargetConfig::from_dir(&dir).unwrap()
    }

    fn options() -> TargetOptions {
        TargetOptions::new("m", Address::Tcp("127.0.0.1:0".to_owned()))
    }

    #[test]
    fn defaults_follow_the_model() {
        let plan = Plan::new(&options(), &config()).unwrap();
        assert_eq!((plan.capture.as_slice(), plan.aux_width), (&[2, 4, 5][..], 3 * 384));
        assert_eq!((plan.vocab, plan.context, plan.ring_slots), (4096, 4096, 256));
        assert_eq!(default_capture(61), [2, 30, 58]);
        assert_eq!(default_capture(4), [0; 0]);
    }

    #[test]
    fn refusals_name_option_limit_and_value() {
        for (options, parts) in [
            (TargetOptions { context: Some(4097), ..options() }, ["context", "4096, given 4097"]),
            (TargetOptions { capture: Some(vec![2, 9]), ..options() }, ["aux-layers", "given [2, 9]"]),
            (TargetOptions { capture: Some(vec![4, 2]), ..options() }, ["aux-layers", "strictly increasing"]),
            (TargetOptions { ring_bytes: Some(4096), ..options() }, ["ring-bytes", "given 4096"]),
        ] {
            let line = Plan::new(&options, &config()).unwrap_err().to_string();
            assert!(parts.iter().all(|part| line.contains(part)), "{line}");
        }
        let shared = TargetOptions { sharing: Some(RegionKind::CudaIpc), ..options() };
        assert_eq!(
            Plan::new(&shared, &config()).unwrap_err().to_string(),
            "option share must be left out without --device cuda, given cuda_ipc"
        );
        let none = TargetOptions { capture: Some(vec![]), ring_bytes: Some(1), ..options() };
        assert_eq!(Plan::new(&none, &config()).unwrap().ring_slots, 0);
    }

    #[test]
    fn the_kv_cache_has_whole_pages_and_must_fit_the_memory() {
        let plan = |kv_tokens| Plan::new(&TargetOptions { kv_tokens, ..options() }, &config()).unwrap();
        let (fewer, plan) = (plan(128), plan(129));
        assert_eq!(plan.kv_tokens, 192);
        // 8 layers of 128 + 32 values a token.
        let token = 8 * 160 * 4;
        let rest = 1000 + plan.need(&config(), 0).unwrap().features;
        let check = |available| plan.check_memory(&config(), 1000, available);
        assert!(check(rest + 192 * token).is_ok());
        for available in [rest + 192 * token - 1, rest + 128 * token] {
            assert_eq!(
                check(available).unwrap_err().to_string(),
                format!(
                    "option kv-tokens must be at most 128: a token needs 5120 bytes, {} are available, given 192",
                    available - rest
                )
            );
            assert!(fewer.check_memory(&config(), 1000, available).is_ok(), "as advised");
        }
        // Three blocks of the KV cache and one for each sequence beside the ring.
        let features = rest - 1000;
        assert!(features > (3 + 64) * 64 * 1152 * 4 && features < (3 + 64) * 64 * 1152 * 4 + (10 << 20));
        // One page is less than the option takes.
        let available = rest + 128 * token - 1;
        assert_eq!(
            check(available).unwrap_err().to_string(),
            format!(
                "memory of cpu: {} bytes are needed at least (weights 1000, KV cache 983040, features {features}), \
                 {available} are free",
                rest + 192 * token
            )
        );
    }

    #[test]
    fn a_gpu_needs_room_for_a_step_too() {
        let need = |max_sequences| {
            let options = TargetOptions { processor: Processor::Cuda(0), max_sequences, ..options() };
            Plan::new(&options, &config()).unwrap().need(&config(), 1).unwrap()
        };
        // At least the longest round of one sequence, with its logits.
        for (sequences, rounds) in [(1, 64), (16, 64), (64, 256)] {
            let need = need(sequences);
            let Workspace { bytes, rows } = need.workspace.unwrap();
            assert!(rows == 256 + rounds && bytes > GPU_SCRATCH + rounds as u64 * 4096 * 4, "{need}");
            assert!(need.to_string().ends_with(&format!("{bytes} for steps of {rows} rows)")), "{need}");
        }
        let need = need(64);
        let ran_out = KernelError::GpuMemory { what: "linear", wanted: 9, free: 5, total: 7 };
        let line = TargetError::from(ran_out).beside(need, 6).to_string();
        assert!(line.contains("9 bytes wanted for linear, 5 of 7 bytes are free; by the plan "), "{line}");
        assert!(line.ends_with(&format!("{need}, 6 were free at the start")), "{line}");
        let other = TargetError::from(KernelError::Panicked).beside(need, 6).to_string();
        assert_eq!(other, KernelError::Panicked.to_string());
    }

    #[test]
    fn a_gpu_shares_its_memory_by_descriptor_unless_told_otherwise() {
        let on_gpu = TargetOptions { processor: Processor::Cuda(0), ..options() };
        let sharing = |sharing| Plan::new(&TargetOptions { sharing, ..on_gpu.clone() }, &config());
        assert_eq!(sharing(None).unwrap().sharing, RegionKind::CudaVmm);
        assert_eq!(sharing(Some(RegionKind::CudaIpc)).unwrap().sharing, RegionKind::CudaIpc);
        let error = sharing(Some(RegionKind::Memfd)).unwrap_err().to_string();
        assert_eq!(error, "option share must be cuda_vmm or cuda_ipc, given memfd");
    }

    #[test]
    fn a_ring_fits_its_bytes() {
        let plan = Plan::new(&TargetOptions { ring_bytes: Some(8 << 20), ..options() }, &config()).unwrap();
        let geometry = RingGeometry { slots: plan.ring_slots, slot_rows: SLOT_ROWS, row_width: 1152 };
        let bytes = geometry.byte_len().unwrap();
        assert!(bytes <= (8 << 20) + 64 && bytes > (8 << 20) - (64 << 10), "{bytes}");
    }
}
