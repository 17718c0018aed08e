//! What the engine refuses, with the limit and the given value, before it costs anything.

use eyrie_speculation::{MAX_NODES, Proposal, SamplingParams, StopRules};
use eyrie_wire::v1::{self, ItemError};
use eyrie_wire::{MAX_VERIFY_ROWS, Reason, item_error};

use super::sequence::Request;

// What the protocol lets a Verify carry, a proposal can hold.
const _: () = assert!(MAX_VERIFY_ROWS == MAX_NODES);

/// Stop ids of one request at most.
const MAX_STOP_IDS: usize = 64;
/// Steps of one credit at most: what a repeated Verify can make the engine replay.
const MAX_STEPS: u32 = 1024;

/// Sizes of the served model and its cache.
#[derive(Debug, Clone)]
pub(crate) struct Limits {
    pub(crate) vocab: u32,
    /// Prompt and generated tokens together.
    pub(crate) context: u32,
    /// Tokens that the KV cache holds.
    pub(crate) kv_capacity: usize,
    /// Ids that end a sequence unless it ignores them.
    pub(crate) eos_ids: Vec<u32>,
    /// Whether auxiliary hidden states are captured.
    pub(crate) captures: bool,
}

impl Limits {
    /// Checks an Open and resolves it.
    pub(crate) fn request(&self, open: v1::Open) -> Result<Request, ItemError> {
        let length = open.tokens.len();
        if open.generated as usize >= length.max(1) {
            return Err(refuse(format!(
                "generated must be below the number of tokens, {length}, given {}",
                open.generated
            )));
        }
        if length == 0 {
            return Err(refuse("tokens must hold at least one id, given none"));
        }
        self.check_ids("tokens", &open.tokens)?;
        let sampling = sampling(open.sampling)?;
        let limits = open.limits.ok_or_else(|| refuse("limits must be set"))?;
        if limits.max_tokens <= open.generated {
            return Err(refuse(format!(
                "limits.max_tokens must be above generated = {}, given {}",
                open.generated, limits.max_tokens
            )));
        }
        if limits.stop_ids.len() > MAX_STOP_IDS {
            let given = limits.stop_ids.len();
            return Err(refuse(format!("limits.stop_ids may hold {MAX_STOP_IDS} ids, given {given}")));
        }
        self.check_ids("limits.stop_ids", &limits.stop_ids)?;
        self.check_room(length - open.generated as usize, limits.max_tokens as usize)?;
        if open.features && !self.captures {
            let why = "features: this target captures no hidden states (ModelCard.aux_layers is empty)";
            return Err(item_error(Reason::Unsupported, why));
        }
        let rules = StopRules::max_tokens(limits.max_tokens)
            .stop_ids(limits.stop_ids)
            .eos_ids(self.eos_ids.iter().copied(), limits.ignore_eos);
        let v1::Open { tokens, generated, features, priority, .. } = open;
        Ok(Request { tokens, generated, sampling, rules, features, priority })
    }

    /// Checks the drafted part of a Verify.
    pub(crate) fn proposal(&self, verify: &v1::Verify) -> Result<Proposal, ItemError> {
        let v1::Verify { tokens, parents, steps, .. } = verify;
        if *steps > if tokens.is_empty() { MAX_STEPS } else { 1 } {
            let limit = if tokens.is_empty() { MAX_STEPS } else { 1 };
            return Err(refuse(format!(
                "steps may be at most {limit} with {} drafted tokens, given {steps}",
                tokens.len()
            )));
        }
        if let Some(parent) = parents.iter().find(|&&parent| parent as usize >= MAX_VERIFY_ROWS) {
            return Err(refuse(format!("parents must be below {MAX_VERIFY_ROWS}, given {parent}")));
        }
        self.check_ids("tokens", tokens)?;
        let made = match parents.is_empty() {
            true => Proposal::chain(tokens.clone()),
            false => Proposal::try_new(tokens.clone(), parents.iter().map(|&parent| parent as u16).collect()),
        };
        made.map_err(|e| refuse(e.to_string()))
    }

    fn check_ids(&self, field: &str, ids: &[u32]) -> Result<(), ItemError> {
        match ids.iter().position(|&id| id >= self.vocab) {
            None => Ok(()),
            Some(at) => Err(item_error(
                Reason::TokenRange,
                format!("{field}[{at}] must be below the vocabulary size {}, given {}", self.vocab, ids[at]),
            )),
        }
    }

    /// Refuses what can never fit. With the whole cache to itself every other request can be served to its end, which
    /// is why none that was accepted fails for memory.
    fn check_room(&self, prompt: usize, max_tokens: usize) -> Result<(), ItemError> {
        let context = self.context as usize;
        if prompt + max_tokens > context {
            return Err(item_error(
                Reason::Context,
                format!(
                    "prompt and max_tokens must fit the context of {context} tokens, given {prompt} + {max_tokens}"
                ),
            ));
        }
        if prompt + max_tokens + MAX_VERIFY_ROWS > self.kv_capacity {
            return Err(item_error(
                Reason::KvCapacity,
                format!(
                    "prompt, max_tokens and {MAX_VERIFY_ROWS} verify rows must fit the KV cache of {} tokens, given {prompt} + {max_tokens}",
                    self.kv_capacity
                ),
            ));
        }
        Ok(())
    }
}

