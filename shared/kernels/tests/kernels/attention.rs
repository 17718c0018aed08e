use std::ops::Range;
use std::sync::Arc;

use eyrie_checkpoint::{Layout, WeightView, Yarn};
use eyrie_kernels::{
    Backend, GqaSpec, Isa, MlaDims, MlaWeights, PagedRows, Ragged, RmsNorm, Rope, RopeSpec, RopeStyle,
    RowRef, Rows, gqa, mla,
};

use crate::common::*;
use crate::sequences::*;

fn on_cpu(rows: &Ragged) -> Rows {
    Rows::new(&best(), rows.clone()).unwrap()
}

fn rotate(x: &mut [f64], position: usize, rope: &RopeSpec) {
    let half = rope.dim / 2;
    for i in 0..half {
        let angle = position as f64 * rope.theta.powf(-2.0 * i as f64 / rope.dim as f64);
        let (a, b) = if rope.style == RopeStyle::Interleaved { (2 * i, 2 * i + 1) } else { (i, i + half) };
        let (u, v) = (x[a], x[b]);
        x[a] = u * angle.cos() - v * angle.sin();
        x[b] = v * angle.cos() + u * angle.sin();
    }
}

fn softmax(scores: &mut [f64]) {
    let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    scores.iter_mut().for_each(|s| *s = (*s - top).exp());
    let sum: f64 = scores.iter().sum();
    scores.iter_mut().for_each(|s| *s /= sum);
}

struct Mla {
    dims: MlaDims,
    rope: RopeSpec,
    gain: Vec<f32>,
    view: WeightView,
    kv_b: Vec<f64>,
}

impl Mla {
    fn new(rng: &mut Rng, dims: MlaDims, layout: Layout) -> Mla {
        let (view, kv_b) = weight(rng, layout, [dims.heads * (dims.nope + dims.v), dims.kv_lora]);
        let rope = RopeSpec { dim: dims.rope, theta: 1e4, yarn: None, style: RopeStyle::Interleaved };
        Mla { dims, rope, gain: rng.values(dims.kv_lora, 2.0), view, kv_b }
    }

    fn weights(&self, cpu: &Backend) -> MlaWeights {
        let norm = RmsNorm::new(cpu, self.gain.clone(), 1e-6).unwrap();
        MlaWeights::new(cpu, self.dims, norm, &self.view, Arc::new(Rope::new(self.rope).unwrap())).unwrap()
    }

    fn widths(&self) -> (usize, usize, usize) {
        let d = &self.dims;
        (d.heads * (d.nope + d.rope), d.cache_width(), d.heads * d.v)
    }

    /// Not absorbed: expands keys and values of the seen rows. `positions` are those of all key rows.
    fn reference(
        &self,
        q: &[f32],
        kv: &[f32],
        position: usize,
        positions: &[usize],
        seen: &[usize],
    ) -> Vec<f64> {
        let MlaDims { heads, kv_lora, nope, rope, v } = self.dims;
        let mut latents = Vec::new();
        let mut keys = Vec::new();
        for &s in seen {
            let row = wide(&kv[s * (kv_lora + rope)..][..kv_lora + rope]);
            let mean = row[..kv_lora].iter().map(|x| x * x).sum::<f64>() / kv_lora as f64;
            let norm = |(x, g): (&f64, &f32)| x * f64::from(*g) / (mean + 1e-6).sqrt();
            latents.push(row[..kv_lora].iter().zip(&self.gain).map(norm).collect::<Vec<_>>());
            let mut key = row[kv_lora..].to_vec();
            rotate(&mut key, positions[s], &self.rope);
            keys.push(key);
        }
        let mut out = Vec::new();
        for (head, q) in q.chunks(nope + rope).enumerate() {
            let mut q = wide(q);
            rotate(&mut q[nope..], position, &self.rope);
            let w = &self.kv_b[head * (nope + v) * kv_lora..][..(nope + v) * kv_lora];
            let expanded: Vec<Vec<f64>> = latents.iter().map(|c| matmul(c, w, kv_lora)).collect();
            let mut scores: Vec<f64> = expanded
                .iter()
                .zip(&keys)
                .map(|(e, k)| e[..nope].iter().chain(k).zip(&q).map(|(k, q)| k * q).sum::<f64>())
                .map(|s| s / ((nope + rope) as f64).sqrt())
                .collect();
            softmax(&mut scores);
            out.extend(
                (0..v).map(|i| expanded.iter().zip(&scores).map(|(e, p)| e[nope + i] * p).sum::<f64>()),
            );
        }
        assert_eq!(out.len(), heads * v);
        out
    }
}

