//! A peer of the target that keeps no rules: it repeats, skips, mixes up and forgets. Whatever it sends, what the
//! target commits is what plain decoding gives, a repeated round gets the same reply, and nobody else notices.

use std::collections::BTreeMap;
use std::time::Duration;

use eyrie_wire::v1::target_client::TargetClient;
use eyrie_wire::v1::target_item::Op;
use eyrie_wire::v1::target_out::Body;
use eyrie_wire::v1::{
    Close, Committed, FetchFeatures, Hello, Limits, Open, Revoke, Sampling, TargetFrame, TargetItem,
    TargetOut, TargetReply, Verify,
};
use eyrie_wire::{Address, Dialer, PROTOCOL_VERSION, PeerChannel, Reason};
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

use crate::lm::VOCAB;
use crate::net::Network;
use crate::rng::Rng;
use crate::scenario::Ask;

/// What was asked in peace is answered within this.
const ANSWERED: Duration = Duration::from_secs(2);

/// Reasons that answer nonsense.
const REASONS: [Reason; 8] = [
    Reason::BaseLen,
    Reason::InvalidArgument,
    Reason::TokenRange,
    Reason::UnknownSeq,
    Reason::DuplicateSeq,
    Reason::Busy,
    Reason::Unsupported,
    Reason::Draining,
];

/// A sequence as far as the peer knows it.
struct Known {
    ask: Ask,
    /// Prompt and plain tokens.
    truth: Vec<u32>,
    round: u32,
    kv_len: u32,
    seen: BTreeMap<u32, Committed>,
    last: Option<Verify>,
    /// Every round that was asked for: number, base and steps.
    asked: Vec<(u32, u32, u32)>,
}

pub(crate) struct Rude {
    pub(crate) rng: Rng,
    pub(crate) boot: u64,
    /// Whom it bothers.
    pub(crate) target: Address,
    pub(crate) dialer: Dialer,
    pub(crate) network: Network,
    pub(crate) asks: Vec<Ask>,
    /// Nothing breaks: what is asked is answered.
    pub(crate) is_calm: bool,
}

struct Talk {
    rng: Rng,
    boot: u64,
    network: Network,
    asks: Vec<Ask>,
    is_calm: bool,
    client: TargetClient<PeerChannel>,
    epoch: u64,
    next_seq: u64,
    known: BTreeMap<u64, Known>,
}

impl Rude {
    /// Talks until it has had enough; errors say what the target must not have done.
    pub(crate) async fn run(mut self) -> Result<(), String> {
        let mut talk: Option<Talk> = None;
        for _ in 0..self.rng.within(1..=4) {
            let Ok(channel) = self.dialer.connect(&self.target).await else {
                sleep(Duration::from_millis(500)).await;
                continue;
            };
            let client = TargetClient::new(channel);
            let mut next = match talk.take() {
                Some(talk) => Talk { client, ..talk },
                None => Talk {
                    rng: self.rng.fork(),
                    boot: self.boot,
                    network: self.network.clone(),
                    asks: self.asks.clone(),
                    is_calm: self.is_calm,
                    client,
                    epoch: 0,
                    next_seq: 1,
                    known: BTreeMap::new(),
                },
            };
            next.stream().await?;
            talk = Some(next);
            let pause = self.rng.pick(&[0, 10, 6000]);
            sleep(self.rng.millis(0..=pause)).await;
        }
        Ok(())
    }
}

impl Talk {
    /// One stream, until it breaks or bores.
    async fn stream(&mut self) -> Result<(), String> {
        let (frames, outgoing) = mpsc::channel(64);
        let hello = Hello { protocol_version: PROTOCOL_VERSION, boot_id: self.boot, ..Default::default() };
        let _ = frames.try_send(TargetFrame { hello: Some(hello), items: Vec::new() });
        let Ok(replies) = self.client.rounds(ReceiverStream::new(outgoing)).await else { return Ok(()) };
        let mut replies = replies.into_inner();
        let Ok(Some(TargetReply { hello: Some(hello), .. })) = replies.message().await else { return Ok(()) };
        if hello.epoch != self.epoch {
            // Another boot knows nothing of what was.
            self.known.clear();
            self.epoch = hello.epoch;
        }
        for _ in 0..self.rng.within(1..=25) {
            let items = self.nonsense();
            if self.rng.chance(80) {
                self.unary(items).await?;
            } else if frames.send(TargetFrame { hello: None, items }).await.is_err() {
                return Ok(());
            }
            let patience = self.rng.millis(0..=40);
            if timeout(patience, self.listen(&mut replies)).await.unwrap_or(Ok(true))? {
                continue;
            }
            return Ok(());
        }
        if self.is_calm {
            let _ = timeout(ANSWERED, self.listen(&mut replies)).await.unwrap_or(Ok(true))?;
            self.repeat().await?;
        }
        let closes = self.known.keys().map(|&seq| item(seq, Op::Close(Close {}))).collect();
        let _ = frames.send(TargetFrame { hello: None, items: closes }).await;
        drop(frames);
        self.known.clear();
        // The target answers what it was asked, then ends the stream.
        while self.listen_once(&mut replies).await? {}
        Ok(())
    }

