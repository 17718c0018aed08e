//! One request's life: open at the target, rounds until the end, open again if the target went away.
//! Everything a session holds is freed by dropping it, so it may be dropped at any await.

use std::sync::Arc;
use std::time::Duration;

use eyrie_speculation::Proposal;
use eyrie_wire::v1::draft_item::Op as DraftOp;
use eyrie_wire::v1::target_item::Op;
use eyrie_wire::v1::target_out::Body;
use eyrie_wire::v1::{Close, FetchFeatures, GenerateChunk, ItemError, Open, Started};
use eyrie_wire::{Reason, refuse, status_of};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tonic::Status;

use crate::draft_side::Heard;
use crate::gateway::Gateway;
use crate::link::{DraftPeer, Link, Route, TargetPeer, TargetReady};
use crate::output::Output;
use crate::policy::{self, Ask, Plan};
use crate::round::{Commit, Rounds};
use crate::stats::add;
use crate::validate::Admitted;

/// Times in a row that a sequence is opened again without a single new token.
const MAX_FRUITLESS: u32 = 5;
/// Pauses between attempts to open a sequence at a target that takes none just now.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LAST_PAUSE: Duration = Duration::from_secs(1);

/// Why a sequence at the target ended before the request did.
#[derive(Debug)]
enum Halt {
    /// The sequence is lost but the request can go on with another one.
    Lost(String),
    /// The target takes no sequences now; it may in a moment.
    Refused(Status),
    /// The request ends with this.
    Fatal(Status),
    /// Nobody reads the reply any more.
    ClientGone,
}

/// How the request ended; [`Session::run`] puts it into words.
enum End {
    Done(Result<(), Status>),
    ClientGone,
    Deadline,
    Stopped,
}

/// A request that was admitted.
pub(crate) struct Session {
    gateway: Arc<Gateway>,
    request: Admitted,
    /// The model the request was admitted for.
    fingerprint: String,
    /// Prompt and every token generated so far, held-back ones included.
    tokens: Vec<u32>,
    output: Output,
    chunks: mpsc::Sender<GenerateChunk>,
}

/// The request's sequence at one boot of the target.
struct Sequence {
    rounds: Rounds,
    context: u32,
    target: Route<TargetPeer>,
    draft: Option<Route<DraftPeer>>,
}

impl Session {
    pub(crate) fn new(
        gateway: Arc<Gateway>,
        request: Admitted,
        fingerprint: String,
        output: Output,
        chunks: mpsc::Sender<GenerateChunk>,
    ) -> Self {
        let tokens = request.prompt.clone();
        Self { gateway, request, fingerprint, tokens, output, chunks }
    }

    /// Runs the request to its end.
    ///
    /// # Errors
    /// The status that the client gets.
    pub(crate) async fn run(mut self, deadline: Option<Instant>) -> Result<(), Status> {
        let gateway = Arc::clone(&self.gateway);
        let client = self.chunks.clone();
        let overdue = async {
            match deadline {
                Some(deadline) => tokio::time::sleep_until(deadline).await,
                None => std::future::pending().await,
            }
        };
        let end = tokio::select! {
            done = self.drive() => match done {
                Ok(()) => End::Done(Ok(())),
                Err(Halt::ClientGone) => End::ClientGone,
                Err(Halt::Fatal(status) | Halt::Refused(status)) => End::Done(Err(status)),
                Err(Halt::Lost(why)) => End::Done(Err(refuse(Reason::Unreachable, why))),
            },
            () = client.closed() => End::ClientGone,
            () = overdue => End::Deadline,
            () = gateway.drain.stopped() => End::Stopped,
        };
        self.conclude(end)
    }

    fn conclude(&self, end: End) -> Result<(), Status> {
        let stats = &self.gateway.stats;
        let tokens = self.output.completion_tokens();
        let id = &self.request.request_id;
        let result = match end {
            End::Done(result) => result,
            End::ClientGone => {
                add(&stats.cancelled, 1);
                tracing::info!(id, tokens, "the client left");
                return Ok(());
            }
            End::Deadline => {
                Err(refuse(Reason::Deadline, format!("the deadline passed after {tokens} tokens")))
            }
            End::Stopped => {
                Err(refuse(Reason::Draining, format!("the gateway stopped after {tokens} tokens")))
            }
        };
        match &result {
            Ok(()) => {
                add(&stats.finished, 1);
                let usage = self.output.usage();
                let (rounds, accepted) = (usage.rounds, usage.accepted_tokens);
                let without_draft = usage.rounds_without_draft;
                tracing::info!(id, tokens, rounds, accepted, without_draft, "finished");
            }
            Err(status) => {
                add(&stats.failed, 1);
                tracing::warn!(id, tokens, code = ?status.code(), "failed: {}", status.message());
            }
        }
        result
    }

