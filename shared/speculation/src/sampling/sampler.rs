use super::{ParamsError, SamplingParams, filter};
use crate::uniform;

/// Why a row has no token.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
pub enum SampleError {
    /// The row is empty.
    #[error("a logits row must have at least 1 entry, given 0")]
    EmptyRow,
    /// The row holds a NaN or an infinity: the forward pass went wrong, and any token would hide it.
    #[error("logits must be finite, given {value} at token {token} for position {position}")]
    NotFinite {
        /// The first such token id.
        token: u32,
        /// Its logit.
        value: f32,
        /// Absolute position the row decides.
        position: u32,
    },
    /// The parameters are out of range.
    #[error(transparent)]
    Params(#[from] ParamsError),
}

/// Samples tokens from logits rows; holds the scratch memory, which grows to one row's need and is
/// reused. The result depends on the arguments only, never on earlier calls.
#[derive(Debug, Default)]
pub struct Sampler {
    weights: Vec<f64>,
    keys: Vec<u64>,
}

/// A row with its weight function `exp((logit − max) / T)`; the largest weight is exactly 1.
#[derive(Clone, Copy)]
struct Row<'a> {
    logits: &'a [f32],
    max: f64,
    temperature: f64,
}

impl Row<'_> {
    fn weigh(&self, logit: f32) -> f64 {
        ((f64::from(logit) - self.max) / self.temperature).exp()
    }

    fn weight(&self, key: u64) -> f64 {
        self.weigh(self.logits[filter::id(key) as usize])
    }
}

impl Sampler {
    /// A sampler without scratch memory yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The token for absolute `position` from its `logits` row (one entry per vocabulary id).
    ///
    /// Greedy takes the highest logit, ties to the lowest id, and allocates nothing. Otherwise the
    /// filters apply in the module's order and [`uniform`] of (seed, choice, position) picks.
    ///
    /// # Errors
    /// An empty row, a logit that is not finite, or parameters out of range.
    pub fn sample(
        &mut self,
        logits: &[f32],
        params: &SamplingParams,
        position: u32,
    ) -> Result<u32, SampleError> {
        params.validate()?;
        let best = argmax(logits, position)?;
        if params.is_greedy() || params.top_k == 1 {
            return Ok(best);
        }
        let row =
            Row { logits, max: f64::from(logits[best as usize]), temperature: f64::from(params.temperature) };
        let u = uniform(params.seed, params.choice, position);
        let k = params.top_k as usize;
        if k == 0 || k >= logits.len() {
            let total = self.weigh_all(row);
            if params.top_p >= 1.0 {
                return Ok(self.draw_from_all(f64::from(params.min_p), total, u));
            }
            self.nucleus_of_all(logits, f64::from(params.top_p) * total, total);
        } else {
            filter::top_k(logits, k, &mut self.keys);
            self.keys.sort_unstable_by(|a, b| b.cmp(a));
            if params.top_p < 1.0 {
                let total: f64 = self.keys.iter().map(|&key| row.weight(key)).sum();
                filter::nucleus(&mut self.keys, f64::from(params.top_p) * total, |key| row.weight(key));
            }
        }
        Ok(self.draw_from_keys(row, f64::from(params.min_p), u))
    }

    /// Fills `weights` and returns their sum in id order.
    fn weigh_all(&mut self, row: Row<'_>) -> f64 {
        self.weights.clear();
        self.weights.extend(row.logits.iter().map(|&logit| row.weigh(logit)));
        self.weights.iter().sum()
    }

    /// Leaves the top-p set of the whole row, whose weights are filled in, in `keys`.
    fn nucleus_of_all(&mut self, logits: &[f32], mass: f64, total: f64) {
        let Self { weights, keys } = self;
        // All tokens lighter than this weigh together at most half of what top-p may drop, so the
        // set is found without them; top_p is an f32 below 1, so that half dwarfs all rounding.
        let floor = 0.5 * (total - mass) / logits.len() as f64;
        let heavy = logits.iter().zip(&*weights).enumerate().filter(|(_, (_, w))| **w >= floor);
        keys.clear();
        keys.extend(heavy.map(|(id, (&logit, _))| filter::key(id as u32, logit)));
        filter::nucleus(keys, mass, |key| weights[filter::id(key) as usize]);
    }

