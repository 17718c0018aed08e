//! What an operator can set.

use std::time::Duration;

use eyrie_wire::Address;

/// How the gateway runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GatewayOptions {
    /// Where clients connect.
    pub listen: Address,
    /// The target service.
    pub target: Address,
    /// The draft service; without one every round is plain.
    pub draft: Option<Address>,
    /// Longest wait for a proposal when the gateway chooses the length; a round that misses it is
    /// plain. A request that fixes its own draft waits at least [`GatewayOptions::EXACT_DEADLINE`].
    pub draft_deadline: Duration,
    /// How long a request waits for a target that is away, at admission or in the middle.
    pub target_timeout: Duration,
    /// How long the target may compute nothing while a request waits for it. A request that has waited
    /// this long looks once; if nothing was computed by the next look, it gives that target up.
    pub stall_limit: Duration,
    /// Tokens drafted a round when the request does not say.
    pub default_k: u32,
    /// Requests that run at once; one more is refused with RESOURCE_EXHAUSTED.
    pub max_streams: u32,
    /// Longest text prompt in bytes, refused before it is tokenised.
    pub max_prompt_bytes: usize,
    /// How long running requests may take to end after a drain began.
    pub drain_grace: Duration,
}

impl GatewayOptions {
    /// Shortest wait for a proposal of a request that fixes its own draft.
    pub const EXACT_DEADLINE: Duration = Duration::from_secs(1);

    /// The defaults: 250 ms for a draft, 10 s for a target, 20 s for a stalled one, 3 tokens a round, 1,024 streams.
    #[must_use]
    pub fn new(listen: Address, target: Address, draft: Option<Address>) -> Self {
        Self {
            listen,
            target,
            draft,
            draft_deadline: Duration::from_millis(250),
            target_timeout: Duration::from_secs(10),
            stall_limit: Duration::from_secs(20),
            default_k: 3,
            max_streams: 1024,
            max_prompt_bytes: 8 << 20,
            drain_grace: Duration::from_secs(30),
        }
    }
}