    async fn listen(&mut self, replies: &mut Streaming<TargetReply>) -> Result<bool, String> {
        while self.listen_once(replies).await? {}
        Ok(false)
    }

    async fn listen_once(&mut self, replies: &mut Streaming<TargetReply>) -> Result<bool, String> {
        let Ok(Some(reply)) = replies.message().await else { return Ok(false) };
        reply.outs.into_iter().try_for_each(|out| self.hear(out))?;
        Ok(true)
    }

    /// A round that was answered is answered alike when it is asked for again.
    async fn repeat(&mut self) -> Result<(), String> {
        let latest: Vec<_> =
            self.known.iter().filter_map(|(&seq, known)| Some((seq, known.latest()?))).collect();
        for (seq, (verify, first)) in latest {
            let hello =
                Hello { protocol_version: PROTOCOL_VERSION, boot_id: self.boot, ..Default::default() };
            let frame = TargetFrame { hello: Some(hello), items: vec![item(seq, Op::Verify(verify))] };
            let reply = self.client.round(frame).await.map_err(|e| format!("a repeated round: {e}"))?;
            let outs = reply.into_inner().outs;
            let is_same = |out: &TargetOut| out.body == Some(Body::Committed(first.clone()));
            if !outs.first().is_some_and(is_same) {
                return Err(format!(
                    "sequence {seq}: a repeated round is answered with {outs:?}, at first {first:?}"
                ));
            }
            self.network.count("repeated in peace", 1);
        }
        Ok(())
    }

    /// The same items by the unary twin, which takes one item a sequence.
    async fn unary(&mut self, items: Vec<TargetItem>) -> Result<(), String> {
        let hello = Hello { protocol_version: PROTOCOL_VERSION, boot_id: self.boot, ..Default::default() };
        let items = items.into_iter().take(1).collect();
        let frame = TargetFrame { hello: Some(hello), items };
        let patience = Duration::from_secs(2);
        let Ok(Ok(reply)) = timeout(patience, self.client.round(frame)).await else { return Ok(()) };
        reply.into_inner().outs.into_iter().try_for_each(|out| self.hear(out))
    }

