//! Classic porting mistakes, one at a time: each must move a fixture's result out of the parity tolerance.

use std::f64::consts::TAU;

use crate::common::fixtures::{LOGIT_TOLERANCE, VARIANTS, WHOLE, compare, expected, load, run};
use crate::common::rewrite::{Stored, rewrite};
use crate::common::{Expected, backend, deepseek, deepseek_as, fixture, values};
use eyrie_checkpoint::{FfnTensors, Layout};
use eyrie_checkpoint::{Scoring, TargetCheckpoint, TargetConfig, TopkMethod, Yarn, layer_tensors};
use eyrie_model::{LayerRoutes, TargetModel};

/// How far a changed config moves the logits of a fixture.
fn moved(variant: &str, change: impl FnOnce(&mut TargetConfig)) -> f64 {
    let mut model = deepseek_as(&fixture(variant), &backend(2), change);
    let expected = expected(variant);
    compare(&run(&mut model, &expected, WHOLE), &expected).0
}

fn config(variant: &str) -> TargetConfig {
    TargetCheckpoint::open(&fixture(variant)).unwrap().config().clone()
}

fn assert_seen(what: &str, applies: impl Fn(&TargetConfig) -> bool, change: impl Fn(&mut TargetConfig)) {
    let mut seen = 0;
    for variant in VARIANTS.into_iter().filter(|variant| applies(&config(variant))) {
        let moved = moved(variant, &change);
        assert!(moved > 2.0 * LOGIT_TOLERANCE, "{variant} does not see {what}: {moved:e}");
        seen += 1;
    }
    assert!(seen > 0, "no fixture can see {what}");
}

fn yarn(config: &mut TargetConfig) -> &mut Yarn {
    config.rope.yarn.as_mut().unwrap()
}

fn has_yarn(config: &TargetConfig) -> bool {
    config.rope.yarn.is_some()
}

fn magnitude(factor: f64, mscale: f64) -> f64 {
    0.1 * mscale * factor.ln() + 1.0
}

#[test]
fn latent_norms_with_the_layer_norms_eps() {
    assert_seen("latent eps", |_| true, |config| config.latent_norm_eps = 1e-5);
}

#[test]
fn softmax_scale_without_mscale_squared() {
    assert_seen("mscale squared", has_yarn, |config| {
        (yarn(config).mscale, yarn(config).mscale_all_dim) = (1e-12, 1e-12);
    });
}

#[test]
fn rotation_multiplied_by_mscale() {
    assert_seen("mscale on the rotation", has_yarn, |config| {
        let yarn = yarn(config);
        let wanted = magnitude(yarn.factor, yarn.mscale) * magnitude(yarn.factor, yarn.mscale_all_dim);
        yarn.mscale = (wanted - 1.0) / (0.1 * yarn.factor.ln());
    });
}

#[test]
fn frequencies_without_the_yarn_blend() {
    assert_seen("yarn blend", has_yarn, |config| {
        let (theta, dim) = (config.rope.theta, config.qk_rope_head_dim as f64);
        let yarn = yarn(config);
        // The ramp starts at the last dimension, so that every frequency is kept.
        let rotations =
            |at: f64| yarn.original_max_position_embeddings as f64 / TAU * theta.powf(-2.0 * at / dim);
        (yarn.beta_fast, yarn.beta_slow) = (rotations(dim - 1.5), rotations(dim - 0.5));
    });
}

#[test]
fn routed_scale_ignored() {
    let scaled =
        |config: &TargetConfig| config.moe.as_ref().is_some_and(|moe| moe.routed_scaling_factor != 1.0);
    assert_seen("routed scale", scaled, |config| config.moe.as_mut().unwrap().routed_scaling_factor = 1.0);
}

#[test]
fn normalisation_inverted() {
    assert_seen(
        "norm_topk_prob",
        |_| true,
        |config| {
            let moe = config.moe.as_mut().unwrap();
            moe.norm_topk_prob = !moe.norm_topk_prob;
        },
    );
}

/// Rotating halves is rotating pairs of a permuted head: the rope rows of the stored weights are permuted instead.
#[test]
fn halves_rotated_instead_of_pairs() {
    for variant in VARIANTS {
        let config = config(variant);
        let query = if config.q_lora_rank.is_some() { "q_b_proj" } else { "q_proj" };
        let dir = rewrite(&fixture(variant), |_, tensors| {
            for (name, tensor) in tensors {
                let plain = match name.rsplit('.').nth(1) {
                    Some("kv_a_proj_with_mqa") => config.kv_lora_rank,
                    Some(module) if module == query => config.qk_nope_head_dim,
                    _ => continue,
                };
                permute_rope_rows(tensor, plain, config.qk_rope_head_dim);
            }
        });
        let expected = expected(variant);
        let mut model = deepseek(dir.path(), &backend(2));
        let (moved, _) = compare(&run(&mut model, &expected, WHOLE), &expected);
        assert!(moved > 2.0 * LOGIT_TOLERANCE, "{variant} does not see rotated halves: {moved:e}");
    }
}

