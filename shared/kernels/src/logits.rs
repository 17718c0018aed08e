//! What a drafter or a greedy sampler reads off logits.

use std::cmp::Ordering;

use crate::cpu::{Isa, exp};
use crate::error::{KernelError, Result, limit};

fn first_nan(op: &'static str, logits: &[f32]) -> Result<()> {
    match logits.iter().position(|x| x.is_nan()) {
        Some(index) => Err(KernelError::NotANumber { op, index }),
        None if logits.is_empty() => Err(limit(op, "number of logits", 0, "at least 1")),
        None => Ok(()),
    }
}

/// Index of the largest value, the lowest one among equals.
///
/// # Errors
/// A NaN, or no values.
pub fn argmax(logits: &[f32]) -> Result<u32> {
    first_nan("argmax", logits)?;
    let mut best = 0;
    for (index, &value) in logits.iter().enumerate() {
        if value > logits[best] {
            best = index;
        }
    }
    Ok(best as u32)
}

/// The `k` most probable ids of one row of logits with their float32 softmax probabilities over the
/// whole row, most probable first, the lower id first among equals; fewer when the row is shorter.
///
/// # Errors
/// A NaN, or no values.
pub fn top_k_softmax(logits: &[f32], k: usize) -> Result<Vec<(u32, f32)>> {
    first_nan("top_k_softmax", logits)?;
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    // Ordered by logits: different logits can round to equal probabilities.
    let by_logit = |a: &u32, b: &u32| {
        let order = logits[*b as usize].partial_cmp(&logits[*a as usize]);
        order.unwrap_or(Ordering::Equal).then(a.cmp(b))
    };
    let k = k.min(order.len());
    if k > 0 && k < order.len() {
        order.select_nth_unstable_by(k - 1, by_logit);
    }
    order.truncate(k);
    order.sort_unstable_by(by_logit);
    let mut probabilities = logits.to_vec();
    exp::softmax_in_place(Isa::best(), &mut probabilities);
    Ok(order.into_iter().map(|id| (id, probabilities[id as usize])).collect())
}