    fn hear(&mut self, out: TargetOut) -> Result<(), String> {
        let seq = out.seq;
        match out.body {
            Some(Body::Committed(committed)) => {
                let Some(known) = self.known.get_mut(&seq) else { return Ok(()) };
                let is_new = known.hear(committed).map_err(|why| format!("sequence {seq}: {why}"))?;
                self.network.count(if is_new { "rude rounds" } else { "replayed" }, 1);
            }
            Some(Body::Error(error)) => {
                if !REASONS.iter().any(|reason| reason.as_str() == error.reason) {
                    return Err(format!("sequence {seq}: nonsense was answered with {error:?}"));
                }
                self.network.count("nonsense refused", 1);
                let Some(known) = self.known.get_mut(&seq) else { return Ok(()) };
                if error.reason == Reason::BaseLen.as_str() {
                    (known.kv_len, known.round) =
                        (error.expected_len, error.expected_round.saturating_sub(1));
                }
                if error.reason == Reason::UnknownSeq.as_str() {
                    self.known.remove(&seq);
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn nonsense(&mut self) -> Vec<TargetItem> {
        let mut items: Vec<TargetItem> = (0..self.rng.within(1..=3)).map(|_| self.item()).collect();
        if self.rng.chance(200) {
            items.extend(items.clone());
        }
        items
    }

    fn item(&mut self) -> TargetItem {
        if self.known.is_empty() || (self.known.len() < 4 && self.rng.chance(150)) {
            return self.open();
        }
        let seqs: Vec<u64> = self.known.keys().copied().collect();
        let seq = self.rng.pick(&seqs);
        let rng = &mut self.rng;
        let Some(known) = self.known.get_mut(&seq) else { return TargetItem { seq, op: None } };
        let op = match rng.within(0..=19) {
            0..=8 => Op::Verify(known.next(rng)),
            9..=12 => Op::Verify(known.last.clone().unwrap_or_default()),
            13 | 14 => Op::Verify(known.wrong(rng)),
            15 => Op::Revoke(Revoke {}),
            16 => Op::FetchFeatures(FetchFeatures { from: rng.within(0..=known.kv_len + 3) }),
            17 => Op::Open(open(&known.ask)),
            18 => return item(seq + 1000, Op::Verify(Verify::default())),
            _ => {
                self.known.remove(&seq);
                Op::Close(Close {})
            }
        };
        item(seq, op)
    }

    fn open(&mut self) -> TargetItem {
        let which = self.rng.within(0..=self.asks.len() as u32 - 1) as usize;
        let (seq, ask) = (self.next_seq, self.asks[which].clone());
        self.next_seq += 1;
        let op = Op::Open(open(&ask));
        let truth = ask.prompt.iter().chain(&ask.plain.tokens).copied().collect();
        let kv_len = ask.prompt.len() as u32;
        self.known.insert(
            seq,
            Known { ask, truth, round: 0, kv_len, seen: BTreeMap::new(), last: None, asked: Vec::new() },
        );
        item(seq, op)
    }
}

fn item(seq: u64, op: Op) -> TargetItem {
    TargetItem { seq, op: Some(op) }
}

fn open(ask: &Ask) -> Open {
    let p = ask.params;
    Open {
        tokens: ask.prompt.clone(),
        generated: 0,
        sampling: Some(Sampling {
            temperature: p.temperature,
            top_k: p.top_k,
            top_p: p.top_p,
            min_p: p.min_p,
            seed: p.seed,
            choice: p.choice,
        }),
        limits: Some(Limits {
            max_tokens: ask.request.max_tokens.unwrap_or_default(),
            stop_ids: ask.request.stop_ids.clone(),
            ignore_eos: ask.request.ignore_eos,
        }),
        features: false,
        priority: ask.request.priority,
    }
}

impl Known {
    /// Takes in a commit; whether it is a new one.
    fn hear(&mut self, committed: Committed) -> Result<bool, String> {
        let end = committed.kv_len as usize + 1;
        let count = committed.tokens.len();
        let start = end.checked_sub(count).filter(|&start| start >= self.ask.prompt.len());
        let truth = start.and_then(|start| self.truth.get(start..end));
        if truth != Some(&committed.tokens[..]) {
            return Err(format!("{committed:?} is not plain decoding, which is {:?}", self.truth));
        }
        let is_over = committed.finish != 0;
        if is_over != (end == self.truth.len()) {
            return Err(format!("{committed:?} ends at {end}, plain decoding at {}", self.truth.len()));
        }
        if committed.round == 0 && self.seen.len() > 1 {
            // It was freed while its stream was away, and opened again.
            self.seen.clear();
            self.round = 0;
        }
        if let Some(first) = self.seen.get(&committed.round) {
            return match *first == committed {
                true => Ok(false),
                false => Err(format!("a repeated round is answered with {committed:?}, at first {first:?}")),
            };
        }
        if committed.round > 0 && self.origins(&committed).next().is_none() {
            return Err(format!("{committed:?} was never asked for: {:?}", self.asked));
        }
        if committed.round >= self.round {
            (self.round, self.kv_len) = (committed.round, committed.kv_len);
        }
        self.seen.insert(committed.round, committed);
        Ok(true)
    }

    /// The first rounds of what `committed` may be an answer to: a Verify of this round and base, and credits that
    /// reach it.
    fn origins(&self, committed: &Committed) -> impl Iterator<Item = u32> {
        let (given, base) = (committed.round, committed.kv_len - committed.tokens.len() as u32);
        let reaches = move |&&(round, base_len, steps): &&(u32, u32, u32)| {
            let step = given.wrapping_sub(round);
            step < steps.max(1) && base_len + step == base
        };
        self.asked.iter().filter(reaches).map(|&(round, ..)| round)
    }

    /// The latest Verify with the first reply to it, if it was answered and nothing came after it.
    fn latest(&self) -> Option<(Verify, Committed)> {
        let verify = self.last.clone()?;
        let first = self.seen.get(&verify.round)?;
        let is_its = first.kv_len - first.tokens.len() as u32 == verify.base_len;
        let is_no_other_s = self.origins(first).all(|round| round == verify.round);
        let is_latest = self.round < verify.round + verify.steps.max(1);
        (is_its && is_no_other_s && is_latest).then(|| (verify, first.clone()))
    }

    /// What would be right as far as is known, with drafts that may be wrong.
    fn next(&mut self, rng: &mut Rng) -> Verify {
        let at = self.kv_len as usize;
        let root = self.truth.get(at).copied().unwrap_or_default();
        let mut tokens: Vec<u32> =
            self.truth.iter().skip(at + 1).take(rng.pick(&[0, 0, 2, 7])).copied().collect();
        if let Some(last) = tokens.last_mut().filter(|_| rng.chance(500)) {
            *last = (*last + 1) % VOCAB;
        }
        let mut parents = Vec::new();
        if tokens.len() > 1 && rng.chance(300) {
            // The last one beside the first.
            parents = (0..tokens.len() as u32).collect();
            parents[tokens.len() - 1] = 0;
        }
        let steps = if tokens.is_empty() { rng.within(0..=6) } else { 0 };
        let verify = Verify { round: self.round + 1, base_len: self.kv_len, root, tokens, parents, steps };
        self.asked.push((verify.round, verify.base_len, steps));
        self.last = Some(verify.clone());
        verify
    }

    /// What must be refused, or is a repeat.
    fn wrong(&mut self, rng: &mut Rng) -> Verify {
        let kept = self.last.clone();
        let mut verify = self.next(rng);
        self.last = kept;
        self.asked.pop();
        match rng.within(0..=6) {
            0 => verify.base_len += 1,
            1 => verify.base_len = verify.base_len.saturating_sub(1),
            2 => verify.round += 1,
            3 => verify.round = rng.within(0..=verify.round),
            4 => verify.root = (verify.root + 1) % VOCAB,
            5 => verify.tokens.push(VOCAB),
            _ => verify.steps = 5000,
        }
        self.asked.push((verify.round, verify.base_len, verify.steps));
        verify
    }
}
