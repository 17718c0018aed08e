//! The targets of this gateway, each with a link to every draft: which model is served, and who takes the next
//! sequence.

mod member;
mod report;

use std::sync::Arc;

use eyrie_service::Drain;
use eyrie_wire::{Dialer, Reason, reason_of, refuse};
use parking_lot::Mutex;
use tokio::time::{Instant, timeout_at};
use tonic::Status;

use crate::catalog::Served;
use crate::link::{Route, State, TargetPeer, TargetReady, Watched};
use crate::options::GatewayOptions;

pub(crate) use member::{Hold, Member, Seat};

/// All targets and drafts.
#[derive(Debug)]
pub(crate) struct Pool {
    members: Vec<Arc<Member>>,
    /// The target that goes first among equals. Held until a sequence is counted: two sessions at once would otherwise
    /// both find the same target idle.
    turn: Mutex<usize>,
    view: Watched<View>,
}

/// What the targets serve together.
#[derive(Debug, Clone, Default)]
pub(crate) struct View {
    /// By target: what it served last.
    last: Vec<Option<Arc<Served>>>,
    /// The model of the first target that came up, for as long as some target served it last.
    served: Option<Arc<Served>>,
    /// A target that serves it takes sequences.
    open: bool,
}

/// A registered sequence at a target.
pub(crate) struct Place {
    /// Index of the target.
    pub(crate) index: usize,
    pub(crate) member: Arc<Member>,
    pub(crate) ready: TargetReady,
    pub(crate) route: Route<TargetPeer>,
}

fn same_model(a: &Served, b: &Served) -> bool {
    a.card.fingerprint == b.card.fingerprint
}

