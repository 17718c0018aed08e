use eyrie_checkpoint::Layout;
use eyrie_kernels::{ExpertViews, Experts, Isa, Mlp, Routes, moe};

use crate::common::*;

/// Gate, up and down of one block, exact.
struct Reference([Vec<f64>; 3]);

fn block(rng: &mut Rng, layout: Layout, hidden: usize, width: usize) -> (ExpertViews, Reference) {
    let (gate, g) = weight(rng, layout, [width, hidden]);
    let (up, u) = weight(rng, layout, [width, hidden]);
    let (down, d) = weight(rng, layout, [hidden, width]);
    (ExpertViews { gate, up, down }, Reference([g, u, d]))
}

impl Reference {
    fn forward(&self, x: &[f64]) -> Vec<f64> {
        let [gate, up, down] = &self.0;
        let (g, u) = (matmul(x, gate, x.len()), matmul(x, up, x.len()));
        let h: Vec<f64> = g.iter().zip(&u).map(|(&g, u)| silu(g) * u).collect();
        matmul(&h, down, h.len())
    }
}

fn routes(rng: &mut Rng, rows: usize, experts: usize, per_token: usize) -> Routes {
    let mut out = Routes { ids: Vec::new(), weights: Vec::new(), per_token };
    for _ in 0..rows {
        let mut ids: Vec<u32> = (0..experts as u32).collect();
        while ids.len() > per_token {
            ids.remove(rng.below(ids.len()));
        }
        out.ids.extend(ids);
        out.weights.extend((0..per_token).map(|_| rng.value().abs() + 0.1));
    }
    out
}

fn slice(routes: &Routes, rows: std::ops::Range<usize>) -> Routes {
    let pairs = rows.start * routes.per_token..rows.end * routes.per_token;
    Routes {
        ids: routes.ids[pairs.clone()].to_vec(),
        weights: routes.weights[pairs].to_vec(),
        per_token: routes.per_token,
    }
}

#[test]
fn matches_float64_with_and_without_a_shared_expert() {
    let cases = [
        (Layout::Int4G32, Layout::Bf16, 96, 96, 160),
        (Layout::Bf16, Layout::Bf16, 40, 72, 20),
        (Layout::F32, Layout::Int4G32, 64, 30, 32),
        (Layout::Int4G32, Layout::F16, 64, 32, 17),
    ];
    for (case, (routed, shared, hidden, width, shared_width)) in cases.into_iter().enumerate() {
        let mut rng = Rng(60 + case as u64);
        let (views, experts): (Vec<_>, Vec<_>) =
            (0..6).map(|_| block(&mut rng, routed, hidden, width)).unzip();
        let (shared_views, shared) = block(&mut rng, shared, hidden, shared_width);
        let rows = 23;
        let x = rng.values(rows * hidden, 2.0);
        let routes = routes(&mut rng, rows, 6, 3);
        for with_shared in [false, true] {
            let mut want = Vec::new();
            for (row, x) in x.chunks(hidden).enumerate() {
                let x = wide(x);
                let mut y = vec![0.0; hidden];
                for pair in row * 3..row * 3 + 3 {
                    let out = experts[routes.ids[pair] as usize].forward(&x);
                    let w = f64::from(routes.weights[pair]);
                    y.iter_mut().zip(out).for_each(|(y, o)| *y += w * o);
                }
                if with_shared {
                    y.iter_mut().zip(shared.forward(&x)).for_each(|(y, o)| *y += o);
                }
                want.extend(y);
            }
            let mut first = None;
            for cpu in variants() {
                let experts = Experts::pack(&cpu, &views).unwrap();
                let mlp = Mlp::pack(&cpu, &shared_views).unwrap();
                let y =
                    moe(&tensor(&x, hidden), &routes.clone().into(), &experts, with_shared.then_some(&mlp))
                        .unwrap();
                let y = flat(&y);
                assert_close(&y, &want, 4e-6, &format!("case {case}"));
                assert_eq!(first.get_or_insert(bits(&y)), &bits(&y));
            }
        }
    }
}

#[test]
fn a_row_does_not_see_its_neighbours() {
    let mut rng = Rng(77);
    let (hidden, width) = (64, 96);
    let views: Vec<_> = (0..8).map(|_| block(&mut rng, Layout::Int4G32, hidden, width).0).collect();
    let (shared_views, _) = block(&mut rng, Layout::Bf16, hidden, 128);
    let x = rng.values(512 * hidden, 1.0);
    let routes = routes(&mut rng, 512, 8, 2);
    let one = cpu(1, Isa::best());
    let (experts, shared) = (Experts::pack(&one, &views).unwrap(), Mlp::pack(&one, &shared_views).unwrap());
    let mut want = Vec::new();
    for (row, x) in x.chunks(hidden).enumerate() {
        let y =
            moe(&tensor(x, hidden), &slice(&routes, row..row + 1).into(), &experts, Some(&shared)).unwrap();
        want.extend(bits(&flat(&y)));
    }
    for cpu in variants() {
        let (experts, shared) =
            (Experts::pack(&cpu, &views).unwrap(), Mlp::pack(&cpu, &shared_views).unwrap());
        for rows in WIDTHS {
            let rows = if is_slow(&cpu) { rows.min(16) } else { rows };
            let first = 512 - rows;
            let x = tensor(&x[first * hidden..], hidden);
            let y = moe(&x, &slice(&routes, first..512).into(), &experts, Some(&shared)).unwrap();
            assert!(bits(&flat(&y)) == want[first * hidden..], "{rows} rows on {cpu:?}");
        }
    }
}

#[test]
fn mlp_is_down_of_silu_gate_times_up() {
    let mut rng = Rng(80);
    let (views, reference) = block(&mut rng, Layout::Bf16, 48, 100);
    let x = rng.values(7 * 48, 2.0);
    let mlp = Mlp::pack(&best(), &views).unwrap();
    let want: Vec<f64> = x.chunks(48).flat_map(|x| reference.forward(&wide(x))).collect();
    assert_close(&flat(&mlp.forward(&tensor(&x, 48)).unwrap()), &want, 3e-6, "mlp");
}

#[test]
fn misfits_are_errors() {
    let mut rng = Rng(81);
    let cpu = best();
    let (good, _) = block(&mut rng, Layout::Bf16, 32, 48);
    let (other, _) = block(&mut rng, Layout::Bf16, 32, 64);
    let mixed = Experts::pack(&cpu, &[good.clone(), other]).unwrap_err().to_string();
    assert_eq!(mixed, "moe: expert is [64, 32], expected [48, 32] as expert 0");
    let swapped = ExpertViews { down: good.gate.clone(), ..good.clone() };
    let error = Mlp::pack(&cpu, &swapped).unwrap_err().to_string();
    assert_eq!(error, "moe: down_proj is [48, 32], expected [32, 48]");
    let experts = Experts::pack(&cpu, &[good]).unwrap();
    let x = tensor(&[0.0; 64], 32);
    let bad_id = Routes { ids: vec![0, 1], weights: vec![1.0; 2], per_token: 1 };
    let error = moe(&x, &bad_id.into(), &experts, None).unwrap_err().to_string();
    assert_eq!(error, "moe: expert id is 1, limit below 1 experts");
    let short = Routes { ids: vec![0], weights: vec![1.0], per_token: 1 };
    assert!(moe(&x, &short.into(), &experts, None).unwrap_err().to_string().contains("2 rows x 1 experts"));
    assert!(Experts::pack(&cpu, &[]).is_err());
}
