use std::ops::Range;
use std::sync::Arc;

use candle_core::Tensor;
use eyrie_checkpoint::{Layout, WeightView, Yarn};
use eyrie_kernels::{
    Backend, GqaSpec, MlaDims, MlaWeights, PagedRows, Ragged, RmsNorm, Rope, RopeSpec, RopeStyle, Rows, gqa,
    mla,
};

use crate::common::{Rng, best, bits, flat, tensor, weight};
use crate::gpu::{Gpu, MOST_ROWS, gpus, host, sized};
use crate::sequences::{PAGE, Sequence, prompt, sequences, tree};

/// A layer's attention, its inputs for every row of some sequences, and where those lie.
struct Layer {
    kind: Kind,
    sequences: Vec<Sequence>,
    pages: usize,
    /// Inputs of a row (queries, then what is cached) and their widths, of each sequence.
    inputs: Vec<Vec<Vec<f32>>>,
    widths: Vec<usize>,
}

enum Kind {
    Mla { dims: MlaDims, gain: Vec<f32>, view: WeightView, rope: Arc<Rope> },
    Gqa(GqaSpec),
}

fn rope(dim: usize, style: RopeStyle, yarn: bool) -> Arc<Rope> {
    let yarn = yarn.then_some(Yarn {
        factor: 40.0,
        original_max_position_embeddings: 4096,
        beta_fast: 32.0,
        beta_slow: 1.0,
        mscale: 1.0,
        mscale_all_dim: 1.0,
    });
    Arc::new(Rope::new(RopeSpec { dim, theta: 1e4, yarn, style }).unwrap())
}

impl Layer {
    fn mla(gpu: &Gpu, seed: u64, dims: MlaDims, layout: Layout, lengths: &[usize]) -> Layer {
        let mut rng = Rng(seed);
        let (view, _) = weight(&mut rng, layout, [dims.heads * (dims.nope + dims.v), dims.kv_lora]);
        let gain = rng.values(dims.kv_lora, 2.0);
        let rope = rope(dims.rope, RopeStyle::Interleaved, seed.is_multiple_of(2));
        let widths = vec![dims.heads * (dims.nope + dims.rope), dims.cache_width()];
        Layer::new(gpu, rng, Kind::Mla { dims, gain, view, rope }, widths, lengths)
    }

    fn gqa(gpu: &Gpu, seed: u64, [heads, kv_heads, head_dim]: [usize; 3], lengths: &[usize]) -> Layer {
        let style = if seed.is_multiple_of(2) { RopeStyle::HalfSplit } else { RopeStyle::Interleaved };
        let spec = GqaSpec { heads, kv_heads, head_dim, rope: rope(head_dim, style, false) };
        let widths = vec![heads * head_dim, kv_heads * head_dim, kv_heads * head_dim];
        Layer::new(gpu, Rng(seed), Kind::Gqa(spec), widths, lengths)
    }

    fn new(gpu: &Gpu, mut rng: Rng, kind: Kind, widths: Vec<usize>, lengths: &[usize]) -> Layer {
        let (sequences, pages) = sequences(&mut rng, lengths);
        let one = |rng: &mut Rng, len: usize| {
            widths.iter().map(|width| gpu.round(rng.values(len * width, 2.0))).collect()
        };
        let inputs = lengths.iter().map(|&len| one(&mut rng, len)).collect();
        Layer { kind, sequences, pages, inputs, widths }
    }

    fn on<'a>(&'a self, backend: &'a Backend) -> Run<'a> {
        let (weights, width) = match &self.kind {
            Kind::Mla { dims, gain, view, rope } => {
                let norm = RmsNorm::new(backend, gain.clone(), 1e-6).unwrap();
                let weights = MlaWeights::new(backend, *dims, norm, view, Arc::clone(rope)).unwrap();
                (Some(weights), dims.cache_width())
            }
            Kind::Gqa(spec) => (None, spec.cache_width()),
        };
        Run { layer: self, backend, weights, width }
    }
}

/// A layer on one backend.
struct Run<'a> {
    layer: &'a Layer,
    backend: &'a Backend,
    weights: Option<MlaWeights>,
    width: usize,
}

