//! From a checkpoint whose headers were checked to an engine that can step, on the engine's own thread.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use eyrie_checkpoint::{
    FfnTensors, LinearSpec, MlpTensors, QueryTensors, TargetCheckpoint, layer_tensors, model_tensors,
};
use eyrie_kernels::{Backend, CpuOptions, Isa, Processor};
use eyrie_model::{Backing, CaptureSet, Progress, SharedWeights, TargetModel, load_target};
use eyrie_region::{Epoch, Gpu, Grant, Region, RegionError, RegionKind, available_memory};
use eyrie_service::Drain;
use eyrie_speculation::Sampler;

use super::admission::Limits;
use super::features::{Features, RingSizes};
use super::kept::KeptSizes;
use super::ring::RingCopy;
use super::streams::Streams;
use super::{Engine, Gauges, Prefixes};
use crate::TargetError;
use crate::fingerprint::{Parts, fingerprint};
use crate::plan::Plan;

/// Slots of a KV page.
pub(crate) const PAGE_ROWS: usize = 64;

/// What loading needs.
pub(crate) struct LoadRequest {
    pub(crate) checkpoint: Arc<TargetCheckpoint>,
    /// blake3 of its `config.json`, in hex.
    pub(crate) config_hash: String,
    pub(crate) plan: Plan,
    pub(crate) epoch: Epoch,
    pub(crate) gauges: Arc<Gauges>,
    pub(crate) drain: Drain,
}

/// What a loaded target exports to drafts.
pub(crate) struct Exports {
    /// Embedding and head, with the ring's geometry if features are captured.
    pub(crate) grant: Grant,
    /// The granted region.
    pub(crate) region: Arc<dyn Region>,
    /// The ring, for those who cannot map it.
    pub(crate) ring: Option<Arc<RingCopy>>,
    /// Descriptors of the granted region, unless a handle opens it, and, with features, of the ring and its rows.
    pub(crate) fds: Vec<OwnedFd>,
}

/// An engine that is ready, and what others need to know of it.
pub(crate) struct Loaded {
    pub(crate) engine: Engine,
    pub(crate) exports: Exports,
    /// Weight formats with bytes, for people.
    pub(crate) formats: String,
    /// Identity of the model, in hex.
    pub(crate) fingerprint: String,
}

/// Loads the model; `progress` is told the bytes read.
pub(crate) fn load(request: LoadRequest, progress: &mut dyn FnMut(Progress)) -> Result<Loaded, TargetError> {
    let plan = &request.plan;
    let cpu = CpuOptions { threads: plan.threads, isa: plan.isa.unwrap_or_else(Isa::best) };
    let backend = Backend::open(plan.processor, plan.activations, cpu)?;
    let (backing, available) = match plan.processor {
        Processor::Cpu => (Backing::Memfd, available_memory()),
        Processor::Cuda(ordinal) => {
            let gpu = Gpu::open(ordinal).map_err(RegionError::from)?;
            let (free, _) = gpu.memory().map_err(RegionError::from)?;
            match plan.sharing {
                RegionKind::CudaIpc => (Backing::CudaIpc(gpu, &backend), free),
                _ => (Backing::CudaVmm(gpu, &backend), free),
            }
        }
    };
    let weights = request.checkpoint.account().loaded.bytes;
    let need = plan.check_memory(request.checkpoint.config(), weights, available)?;
    load_into(request, backing, &backend, progress).map_err(|error| error.beside(need, available))
}

fn load_into(
    request: LoadRequest,
    backing: Backing<'_>,
    backend: &Backend,
    progress: &mut dyn FnMut(Progress),
) -> Result<Loaded, TargetError> {
    let LoadRequest { checkpoint, config_hash, plan, epoch, gauges, drain } = request;
    let shared = SharedWeights::build(&checkpoint, backing, epoch)?;
    let model = load_target(&checkpoint, shared, backend, progress)?;
    let parts = Parts {
        config: &config_hash,
        capture: &plan.capture,
        shared: model.embed_and_head().fingerprint(),
        arithmetic: &backend.arithmetic(),
    };
    let fingerprint = fingerprint(&checkpoint, parts);
    let (mut engine, exports) = assemble(model, backend, &plan, epoch, gauges, drain)?;
    if backend.is_gpu() {
        engine.warm_up()?;
    }
    Ok(Loaded { engine, exports, formats: formats(&checkpoint)?, fingerprint })
}

