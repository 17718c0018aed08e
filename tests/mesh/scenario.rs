//! What happens in a seed: all of it is drawn before anything runs.

use std::time::Duration;

use eyrie_speculation::{SamplingParams, StopRules};
use eyrie_target::TargetOptions;
use eyrie_wire::Address;
use eyrie_wire::v1::generate_request::Prompt;
use eyrie_wire::v1::speculation::Mode;
use eyrie_wire::v1::{GenerateRequest, Speculation, TokenIds, TreeShape};
use tonic::Code;

use crate::draft::{MAX_DRAFT, Mood};
use crate::lm::{EOS, Plain, VOCAB, plain};
use crate::net::Weather;
use crate::rng::Rng;

/// Longest time until the other end hears of a break (ms).
pub(crate) const LATENESS: u32 = 8000;

/// How bad it gets, and so what a request may end with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Nothing breaks but drafts: every request ends with its tokens.
    Calm,
    /// No more breaks and restarts than a request survives: the same.
    Rough,
    /// Outages without measure: UNAVAILABLE and BUSY are answers too.
    Storm,
    /// Rounds come twice, or in another order, and then a contradiction may end a request with INTERNAL.
    Hostile,
}

/// One request of a client.
#[derive(Debug, Clone)]
pub(crate) struct Ask {
    pub(crate) gateway: usize,
    pub(crate) after: Duration,
    pub(crate) request: GenerateRequest,
    pub(crate) params: SamplingParams,
    pub(crate) prompt: Vec<u32>,
    pub(crate) plain: Plain,
    pub(crate) deadline: Option<Duration>,
    /// The client goes away after so many chunks.
    pub(crate) leaves_after: Option<u32>,
    /// The client reads a chunk in so long.
    pub(crate) reads_in: Duration,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Node {
    Target(usize),
    Draft,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Event {
    TargetDies {
        target: usize,
        down: Duration,
    },
    TargetFreezes(usize, Duration),
    DraftDies {
        down: Duration,
    },
    DraftTurns(Mood),
    StreamsBreak(Node),
    /// Takes no new sequences, is stopped, and comes back.
    TargetDrains {
        target: usize,
        down: Duration,
    },
    /// Messages come once and in order again, on new streams: a Close that overtook its Open has freed nothing, and then
    /// the end of the stream does.
    OrderReturns,
    GatewayDies(usize),
}

#[derive(Debug, Clone)]
pub(crate) struct Scenario {
    pub(crate) kind: Kind,
    pub(crate) weather: Weather,
    pub(crate) target: TargetOptions,
    /// Longest step (ms).
    pub(crate) step: u32,
    pub(crate) mood: Mood,
    pub(crate) targets: usize,
    pub(crate) gateways: usize,
    /// How long a gateway waits for the target: where a request has to survive, longer than any outage.
    pub(crate) target_timeout: Duration,
    pub(crate) asks: Vec<Ask>,
    /// Peers of the target's own that keep no rules.
    pub(crate) rude: u32,
    pub(crate) events: Vec<(Duration, Event)>,
}

impl Scenario {
    pub(crate) fn draw(rng: &mut Rng) -> Self {
        let kind = rng.pick(&[Kind::Calm, Kind::Rough, Kind::Rough, Kind::Storm, Kind::Hostile]);
        let (targets, gateways) = (rng.pick(&[1, 1, 2]), rng.pick(&[1, 1, 2]));
        let asks = (0..rng.within(1..=7)).map(|_| ask(rng, gateways)).collect();
        Self {
            kind,
            weather: weather(rng, kind),
            target: target(rng),
            step: rng.pick(&[1, 3, 20]),
            mood: rng.pick(&[Mood::Fine, Mood::Fine, Mood::Moody, Mood::Mad, Mood::Frozen]),
            targets,
            gateways,
            target_timeout: Duration::from_secs(if kind == Kind::Storm { 10 } else { 60 }),
            asks,
            rude: rng.within(0..=2),
            events: events(rng, kind, targets, gateways),
        }
    }

    /// Whether a request may end with `code` instead of its tokens.
    pub(crate) fn allows(&self, ask: &Ask, code: Code) -> bool {
        match code {
            Code::DeadlineExceeded => ask.deadline.is_some(),
            // A deadline that passes while no target is there.
            Code::Unavailable if ask.deadline.is_some() => self.kind != Kind::Calm,
            Code::Unavailable | Code::ResourceExhausted => matches!(self.kind, Kind::Storm | Kind::Hostile),
            // An error says of no item that it answers it: that of a fetch which came twice may be taken for a round's.
            Code::InvalidArgument => self.weather.doubling > 0 || self.weather.swapping > 0,
            // What comes twice is taken once; what comes in another order may contradict.
            Code::Internal => self.weather.swapping > 0,
            _ => false,
        }
    }
}

fn weather(rng: &mut Rng, kind: Kind) -> Weather {
    let latency = rng.pick(&[0, 2, 10, 40]);
    let lateness = rng.pick(&[0, 20, 1000, LATENESS]);
    let (breaking, breaks) = match kind {
        Kind::Calm => (0, 0),
        // One less than the times that a request is opened again without a new token.
        Kind::Rough => (20, 2),
        Kind::Storm => (rng.pick(&[20, 60, 150]), 200),
        Kind::Hostile => (5, 5),
    };
    let (doubling, swapping) = match kind {
        Kind::Hostile => (rng.pick(&[0, 50, 200]), rng.pick(&[0, 50, 200])),
        _ => (0, 0),
    };
    Weather { latency, lateness, breaking, breaks, doubling, swapping }
}

fn target(rng: &mut Rng) -> TargetOptions {
    let prefill_chunk = rng.pick(&[1_usize, 7, 16, 64]);
    // Bytes of a ring slot, generously.
    let slots = (2 * prefill_chunk).div_ceil(8) as u32 + rng.pick(&[1, 4, 64]);
    TargetOptions {
        kv_tokens: rng.pick(&[192, 256, 512, 1024]),
        threads: Some(1),
        prefill_chunk,
        // Four times as many may wait: enough for all, and for what rude peers leave behind.
        max_sequences: rng.within(6..=9) as usize,
        ring_bytes: Some(u64::from(slots) * 9400 + 4096),
        prefix_cache_bytes: rng.pick(&[Some(0), Some(40_000), None]),
        aux_cache_bytes: rng.pick(&[0, 80_000, 1 << 20]),
        capture: Some(rng.pick(&[&[1, 2, 4][..], &[1, 2, 4], &[1, 2, 4], &[]]).to_vec()),
        ..TargetOptions::new("mesh", Address::Tcp("target".to_owned()))
    }
}

fn events(rng: &mut Rng, kind: Kind, targets: usize, gateways: usize) -> Vec<(Duration, Event)> {
    let most = match kind {
        Kind::Calm => 0,
        Kind::Rough => 2,
        Kind::Storm => 8,
        Kind::Hostile => 3,
    };
    let outage = if kind == Kind::Storm { 30_000 } else { 6_000 };
    let mut events: Vec<_> = (0..rng.within(0..=most))
        .map(|_| {
            let target = rng.within(0..=targets as u32 - 1) as usize;
            let event = match rng.within(0..=if kind == Kind::Storm { 6 } else { 5 }) {
                0 => Event::TargetDies { target, down: rng.millis(0..=outage) },
                1 => Event::StreamsBreak(Node::Target(target)),
                2 => Event::StreamsBreak(Node::Draft),
                3 => Event::DraftDies { down: rng.millis(0..=outage) },
                4 => Event::TargetFreezes(target, rng.millis(100..=outage)),
                5 => Event::TargetDrains { target, down: rng.millis(0..=outage / 2) },
                _ => Event::GatewayDies(rng.within(0..=gateways as u32 - 1) as usize),
            };
            (rng.millis(1..=4000), event)
        })
        .collect();
    // Drafts may do what they want in any kind.
    for _ in 0..rng.within(0..=2) {
        let mood = rng.pick(&[Mood::Fine, Mood::Moody, Mood::Mad, Mood::Frozen]);
        events.push((rng.millis(1..=4000), Event::DraftTurns(mood)));
    }
    if kind == Kind::Hostile {
        events.push((Duration::from_secs(10), Event::OrderReturns));
    }
    events.sort_by_key(|(at, _)| *at);
    events
}

/// A prompt; half of them share their beginning.
fn prompt(rng: &mut Rng) -> Vec<u32> {
    let length = rng.pick(&[1, 2, 9, 16, 33, 60]);
    match rng.chance(500) {
        true => (0..length).map(|i| i * 7 % VOCAB).collect(),
        false => (0..length).map(|_| rng.within(0..=VOCAB - 1)).collect(),
    }
}

fn ask(rng: &mut Rng, gateways: usize) -> Ask {
    let prompt = prompt(rng);
    let params = match rng.chance(400) {
        true => SamplingParams::default(),
        false => SamplingParams {
            temperature: rng.pick(&[0.5, 1.0, 1.5]),
            top_k: rng.pick(&[0, 0, 3, 50]),
            top_p: rng.pick(&[1.0, 0.9]),
            min_p: rng.pick(&[0.0, 0.05]),
            seed: rng.next(),
            choice: 0,
        },
    };
    let max_tokens = rng.pick(&[1, 2, 5, 17, 40]);
    let ignore_eos = rng.chance(300);
    let stop_ids: Vec<u32> = (0..rng.pick(&[0, 0, 3])).map(|_| rng.within(0..=VOCAB - 1)).collect();
    let rules = StopRules::max_tokens(max_tokens).stop_ids(stop_ids.clone()).eos_ids(EOS, ignore_eos);
    let request = GenerateRequest {
        prompt: Some(Prompt::Ids(TokenIds { ids: prompt.clone() })),
        max_tokens: Some(max_tokens),
        temperature: Some(params.temperature),
        top_p: Some(params.top_p),
        top_k: Some(params.top_k),
        min_p: Some(params.min_p),
        seed: Some(params.seed),
        stop_ids,
        ignore_eos,
        speculation: Some(speculation(rng)),
        priority: rng.pick(&[-1, 0, 0, 5]),
        ..Default::default()
    };
    Ask {
        gateway: rng.within(0..=gateways as u32 - 1) as usize,
        after: rng.millis(0..=2000),
        plain: plain(&prompt, &params, &rules),
        request,
        params,
        prompt,
        deadline: rng.chance(100).then(|| rng.millis(10..=3000)),
        leaves_after: rng.chance(120).then(|| rng.within(0..=6)),
        reads_in: rng.pick(&[Duration::ZERO, Duration::ZERO, Duration::from_millis(300)]),
    }
}

fn speculation(rng: &mut Rng) -> Speculation {
    let trace = rng.chance(500);
    match rng.within(0..=5) {
        0 => Speculation { mode: Mode::Off as i32, trace, ..Default::default() },
        1 => {
            Speculation { max_draft_tokens: Some(rng.pick(&[1, 3, MAX_DRAFT])), trace, ..Default::default() }
        }
        2 => {
            let tree = Some(TreeShape { top_k: 2, levels: 4, nodes: 8 });
            Speculation { tree, trace, ..Default::default() }
        }
        _ => Speculation { trace, ..Default::default() },
    }
}
