//! Kernels that work row by row: norm, embedding, small operations, argmax, router, cached rows.

use eyrie_checkpoint::{Layout, Scoring, TopkMethod};
use eyrie_kernels::{
    Activations, Backend, Embedding, KernelError, Linear, PagedRows, RmsNorm, Router, RouterSpec,
};

use crate::common::{Rng, best, flat, tensor, weight};
use crate::gpu::{MOST_ROWS, assert_alone, assert_near, gpus, host};

#[test]
fn rms_norm_matches_the_cpu_and_keeps_rows_apart() {
    for gpu in gpus() {
        for width in [1, 7, 12, 384, 513, 7168] {
            let mut rng = Rng(width as u64);
            let gain = rng.values(width, 2.0);
            let x = gpu.round(rng.values(65 * width, 5.0));
            let norm = |backend: &Backend| RmsNorm::new(backend, gain.clone(), 1e-6).unwrap();
            let want = flat(&norm(&best()).forward(&tensor(&x, width)).unwrap());
            let y = norm(&gpu.backend).forward(&gpu.put(&x, width)).unwrap();
            gpu.assert_close(&y, &want, &format!("width {width}"));
        }
        let mut rng = Rng(1);
        let norm = RmsNorm::new(&gpu.backend, rng.values(96, 1.0), 1e-6).unwrap();
        let x = gpu.put(&rng.values(MOST_ROWS * 96, 1.0), 96);
        let run = |rows: std::ops::Range<usize>| {
            host(&norm.forward(&x.narrow(0, rows.start, rows.len()).unwrap()).unwrap())
        };
        assert_alone(run, "rms_norm");
    }
}

#[test]
fn embedding_rows_are_the_tables_rows() {
    for gpu in gpus() {
        for layout in [Layout::F32, Layout::F16, Layout::Bf16] {
            let (view, values) = weight(&mut Rng(3), layout, [50, 37]);
            let ids = [49, 0, 7, 7, 12];
            let want: Vec<f32> =
                ids.iter().flat_map(|&id| &values[id as usize * 37..][..37]).map(|&v| v as f32).collect();
            let table = Embedding::new(&gpu.backend, &view).unwrap();
            assert_eq!(host(&table.lookup(&ids).unwrap()), gpu.round(want), "{layout:?}");
            assert!(table.lookup(&[50]).is_err());
            assert_eq!(table.lookup(&[]).unwrap().dims(), [0, 37]);
        }
    }
}

#[test]
fn small_operations_are_exact() {
    for gpu in gpus() {
        let mut rng = Rng(5);
        let (a, b) = (gpu.round(rng.values(6 * 35, 4.0)), gpu.round(rng.values(6 * 35, 4.0)));
        let (x, y) = (gpu.put(&a, 35), gpu.put(&b, 35));
        assert_eq!(host(&x), a);
        let sum = a.iter().zip(&b).map(|(a, b)| a + b).collect();
        assert_eq!(host(&gpu.backend.add(&x, &y).unwrap()), gpu.round(sum));
        let scaled = a.iter().map(|a| a * 0.37).collect();
        assert_eq!(host(&gpu.cuda.scale(&x, 0.37).unwrap()), gpu.round(scaled));
        let picked: Vec<f32> = [5, 1, 1].iter().flat_map(|&r| &a[r * 35..][..35]).copied().collect();
        assert_eq!(host(&gpu.backend.select(&x, &[5, 1, 1]).unwrap()), picked);
        assert!(gpu.backend.select(&x, &[6]).is_err());
        let beside = gpu.backend.beside(&[&x, &y, &x]).unwrap();
        let want: Vec<f32> = (0..6).flat_map(|r| [&a, &b, &a].map(|v| &v[r * 35..][..35]).concat()).collect();
        assert_eq!((beside.dims(), host(&beside)), (&[6, 105][..], want));
        let tail = y.narrow(0, 2, 3).unwrap();
        let below = gpu.backend.below(&[&x, &tail]).unwrap();
        assert_eq!((below.dims(), host(&below)), (&[9, 35][..], [&a[..], &b[70..175]].concat()));
        assert!(gpu.backend.add(&x, &tail).is_err());
        assert!(gpu.backend.beside(&[&x, &tail]).is_err());
    }
}