    async fn drive(&mut self) -> Result<(), Halt> {
        let started = Started {
            request_id: self.request.request_id.clone(),
            prompt_ids: self.request.prompt.clone(),
            seed: self.request.sampling.seed,
        };
        self.send(vec![GenerateChunk { started: Some(started), ..Default::default() }]).await?;
        let mut fruitless = 0;
        loop {
            let before = self.tokens.len();
            let why = match self.live().await {
                Ok(()) => return Ok(()),
                Err(Halt::Lost(why)) => why,
                Err(halt) => return Err(halt),
            };
            fruitless = if self.tokens.len() > before { 0 } else { fruitless + 1 };
            if fruitless >= MAX_FRUITLESS {
                return Err(Halt::Lost(format!("{why} ({fruitless} times without a new token)")));
            }
            add(&self.gateway.stats.reopened, 1);
            let (id, tokens) = (&self.request.request_id, self.tokens.len());
            tracing::warn!(id, tokens, "the sequence is opened again: {why}");
        }
    }

    /// One sequence at the target, until the request or the sequence ends.
    async fn live(&mut self) -> Result<(), Halt> {
        let mut seq = self.opened().await?;
        while self.output.ended().is_none() {
            self.round(&mut seq).await?;
        }
        Ok(())
    }

    /// A sequence with its first token. A target that takes none just now is a target that is away.
    async fn opened(&mut self) -> Result<Sequence, Halt> {
        let until = Instant::now() + self.gateway.options.target_timeout;
        let mut pause = FIRST_PAUSE;
        loop {
            let (ready, target) = self.target(until).await?;
            let card = &ready.served.card;
            let rounds = Rounds::opening(self.tokens.clone(), card.vocab_size);
            let mut seq = Sequence { rounds, context: card.context_length, target, draft: None };
            match self.open(&mut seq, !card.aux_layers.is_empty()).await {
                Ok(()) => return Ok(seq),
                Err(Halt::Refused(status)) if self.waits_out(&status) && Instant::now() + pause < until => {
                    let id = &self.request.request_id;
                    tracing::info!(id, "the target takes no sequence now: {}", status.message());
                }
                Err(halt) => return Err(halt),
            }
            drop(seq);
            sleep(pause).await;
            pause = (pause * 2).min(LAST_PAUSE);
        }
    }

    /// A busy target sheds new requests, but must not lose one that it or its predecessor has begun.
    fn waits_out(&self, refusal: &Status) -> bool {
        refusal.code() != Reason::Busy.code() || self.generated() > 0
    }

    /// A registered sequence at a target that is up and serves the model of this request.
    async fn target(&self, until: Instant) -> Result<(TargetReady, Route<TargetPeer>), Halt> {
        loop {
            let ready = self.gateway.target_up(until).await.map_err(Halt::Fatal)?;
            let fingerprint = &ready.served.card.fingerprint;
            if *fingerprint != self.fingerprint {
                let line = format!(
                    "the target came back with model {fingerprint}, the request began with {}",
                    self.fingerprint
                );
                return Err(Halt::Fatal(refuse(Reason::StaleEpoch, line)));
            }
            if let Some(route) = self.gateway.target.register() {
                return Ok((ready, route));
            }
            // Between the state and the registration the stream broke; the state follows at once.
            tokio::task::yield_now().await;
        }
    }

    async fn open(&mut self, seq: &mut Sequence, captured: bool) -> Result<(), Halt> {
        let open = Open {
            tokens: self.tokens.clone(),
            generated: self.generated(),
            sampling: Some(self.request.sampling),
            limits: Some(self.request.limits.clone()),
            features: captured && self.request.plan.speculates() && self.gateway.draft.is_some(),
            priority: self.request.priority,
        };
        seq.ask_target(Op::Open(open)).await?;
        let commit = loop {
            if let Some(commit) = self.hear(seq).await? {
                break commit;
            }
            self.ingest(seq);
            seq.fetch().await?;
        };
        self.tokens.extend_from_slice(&commit.tokens);
        let chunks = self.output.prefilled(commit);
        self.send(chunks).await
    }

    /// Hands finished prompt chunks to the draft without waiting for it.
    fn ingest(&self, seq: &mut Sequence) {
        let Some(link) = &self.gateway.draft else { return };
        if !link.is_up() {
            return;
        }
        seq.take_seat(link);
        seq.overhear();
        if let (Some(propose), Some(draft)) = (seq.rounds.ingest(), &seq.draft) {
            // What is not taken now is asked for by the draft later.
            let _ = draft.try_send(DraftOp::Propose(propose));
        }
    }

