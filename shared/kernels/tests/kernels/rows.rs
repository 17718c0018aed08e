//! Kernels that work row by row: norm, router, argmax, top-k.

use eyrie_checkpoint::{Scoring, TopkMethod};
use eyrie_kernels::{Isa, KernelError, Linear, RmsNorm, Router, RouterSpec, argmax, top_k_softmax};

use crate::common::*;

#[test]
fn rms_norm_matches_float64_and_every_variant() {
    for width in [1, 7, 8, 12, 128, 384, 7168] {
        let mut rng = Rng(width as u64);
        let gain = rng.values(width, 2.0);
        let x = rng.values(65 * width, 5.0);
        let mut want = Vec::new();
        for row in x.chunks(width) {
            let mean = row.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / width as f64;
            want.extend(
                row.iter().zip(&gain).map(|(&v, &g)| f64::from(v) * f64::from(g) / (mean + 1e-6).sqrt()),
            );
        }
        let mut first = None;
        for cpu in variants() {
            let norm = RmsNorm::new(&cpu, gain.clone(), 1e-6).unwrap();
            let y = flat(&norm.forward(&tensor(&x, width)).unwrap());
            assert_close(&y, &want, 4e-6, "rms_norm");
            let alone = flat(&norm.forward(&tensor(&x[64 * width..], width)).unwrap());
            assert_eq!(bits(&alone), bits(&y[64 * width..]));
            assert_eq!(first.get_or_insert(bits(&y)), &bits(&y));
        }
    }
    assert!(RmsNorm::new(&best(), vec![1.0], f64::NAN).is_err());
    let error =
        RmsNorm::new(&best(), vec![1.0; 4], 1e-6).unwrap().forward(&tensor(&[0.0; 6], 3)).unwrap_err();
    assert_eq!(error.to_string(), "rms_norm: x is [2, 3], expected [rows, 4]");
}

#[test]
fn a_row_that_is_no_number_is_found() {
    let backend = best();
    let found = |values: &[f32]| backend.first_not_finite(&tensor(values, 3)).unwrap();
    assert_eq!(found(&[1.0; 9]), None);
    assert_eq!(found(&[1.0, 2.0, 3.0, 4.0, 5.0, f32::INFINITY, f32::NAN, 8.0, 9.0]), Some(1));
    assert_eq!(found(&[]), None);
    // Of a part of a tensor, counted from where it begins.
    let part = tensor(&[f32::NAN, 0.0, 0.0, 1.0, 1.0, 1.0, f32::NAN, 0.0, 0.0], 3).narrow(0, 1, 2).unwrap();
    assert_eq!(backend.first_not_finite(&part).unwrap(), Some(1));
}

#[test]
fn argmax_takes_the_lowest_of_equals_and_refuses_nan() {
    assert_eq!(argmax(&[1.0, 3.0, -2.0, 3.0]).unwrap(), 1);
    assert_eq!(argmax(&[f32::NEG_INFINITY; 3]).unwrap(), 0);
    assert_eq!(argmax(&[-0.0, 0.0]).unwrap(), 0);
    assert!(matches!(argmax(&[0.0, f32::NAN]), Err(KernelError::NotANumber { index: 1, .. })));
    assert!(argmax(&[]).is_err());
}

#[test]
fn top_k_softmax_orders_by_logit_then_id() {
    let mut rng = Rng(4);
    let mut logits = rng.values(2048, 9.0);
    logits[100] = 9.5;
    logits[7] = 9.5;
    let sum: f64 = logits.iter().map(|&l| f64::from(l).exp()).sum();
    let top = top_k_softmax(&logits, 12).unwrap();
    assert_eq!((top[0].0, top[1].0), (7, 100));
    let mut order: Vec<u32> = (0..2048).collect();
    order.sort_by(|a, b| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b)));
    for ((id, p), want) in top.iter().zip(order) {
        assert_eq!(*id, want);
        assert!(
            (f64::from(*p) - f64::from(logits[want as usize]).exp() / sum).abs()
                < 1e-6 * f64::from(*p) + 1e-9
        );
    }
    assert_eq!(
        top_k_softmax(&[0.0, -0.0, 0.0], 9).unwrap().iter().map(|t| t.0).collect::<Vec<_>>(),
        [0, 1, 2]
    );
    assert!(top_k_softmax(&[f32::NAN], 1).is_err());
}

const SPEC: RouterSpec = RouterSpec {
    experts: 16,
    per_token: 4,
    scoring: Scoring::Sigmoid,
    method: TopkMethod::NoAuxTc,
    groups: 4,
    top_groups: 2,
    normalise: true,
    scale: 2.5,
};

/// The k best of `choice` by value then index, by sorting.
fn best_of(choice: &[f64], k: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..choice.len()).collect();
    order.sort_by(|&a, &b| choice[b].total_cmp(&choice[a]).then(a.cmp(&b)));
    order.truncate(k);
    order
}

