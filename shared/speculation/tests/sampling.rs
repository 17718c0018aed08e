//! The sampler against a naive reference (full sort, no scratch) and against the softmax itself.
#![expect(clippy::unwrap_used, reason = "a failed test helper should panic")]

use std::collections::BTreeSet;

use eyrie_speculation::{SampleError, Sampler, SamplingParams, uniform};
use proptest::prelude::*;

/// Ids kept by top-k, top-p, min-p with their weights, in id order.
fn kept(logits: &[f32], params: &SamplingParams) -> Vec<(usize, f64)> {
    let max = f64::from(logits.iter().copied().fold(f32::MIN, f32::max));
    let weight = |id: usize| ((f64::from(logits[id]) - max) / f64::from(params.temperature)).exp();
    let mut ids: Vec<usize> = (0..logits.len()).collect();
    ids.sort_by(|&a, &b| logits[b].partial_cmp(&logits[a]).unwrap().then(a.cmp(&b)));
    let k = params.top_k as usize;
    let total: f64 = if k > 0 && k < ids.len() {
        ids.truncate(k);
        ids.iter().map(|&id| weight(id)).sum()
    } else {
        (0..logits.len()).map(weight).sum()
    };
    if params.top_p < 1.0 {
        let mut sum = 0.0;
        let enough = ids.iter().position(|&id| {
            sum += weight(id);
            sum >= f64::from(params.top_p) * total
        });
        ids.truncate(enough.map_or(ids.len(), |last| last + 1));
    }
    ids.retain(|&id| weight(id) >= f64::from(params.min_p));
    ids.sort_unstable();
    ids.into_iter().map(|id| (id, weight(id))).collect()
}

fn reference(logits: &[f32], params: &SamplingParams, position: u32) -> u32 {
    let kept = kept(logits, params);
    let total: f64 = kept.iter().map(|&(_, w)| w).sum();
    let mut cumulative = 0.0;
    for &(id, weight) in &kept {
        cumulative += weight;
        if cumulative > uniform(params.seed, params.choice, position) * total {
            return id as u32;
        }
    }
    kept.last().unwrap().0 as u32
}

fn params() -> impl Strategy<Value = SamplingParams> {
    let top_k = prop_oneof![Just(0u32), 1u32..8, 1u32..3000];
    let top_p = prop_oneof![Just(1.0f32), 0.01f32..1.0, Just(0.999_999_9f32)];
    let min_p = prop_oneof![Just(0.0f32), 0.0f32..1.0, Just(1.0f32)];
    (0.05f32..4.0, top_k, top_p, min_p, any::<u64>(), any::<u32>()).prop_map(
        |(temperature, top_k, top_p, min_p, seed, choice)| SamplingParams {
            temperature,
            top_k,
            top_p,
            min_p,
            seed,
            choice,
        },
    )
}

/// Rows with many exact ties (`step` quantises) and rows with none to speak of.
fn rows() -> impl Strategy<Value = Vec<f32>> {
    let sizes = prop_oneof![1usize..40, 500usize..4000];
    (sizes, prop_oneof![Just(1.0f32), Just(0.0)], any::<u64>()).prop_map(|(size, step, seed)| {
        let logit = |id| {
            let raw = (uniform(seed, 0, id) * 24.0 - 12.0) as f32;
            if step > 0.0 { (raw / step).round() * step } else { raw }
        };
        (0..size as u32).map(logit).collect()
    })
}

proptest! {
    #[test]
    fn equals_the_naive_reference(
        rows in prop::collection::vec(rows(), 1..3), params in params(), position in 0u32..1000,
    ) {
        // One sampler for all rows: what an earlier row left in the scratch must not show.
        let mut sampler = Sampler::new();
        for row in &rows {
            for position in position..position + 4 {
                let token = sampler.sample(row, &params, position).unwrap();
                prop_assert_eq!(token, reference(row, &params, position));
            }
        }
    }

    #[test]
    fn greedy_is_the_lowest_id_of_the_highest_logit(row in rows(), position: u32) {
        let token = Sampler::new().sample(&row, &SamplingParams::default(), position).unwrap();
        let max = row.iter().copied().fold(f32::MIN, f32::max);
        prop_assert_eq!(Some(token as usize), row.iter().position(|&logit| logit == max));
    }
}