impl Run<'_> {
    fn cache(&self) -> PagedRows {
        PagedRows::new(self.backend, self.layer.pages, PAGE, self.width).unwrap()
    }

    /// `picked` names the sequence and row that each row of `ragged` takes its inputs from.
    fn rows(&self, ragged: Ragged, picked: &[(usize, usize)], cache: &mut PagedRows) -> Tensor {
        let inputs: Vec<Tensor> = (0..self.layer.widths.len())
            .map(|i| {
                let width = self.layer.widths[i];
                let row = |&(s, row): &(usize, usize)| &self.layer.inputs[s][i][row * width..][..width];
                let values: Vec<f32> = picked.iter().flat_map(row).copied().collect();
                self.backend.activations(values, width).unwrap()
            })
            .collect();
        let rows = Rows::new(self.backend, ragged).unwrap();
        match (&self.weights, &self.layer.kind) {
            (Some(weights), _) => mla(weights, &inputs[0], &inputs[1], cache, &rows).unwrap(),
            (None, Kind::Gqa(spec)) => {
                gqa(self.backend, spec, &inputs[0], &inputs[1], &inputs[2], cache, &rows).unwrap()
            }
            (None, Kind::Mla { .. }) => panic!("no weights"),
        }
    }

    /// Ranges of sequences as prompts, each row's last `tail` keys spelled as tail slots.
    fn prompts(&self, parts: &[(usize, Range<usize>)], tail: usize, cache: &mut PagedRows) -> Tensor {
        let (mut ragged, mut picked) = (Ragged::default(), Vec::new());
        for (s, range) in parts {
            prompt(&mut ragged, &self.layer.sequences[*s], range.clone(), tail);
            picked.extend(range.clone().map(|row| (*s, row)));
        }
        self.rows(ragged, &picked, cache)
    }

    /// The first sequence in pieces of `chunk` rows.
    fn chunks(&self, len: usize, chunk: usize, tail: usize) -> Vec<Vec<u32>> {
        let mut cache = self.cache();
        let mut rows = Vec::new();
        for start in (0..len).step_by(chunk) {
            let count = chunk.min(len - start);
            let y = host(&self.prompts(&[(0, start..start + count)], tail, &mut cache));
            rows.extend(y.chunks(y.len() / count).map(bits));
        }
        rows
    }
}

const SMALL: MlaDims = MlaDims { heads: 6, kv_lora: 32, nope: 16, rope: 8, v: 16 };
const DIMS: [MlaDims; 6] = [
    SMALL,
    MlaDims { heads: 1, kv_lora: 24, nope: 12, rope: 6, v: 10 },
    MlaDims { heads: 2, kv_lora: 9, nope: 3, rope: 2, v: 5 },
    // The demo pair's, DeepSeek-V2-Lite's, and heads that fill no block.
    MlaDims { heads: 6, kv_lora: 128, nope: 64, rope: 32, v: 64 },
    MlaDims { heads: 16, kv_lora: 512, nope: 128, rope: 64, v: 128 },
    MlaDims { heads: 21, kv_lora: 256, nope: 32, rope: 16, v: 40 },
];
const LAYOUTS: [Layout; 4] = [Layout::Bf16, Layout::F32, Layout::F16, Layout::Int4G32];
const GROUPED: [[usize; 3]; 7] =
    [[6, 2, 64], [4, 4, 10], [9, 1, 16], [8, 2, 12], [32, 2, 128], [20, 1, 64], [3, 1, 256]];

fn check_prompts(gpu: &Gpu, layer: &Layer, lengths: &[usize], what: &str) {
    let parts: Vec<_> = lengths.iter().enumerate().map(|(s, &len)| (s, 0..len)).collect();
    let cpu = best();
    let (on_cpu, on_gpu) = (layer.on(&cpu), layer.on(&gpu.backend));
    let (mut want_cache, mut cache) = (on_cpu.cache(), on_gpu.cache());
    let want = flat(&on_cpu.prompts(&parts, 0, &mut want_cache));
    gpu.assert_close(&on_gpu.prompts(&parts, 3, &mut cache), &want, what);
    for (s, len) in lengths.iter().enumerate() {
        let slot = layer.sequences[s].slot(len - 1);
        let row = tensor(&cache.row(slot).unwrap(), on_gpu.width);
        gpu.assert_close(&row, &want_cache.row(slot).unwrap(), &format!("cached row, {what}"));
    }
}

#[test]
fn attention_matches_the_cpu() {
    // The last key alone in a tile, and in a chunk.
    for lengths in [&[1, 40][..], &[33, 257, 300]] {
        for gpu in gpus() {
            for (case, dims) in DIMS.into_iter().enumerate() {
                let layout = LAYOUTS[case % if dims.kv_lora % 32 == 0 { 4 } else { 3 }];
                let layer = Layer::mla(gpu, 100 + case as u64, dims, layout, lengths);
                check_prompts(gpu, &layer, lengths, &format!("{dims:?} {layout:?} {lengths:?}"));
            }
            for (case, dims) in GROUPED.into_iter().enumerate() {
                let layer = Layer::gqa(gpu, case as u64, dims, lengths);
                check_prompts(gpu, &layer, lengths, &format!("grouped {dims:?} {lengths:?}"));
            }
        }
    }
}