const DIMS: [MlaDims; 4] = [
    MlaDims { heads: 6, kv_lora: 32, nope: 16, rope: 8, v: 16 },
    MlaDims { heads: 1, kv_lora: 24, nope: 12, rope: 6, v: 10 },
    MlaDims { heads: 5, kv_lora: 128, nope: 64, rope: 32, v: 64 },
    MlaDims { heads: 2, kv_lora: 9, nope: 3, rope: 2, v: 5 },
];

#[test]
fn mla_matches_expanded_float64() {
    for (case, dims) in DIMS.into_iter().enumerate() {
        for layout in [Layout::Bf16, Layout::F32] {
            let mut rng = Rng(100 + case as u64);
            let model = Mla::new(&mut rng, dims, layout);
            let (q_width, kv_width, out_width) = model.widths();
            let len = 40;
            let (q, kv) = (rng.values(len * q_width, 3.0), rng.values(len * kv_width, 2.0));
            let (sequences, pages) = sequences(&mut rng, &[len]);
            let mut rows = Ragged::default();
            prompt(&mut rows, &sequences[0], 0..len, 0);
            let mut cache = PagedRows::new(&best(), pages, PAGE, kv_width).unwrap();
            let cpu = best();
            let (q_t, kv_t) = (tensor(&q, q_width), tensor(&kv, kv_width));
            let y = flat(&mla(&model.weights(&cpu), &q_t, &kv_t, &mut cache, &on_cpu(&rows)).unwrap());
            let positions: Vec<usize> = (0..len).collect();
            for row in 0..len {
                let seen: Vec<usize> = (0..=row).collect();
                let want = model.reference(&q[row * q_width..][..q_width], &kv, row, &positions, &seen);
                assert_close(
                    &y[row * out_width..][..out_width],
                    &want,
                    1e-5,
                    &format!("case {case} row {row}"),
                );
            }
        }
    }
}

#[test]
fn mla_bits_survive_chunks_batches_threads_instruction_sets_and_spellings() {
    let mut rng = Rng(120);
    let model = Mla::new(&mut rng, DIMS[0], Layout::Bf16);
    let (q_width, kv_width, out_width) = model.widths();
    let lengths = [150, 37];
    let (sequences, pages) = sequences(&mut rng, &lengths);
    let data: Vec<(Vec<f32>, Vec<f32>)> =
        lengths.iter().map(|len| (rng.values(len * q_width, 3.0), rng.values(len * kv_width, 2.0))).collect();
    let run =
        |cpu: &Backend, cache: &mut PagedRows, parts: &[(usize, Range<usize>)], tail: usize| -> Vec<u32> {
            let (mut rows, mut q, mut kv) = (Ragged::default(), Vec::new(), Vec::new());
            for (s, range) in parts {
                prompt(&mut rows, &sequences[*s], range.clone(), tail);
                q.extend(&data[*s].0[range.start * q_width..range.end * q_width]);
                kv.extend(&data[*s].1[range.start * kv_width..range.end * kv_width]);
            }
            let (q, kv) = (tensor(&q, q_width), tensor(&kv, kv_width));
            bits(&flat(&mla(&model.weights(cpu), &q, &kv, cache, &on_cpu(&rows)).unwrap()))
        };
    let pool = || PagedRows::new(&best(), pages, PAGE, kv_width).unwrap();
    let one = cpu(1, Isa::best());
    let mut cache = pool();
    let want: Vec<u32> = (0..150).flat_map(|p| run(&one, &mut cache, &[(0, p..p + 1)], 0)).collect();
    for cpu in variants() {
        assert!(run(&cpu, &mut pool(), &[(0, 0..150)], 0) == want, "whole on {cpu:?}");
        for (chunk, tail) in [(64, 0), (7, 0), (5, 3), (150, 150), (16, 1)] {
            let mut cache = pool();
            let mut got = Vec::new();
            for start in (0..150).step_by(chunk) {
                got.extend(run(&cpu, &mut cache, &[(0, start..150.min(start + chunk))], tail));
            }
            assert!(got == want, "chunks of {chunk}, tails of {tail} on {cpu:?}");
        }
        let mut cache = pool();
        run(&cpu, &mut cache, &[(0, 0..100)], 0);
        let beside = run(&cpu, &mut cache, &[(1, 0..37), (0, 100..150)], 2);
        assert!(beside[37 * out_width..] == want[100 * out_width..], "beside another sequence on {cpu:?}");
    }
}