/// The boot id that a link gives itself out for. Each counts its own sequences, and two of them may lead to one peer
/// by different names: under one id they would take each other's streams away and mix their sequences up.
fn link_id(boot_id: u64, link: u64) -> u64 {
    // splitmix64: its finaliser is a bijection, so the links of a gateway differ.
    let mut id = boot_id.wrapping_add((link + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    id = (id ^ (id >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    id = (id ^ (id >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    // Peers take 0 for a missing id.
    (id ^ (id >> 31)).max(1)
}

impl View {
    /// Whether a request would find a target.
    pub(crate) fn is_open(&self) -> bool {
        self.open
    }

    /// Takes in what every target serves `now`, where it is connected, and what those that are `up` do.
    fn follow(&mut self, now: Vec<Option<Arc<Served>>>, up: &[Arc<Served>]) {
        for (last, now) in self.last.iter_mut().zip(now) {
            if now.is_some() {
                *last = now;
            }
        }
        let kept =
            self.served.take().filter(|kept| self.last.iter().flatten().any(|last| same_model(last, kept)));
        let model = kept.or_else(|| up.first().cloned());
        // Admission goes by the roomiest target; a smaller one refuses what does not fit, and another is asked.
        let best = up
            .iter()
            .filter(|served| model.as_ref().is_some_and(|model| same_model(model, served)))
            .max_by_key(|served| served.card.context_length);
        self.open = best.is_some();
        self.served = best.cloned().or(model);
    }
}

impl Pool {
    /// Starts every link on `drain`.
    pub(crate) fn start(options: &GatewayOptions, dialer: &Dialer, boot_id: u64, drain: &Drain) -> Arc<Self> {
        let files = Arc::default();
        let mut links = (0..).map(|link| link_id(boot_id, link));
        let member = |target: &eyrie_wire::Address| {
            let mut id = || links.next().unwrap_or(boot_id);
            let peer = TargetPeer::new(dialer.clone(), target.clone(), id(), Arc::clone(&files));
            Arc::new(Member::spawn(dialer.clone(), peer, &options.drafts, id, drain))
        };
        let members: Vec<_> = options.targets.iter().map(member).collect();
        let view = View { last: vec![None; members.len()], ..View::default() };
        let pool = Arc::new(Self { members, turn: Mutex::new(0), view: Watched::new(view) });
        for member in &pool.members {
            let (pool, member, stop) = (Arc::clone(&pool), Arc::clone(member), drain.clone());
            drain.spawn(async move {
                tokio::select! {
                    biased;
                    () = stop.stopped() => {}
                    () = pool.follow(&member) => {}
                    () = member.watch_load(), if pool.members.len() > 1 => {}
                }
            });
        }
        pool
    }

    /// Keeps the view up to date with one target.
    async fn follow(&self, member: &Member) {
        let state = member.link.watched();
        let mut named = None;
        loop {
            let seen = state.version();
            self.refresh();
            let stranger = self.model_left_out(member);
            if let Some(fingerprint) = stranger.as_ref().filter(|_| stranger != named) {
                tracing::warn!(target = %member.address, "left out: it serves another model, {fingerprint}");
            }
            named = stranger.or(named);
            state.changed(seen).await;
        }
    }

    fn refresh(&self) {
        self.view.modify(|view| {
            let states: Vec<_> = self.members.iter().map(|member| member.link.state()).collect();
            let served = |ready: &TargetReady| Arc::clone(&ready.served);
            let now = states.iter().map(|state| state.connected().map(served)).collect();
            let up: Vec<_> = states.iter().filter_map(|state| state.up().map(served)).collect();
            view.follow(now, &up);
            true
        });
    }

    /// The fingerprint of a connected target that serves another model than this gateway.
    fn model_left_out(&self, member: &Member) -> Option<String> {
        let theirs = member.link.state().connected().map(|ready| Arc::clone(&ready.served))?;
        let view = self.view.borrow();
        let ours = view.served.as_ref()?;
        (!same_model(ours, &theirs)).then(|| theirs.card.fingerprint.clone())
    }

    /// What is served, to be followed.
    pub(crate) fn view(&self) -> Watched<View> {
        self.view.clone()
    }

    /// What is served, once a target takes sequences, waiting until `until`.
    ///
    /// # Errors
    /// UNAVAILABLE with the reason why there is none.
    pub(crate) async fn served(&self, until: Instant) -> Result<Arc<Served>, Status> {
        let served = |view: &View| view.served.clone().filter(|_| view.is_open());
        timeout_at(until, self.view.wait_for(served)).await.map_err(|_| self.unavailable())
    }

    /// Waits until a target takes sequences of `fingerprint`, at most until `until`.
    ///
    /// # Errors
    /// UNAVAILABLE with the reason why there is none; STALE_EPOCH when no target has that model any more.
    pub(crate) async fn wait(&self, fingerprint: &str, until: Instant) -> Result<(), Status> {
        let told = |view: &View| {
            let now = view.served.as_ref().map(|served| &served.card.fingerprint);
            match now.filter(|&now| now != fingerprint) {
                Some(other) => Some(Err(other.clone())),
                None => view.is_open().then_some(Ok(())),
            }
        };
        let told = timeout_at(until, self.view.wait_for(told)).await.map_err(|_| self.unavailable())?;
        told.map_err(|now| {
            let line =
                format!("the targets came back with model {now}, the request began with {fingerprint}");
            refuse(Reason::StaleEpoch, line)
        })
    }

    /// What a client is told of a `refusal`: that its sequence is too long is its own fault only where no target took
    /// it before (it has not `begun`) and none that might is away.
    pub(crate) fn judged(&self, refusal: Status, begun: bool) -> Status {
        let is_complete = || self.members.iter().all(|member| member.link.is_up());
        let too_long = [Reason::Context, Reason::KvCapacity];
        let given = reason_of(&refusal);
        if !too_long.iter().any(|reason| given.as_deref() == Some(reason.as_str())) || !begun && is_complete()
        {
            return refusal;
        }
        let line = format!("{}; {}", refusal.message(), self.unavailable().message());
        refuse(Reason::Unreachable, line)
    }

    /// UNAVAILABLE, with a line on every target and a hint of when to try again.
    pub(crate) fn unavailable(&self) -> Status {
        let why = |member: &Arc<Member>| {
            let why = match member.link.state() {
                State::Down(why) => why.to_string(),
                State::Suspect(..) => "it is connected but computes nothing".to_owned(),
                State::Draining(_) => "it drains".to_owned(),
                State::Up(ready) => format!("it serves model {}", ready.served.card.fingerprint),
            };
            format!("{}: {why}", member.address)
        };
        let whys: Vec<_> = self.members.iter().map(why).collect();
        let line = format!("no target is available: {}", whys.join("; "));
        refuse(Reason::Unreachable, line)
    }

    /// A new sequence at the target with the fewest, of those that take sequences of `fingerprint` and are not among
    /// `refused`.
    pub(crate) fn place(&self, fingerprint: &str, refused: &[usize]) -> Option<Place> {
        let mut turn = self.turn.lock();
        let count = self.members.len();
        let burden = |i: usize| (self.members[i].burden(), (i + count - *turn) % count);
        let index = (0..count)
            .filter(|i| !refused.contains(i) && self.members[*i].serves(fingerprint).is_some())
            .min_by_key(|&i| burden(i))?;
        let member = Arc::clone(&self.members[index]);
        let route = member.link.register()?;
        // Asked again: the stream that it is registered on may be that of a later boot with another model.
        let ready = member.serves(fingerprint)?;
        *turn = (index + 1) % count;
        Some(Place { index, member, ready, route })
    }
}