#[test]
fn a_row_that_is_no_number_is_found() {
    for gpu in gpus() {
        let mut values = Rng(11).values(70 * 300, 3.0);
        let found = |values: &[f32]| gpu.backend.first_not_finite(&gpu.put(values, 300)).unwrap();
        assert_eq!(found(&values), None);
        values[66 * 300 + 299] = f32::NAN;
        values[41 * 300] = f32::NEG_INFINITY;
        assert_eq!(found(&values), Some(41));
        assert_eq!(found(&[]), None);
    }
}

#[test]
fn device_memory_is_taken_in_as_activations() {
    for gpu in gpus() {
        let values = gpu.round(Rng(12).values(9 * 35, 4.0));
        let x = gpu.put(&values, 35);
        let rows = gpu.backend.device_rows(&x).unwrap();
        assert_eq!((rows.rows(), rows.row_bytes()), (9, 35 * gpu.cuda.numbers().size() as u64));
        let taken = gpu.backend.take_in(rows.slice(2..8), gpu.cuda.numbers()).unwrap();
        assert_eq!((taken.dims(), host(&taken)), (&[6, 35][..], values[2 * 35..8 * 35].to_vec()));
        // Numbers of another target.
        let wide = gpu.cuda.convert(&x, Activations::F32).unwrap();
        let wide = gpu.backend.device_rows(&wide).unwrap();
        assert_eq!(host(&gpu.backend.take_in(wide, Activations::F32).unwrap()), values);
        assert_eq!(gpu.backend.stream().unwrap().unwrap().gpu().ordinal(), gpu.cuda.ordinal());
    }
}

#[test]
fn argmax_takes_the_lowest_of_equals_and_refuses_nan() {
    let gpu = &gpus()[0];
    let argmax = |values: &[f32], width| gpu.cuda.argmax(&gpu.put(values, width));
    assert_eq!(argmax(&[1.0, 3.0, -2.0, 3.0, -0.0, 0.0, -1.0, -1.0], 4).unwrap(), [1, 0]);
    assert_eq!(argmax(&[f32::NEG_INFINITY; 3], 3).unwrap(), [0]);
    let mut rng = Rng(9);
    let width = 163_840;
    let mut x = rng.values(3 * width, 1.0);
    (x[70_000], x[150_000]) = (2.0, 2.0);
    x[2 * width - 1] = 2.0;
    x[2 * width] = 2.0;
    assert_eq!(argmax(&x, width).unwrap(), [70_000, width as u32 - 1, 0]);
    x[width + 77] = f32::NAN;
    assert!(matches!(argmax(&x, width), Err(KernelError::NotANumber { index: 77, .. })));
}

const SPEC: RouterSpec = RouterSpec {
    experts: 64,
    per_token: 6,
    scoring: Scoring::Sigmoid,
    method: TopkMethod::NoAuxTc,
    groups: 8,
    top_groups: 3,
    normalise: true,
    scale: 2.5,
};

fn specs() -> [RouterSpec; 5] {
    let plain = RouterSpec { groups: 1, top_groups: 1, scale: 1.0, normalise: false, ..SPEC };
    let limited = TopkMethod::GroupLimitedGreedy;
    [
        RouterSpec { scoring: Scoring::Softmax, method: TopkMethod::Greedy, ..plain },
        RouterSpec { scoring: Scoring::Softmax, method: limited, normalise: false, scale: 16.0, ..SPEC },
        SPEC,
        RouterSpec { scale: 2.827, normalise: true, experts: 384, per_token: 8, ..plain },
        RouterSpec { experts: 7, per_token: 7, ..plain },
    ]
}