#[test]
fn mla_tree_rows_see_their_ancestors_only() {
    let mut rng = Rng(130);
    let parents = [None, Some(0), Some(0), Some(1), Some(1), Some(2), Some(4), Some(3)];
    for dims in [DIMS[0], DIMS[1]] {
        let model = Mla::new(&mut rng, dims, Layout::Bf16);
        let (q_width, kv_width, out_width) = model.widths();
        let base = 21;
        let total = base + parents.len();
        let (q, kv) = (rng.values(total * q_width, 3.0), rng.values(total * kv_width, 2.0));
        let (sequences, pages) = sequences(&mut rng, &[total]);
        let mut cache = PagedRows::new(&best(), pages, PAGE, kv_width).unwrap();
        let cpu = best();
        let weights = model.weights(&cpu);
        let mut committed = Ragged::default();
        prompt(&mut committed, &sequences[0], 0..base, 0);
        let part = |x: &[f32], width: usize, rows: Range<usize>| {
            tensor(&x[rows.start * width..rows.end * width], width)
        };
        mla(
            &weights,
            &part(&q, q_width, 0..base),
            &part(&kv, kv_width, 0..base),
            &mut cache,
            &on_cpu(&committed),
        )
        .unwrap();
        let mut nodes = Ragged::default();
        let seen = tree(&mut nodes, &sequences[0], base, &parents);
        let (q_t, kv_t) = (part(&q, q_width, base..total), part(&kv, kv_width, base..total));
        let y = flat(&mla(&weights, &q_t, &kv_t, &mut cache, &on_cpu(&nodes)).unwrap());
        let positions: Vec<usize> =
            (0..base).chain(nodes.rows.iter().map(|row| row.position as usize)).collect();
        for (node, seen) in seen.iter().enumerate() {
            let q = &q[(base + node) * q_width..][..q_width];
            let want = model.reference(q, &kv, positions[base + node], &positions, seen);
            assert_close(&y[node * out_width..][..out_width], &want, 1e-5, &format!("node {node}"));
        }
        // An accepted path, moved together, answers the next row as if it had been a chain.
        let path = [0, 1, 4, 6];
        let mut chain = PagedRows::new(&best(), pages, PAGE, kv_width).unwrap();
        mla(
            &weights,
            &part(&q, q_width, 0..base),
            &part(&kv, kv_width, 0..base),
            &mut chain,
            &on_cpu(&committed),
        )
        .unwrap();
        for (depth, node) in path.into_iter().enumerate() {
            let to = sequences[0].slot(base + depth);
            cache.copy(&[(sequences[0].slot(base + node), to)]).unwrap();
            let mut row = Ragged::default();
            prompt(&mut row, &sequences[0], base + depth..base + depth + 1, 0);
            let index = base + node..base + node + 1;
            let (q_t, kv_t) = (part(&q, q_width, index.clone()), part(&kv, kv_width, index));
            let alone = flat(&mla(&weights, &q_t, &kv_t, &mut chain, &on_cpu(&row)).unwrap());
            assert_eq!(bits(&alone), bits(&y[node * out_width..][..out_width]), "node {node} as a chain");
            assert_eq!(cache.row(to).unwrap(), chain.row(to).unwrap());
        }
    }
}