/// χ² of 40,000 draws at consecutive positions against the exact distribution.
fn chi_squared(logits: &[f32], params: &SamplingParams) -> (f64, usize) {
    const DRAWS: u32 = 40_000;
    let kept = kept(logits, params);
    let total: f64 = kept.iter().map(|&(_, w)| w).sum();
    let mut sampler = Sampler::new();
    let mut counts = vec![0u32; logits.len()];
    for position in 0..DRAWS {
        counts[sampler.sample(logits, params, position).unwrap() as usize] += 1;
    }
    assert_eq!(kept.iter().map(|&(id, _)| counts[id]).sum::<u32>(), DRAWS, "a cut token came out");
    let statistic = kept
        .iter()
        .map(|&(id, weight)| {
            let expected = f64::from(DRAWS) * weight / total;
            (f64::from(counts[id]) - expected).powi(2) / expected
        })
        .sum();
    (statistic, kept.len() - 1)
}

#[test]
fn draws_follow_the_softmax() {
    let logits: Vec<f32> = (0..24).map(|id| ((id * 37 % 24) as f32 - 12.0) / 4.0).collect();
    let base = SamplingParams { temperature: 1.0, ..SamplingParams::default() };
    for params in [
        base,
        SamplingParams { temperature: 0.7, seed: 1, ..base },
        SamplingParams { temperature: 1.8, seed: 2, choice: 3, ..base },
        SamplingParams { top_k: 9, seed: 3, ..base },
        SamplingParams { top_p: 0.8, seed: 4, ..base },
        SamplingParams { min_p: 0.1, seed: 5, ..base },
        SamplingParams { temperature: 1.3, top_k: 16, top_p: 0.9, min_p: 0.05, seed: 6, ..base },
    ] {
        let (statistic, freedom) = chi_squared(&logits, &params);
        // Wilson–Hilferty: the 0.1 % point of χ² with that many degrees of freedom.
        let f = freedom as f64;
        let limit = f * (1.0 - 2.0 / (9.0 * f) + 3.09 * (2.0 / (9.0 * f)).sqrt()).powi(3);
        assert!(statistic < limit, "χ² {statistic:.1} ≥ {limit:.1} for {params:?}");
    }
}

#[test]
fn a_nucleus_reached_exactly_takes_the_lower_ids_of_a_tie_and_no_more() {
    let params = SamplingParams { temperature: 1.0, top_p: 0.5, ..SamplingParams::default() };
    let mut sampler = Sampler::new();
    let drawn: BTreeSet<u32> =
        (0..200).map(|position| sampler.sample(&[0.0; 8], &params, position).unwrap()).collect();
    assert!(drawn.into_iter().eq(0..4));
}

#[test]
fn rows_that_are_not_finite_are_errors_at_every_temperature() {
    let mut sampler = Sampler::new();
    for temperature in [0.0, 1.0] {
        let params = SamplingParams { temperature, ..SamplingParams::default() };
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for (size, at) in [(3, 2), (64, 40), (70, 69)] {
                let mut row = vec![0.5f32; size];
                row[at] = bad;
                assert_eq!(
                    sampler.sample(&row, &params, 12).unwrap_err().to_string(),
                    format!("logits must be finite, given {bad} at token {at} for position 12")
                );
            }
        }
        assert_eq!(sampler.sample(&[], &params, 0), Err(SampleError::EmptyRow));
    }
}

#[test]
fn extreme_finite_rows_and_temperatures_stay_in_range() {
    let mut sampler = Sampler::new();
    for temperature in [1e-5, 1e30] {
        for row in [vec![f32::MAX, f32::MIN, f32::MAX], vec![f32::MIN; 3], vec![0.0; 3]] {
            let params = SamplingParams { temperature, top_p: 0.9, ..SamplingParams::default() };
            let token = sampler.sample(&row, &params, 5).unwrap();
            assert_eq!(token, reference(&row, &params, 5));
        }
    }
}

#[test]
fn parameters_out_of_range_are_refused() {
    let params = SamplingParams { temperature: f32::NAN, ..SamplingParams::default() };
    assert_eq!(
        Sampler::new().sample(&[1.0], &params, 0).unwrap_err().to_string(),
        "temperature must be finite and at least 0, given NaN"
    );
}
