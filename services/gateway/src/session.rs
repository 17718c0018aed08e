//! One request's life: open at the target, rounds until the end, open again if the target went away.
//! Everything a session holds is freed by dropping it, so it may be dropped at any await.

use std::sync::Arc;
use std::time::Duration;

use eyrie_speculation::Proposal;
use eyrie_wire::v1::draft_item::Op as DraftOp;
use eyrie_wire::v1::target_item::Op;
use eyrie_wire::v1::{GenerateChunk, Open, Started};
use eyrie_wire::{Reason, reason_of, refuse};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tonic::{Code, Status};

use crate::draft_side::Heard;
use crate::gateway::Gateway;
use crate::output::Output;
use crate::policy::{self, Ask, Plan};
use crate::round::Commit;
use crate::sequence::{Halt, Sequence};
use crate::stats::add;
use crate::validate::Admitted;

/// Times in a row that a sequence is opened again without a single new token.
const MAX_FRUITLESS: u32 = 5;
/// Pauses between attempts to open a sequence at a target that takes none just now.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LAST_PAUSE: Duration = Duration::from_secs(1);

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
    /// It waits for a target to come up.
    waits: bool,
}

/// The targets that have refused a sequence since it was last tried everywhere.
#[derive(Debug)]
struct Refusals {
    by: Vec<usize>,
    why: Option<Status>,
    /// Before it is tried everywhere again.
    pause: Duration,
    /// When it is not tried any more.
    until: Instant,
}

impl Refusals {
    fn none(until: Instant) -> Self {
        Self { by: Vec::new(), why: None, pause: FIRST_PAUSE, until }
    }

