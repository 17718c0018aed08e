//! Models, fixtures and expected values shared by this crate's tests.

pub(crate) mod driver;
pub(crate) mod fixtures;
pub(crate) mod rewrite;

use std::collections::HashMap;
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use eyrie_checkpoint::{DraftCheckpoint, TargetCheckpoint, TargetConfig};
use eyrie_kernels::{Activations, Backend, Cpu, CpuOptions, Isa, Processor};
use eyrie_model::{
    Backing, CaptureSet, DeepSeek, Eagle3Head, ForwardOut, Keep, LatentCache, LogitRows, PageAllocator,
    SeqRows, SeqTable, SharedWeights, TargetModel,
};
use eyrie_region::{Epoch, Gpu};

/// The GPU that a build with the feature `cuda` is tested on.
pub(crate) const GPU: usize = 0;
pub(crate) const PAGE_ROWS: usize = 16;

pub(crate) fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

pub(crate) fn fixture(name: &str) -> PathBuf {
    workspace().join("tests/fixtures").join(name)
}

pub(crate) fn demo(name: &str) -> PathBuf {
    workspace().join("deploy/demo").join(name)
}

pub(crate) fn cpu(threads: usize) -> Backend {
    Cpu::new(CpuOptions { threads, isa: Isa::best() }).unwrap().into()
}

/// Where the tests compute: on the CPU with that many threads. With the feature `cuda` it is the first GPU, never the CPU
/// instead, with the activations that `EYRIE_ACTIVATIONS` names, float32 unless told otherwise; one backend a test thread,
/// since operands of different backends do not mix.
pub(crate) fn backend(threads: usize) -> Backend {
    if !cfg!(feature = "cuda") {
        return cpu(threads);
    }
    thread_local! {
        // Never dropped: a context goes with its last user, and would be made anew for every test.
        static BACKEND: ManuallyDrop<Backend> = ManuallyDrop::new(gpu(
            std::env::var("EYRIE_ACTIVATIONS").map_or(Activations::F32, |numbers| numbers.parse().unwrap()),
        ));
    }
    BACKEND.with(|backend| Backend::clone(backend))
}

/// The GPU with these activations.
pub(crate) fn gpu(activations: Activations) -> Backend {
    let cpu = CpuOptions { threads: 1, isa: Isa::best() };
    let backend = Backend::open(Processor::Cuda(GPU), activations, cpu).unwrap();
    assert!(backend.device().is_cuda());
    backend
}

/// Embedding and head in memory that `backend` uses where it lies.
pub(crate) fn shared(checkpoint: &TargetCheckpoint, backend: &Backend) -> SharedWeights {
    let backing = match backend.device() {
        Device::Cpu => Backing::Local,
        _ => Backing::CudaVmm(Gpu::open(GPU).unwrap(), backend),
    };
    SharedWeights::build(checkpoint, backing, Epoch::random().unwrap()).unwrap()
}

pub(crate) fn deepseek(dir: &Path, backend: &Backend) -> DeepSeek {
    deepseek_as(dir, backend, |_| {})
}

/// The model in `dir` under a config that `change` has edited.
pub(crate) fn deepseek_as(dir: &Path, backend: &Backend, change: impl FnOnce(&mut TargetConfig)) -> DeepSeek {
    let checkpoint = TargetCheckpoint::open(dir).unwrap();
    let mut config = checkpoint.config().clone();
    change(&mut config);
    DeepSeek::load_as(config, &checkpoint, shared(&checkpoint, backend), backend, &mut |_| {}).unwrap()
}

pub(crate) fn draft(
    dir: &Path,
    capture: &CaptureSet,
    shared: &SharedWeights,
    backend: &Backend,
) -> Eagle3Head {
    Eagle3Head::load(&DraftCheckpoint::open(dir).unwrap(), capture, shared, backend).unwrap()
}

/// Tensors a fixture's independent reference computed.
pub(crate) struct Expected(HashMap<String, (Vec<usize>, Vec<f64>)>);

