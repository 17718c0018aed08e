//! P1 when sampling: served tokens follow the distribution of an independent reference's logits.

use crate::EYRIE;
use std::collections::HashMap;

use candle_core::{Device, Tensor, safetensors};
use eyrie_tests::{Fleet, ask, client, root};

const DRAWS: u64 = 4000;
const TEMPERATURE: f64 = 1.0;

/// Softmax of the reference's float64-computed logits of one position.
fn probabilities(expected: &HashMap<String, Tensor>, position: usize) -> Vec<f64> {
    let logits = expected["logits"].get(0).unwrap().get(position).unwrap().to_vec1::<f32>().unwrap();
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weights: Vec<f64> = logits.iter().map(|&l| (f64::from(l - largest) / TEMPERATURE).exp()).collect();
    let sum: f64 = weights.iter().sum();
    weights.into_iter().map(|w| w / sum).collect()
}

/// Pearson's statistic and its degrees of freedom; cells expected fewer than five times are pooled.
fn chi_square(counts: &[u64], probabilities: &[f64], draws: f64) -> (f64, f64) {
    let (mut statistic, mut cells, mut rest) = (0.0, 0.0, (0.0, 0.0));
    for (&count, &p) in counts.iter().zip(probabilities) {
        let want = p * draws;
        if want < 5.0 {
            rest = (rest.0 + count as f64, rest.1 + want);
        } else {
            statistic += (count as f64 - want).powi(2) / want;
            cells += 1.0;
        }
    }
    if rest.1 > 0.0 {
        statistic += (rest.0 - rest.1).powi(2) / rest.1;
        cells += 1.0;
    }
    (statistic, cells - 1.0)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn drawn_tokens_follow_the_reference_distribution() {
    let target = root().join("tests/fixtures/v3");
    let draft = root().join("tests/fixtures/v3_eagle3");
    let expected = safetensors::load(target.join("expected.safetensors"), &Device::Cpu).unwrap();
    let tokens: Vec<u32> =
        expected["tokens"].get(0).unwrap().to_dtype(candle_core::DType::U32).unwrap().to_vec1().unwrap();
    let position = 5;
    let probabilities = probabilities(&expected, position);
    let fleet =
        Fleet::start(EYRIE, &["--target", target.to_str().unwrap(), "--draft", draft.to_str().unwrap()]);
    let mut client = client(&fleet.ready().grpc).await;

    let mut counts = vec![0u64; probabilities.len()];
    for seed in 0..DRAWS {
        let asked = ask(&tokens[..=position], 1).sampled(TEMPERATURE as f32, seed);
        let outcome = asked.run(&mut client).await.unwrap();
        counts[outcome.ids[0] as usize] += 1;
    }
    let (statistic, freedom) = chi_square(&counts, &probabilities, DRAWS as f64);
    // Mean `freedom`, variance 2·`freedom`: five standard deviations. Seeds are fixed, so this cannot flake.
    let limit = freedom + 5.0 * (2.0 * freedom).sqrt();
    assert!(freedom > 10.0, "the position is spread over {freedom} cells");
    assert!(
        statistic < limit,
        "chi-square {statistic:.1} over {freedom} degrees of freedom, limit {limit:.1}"
    );

    // The check can fail: the same counts against the distribution of another temperature.
    let flat = vec![1.0 / counts.len() as f64; counts.len()];
    let (wrong, freedom) = chi_square(&counts, &flat, DRAWS as f64);
    assert!(wrong > freedom + 5.0 * (2.0 * freedom).sqrt());

    // Later tokens come from verification: the same draws with and without a draft.
    for seed in 0..100 {
        let asked = ask(&tokens[..=position], 6).sampled(TEMPERATURE as f32, seed);
        let plain = asked.run(&mut client).await.unwrap();
        let drafted = asked.chain(2).run(&mut client).await.unwrap();
        assert_eq!(drafted.ids, plain.ids, "seed {seed}");
    }
}