/// An engine over a loaded model, with nothing open.
pub(crate) fn assemble(
    mut model: Box<dyn TargetModel>,
    backend: &Backend,
    plan: &Plan,
    epoch: Epoch,
    gauges: Arc<Gauges>,
    drain: Drain,
) -> Result<(Engine, Exports), TargetError> {
    let features = match plan.capture.as_slice() {
        [] => None,
        ids => {
            let ids: Vec<usize> = ids.iter().map(|&id| id as usize).collect();
            model.set_capture(&CaptureSet::new(&ids, model.config().num_hidden_layers)?)?;
            let ring =
                RingSizes { slots: plan.ring_slots, width: plan.aux_width as usize, sharing: plan.sharing };
            let sizes = KeptSizes {
                page_rows: PAGE_ROWS,
                pages: plan.kv_tokens.div_ceil(PAGE_ROWS),
                sequences: plan.max_sequences,
                limit: plan.aux_cache_bytes,
            };
            Some(Features::create(backend, ring, sizes, epoch)?)
        }
    };
    let exports = Exports::of(model.as_ref(), features.as_ref())?;
    let cache = model.new_cache(plan.kv_tokens, PAGE_ROWS)?;
    let engine = Engine {
        pages: cache.allocator_with_prefixes(plan.prefix_cache_bytes),
        copies: Vec::new(),
        prefixes: Prefixes::default(),
        limits: Limits {
            vocab: plan.vocab,
            context: plan.context,
            kv_capacity: plan.kv_tokens,
            eos_ids: model.config().eos_token_ids.clone(),
            captures: features.is_some(),
        },
        model,
        cache,
        features,
        sequences: BTreeMap::new(),
        finished: VecDeque::new(),
        arrivals: 0,
        preemptions: 0,
        streams: Streams::default(),
        sampler: Sampler::new(),
        max_sequences: plan.max_sequences,
        prefill_chunk: plan.prefill_chunk,
        gauges,
        drain,
        last_step: Duration::ZERO,
        ready_since: None,
    };
    Ok((engine, exports))
}

impl Exports {
    fn of(model: &dyn TargetModel, features: Option<&Features>) -> Result<Self, TargetError> {
        let shared = model.embed_and_head();
        let mut grant = shared.grant().clone();
        let mut fds = Vec::new();
        if let Some(descriptor) = shared.descriptor() {
            fds.push(descriptor.try_clone_to_owned()?);
        }
        let mut ring = None;
        if let Some(features) = features {
            grant.ring = Some(features.geometry());
            grant.ring_payload = features.payload();
            fds.extend(features.fds()?);
            ring = Some(features.copy()?);
        }
        Ok(Self { grant, region: Arc::clone(shared.region()), ring, fds })
    }
}

/// Bytes of the weight matrices by the layout they have in memory, largest first.
fn formats(checkpoint: &TargetCheckpoint) -> Result<String, TargetError> {
    let config = checkpoint.config();
    let outside = model_tensors(config);
    let layers: Vec<_> = (0..config.num_hidden_layers).map(|layer| layer_tensors(config, layer)).collect();
    let mut linears: Vec<&LinearSpec> = vec![&outside.embed];
    if !config.tie_word_embeddings {
        linears.push(&outside.head);
    }
    let mlp = |mlp: &MlpTensors| [&mlp.gate, &mlp.up, &mlp.down].map(Clone::clone);
    let mut owned = Vec::new();
    for layer in &layers {
        let attention = &layer.attention;
        linears.extend([&attention.kv_a, &attention.kv_b, &attention.o]);
        match &attention.query {
            QueryTensors::Full(q) => linears.push(q),
            QueryTensors::LowRank { a, b, .. } => linears.extend([a, b]),
        }
        match &layer.ffn {
            FfnTensors::Dense(dense) => owned.extend(mlp(dense)),
            FfnTensors::Moe(moe) => {
                linears.push(&moe.router);
                owned.extend(moe.experts.iter().chain(&moe.shared).flat_map(mlp));
            }
        }
    }
    let mut bytes: BTreeMap<String, usize> = BTreeMap::new();
    for linear in linears.into_iter().chain(&owned) {
        let view = checkpoint.linear(&linear.name)?;
        *bytes.entry(view.layout.to_string()).or_default() += view.byte_len();
    }
    let mut bytes: Vec<_> = bytes.into_iter().collect();
    bytes.sort_by_key(|&(_, bytes)| std::cmp::Reverse(bytes));
    let line = |(layout, bytes): (String, usize)| format!("{layout} {:.1} MB", bytes as f64 / 1e6);
    Ok(bytes.into_iter().map(line).collect::<Vec<_>>().join(", "))
}