/// In every block of `plain` rows followed by the rope rows, rows `[0, 1, 2, 3, …]` become `[0, d/2, 1, d/2 + 1, …]`.
fn permute_rope_rows(tensor: &mut Stored, plain: usize, rope: usize) {
    let width = tensor.data.len() / tensor.shape[0];
    let before = tensor.data.clone();
    for row in 0..tensor.shape[0] {
        let Some(place) = (row % (plain + rope)).checked_sub(plain) else { continue };
        let from = row - place + place / 2 + (place % 2) * rope / 2;
        tensor.data[row * width..][..width].copy_from_slice(&before[from * width..][..width]);
    }
}

/// A MoE layer's routing as a float64 reference has it, with the mistakes to be seen.
#[derive(Clone, Copy, PartialEq)]
enum Mistake {
    None,
    ZeroMask,
    BiasedWeights,
}

fn route(variant: &str, layer: &LayerRoutes, mistake: Mistake) -> (Vec<u32>, Vec<f64>) {
    let checkpoint = TargetCheckpoint::open(&fixture(variant)).unwrap();
    let config = checkpoint.config().moe.clone().unwrap();
    assert_eq!((config.scoring, config.method), (Scoring::Sigmoid, TopkMethod::NoAuxTc));
    let FfnTensors::Moe(tensors) = layer_tensors(checkpoint.config(), layer.layer).ffn else {
        panic!("dense layer")
    };
    let gate = checkpoint.linear(&tensors.router.name).unwrap();
    assert_eq!(gate.layout, Layout::Bf16);
    let gate: Vec<f64> = gate
        .bytes()
        .unwrap()
        .chunks_exact(2)
        .map(|w| f64::from(f32::from_bits(u32::from(u16::from_le_bytes([w[0], w[1]])) << 16)))
        .collect();
    let bias = checkpoint.vector(&tensors.router_bias.unwrap().name).unwrap();
    let hidden = checkpoint.config().hidden_size;
    let (mut ids, mut weights) = (Vec::new(), Vec::new());
    for x in values(&layer.input).chunks(hidden) {
        let score = |row: &[f64]| {
            let logit: f64 = row.iter().zip(x).map(|(w, x)| w * f64::from(*x)).sum();
            1.0 / (1.0 + (-logit).exp())
        };
        let scores: Vec<f64> = gate.chunks(hidden).map(score).collect();
        let biased: Vec<f64> = scores.iter().zip(&bias).map(|(s, b)| s + f64::from(*b)).collect();
        let size = config.n_routed_experts / config.n_group;
        let group_score = |group: &[f64]| {
            let mut sorted = group.to_vec();
            sorted.sort_by(|a, b| b.total_cmp(a));
            sorted.iter().take(2).sum::<f64>()
        };
        let groups: Vec<f64> = biased.chunks(size).map(group_score).collect();
        let kept = best(&groups, config.topk_group);
        let masked = if mistake == Mistake::ZeroMask { 0.0 } else { f64::NEG_INFINITY };
        let choice: Vec<f64> =
            (0..biased.len()).map(|e| if kept.contains(&(e / size)) { biased[e] } else { masked }).collect();
        let mut chosen = best(&choice, config.num_experts_per_tok);
        chosen.sort_unstable();
        let from = if mistake == Mistake::BiasedWeights { &choice } else { &scores };
        let sum: f64 = chosen.iter().map(|&e| from[e]).sum();
        let sum = if config.norm_topk_prob { sum } else { 1.0 };
        ids.extend(chosen.iter().map(|&e| e as u32));
        weights.extend(chosen.iter().map(|&e| from[e] / sum * config.routed_scaling_factor));
    }
    (ids, weights)
}

fn best(scores: &[f64], n: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]).then(a.cmp(&b)));
    order.truncate(n);
    order
}

/// The router is compared id by id with the fixture, so a wrong mask or wrong weights show there.
#[test]
fn zero_mask_and_biased_weights() {
    for variant in ["v3", "v3_norope_scaling", "k25_int4"] {
        let mut model = load(variant, 2);
        let expected: Expected = expected(variant);
        let run = run(&mut model, &expected, WHOLE);
        let grouped = model.config().moe.as_ref().unwrap().n_group > 1;
        let (mut other_ids, mut other_weights) = (false, false);
        for layer in &run.trace.routes {
            let ids = expected.ids(&format!("route.{}.ids", layer.layer));
            let weights = expected.floats(&format!("route.{}.w", layer.layer));
            let far = |got: &[f64]| got.iter().zip(weights).any(|(a, b)| (a - b).abs() > 1e-3);
            let right = route(variant, layer, Mistake::None);
            assert!(right.0 == ids && !far(&right.1), "{variant}: the reference route itself is off");
            other_ids |= route(variant, layer, Mistake::ZeroMask).0 != ids;
            other_weights |= far(&route(variant, layer, Mistake::BiasedWeights).1);
        }
        assert_eq!(other_ids, grouped, "{variant}: mask of 0");
        assert!(other_weights, "{variant}: biased weights");
    }
}