#[test]
fn router_chooses_as_the_cpu_and_keeps_rows_apart() {
    for gpu in gpus() {
        for (case, spec) in specs().into_iter().enumerate() {
            let mut rng = Rng(40 + case as u64);
            let width = 48;
            // Logits are exact in float32 whatever the order of the sum, so both backends see the same ties.
            let gate: Vec<f32> =
                (0..spec.experts * width).map(|_| (rng.below(17) as f32 - 8.0) / 16.0).collect();
            let x: Vec<f32> = (0..MOST_ROWS * width).map(|_| rng.below(3) as f32 - 1.0).collect();
            // All biased scores are negative: a mask of 0 instead of -inf would pick outside experts.
            let bias: Vec<f32> = rng.values(spec.experts, 0.2).iter().map(|b| b - 3.0).collect();
            let bias = (spec.method == TopkMethod::NoAuxTc).then_some(bias);
            let router = |backend: &Backend| {
                let gate = Linear::from_f32(backend, &gate, [spec.experts, width]).unwrap();
                Router::new(spec, gate, bias.clone()).unwrap()
            };
            // Few rows: scores that differ by a rounding are the rarer, the fewer there are.
            let compared = 300;
            let cpu = best();
            let want = router(&cpu).route(&tensor(&x[..compared * width], width)).unwrap().to_host().unwrap();
            let (router, x) = (router(&gpu.backend), gpu.put(&x, width));
            let got = router.route(&x).unwrap().to_host().unwrap();
            let pairs = compared * spec.per_token;
            assert!(got.ids[..pairs] == want.ids, "case {case}");
            assert_near(&got.weights[..pairs], &want.weights, 1e-5, &format!("weights of case {case}"));
            let run = |rows: std::ops::Range<usize>| {
                let x = x.narrow(0, rows.start, rows.len()).unwrap();
                let routes = router.route(&x).unwrap().to_host().unwrap();
                let ids = routes.ids.iter().map(|&id| id as f32);
                ids.zip(routes.weights).flat_map(|(id, weight)| [id, weight]).collect()
            };
            assert_alone(run, &format!("case {case}"));
        }
    }
}

#[test]
fn router_ties_go_to_the_lower_index_and_a_nan_stays_in_range() {
    let gpu = &gpus()[0];
    let gate = || Linear::from_f32(&gpu.backend, &[0.0; 64 * 8], [64, 8]).unwrap();
    let router = Router::new(SPEC, gate(), Some(vec![-1.0; 64])).unwrap();
    let routes = router.route(&gpu.put(&[1.0; 8], 8)).unwrap().to_host().unwrap();
    assert_eq!(routes.ids, [0, 1, 2, 3, 4, 5]);
    assert_near(&routes.weights, &[2.5 / 6.0; 6], 1e-6, "weights");
    for (row, bias) in [([f32::NAN; 8], -1.0), ([f32::INFINITY; 8], -1.0), ([1.0; 8], f32::NAN)] {
        let router = Router::new(SPEC, gate(), Some(vec![bias; 64])).unwrap();
        let lost = router.route(&gpu.put(&row, 8)).unwrap();
        assert!(matches!(lost.to_host(), Err(KernelError::NotANumber { index: 0, .. })));
    }
}

#[test]
fn cached_rows_are_read_written_and_moved_in_order() {
    for gpu in gpus() {
        for width in [1, 7, 576] {
            let mut cache = PagedRows::new(&gpu.backend, 4, 16, width).unwrap();
            let mut want: Vec<Vec<f32>> =
                (0..64).map(|slot| gpu.round(Rng(slot).values(width, 1.0))).collect();
            assert!(cache.row(9).unwrap().iter().all(|&v| v == 0.0));
            for (slot, row) in want.iter().enumerate() {
                cache.write(slot as u32, row).unwrap();
            }
            let path = [(33, 32), (36, 33), (40, 34), (34, 36)];
            let page: Vec<_> = (0..16).map(|row| (row, 48 + row)).collect();
            for moves in [&path[..], &page, &[(1, 2), (2, 3), (3, 1)], &[]] {
                cache.copy(moves).unwrap();
                for &(from, to) in moves {
                    want[to as usize] = want[from as usize].clone();
                }
                for (slot, row) in want.iter().enumerate() {
                    assert_eq!(&cache.row(slot as u32).unwrap(), row, "width {width}, slot {slot}");
                }
            }
            assert!(cache.copy(&[(0, 64)]).is_err());
        }
    }
}