fn reference(spec: &RouterSpec, logits: &[f64], bias: Option<&[f32]>) -> (Vec<u32>, Vec<f64>) {
    let sum: f64 = logits.iter().map(|l| l.exp()).sum();
    let scores: Vec<f64> = logits
        .iter()
        .map(|l| match spec.scoring {
            Scoring::Softmax => l.exp() / sum,
            Scoring::Sigmoid => 1.0 / (1.0 + (-l).exp()),
        })
        .collect();
    let mut choice: Vec<f64> = scores.clone();
    if let Some(bias) = bias {
        choice.iter_mut().zip(bias).for_each(|(c, &b)| *c += f64::from(b));
    }
    if spec.method != TopkMethod::Greedy {
        let counted = if spec.method == TopkMethod::NoAuxTc { 2 } else { 1 };
        let size = spec.experts / spec.groups;
        let groups: Vec<f64> =
            choice.chunks(size).map(|g| best_of(g, counted).iter().map(|&i| g[i]).sum()).collect();
        let kept = best_of(&groups, spec.top_groups);
        for (id, c) in choice.iter_mut().enumerate() {
            if !kept.contains(&(id / size)) {
                *c = f64::NEG_INFINITY;
            }
        }
    }
    let mut ids = best_of(&choice, spec.per_token);
    ids.sort_unstable();
    let mut weights: Vec<f64> = ids.iter().map(|&i| scores[i]).collect();
    if spec.normalise {
        let sum: f64 = weights.iter().sum();
        weights.iter_mut().for_each(|w| *w /= sum);
    }
    (ids.iter().map(|&i| i as u32).collect(), weights.iter().map(|w| w * spec.scale).collect())
}

#[test]
fn router_matches_float64_for_every_method() {
    let plain = RouterSpec { groups: 1, top_groups: 1, scale: 1.0, normalise: false, ..SPEC };
    let specs = [
        RouterSpec { scoring: Scoring::Softmax, method: TopkMethod::Greedy, ..plain },
        RouterSpec {
            scoring: Scoring::Softmax,
            method: TopkMethod::GroupLimitedGreedy,
            normalise: false,
            scale: 16.0,
            ..SPEC
        },
        SPEC,
        RouterSpec { scale: 2.827, normalise: true, ..plain },
    ];
    for (case, spec) in specs.into_iter().enumerate() {
        let mut rng = Rng(40 + case as u64);
        let width = 48;
        let gate = rng.values(16 * width, 0.5);
        // All biased scores are negative: a mask of 0 instead of -inf would pick outside experts.
        let bias: Vec<f32> = rng.values(16, 0.2).iter().map(|b| b - 3.0).collect();
        let bias = (spec.method == TopkMethod::NoAuxTc).then_some(bias);
        let x = rng.values(200 * width, 1.0);
        let logits = matmul(&wide(&x), &wide(&gate), width);
        let mut first = None;
        for cpu in variants() {
            let linear = Linear::from_f32(&cpu, &gate, [16, width]).unwrap();
            let router = Router::new(spec, linear, bias.clone()).unwrap();
            let routes = router.route(&tensor(&x, width)).unwrap().to_host().unwrap();
            for (row, logits) in logits.chunks(16).enumerate() {
                let (ids, weights) = reference(&spec, logits, bias.as_deref());
                assert_eq!(routes.ids[row * 4..][..4], ids, "case {case} row {row}");
                assert_close(&routes.weights[row * 4..][..4], &weights, 1e-5, "weights");
            }
            assert_eq!(first.get_or_insert(routes.clone()), &routes);
        }
    }
}

#[test]
fn router_ties_go_to_the_lower_index() {
    let cpu = cpu(1, Isa::best());
    let gate = || Linear::from_f32(&cpu, &[0.0; 16 * 8], [16, 8]).unwrap();
    let routes = Router::new(SPEC, gate(), Some(vec![-1.0; 16]))
        .unwrap()
        .route(&tensor(&[1.0; 8], 8))
        .unwrap()
        .to_host()
        .unwrap();
    assert_eq!(routes.ids, [0, 1, 2, 3]);
    assert_eq!(routes.weights, [0.625; 4]);
    let error = Router::new(SPEC, gate(), None).unwrap_err().to_string();
    assert_eq!(error, "router: bias is [0], expected 16 values for NoAuxTc");
    let wide = RouterSpec { per_token: 9, ..SPEC };
    let error = Router::new(wide, gate(), Some(vec![0.0; 16])).unwrap_err().to_string();
    assert_eq!(error, "router: per_token is 9, limit 8 reachable experts");
    let nan = tensor(&[f32::NAN; 8], 8);
    let router = Router::new(SPEC, gate(), Some(vec![0.0; 16])).unwrap();
    assert!(matches!(router.route(&nan), Err(KernelError::NotANumber { index: 0, .. })));
}
