//! Turning a logits row into a token. Order of operations, as in vLLM and SGLang: temperature, top-k,
//! top-p over what top-k left (renormalised), min-p relative to the largest probability, then the
//! inverse CDF in token-id order with the position's own uniform.

mod filter;
mod sampler;

pub use sampler::{SampleError, Sampler};

/// Temperatures below this are greedy: dividing by them would overflow.
pub const GREEDY_BELOW: f32 = 1e-5;

/// A sampling parameter outside its range.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[error("{field} must be {limit}, given {value}")]
pub struct ParamsError {
    /// Name of the field.
    pub field: &'static str,
    /// The accepted range in words.
    pub limit: &'static str,
    /// The value given.
    pub value: f32,
}

/// How a request samples. The default is greedy with every filter off.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SamplingParams {
    /// Divides the logits; below [`GREEDY_BELOW`] the highest logit wins.
    pub temperature: f32,
    /// Keeps the `top_k` highest logits, ties to the lower ids; 0 = off.
    pub top_k: u32,
    /// Keeps the fewest most probable tokens whose mass reaches `top_p` of what top-k left; 1 = off.
    pub top_p: f32,
    /// Keeps tokens with at least `min_p` times the largest probability; 0 = off.
    pub min_p: f32,
    /// Seed of the request's uniforms.
    pub seed: u64,
    /// Which of the request's completions this is.
    pub choice: u32,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 0, choice: 0 }
    }
}

impl SamplingParams {
    /// Parameters that passed [`SamplingParams::validate`].
    ///
    /// # Errors
    /// As [`SamplingParams::validate`].
    pub fn try_new(
        temperature: f32,
        top_k: u32,
        top_p: f32,
        min_p: f32,
        seed: u64,
        choice: u32,
    ) -> Result<Self, ParamsError> {
        let params = Self { temperature, top_k, top_p, min_p, seed, choice };
        params.validate()?;
        Ok(params)
    }

    /// Checks every field's range.
    ///
    /// # Errors
    /// The first field that is out of range, with its limit and the value given.
    pub fn validate(&self) -> Result<(), ParamsError> {
        // Positive form throughout: a NaN satisfies none of these.
        let checks = [
            (
                "temperature",
                "finite and at least 0",
                self.temperature,
                self.temperature.is_finite() && self.temperature >= 0.0,
            ),
            ("top_p", "above 0 and at most 1", self.top_p, self.top_p > 0.0 && self.top_p <= 1.0),
            ("min_p", "between 0 and 1", self.min_p, (0.0..=1.0).contains(&self.min_p)),
        ];
        match checks.into_iter().find(|&(.., ok)| !ok) {
            Some((field, limit, value, _)) => Err(ParamsError { field, limit, value }),
            None => Ok(()),
        }
    }

    /// Whether the highest logit is taken and no uniform is drawn.
    #[must_use]
    pub fn is_greedy(&self) -> bool {
        self.temperature < GREEDY_BELOW
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_named_with_the_value() {
        let ok = SamplingParams::default();
        for (params, text) in [
            (
                SamplingParams { temperature: -0.5, ..ok },
                "temperature must be finite and at least 0, given -0.5",
            ),
            (
                SamplingParams { temperature: f32::NAN, ..ok },
                "temperature must be finite and at least 0, given NaN",
            ),
            (
                SamplingParams { temperature: f32::INFINITY, ..ok },
                "temperature must be finite and at least 0, given inf",
            ),
            (SamplingParams { top_p: 0.0, ..ok }, "top_p must be above 0 and at most 1, given 0"),
            (SamplingParams { top_p: f32::NAN, ..ok }, "top_p must be above 0 and at most 1, given NaN"),
            (SamplingParams { top_p: 1.5, ..ok }, "top_p must be above 0 and at most 1, given 1.5"),
            (SamplingParams { min_p: f32::NAN, ..ok }, "min_p must be between 0 and 1, given NaN"),
            (SamplingParams { min_p: -0.1, ..ok }, "min_p must be between 0 and 1, given -0.1"),
        ] {
            assert_eq!(params.validate().unwrap_err().to_string(), text);
        }
        assert!(SamplingParams::try_new(2.0, 5, 0.5, 1.0, 1, 0).is_ok());
    }

    #[test]
    fn tiny_temperatures_are_greedy() {
        let at = |temperature| SamplingParams { temperature, ..SamplingParams::default() };
        assert!(at(0.0).is_greedy() && at(9.9e-6).is_greedy());
        assert!(!at(1e-5).is_greedy());
    }
}
