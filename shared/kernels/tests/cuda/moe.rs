use candle_core::Tensor;
use eyrie_checkpoint::{Layout, Scoring, TopkMethod};
use eyrie_kernels::{Backend, ExpertViews, Experts, Linear, Mlp, Router, RouterSpec, Routing, moe};

use crate::common::{Rng, best, flat, tensor, weight};
use crate::gpu::{Gpu, MOST_ROWS, assert_alone, gpus, host, sized};

fn views(rng: &mut Rng, layout: Layout, hidden: usize, width: usize) -> ExpertViews {
    let mut one = |shape| weight(rng, layout, shape).0;
    ExpertViews { gate: one([width, hidden]), up: one([width, hidden]), down: one([hidden, width]) }
}

struct Case {
    routed: Layout,
    shared: Layout,
    hidden: usize,
    width: usize,
    shared_width: usize,
    experts: usize,
    per_token: usize,
}

impl Case {
    fn router(&self, rng: &mut Rng, backend: &Backend) -> Router {
        let spec = RouterSpec {
            experts: self.experts,
            per_token: self.per_token,
            scoring: Scoring::Softmax,
            method: TopkMethod::Greedy,
            groups: 1,
            top_groups: 1,
            normalise: true,
            scale: 1.5,
        };
        let gate = rng.values(self.experts * self.hidden, 1.0);
        Router::new(spec, Linear::from_f32(backend, &gate, [self.experts, self.hidden]).unwrap(), None)
            .unwrap()
    }

    fn views(&self, rng: &mut Rng) -> (Vec<ExpertViews>, ExpertViews) {
        let experts = (0..self.experts).map(|_| views(rng, self.routed, self.hidden, self.width)).collect();
        (experts, views(rng, self.shared, self.hidden, self.shared_width))
    }
}

const fn case(
    (routed, shared): (Layout, Layout),
    [hidden, width, shared_width]: [usize; 3],
    [experts, per_token]: [usize; 2],
) -> Case {
    Case { routed, shared, hidden, width, shared_width, experts, per_token }
}

const CASES: [Case; 6] = [
    case((Layout::Int4G32, Layout::Bf16), [96, 96, 160], [6, 3]),
    case((Layout::Bf16, Layout::Bf16), [40, 72, 20], [6, 3]),
    case((Layout::F32, Layout::Int4G32), [64, 30, 32], [5, 5]),
    case((Layout::F16, Layout::F16), [35, 33, 17], [3, 1]),
    case((Layout::Bf16, Layout::F32), [2048, 704, 512], [16, 6]),
    case((Layout::Int4G32, Layout::Int4G32), [1024, 512, 256], [40, 8]),
];

fn run(gpu: &Gpu, case: &Case, seed: u64, rows: usize) {
    let mut rng = Rng(seed);
    let (experts, shared) = case.views(&mut rng);
    let router = case.router(&mut rng, &gpu.backend);
    let x = gpu.round(rng.values(rows * case.hidden, 2.0));
    let on_gpu = gpu.put(&x, case.hidden);
    let routing = router.route(&on_gpu).unwrap();
    let routes: Routing = routing.to_host().unwrap().into();
    let cpu = best();
    for with_shared in [false, true] {
        let go = |backend: &Backend, x: &Tensor, routing: &Routing| {
            let shared = with_shared.then(|| Mlp::pack(backend, &shared).unwrap());
            moe(x, routing, &Experts::pack(backend, &experts).unwrap(), shared.as_ref()).unwrap()
        };
        let want = flat(&go(&cpu, &tensor(&x, case.hidden), &routes));
        let what = format!("{:?}, {rows} rows, shared {with_shared}", case.routed);
        gpu.assert_close(&go(&gpu.backend, &on_gpu, &routing), &want, &what);
    }
    let want = flat(&Mlp::pack(&cpu, &shared).unwrap().forward(&tensor(&x, case.hidden)).unwrap());
    let got = Mlp::pack(&gpu.backend, &shared).unwrap().forward(&on_gpu).unwrap();
    gpu.assert_close(&got, &want, &format!("mlp of {:?}", case.shared));
}

#[test]
fn experts_match_the_cpu() {
    for gpu in gpus() {
        for (seed, case) in CASES.iter().enumerate() {
            for &rows in sized(&[1, 2, 23, 70][..], &[1, 9]) {
                run(gpu, case, 60 + seed as u64, rows);
            }
        }
    }
}

#[test]
fn a_row_does_not_see_its_neighbours() {
    for gpu in gpus() {
        for case in &CASES[..4] {
            let mut rng = Rng(77);
            let (experts, shared) = case.views(&mut rng);
            let router = case.router(&mut rng, &gpu.backend);
            let experts = Experts::pack(&gpu.backend, &experts).unwrap();
            let shared = Mlp::pack(&gpu.backend, &shared).unwrap();
            let x = gpu.put(&rng.values(MOST_ROWS * case.hidden, 1.0), case.hidden);
            let run = |rows: std::ops::Range<usize>| {
                let x = x.narrow(0, rows.start, rows.len()).unwrap();
                let routed = moe(&x, &router.route(&x).unwrap(), &experts, Some(&shared)).unwrap();
                [host(&routed), host(&shared.forward(&x).unwrap())]
                    .map(|values| values.chunks(case.hidden).map(<[f32]>::to_vec).collect::<Vec<_>>())
                    .into_iter()
                    .reduce(|a, b| a.into_iter().zip(b).map(|(a, b)| [a, b].concat()).collect())
                    .unwrap()
                    .concat()
            };
            assert_alone(run, &format!("{:?}", case.routed));
        }
    }
}

#[test]
fn misfits_are_errors() {
    let gpu = &gpus()[0];
    let mut rng = Rng(81);
    let case = &CASES[1];
    let (experts, shared) = case.views(&mut rng);
    let mixed = ExpertViews { up: views(&mut rng, Layout::F32, 40, 20).up, ..shared };
    let error = Mlp::pack(&gpu.backend, &mixed).unwrap_err().to_string();
    assert_eq!(error, "moe: format of up_proj is f32, limit gate_proj's bf16");
    let routing = case.router(&mut rng, &gpu.backend).route(&gpu.put(&[0.5; 80], 40)).unwrap();
    let experts = Experts::pack(&gpu.backend, &experts).unwrap();
    let error = moe(&gpu.put(&[0.0; 120], 40), &routing, &experts, None).unwrap_err().to_string();
    assert_eq!(error, "moe: routes is [2, 6], expected 3 rows of 6 experts");
    let host = routing.to_host().unwrap().into();
    let error = moe(&gpu.put(&[0.0; 80], 40), &host, &experts, None).unwrap_err().to_string();
    assert_eq!(error, "moe: operands of different backends");
}