impl Expected {
    pub(crate) fn read(path: &Path) -> Self {
        let bytes = std::fs::read(path).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let tensors = file.iter().map(|(name, view)| {
            let words =
                view.data().chunks_exact(view.data().len() / view.shape().iter().product::<usize>().max(1));
            let values = match view.dtype() {
                safetensors::Dtype::F32 => {
                    words.map(|w| f64::from(f32::from_le_bytes(w.try_into().unwrap()))).collect()
                }
                safetensors::Dtype::I32 => {
                    words.map(|w| f64::from(i32::from_le_bytes(w.try_into().unwrap()))).collect()
                }
                other => panic!("{name}: {other:?}"),
            };
            (name.to_owned(), (view.shape().to_vec(), values))
        });
        Self(tensors.collect())
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    pub(crate) fn shape(&self, name: &str) -> &[usize] {
        &self.0[name].0
    }

    pub(crate) fn floats(&self, name: &str) -> &[f64] {
        &self.0[name].1
    }

    pub(crate) fn ids(&self, name: &str) -> Vec<u32> {
        self.0[name].1.iter().map(|&id| id as u32).collect()
    }

    /// Rows of the integer matrix `name`.
    pub(crate) fn id_rows(&self, name: &str) -> Vec<Vec<u32>> {
        let width = *self.shape(name).last().unwrap();
        self.ids(name).chunks(width).map(<[u32]>::to_vec).collect()
    }
}

/// Float32 values, wherever and whatever `tensor` is; no kernel runs for that.
pub(crate) fn values(tensor: &Tensor) -> Vec<f32> {
    let host = tensor.to_device(&Device::Cpu).unwrap().to_dtype(DType::F32).unwrap();
    host.flatten_all().unwrap().to_vec1().unwrap()
}

/// Largest absolute difference; NaN counts as infinite.
pub(crate) fn max_diff(got: &[f32], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    std::iter::zip(got, want).map(|(&g, &w)| (f64::from(g) - w).abs()).fold(0.0, |max, d| {
        if d > max || d.is_nan() { if d.is_nan() { f64::INFINITY } else { d } } else { max }
    })
}

pub(crate) fn argmax_rows(logits: &Tensor) -> Vec<u32> {
    let width = logits.dim(1).unwrap();
    values(logits).chunks(width).map(|row| eyrie_kernels::argmax(row).unwrap()).collect()
}

/// A target's cache with the allocator over it.
pub(crate) struct Pool {
    pub(crate) cache: LatentCache,
    pub(crate) pages: PageAllocator,
}

impl Pool {
    pub(crate) fn new(model: &dyn TargetModel, tokens: usize) -> Self {
        let cache = model.new_cache(tokens, PAGE_ROWS).unwrap();
        let pages = cache.allocator();
        Self { cache, pages }
    }

    /// Runs `tokens` behind what `table` holds and commits them.
    pub(crate) fn feed(
        &mut self,
        model: &mut dyn TargetModel,
        table: &mut SeqTable,
        tokens: &[u32],
        logits: LogitRows,
    ) -> ForwardOut {
        let base_len = table.len();
        let end = base_len + tokens.len() as u32;
        self.pages.reserve(table, end as usize).unwrap();
        let rows = SeqRows { table, base_len, tokens, parents: None, logits };
        let out = model.forward(&[rows], &mut self.cache).unwrap();
        model.rollback(&mut self.cache, table, Keep::Len(end)).unwrap();
        out
    }
}

impl Pool {
    /// Runs one token of every sequence in one pass, with logits, and commits them.
    pub(crate) fn feed_each(
        &mut self,
        model: &mut dyn TargetModel,
        tables: &mut [SeqTable],
        tokens: &[u32],
    ) -> ForwardOut {
        for table in tables.iter_mut() {
            let end = table.len() as usize + 1;
            self.pages.reserve(table, end).unwrap();
        }
        let batch: Vec<SeqRows<'_>> = std::iter::zip(&*tables, tokens.chunks(1))
            .map(|(table, tokens)| SeqRows {
                table,
                base_len: table.len(),
                tokens,
                parents: None,
                logits: LogitRows::All,
            })
            .collect();
        let out = model.forward(&batch, &mut self.cache).unwrap();
        for table in tables {
            let end = table.len() + 1;
            model.rollback(&mut self.cache, table, Keep::Len(end)).unwrap();
        }
        out
    }
}