    /// One round, or one credit of plain rounds.
    async fn round(&mut self, seq: &mut Sequence) -> Result<(), Halt> {
        seq.catch_up()?;
        let remaining = self.request.limits.max_tokens.saturating_sub(self.generated());
        let at = seq.rounds.standing(remaining, seq.context);
        let plan = self.plan();
        let ask = policy::ask(plan, at, self.gateway.default_k());
        let proposal = match ask {
            Some(ask) => self.proposal(seq, ask).await?.unwrap_or_default(),
            None => Proposal::empty(),
        };
        let without = proposal.is_empty() && (ask.is_some() || self.misses_its_draft());
        let steps = policy::plain_steps(plan, at, seq.rounds.draft.is_healing());
        seq.fetch().await?;
        let verify = seq.rounds.verify(proposal, steps);
        seq.ask_target(Op::Verify(verify)).await?;
        loop {
            let Some(commit) = self.hear(seq).await? else { continue };
            let last = commit.last;
            if without {
                self.output.went_without_draft();
                add(&self.gateway.stats.rounds_without_draft, 1);
            }
            self.gateway.stats.round(&commit);
            self.tokens.extend_from_slice(&commit.tokens);
            let chunks = self.output.round(commit);
            self.send(chunks).await?;
            if last || self.output.ended().is_some() {
                return Ok(());
            }
        }
    }

    /// The target's next reply, of which one is due; `None` if it was no commit. A target that computes
    /// nothing meanwhile is lost, unless the sequence only waits for others to give back their KV pages.
    async fn hear(&self, seq: &mut Sequence) -> Result<Option<Commit>, Halt> {
        let limit = self.gateway.options.stall_limit;
        let mut steps = None;
        loop {
            if let Ok(heard) = timeout(limit, seq.hear_target()).await {
                return heard;
            }
            let why = match self.gateway.target_load().await {
                Ok(load) if steps.replace(load.steps) != Some(load.steps) => continue,
                Ok(load) if load.waiting > 0 && seq.rounds.is_opening() && self.target_replies().await => {
                    continue;
                }
                Ok(_) => format!("the target computed nothing for {limit:?} while a reply was due"),
                Err(status) => status.message().to_owned(),
            };
            self.gateway.target.suspect();
            return Err(Halt::Lost(why));
        }
    }

    /// Whether the target's engine takes items and answers them: closing a sequence that nobody opened does nothing
    /// else, and Load is answered without the engine.
    async fn target_replies(&self) -> bool {
        let Some(mut nobody) = self.gateway.target.register() else { return false };
        let asked = nobody.send(Op::Close(Close {})).await.is_ok();
        asked && matches!(timeout(self.gateway.options.stall_limit, nobody.recv()).await, Ok(Some(_)))
    }

    /// Tokens generated so far, held-back ones included.
    fn generated(&self) -> u32 {
        (self.tokens.len() - self.request.prompt.len()) as u32
    }

    /// The request's plan, or plain decoding where no draft is configured at all.
    fn plan(&self) -> Plan {
        match self.gateway.draft {
            Some(_) => self.request.plan,
            None => Plan::Off,
        }
    }

    /// The request names a draft where none is configured.
    fn misses_its_draft(&self) -> bool {
        self.gateway.draft.is_none() && self.request.plan.is_exact()
    }

    /// A proposal for the next round, if there is one in time. An exact plan gives a draft that lacks rows the time to
    /// get them, and so does the first round after a prefix cache held some; otherwise the round goes without and the
    /// draft heals beside it.
    async fn proposal(&mut self, seq: &mut Sequence, ask: Ask) -> Result<Option<Proposal>, Halt> {
        let until = Instant::now() + self.request.plan.deadline(self.gateway.options.draft_deadline);
        let waits = self.request.plan.is_exact() || seq.rounds.begins_with_cached_rows();
        loop {
            let proposal = self.propose(seq, ask, until).await;
            let patient = waits && Instant::now() < until;
            if proposal.is_some() || !patient || !seq.rounds.draft.is_healing() {
                return Ok(proposal);
            }
            seq.heal(until).await?;
        }
    }