fn gqa_reference(spec: &GqaSpec, q: &[f32], k: &[f32], v: &[f32], row: usize) -> Vec<f64> {
    let d = spec.head_dim;
    let kv_width = spec.kv_heads * d;
    let mut out = Vec::new();
    for (head, q) in q[row * spec.heads * d..][..spec.heads * d].chunks(d).enumerate() {
        let kv_head = head / (spec.heads / spec.kv_heads);
        let at = |x: &[f32], s: usize| wide(&x[s * kv_width + kv_head * d..][..d]);
        let mut q = wide(q);
        rotate(&mut q, row, spec.rope.spec());
        let mut scores: Vec<f64> = (0..=row)
            .map(|s| {
                let mut k = at(k, s);
                rotate(&mut k, s, spec.rope.spec());
                k.iter().zip(&q).map(|(k, q)| k * q).sum::<f64>() / (d as f64).sqrt()
            })
            .collect();
        softmax(&mut scores);
        out.extend((0..d).map(|i| scores.iter().enumerate().map(|(s, p)| p * at(v, s)[i]).sum::<f64>()));
    }
    out
}

#[test]
fn gqa_matches_float64_and_keeps_its_bits() {
    for (heads, kv_heads, head_dim) in [(6, 2, 64), (4, 4, 10), (9, 1, 16), (8, 2, 12)] {
        let mut rng = Rng(heads as u64);
        let rope = RopeSpec { dim: head_dim, theta: 1e4, yarn: None, style: RopeStyle::HalfSplit };
        let spec = GqaSpec { heads, kv_heads, head_dim, rope: Arc::new(Rope::new(rope).unwrap()) };
        let (q_width, kv_width, len) = (heads * head_dim, kv_heads * head_dim, 50);
        let (q, k, v) = (
            rng.values(len * q_width, 2.0),
            rng.values(len * kv_width, 2.0),
            rng.values(len * kv_width, 2.0),
        );
        let (sequences, pages) = sequences(&mut rng, &[len]);
        let run = |cpu: &Backend, cache: &mut PagedRows, range: Range<usize>, tail: usize| {
            let mut rows = Ragged::default();
            prompt(&mut rows, &sequences[0], range.clone(), tail);
            let part = |x: &[f32], width: usize| tensor(&x[range.start * width..range.end * width], width);
            let (k, v) = (part(&k, kv_width), part(&v, kv_width));
            flat(&gqa(cpu, &spec, &part(&q, q_width), &k, &v, cache, &on_cpu(&rows)).unwrap())
        };
        let pool = || PagedRows::new(&best(), pages, PAGE, spec.cache_width()).unwrap();
        let whole = run(&best(), &mut pool(), 0..len, 0);
        let want: Vec<f64> = (0..len).flat_map(|row| gqa_reference(&spec, &q, &k, &v, row)).collect();
        assert_close(&whole, &want, 1e-5, "gqa");
        for cpu in variants() {
            for (chunk, tail) in [(1, 0), (13, 4), (50, 50)] {
                let mut cache = pool();
                let chunks = (0..len).step_by(chunk);
                let got: Vec<f32> =
                    chunks.flat_map(|s| run(&cpu, &mut cache, s..len.min(s + chunk), tail)).collect();
                assert!(bits(&got) == bits(&whole), "chunks of {chunk}, tails of {tail} on {cpu:?}");
            }
        }
    }
}