    /// Inverse CDF over the whole row, min-p applied on the way.
    fn draw_from_all(&self, min_p: f64, total: f64, u: f64) -> u32 {
        let ids = || self.weights.iter().enumerate().filter(|&(_, &w)| w >= min_p);
        let total = if min_p > 0.0 { ids().map(|(_, w)| w).sum() } else { total };
        inverse_cdf(ids().map(|(id, &w)| (id as u32, w)), total, u)
    }

    /// Inverse CDF in id order over `keys`, which are in descending order, after min-p.
    fn draw_from_keys(&mut self, row: Row<'_>, min_p: f64, u: f64) -> u32 {
        let kept = self.keys.partition_point(|&key| row.weight(key) >= min_p);
        self.keys.truncate(kept);
        self.keys.sort_unstable_by_key(|&key| filter::id(key));
        self.weights.clear();
        self.weights.extend(self.keys.iter().map(|&key| row.weight(key)));
        let total = self.weights.iter().sum();
        let ids = self.keys.iter().map(|&key| filter::id(key));
        inverse_cdf(ids.zip(self.weights.iter().copied()), total, u)
    }
}

/// The first token whose cumulative weight exceeds `u · total`; weightless tokens are never chosen.
fn inverse_cdf(tokens: impl Iterator<Item = (u32, f64)>, total: f64, u: f64) -> u32 {
    let threshold = u * total;
    let mut cumulative = 0.0;
    let mut last = 0;
    for (token, weight) in tokens {
        cumulative += weight;
        if weight > 0.0 {
            last = token;
        }
        if cumulative > threshold {
            return token;
        }
    }
    // u · total can round up to total.
    last
}

/// The lowest id with the highest logit.
fn argmax(logits: &[f32], position: u32) -> Result<u32, SampleError> {
    const LANES: usize = 16;
    // Independent lanes, since neither an early exit nor one running maximum vectorises.
    let mut maxima = [f32::NEG_INFINITY; LANES];
    // x · 0 is NaN for every x that is not finite, and a NaN stays in a sum.
    let mut poison = [0.0f32; LANES];
    let (blocks, tail) = logits.as_chunks::<LANES>();
    for block in blocks {
        for lane in 0..LANES {
            maxima[lane] = if block[lane] > maxima[lane] { block[lane] } else { maxima[lane] };
            poison[lane] += block[lane] * 0.0;
        }
    }
    for (lane, &logit) in tail.iter().enumerate() {
        maxima[lane] = maxima[lane].max(logit);
        poison[lane] += logit * 0.0;
    }
    if poison.iter().any(|lane| lane.is_nan())
        && let Some(token) = logits.iter().position(|logit| !logit.is_finite())
    {
        return Err(SampleError::NotFinite { token: token as u32, value: logits[token], position });
    }
    let max = maxima.into_iter().fold(f32::NEG_INFINITY, f32::max);
    let best = logits.iter().position(|&logit| logit == max).ok_or(SampleError::EmptyRow)?;
    Ok(best as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_inverse_cdf_skips_weightless_tokens_and_never_runs_out() {
        let draw = |weights: &[(u32, f64)], u| inverse_cdf(weights.iter().copied(), 2.0, u);
        assert_eq!(draw(&[(3, 0.0), (5, 1.0), (6, 1.0)], 0.0), 5);
        assert_eq!(draw(&[(3, 0.0), (5, 1.0), (6, 1.0)], 0.5), 6);
        assert_eq!(draw(&[(3, 1.0), (5, 1.0), (6, 0.0)], 1.0), 5);
    }

    #[test]
    fn greedy_leaves_the_scratch_unallocated() {
        let mut sampler = Sampler::new();
        let row: Vec<f32> = (0..1000).map(|id| (id % 7) as f32).collect();
        assert_eq!(sampler.sample(&row, &SamplingParams::default(), 0), Ok(6));
        assert_eq!((sampler.weights.capacity(), sampler.keys.capacity()), (0, 0));
    }
}