    /// Asks the draft once.
    async fn propose(&mut self, seq: &mut Sequence, ask: Ask, until: Instant) -> Option<Proposal> {
        let link = self.gateway.draft.as_ref()?;
        if !link.is_up() {
            return None;
        }
        seq.take_seat(link);
        seq.overhear();
        let next = seq.rounds.next();
        let Sequence { rounds, draft, .. } = seq;
        let draft = draft.as_mut()?;
        if !rounds.draft.ready() {
            return None;
        }
        draft.try_send(DraftOp::Propose(rounds.propose(ask))).ok()?;
        loop {
            let Ok(out) = timeout_at(until, draft.recv()).await else {
                add(&self.gateway.stats.draft_deadlines, 1);
                rounds.draft.missed(next.0);
                link.suspect();
                return None;
            };
            let vocab = rounds.vocab();
            match rounds.draft.hear(out?, next, ask, vocab) {
                Heard::Proposal(proposal) => return Some(proposal),
                Heard::Stale => {}
                Heard::Need => return None,
                Heard::Refused(error) => {
                    self.gateway.stats.refused(&error);
                    return None;
                }
                Heard::Garbage(why) => {
                    self.gateway.stats.garbage(&why);
                    return None;
                }
            }
        }
    }

    /// Waits for a slow client; its own sequence waits with it, nobody else.
    async fn send(&self, chunks: Vec<GenerateChunk>) -> Result<(), Halt> {
        for chunk in chunks {
            self.chunks.send(chunk).await.map_err(|_| Halt::ClientGone)?;
        }
        Ok(())
    }
}

impl Sequence {
    /// A place at the draft's current stream.
    fn take_seat(&mut self, link: &Link<DraftPeer>) {
        if self.draft.as_ref().is_some_and(Route::is_broken) {
            self.draft = None;
        }
        if self.draft.is_none() {
            self.draft = link.register();
            self.rounds.draft.joined();
        }
    }

    /// Takes in what the draft said without being waited for.
    fn overhear(&mut self) {
        let next = self.rounds.next();
        while let Some(late) = self.draft.as_mut().and_then(Route::try_recv) {
            self.rounds.draft.overhear(late, next);
        }
    }

    /// Asks the target for rows that the draft lacks.
    async fn fetch(&mut self) -> Result<(), Halt> {
        match self.rounds.draft.fetch() {
            Some(from) => self.ask_target(Op::FetchFeatures(FetchFeatures { from })).await,
            None => Ok(()),
        }
    }

    /// Fetches what the draft lacks and waits for it, at most until `until`.
    async fn heal(&mut self, until: Instant) -> Result<(), Halt> {
        self.fetch().await?;
        while self.rounds.draft.is_healing() {
            let Ok(heard) = timeout_at(until, self.hear_target()).await else { return Ok(()) };
            heard?;
        }
        Ok(())
    }

    async fn ask_target(&self, op: Op) -> Result<(), Halt> {
        let stopping = |_| Halt::Lost("the gateway stops".to_owned());
        self.target.send(op).await.map_err(stopping)
    }

    /// The next reply; `None` if it was no commit.
    async fn hear_target(&mut self) -> Result<Option<Commit>, Halt> {
        let Some(out) = self.target.recv().await else {
            return Err(Halt::Lost("the stream to the target broke".to_owned()));
        };
        self.take_in(out.body)
    }

    /// Takes in what the target said between rounds.
    fn catch_up(&mut self) -> Result<(), Halt> {
        while let Some(out) = self.target.try_recv() {
            self.take_in(out.body)?;
        }
        Ok(())
    }

    fn take_in(&mut self, body: Option<Body>) -> Result<Option<Commit>, Halt> {
        match body {
            Some(Body::Committed(committed)) => {
                let commit = self.rounds.committed(committed);
                commit.map(Some).map_err(|e| Halt::Fatal(refuse(Reason::Internal, e.to_string())))
            }
            Some(Body::Features(features)) => {
                self.rounds.draft.features(features);
                Ok(None)
            }
            Some(Body::Error(error)) => match halt(&error) {
                // The target answers in order and a fetch is asked before the round it goes with: this is its answer.
                // The draft only makes things faster, so a fetch that fails must not end the request.
                Halt::Fatal(why) | Halt::Refused(why) if self.rounds.draft.fetch_failed() => {
                    tracing::warn!("rows for the draft cannot be had: {}", why.message());
                    Ok(None)
                }
                halt => Err(halt),
            },
            Some(Body::Closed(_)) | None => Ok(None),
        }
    }
}

/// An error about where the sequence stands is mended by opening it again, one about the target's own state
/// by time; any other is the client's.
fn halt(error: &ItemError) -> Halt {
    let lost = [Reason::BaseLen, Reason::UnknownSeq, Reason::DuplicateSeq, Reason::StaleEpoch];
    let passing = [Reason::Busy, Reason::Loading, Reason::Draining, Reason::Unreachable];
    let is_one_of = |reasons: &[Reason]| reasons.iter().any(|reason| reason.as_str() == error.reason);
    if is_one_of(&lost) {
        Halt::Lost(error.message.clone())
    } else if is_one_of(&passing) {
        Halt::Refused(status_of(error))
    } else {
        Halt::Fatal(status_of(error))
    }
}