#[test]
fn yarn_scales_the_whole_logit() {
    let dims = DIMS[0];
    let mut rng = Rng(150);
    let mut model = Mla::new(&mut rng, dims, Layout::F32);
    let (q_width, kv_width, _) = model.widths();
    let (q, kv) = (rng.values(q_width, 3.0), rng.values(2 * kv_width, 2.0));
    let run = |model: &Mla, q: &[f32]| {
        let (sequences, pages) = sequences(&mut Rng(1), &[2]);
        let mut rows = Ragged::default();
        prompt(&mut rows, &sequences[0], 0..2, 0);
        // Position 0 for all: only the softmax scale can differ.
        rows.rows.iter_mut().for_each(|row| row.position = 0);
        let cpu = best();
        let mut cache = PagedRows::new(&best(), pages, PAGE, kv_width).unwrap();
        let q = tensor(&[q, q].concat(), q_width);
        flat(&mla(&model.weights(&cpu), &q, &tensor(&kv, kv_width), &mut cache, &on_cpu(&rows)).unwrap())
    };
    let m = 0.1 * 40f64.ln() + 1.0;
    let scaled: Vec<f32> = q.iter().map(|&q| (f64::from(q) * m * m) as f32).collect();
    let want = run(&model, &scaled);
    model.rope.yarn = Some(Yarn {
        factor: 40.0,
        original_max_position_embeddings: 4096,
        beta_fast: 32.0,
        beta_slow: 1.0,
        mscale: 1.0,
        mscale_all_dim: 1.0,
    });
    assert_close(&run(&model, &q), &wide(&want), 2e-6, "mscale squared");
}

#[test]
fn bad_rows_are_errors_and_write_nothing() {
    let mut rng = Rng(160);
    let model = Mla::new(&mut rng, DIMS[0], Layout::F32);
    let (q_width, kv_width, _) = model.widths();
    let cpu = best();
    let weights = model.weights(&cpu);
    let mut cache = PagedRows::new(&best(), 2, PAGE, kv_width).unwrap();
    let (q, kv) = (tensor(&rng.values(q_width, 1.0), q_width), tensor(&rng.values(kv_width, 1.0), kv_width));
    let good = RowRef { position: 0, slot: 3, table: 0..1, prefix: 1, tail: 0..0 };
    let base = Ragged { rows: vec![good.clone()], tables: vec![0], tails: vec![], page_rows: PAGE };
    let one = |row: RowRef| Ragged { rows: vec![row], ..base.clone() };
    let cases = [
        (one(RowRef { slot: 32, ..good.clone() }), "mla: slot is 32, limit below 32 slots"),
        (one(RowRef { prefix: 17, ..good.clone() }), "mla: prefix is 17, limit 16 rows of its pages"),
        (one(RowRef { prefix: 0, ..good.clone() }), "mla: number of keys is 0, limit at least 1"),
        (
            one(RowRef { table: 0..2, ..good.clone() }),
            "mla: row range is table 0..2 tail 0..0, limit 1 table and 0 tail entries",
        ),
        (Ragged { tables: vec![2], ..base.clone() }, "mla: page is 2, limit below 2 pages"),
        (Ragged { page_rows: 8, ..base.clone() }, "mla: page_rows is 8, limit the cache's 16"),
        (Ragged { rows: vec![], ..base.clone() }, "mla: rows is [0], expected 1 rows as in the tensors"),
    ];
    for (rows, want) in cases {
        let error = mla(&weights, &q, &kv, &mut cache, &on_cpu(&rows)).unwrap_err();
        assert_eq!(error.to_string(), want);
    }
    assert!(cache.row(3).unwrap().iter().all(|&v| v == 0.0));
    let mut narrow = PagedRows::new(&best(), 2, PAGE, kv_width - 1).unwrap();
    assert!(
        mla(&weights, &q, &kv, &mut narrow, &on_cpu(&base)).unwrap_err().to_string().contains("cache width")
    );
    assert!(cache.copy(&[(3, 4), (0, 32)]).is_err());
    assert!(cache.row(32).is_err());
    assert!(cache.write(32, &vec![0.0; kv_width]).is_err());
    assert!(cache.write(0, &[0.0]).is_err());
    assert!(PagedRows::new(&best(), usize::MAX, 2, 2).is_err());
}