fn sampling(given: Option<v1::Sampling>) -> Result<SamplingParams, ItemError> {
    let s = given.ok_or_else(|| refuse("sampling must be set"))?;
    SamplingParams::try_new(s.temperature, s.top_k, s.top_p, s.min_p, s.seed, s.choice)
        .map_err(|e| refuse(format!("sampling.{e}")))
}

/// An item that is malformed.
pub(crate) fn refuse(message: impl Into<String>) -> ItemError {
    item_error(Reason::InvalidArgument, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits() -> Limits {
        Limits { vocab: 100, context: 50, kv_capacity: 100, eos_ids: vec![0], captures: false }
    }

    fn open() -> v1::Open {
        v1::Open {
            tokens: vec![1, 2, 3],
            generated: 0,
            sampling: Some(v1::Sampling { top_p: 1.0, ..Default::default() }),
            limits: Some(v1::Limits { max_tokens: 9, ..Default::default() }),
            features: false,
            priority: 0,
        }
    }

    fn with_limits(change: impl FnOnce(&mut v1::Limits)) -> v1::Open {
        let mut open = open();
        open.limits.as_mut().map(change);
        open
    }

    fn refusal(open: v1::Open) -> (String, String) {
        let error = limits().request(open).unwrap_err();
        (error.reason, error.message)
    }

    #[test]
    fn a_request_that_fits_the_whole_cache_is_taken_whatever_it_has_generated() {
        let fitting = with_limits(|l| l.max_tokens = 33);
        assert!(limits().request(fitting.clone()).is_ok());
        let reopened = v1::Open { tokens: vec![1, 2, 3, 4, 5], generated: 2, ..fitting };
        assert!(limits().request(reopened).is_ok());
        assert_eq!(refusal(with_limits(|l| l.max_tokens = 34)).0, "KV_CAPACITY");
    }

    #[test]
    fn refusals_of_an_open_name_field_limit_and_value() {
        for (open, reason, parts) in [
            (v1::Open { tokens: vec![], ..open() }, "INVALID_ARGUMENT", ["tokens", "none"]),
            (v1::Open { tokens: vec![1, 100], ..open() }, "TOKEN_RANGE", ["tokens[1]", "given 100"]),
            (v1::Open { generated: 3, ..open() }, "INVALID_ARGUMENT", ["generated", "given 3"]),
            (v1::Open { generated: u32::MAX, ..open() }, "INVALID_ARGUMENT", ["generated", "4294967295"]),
            (v1::Open { sampling: None, ..open() }, "INVALID_ARGUMENT", ["sampling", "set"]),
            (
                v1::Open { sampling: Some(v1::Sampling::default()), ..open() },
                "INVALID_ARGUMENT",
                ["sampling.top_p", "given 0"],
            ),
            (v1::Open { limits: None, ..open() }, "INVALID_ARGUMENT", ["limits", "set"]),
            (v1::Open { features: true, ..open() }, "UNSUPPORTED", ["features", "aux_layers"]),
            (with_limits(|l| l.max_tokens = 0), "INVALID_ARGUMENT", ["max_tokens", "given 0"]),
            (with_limits(|l| l.max_tokens = 48), "CONTEXT", ["50 tokens", "3 + 48"]),
            (with_limits(|l| l.max_tokens = u32::MAX), "CONTEXT", ["50 tokens", "4294967295"]),
            (with_limits(|l| l.max_tokens = 40), "KV_CAPACITY", ["100 tokens", "3 + 40"]),
            (with_limits(|l| l.stop_ids = vec![7, 777]), "TOKEN_RANGE", ["stop_ids[1]", "777"]),
            (with_limits(|l| l.stop_ids = vec![7; 65]), "INVALID_ARGUMENT", ["64", "given 65"]),
        ] {
            let (got, message) = refusal(open);
            assert_eq!(got, reason, "{message}");
            assert!(parts.iter().all(|part| message.contains(part)), "{message}");
        }
    }

    #[test]
    fn a_proposal_is_checked_against_rows_vocabulary_and_tree_shape() {
        let verify = |tokens: &[u32], parents: &[u32], steps| v1::Verify {
            tokens: tokens.to_vec(),
            parents: parents.to_vec(),
            steps,
            ..Default::default()
        };
        assert!(limits().proposal(&verify(&[1, 2], &[0, 0], 0)).is_ok());
        assert!(limits().proposal(&verify(&[], &[], 16)).is_ok());
        for (verify, parts) in [
            (verify(&[100], &[], 0), ["tokens[0]", "given 100"]),
            (verify(&[1; 64], &[], 0), ["at most 63", "given 64"]),
            (verify(&[1, 2], &[0], 0), ["2 tokens", "1 parents"]),
            (verify(&[1, 2], &[0, 2], 0), ["parents[1]", "given 2"]),
            (verify(&[1, 2], &[0, 70_000], 0), ["below 64", "given 70000"]),
            (verify(&[1, 1], &[0, 0], 0), ["siblings", "both 1"]),
            (verify(&[1], &[], 2), ["at most 1", "given 2"]),
            (verify(&[], &[], 1025), ["at most 1024", "given 1025"]),
        ] {
            let message = limits().proposal(&verify).unwrap_err().message;
            assert!(parts.iter().all(|part| message.contains(part)), "{message}");
        }
    }
}
