//! What an operator can set.

use std::fmt::Debug;
use std::ops::RangeInclusive;
use std::time::Duration;

use eyrie_wire::{Address, MAX_MESSAGE, MAX_VERIFY_ROWS};

const SHORTEST: Duration = Duration::from_millis(1);
const LONGEST_DRAFT: Duration = Duration::from_secs(60);
const LONGEST_TARGET: Duration = Duration::from_secs(3600);
const MAX_STREAMS: u32 = 1_000_000;
/// Targets at most, and drafts: every pair of them is a stream.
const MAX_PEERS: usize = 32;

/// An option is out of its range.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("option {option} must be {limit}, given {given}")]
pub struct OptionError {
    /// The option's name on the command line, where it has one.
    pub option: &'static str,
    /// What it may be.
    pub limit: String,
    /// What was given.
    pub given: String,
}

/// How the gateway runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GatewayOptions {
    /// Where clients connect.
    pub listen: Address,
    /// The target services, 1 to 32. Those that serve the model of the first one that comes up share the sequences.
    pub targets: Vec<Address>,
    /// The draft services, at most 32; without one every round is plain.
    pub drafts: Vec<Address>,
    /// Longest wait for a proposal when the gateway chooses the length, 1 ms to 60 s; a round that misses it
    /// is plain. A request that fixes its own draft waits at least [`GatewayOptions::EXACT_DEADLINE`].
    pub draft_deadline: Duration,
    /// How long a request waits for a target that is away, at admission or in the middle: 1 ms to 1 h.
    pub target_timeout: Duration,
    /// How long the target may compute nothing while a request waits for it, 1 ms to 1 h. A request that has waited
    /// this long looks once; if nothing was computed by the next look, it gives that target up.
    pub stall_limit: Duration,
    /// Tokens drafted a round when the request does not say, 0 to 63.
    pub default_k: u32,
    /// Requests that run at once, 1 to 1,000,000; one more is refused with RESOURCE_EXHAUSTED.
    pub max_streams: u32,
    /// Longest text prompt in bytes, 1 to [`MAX_MESSAGE`]; a longer one is refused before it is tokenised.
    pub max_prompt_bytes: usize,
    /// How long running requests may take to end after a drain began; 0 ends them at once.
    pub drain_grace: Duration,
}

impl GatewayOptions {
    /// Shortest wait for a proposal of a request that fixes its own draft.
    pub const EXACT_DEADLINE: Duration = Duration::from_secs(1);

    /// The defaults: 250 ms for a draft, 10 s for a target, 20 s for a stalled one, 3 tokens a round, 1,024 streams.
    #[must_use]
    pub fn new(
        listen: Address,
        targets: impl IntoIterator<Item = Address>,
        drafts: impl IntoIterator<Item = Address>,
    ) -> Self {
        Self {
            listen,
            targets: targets.into_iter().collect(),
            drafts: drafts.into_iter().collect(),
            draft_deadline: Duration::from_millis(250),
            target_timeout: Duration::from_secs(10),
            stall_limit: Duration::from_secs(20),
            default_k: 3,
            max_streams: 1024,
            max_prompt_bytes: 8 << 20,
            drain_grace: Duration::from_secs(30),
        }
    }

    pub(crate) fn validate(&self) -> Result<(), OptionError> {
        range("number of targets", self.targets.len(), 1..=MAX_PEERS)?;
        range("number of drafts", self.drafts.len(), 0..=MAX_PEERS)?;
        distinct("targets", &self.targets)?;
        distinct("drafts", &self.drafts)?;
        range("draft-deadline", self.draft_deadline, SHORTEST..=LONGEST_DRAFT)?;
        range("target-timeout", self.target_timeout, SHORTEST..=LONGEST_TARGET)?;
        range("stall-limit", self.stall_limit, SHORTEST..=LONGEST_TARGET)?;
        range("draft-tokens", self.default_k, 0..=MAX_VERIFY_ROWS as u32 - 1)?;
        range("max-streams", self.max_streams, 1..=MAX_STREAMS)?;
        range("max-prompt-bytes", self.max_prompt_bytes, 1..=MAX_MESSAGE)
    }
}

fn range<T: PartialOrd + Debug>(
    option: &'static str,
    given: T,
    allowed: RangeInclusive<T>,
) -> Result<(), OptionError> {
    if allowed.contains(&given) {
        return Ok(());
    }
    Err(OptionError { option, limit: format!("{allowed:?}"), given: format!("{given:?}") })
}

fn distinct(option: &'static str, given: &[Address]) -> Result<(), OptionError> {
    match given.iter().enumerate().find(|(i, address)| given[..*i].contains(address)) {
        Some((_, twice)) => {
            let (limit, given) = ("distinct addresses".to_owned(), format!("{twice} twice"));
            Err(OptionError { option, limit, given })
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(name: impl ToString) -> Address {
        Address::Unix(name.to_string().into())
    }

    fn options() -> GatewayOptions {
        GatewayOptions::new(at("gateway"), [at("target")], [at("draft")])
    }

    #[test]
    fn the_defaults_are_in_range() {
        assert_eq!(options().validate(), Ok(()));
    }

    #[test]
    fn what_is_out_of_range_is_one_line() {
        let zero = Duration::ZERO;
        for (options, line) in [
            (
                GatewayOptions { draft_deadline: zero, ..options() },
                "draft-deadline must be 1ms..=60s, given 0ns",
            ),
            (
                GatewayOptions { target_timeout: zero, ..options() },
                "target-timeout must be 1ms..=3600s, given 0ns",
            ),
            (
                GatewayOptions { stall_limit: Duration::from_secs(3601), ..options() },
                "stall-limit must be 1ms..=3600s, given 3601s",
            ),
            (
                GatewayOptions { targets: Vec::new(), ..options() },
                "number of targets must be 1..=32, given 0",
            ),
            (
                GatewayOptions { drafts: (0..33).map(at).collect(), ..options() },
                "number of drafts must be 0..=32, given 33",
            ),
            (
                GatewayOptions { targets: ["a", "b", "a"].map(at).into(), ..options() },
                "targets must be distinct addresses, given unix:a twice",
            ),
            (GatewayOptions { default_k: 64, ..options() }, "draft-tokens must be 0..=63, given 64"),
            (GatewayOptions { max_streams: 0, ..options() }, "max-streams must be 1..=1000000, given 0"),
            (
                GatewayOptions { max_prompt_bytes: 0, ..options() },
                "max-prompt-bytes must be 1..=33554432, given 0",
            ),
        ] {
            assert_eq!(options.validate().unwrap_err().to_string(), format!("option {line}"));
        }
    }
}
