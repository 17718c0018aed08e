//! Stop rules that need token ids only; stop strings are the text side's duty.

/// Why generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// This id was emitted; it is the last generated token and counts as one.
    Stop {
        /// The stop or end-of-sequence id.
        id: u32,
    },
    /// `max_tokens` tokens were generated.
    Length,
}

/// How much of an emitted run a request takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Admitted {
    /// Length of the prefix of the run that is kept; what follows was never generated.
    pub keep: usize,
    /// Set when the kept prefix ends the request.
    pub finish: Option<Finish>,
}

/// The per-token stop rules of one request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StopRules {
    stop_ids: Vec<u32>,
    eos_ids: Vec<u32>,
    ignore_eos: bool,
    min_tokens: u32,
    max_tokens: u32,
}

impl StopRules {
    /// Rules that end a request at `max_tokens` generated tokens and at nothing else.
    #[must_use]
    pub fn max_tokens(max_tokens: u32) -> Self {
        Self { stop_ids: Vec::new(), eos_ids: Vec::new(), ignore_eos: false, min_tokens: 0, max_tokens }
    }

    /// Adds the request's own stop ids; `ignore_eos` does not silence them.
    #[must_use]
    pub fn stop_ids(mut self, ids: impl IntoIterator<Item = u32>) -> Self {
        self.stop_ids = sorted(ids);
        self
    }

    /// Sets the model's end-of-sequence ids and whether the request ignores them.
    #[must_use]
    pub fn eos_ids(mut self, ids: impl IntoIterator<Item = u32>, ignore_eos: bool) -> Self {
        self.eos_ids = sorted(ids);
        self.ignore_eos = ignore_eos;
        self
    }

    /// No id ends the request before `min_tokens` tokens (the ending one included) exist.
    #[must_use]
    pub fn min_tokens(mut self, min_tokens: u32) -> Self {
        self.min_tokens = min_tokens;
        self
    }

    /// Takes `run`, emitted after `generated_so_far` tokens, one token at a time: a stop id is
    /// looked for before the length cap, and the first hit wins. A request whose cap is already
    /// reached keeps nothing.
    #[must_use]
    pub fn admit(&self, generated_so_far: u32, run: &[u32]) -> Admitted {
        if generated_so_far >= self.max_tokens {
            return Admitted { keep: 0, finish: Some(Finish::Length) };
        }
        let mut generated = generated_so_far;
        for (i, &id) in run.iter().enumerate() {
            generated += 1;
            if generated >= self.min_tokens && self.stops(id) {
                return Admitted { keep: i + 1, finish: Some(Finish::Stop { id }) };
            }
            if generated == self.max_tokens {
                return Admitted { keep: i + 1, finish: Some(Finish::Length) };
            }
        }
        Admitted { keep: run.len(), finish: None }
    }

    fn stops(&self, id: u32) -> bool {
        self.stop_ids.binary_search(&id).is_ok()
            || (!self.ignore_eos && self.eos_ids.binary_search(&id).is_ok())
    }
}

fn sorted(ids: impl IntoIterator<Item = u32>) -> Vec<u32> {
    let mut ids: Vec<u32> = ids.into_iter().collect();
    ids.sort_unstable();
    ids.dedup();
    ids
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn kept(keep: usize, finish: Option<Finish>) -> Admitted {
        Admitted { keep, finish }
    }

    #[test]
    fn a_stop_id_inside_a_run_cuts_the_run_and_is_kept() {
        let rules = StopRules::max_tokens(10).stop_ids([9, 4]).eos_ids([0], false);
        assert_eq!(rules.admit(0, &[1, 4, 9]), kept(2, Some(Finish::Stop { id: 4 })));
        assert_eq!(rules.admit(0, &[1, 9, 4]), kept(2, Some(Finish::Stop { id: 9 })));
        assert_eq!(rules.admit(0, &[1, 0, 9]), kept(2, Some(Finish::Stop { id: 0 })));
        assert_eq!(rules.admit(0, &[1, 2]), kept(2, None));
        assert_eq!(rules.admit(0, &[]), kept(0, None));
    }

    #[test]
    fn a_stop_id_at_the_cap_is_a_stop_and_not_a_length() {
        let rules = StopRules::max_tokens(3).stop_ids([9]);
        assert_eq!(rules.admit(1, &[1, 9, 1]), kept(2, Some(Finish::Stop { id: 9 })));
        assert_eq!(rules.admit(1, &[1, 1, 9]), kept(2, Some(Finish::Length)));
        assert_eq!(rules.admit(3, &[9]), kept(0, Some(Finish::Length)));
    }

    #[test]
    fn ignore_eos_silences_eos_but_not_the_request_s_ids() {
        let rules = StopRules::max_tokens(10).stop_ids([9]).eos_ids([0], true);
        assert_eq!(rules.admit(0, &[0, 0, 9]), kept(3, Some(Finish::Stop { id: 9 })));
    }

    #[test]
    fn min_tokens_counts_the_ending_token() {
        let rules = StopRules::max_tokens(10).stop_ids([9]).min_tokens(3);
        assert_eq!(rules.admit(0, &[9, 9, 9, 9]), kept(3, Some(Finish::Stop { id: 9 })));
        assert_eq!(rules.admit(2, &[9]), kept(1, Some(Finish::Stop { id: 9 })));
    }

    proptest! {
        #[test]
        fn runs_of_any_length_end_where_single_tokens_do(
            tokens in prop::collection::vec(0u32..6, 1..40),
            cuts in prop::collection::vec(1usize..6, 40),
            max in 1u32..45, min in 0u32..10, ignore: bool,
        ) {
            let rules = StopRules::max_tokens(max).stop_ids([3]).eos_ids([5], ignore).min_tokens(min);
            let feed = |sizes: &mut dyn Iterator<Item = usize>| {
                let mut out = Vec::new();
                let mut rest = &tokens[..];
                while !rest.is_empty() {
                    let (run, tail) = rest.split_at(sizes.next().unwrap_or(1).min(rest.len()));
                    let admitted = rules.admit(out.len() as u32, run);
                    out.extend_from_slice(&run[..admitted.keep]);
                    if admitted.finish.is_some() {
                        return (out, admitted.finish);
                    }
                    rest = tail;
                }
                (out, None)
            };
            prop_assert_eq!(feed(&mut cuts.iter().copied()), feed(&mut std::iter::repeat(1)));
        }
    }
}