fn check_bits(layer: &Layer, gpu: &Gpu, len: usize, chunks: &[(usize, usize)], what: &str) {
    let run = layer.on(&gpu.backend);
    let alone = run.chunks(len, 1, 0);
    for &(chunk, tail) in chunks {
        assert!(run.chunks(len, chunk, tail) == alone, "{what}: chunks of {chunk}, tails of {tail}");
    }
    // Beside another sequence's rows.
    let (half, other) = (len / 2, layer.inputs[1][0].len() / layer.widths[0]);
    let mut cache = run.cache();
    run.prompts(&[(0, 0..half)], 0, &mut cache);
    let y = host(&run.prompts(&[(1, 0..other), (0, half..len)], 2, &mut cache));
    let rows: Vec<_> = y.chunks(y.len() / (other + len - half)).map(bits).collect();
    assert!(rows[other..] == alone[half..], "{what}: beside another sequence");
}

#[test]
fn bits_survive_chunks_batches_and_spellings() {
    let chunks = [(1, 1), (63, 0), (64, 5), (65, 0), (512, 300), (MOST_ROWS, 0), (MOST_ROWS, 40)];
    let (most, len) = sized((MOST_ROWS, 600), (300, 270));
    for gpu in gpus() {
        let long = Layer::mla(gpu, 120, SMALL, Layout::Bf16, &[most, 37]);
        check_bits(&long, gpu, most, &chunks, "long prompt");
        for dims in [DIMS[2], DIMS[4]] {
            let layer = Layer::mla(gpu, 121, dims, Layout::Bf16, &[len, 290]);
            check_bits(&layer, gpu, len, &[(7, 3), (64, 600), (600, 0)], &format!("{dims:?}"));
        }
        for dims in [GROUPED[0], GROUPED[1], GROUPED[4]] {
            let layer = Layer::gqa(gpu, 122, dims, &[len, 290]);
            check_bits(&layer, gpu, len, &[(7, 3), (64, 600), (600, 0)], &format!("grouped {dims:?}"));
        }
    }
}

#[test]
fn a_tree_sees_its_ancestors_and_its_path_can_be_moved_together() {
    let parents = [None, Some(0), Some(0), Some(1), Some(1), Some(2), Some(4), Some(0)];
    let path = [0, 1, 4, 6];
    // The tree lies across the end of a tile, and of a chunk.
    for base in [29, 253] {
        for gpu in gpus() {
            let total = base + parents.len();
            let layer = Layer::mla(gpu, 140, SMALL, Layout::Bf16, &[total]);
            let run = layer.on(&gpu.backend);
            let (mut cache, mut chain) = (run.cache(), run.cache());
            run.prompts(&[(0, 0..base)], 0, &mut cache);
            run.prompts(&[(0, 0..base)], 0, &mut chain);
            let mut nodes = Ragged::default();
            tree(&mut nodes, &layer.sequences[0], base, &parents);
            let picked: Vec<_> = (base..total).map(|row| (0, row)).collect();
            let y = host(&run.rows(nodes, &picked, &mut cache));
            let y: Vec<_> = y.chunks(y.len() / parents.len()).map(bits).collect();
            let slot = |index| layer.sequences[0].slot(index);
            let moves: Vec<_> = path
                .iter()
                .enumerate()
                .map(|(depth, node)| (slot(base + node), slot(base + depth)))
                .collect();
            cache.copy(&moves).unwrap();
            for (depth, node) in path.into_iter().enumerate() {
                let mut row = Ragged::default();
                prompt(&mut row, &layer.sequences[0], base + depth..base + depth + 1, 0);
                let alone = bits(&host(&run.rows(row, &[(0, base + node)], &mut chain)));
                assert!(alone == y[node], "node {node} as a chain after {base}");
                assert_eq!(cache.row(slot(base + depth)).unwrap(), chain.row(slot(base + depth)).unwrap());
            }
        }
    }
}

#[test]
fn bad_rows_are_errors_and_write_nothing() {
    let gpu = &gpus()[0];
    let layer = Layer::gqa(gpu, 160, [4, 2, 8], &[20]);
    let run = layer.on(&gpu.backend);
    let Kind::Gqa(spec) = &layer.kind else { panic!("built above") };
    let mut cache = run.cache();
    let inputs: Vec<Tensor> = layer.widths.iter().map(|&width| gpu.put(&vec![1.0; width], width)).collect();
    let mut rows = Ragged::default();
    prompt(&mut rows, &layer.sequences[0], 3..4, 0);
    let slot = rows.rows[0].slot;
    rows.rows[0].slot = 1 << 20;
    let rows = Rows::new(&gpu.backend, rows).unwrap();
    let error = gqa(&gpu.backend, spec, &inputs[0], &inputs[1], &inputs[2], &mut cache, &rows).unwrap_err();
    assert!(error.to_string().starts_with("gqa: slot is 1048576, limit below"), "{error}");
    assert!(cache.row(slot).unwrap().iter().all(|&v| v == 0.0));
}