    /// Of several reasons the one that passes is told.
    fn note(&mut self, target: usize, why: Status) {
        self.by.push(target);
        let passes = |status: &Status| status.code() != Code::InvalidArgument;
        if self.why.as_ref().is_none_or(|known| !passes(known)) {
            self.why = Some(why);
        }
    }
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
        Self { gateway, request, fingerprint, tokens, output, chunks, waits: false }
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
            biased;
            done = self.drive() => match done {
                Ok(()) => End::Done(Ok(())),
                Err(Halt::ClientGone) => End::ClientGone,
                Err(Halt::Fatal(status) | Halt::Refused(status)) => End::Done(Err(status)),
                Err(Halt::Lost(why)) => {
                    End::Done(Err(refuse(Reason::Unreachable, why)))
                }
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
            End::Deadline if self.waits => Err(self.gateway.pool.unavailable()),
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
            // A flood of them would fill the log; the counters tell how many.
            Err(status) if status.code() == Code::ResourceExhausted && tokens == 0 => {
                add(&stats.failed, 1);
                tracing::debug!(id, "refused: {}", status.message());
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
                // Opening has its own patience; here a target that takes no more rounds has lost the sequence.
                Err(Halt::Refused(status)) => status.message().to_owned(),
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

    /// A sequence with its first token, at the first target that takes it.
    async fn opened(&mut self) -> Result<Sequence, Halt> {
        let mut refusals = Refusals::none(Instant::now() + self.gateway.options.target_timeout);
        loop {
            let Some(place) = self.gateway.pool.place(&self.fingerprint, &refusals.by) else {
                self.wait(&mut refusals).await.map_err(Halt::Fatal)?;
                continue;
            };
            let (index, member) = (place.index, Arc::clone(&place.member));
            let mut seq = Sequence::at(place, self.tokens.clone());
            match self.open(&mut seq).await {
                Ok(()) => return Ok(seq),
                Err(Halt::Refused(status)) => {
                    if reason_of(&status).as_deref() == Some(Reason::Draining.as_str()) {
                        member.link.draining();
                    }
                    refusals.note(index, status);
                }
                Err(halt) => return Err(halt),
            }
        }
    }

    /// Waits until it is worth trying every target again.
    async fn wait(&mut self, refusals: &mut Refusals) -> Result<(), Status> {
        refusals.by.clear();
        let Some(status) = refusals.why.take() else {
            self.waits = true;
            self.gateway.pool.wait(&self.fingerprint, refusals.until).await?;
            self.waits = false;
            // Where the stream broke between the state and the registration, the state follows at once.
            tokio::task::yield_now().await;
            return Ok(());
        };
        let (pause, now) = (refusals.pause, Instant::now());
        if status.code() == Code::ResourceExhausted && self.generated() > 0 {
            // Such a target is there, and a place at it comes with time: only the client bounds that.
            refusals.until = now + pause + self.gateway.options.target_timeout;
        }
        if !self.waits_out(&status) || now + pause >= refusals.until {
            return Err(self.gateway.pool.judged(status, self.generated() > 0));
        }
        let id = &self.request.request_id;
        tracing::info!(id, "no target takes the sequence now: {}", status.message());
        sleep(pause).await;
        refusals.pause = (pause * 2).min(LAST_PAUSE);
        Ok(())
    }

    /// Busy targets shed new requests, but must not lose one that was begun.
    fn waits_out(&self, refusal: &Status) -> bool {
        refusal.code() == Code::Unavailable || self.generated() > 0
    }

    async fn open(&mut self, seq: &mut Sequence) -> Result<(), Halt> {
        let open = Open {
            tokens: self.tokens.clone(),
            generated: self.generated(),
            sampling: Some(self.request.sampling),
            limits: Some(self.request.limits.clone()),
            features: seq.captured && self.plan().speculates(),
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
        if !seq.take_seat(self.request.plan.least(), &self.gateway.stats) {
            return;
        }
        seq.overhear();
        if let (Some(propose), Some(seat)) = (seq.rounds.ingest(), &seq.seat) {
            // What is not taken now is asked for by the draft later.
            let _ = seat.route.try_send(DraftOp::Propose(propose));
        }
    }

    /// One round, or one credit of plain rounds.
    async fn round(&mut self, seq: &mut Sequence) -> Result<(), Halt> {
        seq.catch_up()?;
        let remaining = self.request.limits.max_tokens.saturating_sub(self.generated());
        let at = seq.rounds.standing(remaining, seq.context);
        let plan = self.plan();
        if plan.speculates() {
            seq.take_seat(plan.least(), &self.gateway.stats);
        }
        let limit = seq.seat.as_ref().map(|seat| seat.limit);
        let ask = policy::ask(plan, at, self.gateway.default_k(limit));
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
            let why = match seq.member.load().await {
                Ok(load) if steps.replace(load.steps) != Some(load.steps) => continue,
                Ok(load)
                    if load.waiting > 0 && seq.rounds.is_opening() && seq.member.replies(limit).await =>
                {
                    continue;
                }
                Ok(_) => format!("the target computed nothing for {limit:?} while a reply was due"),
                Err(status) => status.message().to_owned(),
            };
            seq.member.link.suspect();
            return Err(Halt::Lost(why));
        }
    }

    /// Tokens generated so far, held-back ones included.
    fn generated(&self) -> u32 {
        (self.tokens.len() - self.request.prompt.len()) as u32
    }

    /// The request's plan, or plain decoding where no draft is configured at all.
    fn plan(&self) -> Plan {
        if self.gateway.options.drafts.is_empty() { Plan::Off } else { self.request.plan }
    }

    /// The request names a draft where none is configured.
    fn misses_its_draft(&self) -> bool {
        self.gateway.options.drafts.is_empty() && self.request.plan.is_exact()
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
        if !seq.take_seat(ask.tokens() as u32, &self.gateway.stats) {
            return None;
        }
        seq.overhear();
        let next = seq.rounds.next();
        let Sequence { rounds, member, seat, .. } = seq;
        let seat = seat.as_mut()?;
        if !rounds.draft.ready() {
            return None;
        }
        seat.route.try_send(DraftOp::Propose(rounds.propose(ask))).ok()?;
        loop {
            let Ok(out) = timeout_at(until, seat.route.recv()).await else {
                add(&self.gateway.stats.draft_deadlines, 1);
                rounds.draft.missed(next.0);
                member.suspect(seat);
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
