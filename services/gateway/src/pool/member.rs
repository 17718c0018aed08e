//! One target with the drafts that may serve its sequences.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use eyrie_service::Drain;
use eyrie_wire::v1::target_client::TargetClient;
use eyrie_wire::v1::target_item::Op;
use eyrie_wire::v1::{Close, LoadReport};
use eyrie_wire::{Address, Dialer};
use parking_lot::Mutex;
use tokio::time::{sleep, timeout};
use tonic::Status;

use crate::link::{DraftPeer, Link, Route, State, TargetPeer, TargetReady, load_of, target_load};

/// How often a target is asked how busy it is.
const LOAD_PERIOD: Duration = Duration::from_secs(1);

/// How long a draft may stay silent after a missed deadline before its sequences leave it: elsewhere all of them would be
/// built anew at once.
const DRAFT_PATIENCE: Duration = Duration::from_secs(1);

/// One target and a link to every draft for its sequences.
#[derive(Debug)]
pub(crate) struct Member {
    dialer: Dialer,
    pub(crate) address: Address,
    pub(crate) link: Link<TargetPeer>,
    pub(crate) drafts: Vec<Pair>,
    /// Sequences that the target last said it has, those of other gateways included.
    reported: AtomicU64,
    /// The draft that goes first among equals. Held until a sequence is counted, as the pool does.
    turn: Mutex<usize>,
}

/// A draft as it stands with one target. It is up only while it is attached to the boot that this gateway knows.
#[derive(Debug)]
pub(crate) struct Pair {
    pub(crate) address: Address,
    pub(crate) link: Link<DraftPeer>,
}

/// A sequence's place at a draft.
pub(crate) struct Seat {
    /// Index of the draft.
    pub(crate) draft: usize,
    pub(crate) route: Route<DraftPeer>,
    /// Longest proposal of that draft.
    pub(crate) limit: u32,
}

/// What is to be had of the draft of a seat.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Hold {
    Answers,
    /// It missed a deadline a moment ago, and still has the sequence.
    Silent,
    Lost,
}

impl Hold {
    fn of<R>(draft: &State<R>) -> Self {
        match draft {
            State::Up(_) => Self::Answers,
            State::Suspect(_, since) if since.elapsed() < DRAFT_PATIENCE => Self::Silent,
            State::Suspect(..) | State::Draining(_) | State::Down(_) => Self::Lost,
        }
    }
}

impl Member {
    /// Starts the links, each under a `boot_id` of its own.
    pub(crate) fn spawn(
        dialer: Dialer,
        target: TargetPeer,
        drafts: &[Address],
        mut boot_id: impl FnMut() -> u64,
        drain: &Drain,
    ) -> Self {
        let address = target.address().clone();
        let link = Link::spawn(target, drain);
        let pair = |draft: &Address| {
            let (dialer, target) = (dialer.clone(), address.clone());
            let peer = DraftPeer::new(dialer, draft.clone(), boot_id(), target, link.watched());
            Pair { address: draft.clone(), link: Link::spawn(peer, drain) }
        };
        let drafts = drafts.iter().map(pair).collect();
        Self { dialer, address, link, drafts, reported: AtomicU64::new(0), turn: Mutex::new(0) }
    }

    /// What it said of itself, while it takes sequences of this model.
    pub(crate) fn serves(&self, fingerprint: &str) -> Option<TargetReady> {
        self.link.state().up().filter(|ready| ready.served.card.fingerprint == fingerprint).cloned()
    }

    /// For comparison: our own sequences, then what the target said last.
    pub(crate) fn burden(&self) -> (usize, u64) {
        (self.link.sequences(), self.reported.load(Ordering::Relaxed))
    }

    /// Keeps asking how busy the target is, so that several gateways do not all choose the same one.
    pub(crate) async fn watch_load(&self) {
        let mut connected = None;
        loop {
            if self.link.is_up() {
                if connected.is_none() {
                    connected = self.dialer.connect(&self.address).await.ok().map(TargetClient::new);
                }
                let told = match &mut connected {
                    Some(client) => load_of(client).await.ok(),
                    None => None,
                };
                match told {
                    Some(load) => {
                        let sequences = u64::from(load.running) + u64::from(load.waiting);
                        self.reported.store(sequences, Ordering::Relaxed);
                    }
                    None => connected = None,
                }
            }
            sleep(LOAD_PERIOD).await;
        }
    }

    /// How busy the target is, asked beside the round stream.
    pub(crate) async fn load(&self) -> Result<LoadReport, Status> {
        target_load(&self.dialer, &self.address).await
    }

    /// Whether the target's engine takes items and answers them within `limit`: closing a sequence that nobody
    /// opened does nothing else, and Load is answered without the engine.
    pub(crate) async fn replies(&self, limit: Duration) -> bool {
        let Some(mut nobody) = self.link.register() else { return false };
        let asked = nobody.send(Op::Close(Close {})).await.is_ok();
        asked && matches!(timeout(limit, nobody.recv()).await, Ok(Some(_)))
    }

    /// The drafts that answer for this boot of the target, each with its longest proposal.
    pub(crate) fn answering(&self) -> impl Iterator<Item = (usize, u32)> {
        let epoch = self.link.state().connected().map(|ready| ready.epoch);
        self.drafts.iter().enumerate().filter_map(move |(i, pair)| Some((i, pair.limit(epoch?)?)))
    }

    /// A place at the draft with the fewest sequences, of those that answer and propose at least `tokens`.
    pub(crate) fn seat(&self, tokens: u32) -> Option<Seat> {
        let mut turn = self.turn.lock();
        let count = self.drafts.len();
        let able = self.answering().filter(|&(_, limit)| limit >= tokens);
        let burden = |i: usize| (self.drafts[i].link.sequences(), (i + count - *turn) % count);
        let (draft, limit) = able.min_by_key(|&(i, _)| burden(i))?;
        let route = self.drafts[draft].link.register()?;
        *turn = (draft + 1) % count;
        Some(Seat { draft, route, limit })
    }

    /// What is to be had of the draft of this seat.
    pub(crate) fn hold(&self, seat: &Seat) -> Hold {
        let Some(pair) = self.drafts.get(seat.draft).filter(|_| !seat.route.is_broken()) else {
            return Hold::Lost;
        };
        Hold::of(&pair.link.state())
    }

    /// Marks the draft of this seat, which missed a deadline.
    pub(crate) fn suspect(&self, seat: &Seat) {
        if let Some(pair) = self.drafts.get(seat.draft) {
            pair.link.suspect();
        }
    }
}

impl Pair {
    /// Longest proposal, while the draft answers for this boot of the target.
    fn limit(&self, epoch: u64) -> Option<u32> {
        let state = self.link.state();
        // A draft that does not say has no limit.
        state.up().filter(|draft| draft.lease.epoch == epoch).map(|draft| match draft.card.max_draft_tokens {
            0 => u32::MAX,
            limit => limit,
        })
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    #[test]
    fn a_draft_is_left_when_it_stays_silent_and_not_for_one_missed_deadline() {
        let (now, minute) = (Instant::now(), Duration::from_secs(60));
        assert_eq!(Hold::of(&State::Up(())), Hold::Answers);
        // A time to come has passed for no time at all, however slow this test is.
        assert_eq!(Hold::of(&State::Suspect((), now + minute)), Hold::Silent);
        assert_eq!(Hold::of(&State::Suspect((), now - DRAFT_PATIENCE)), Hold::Lost);
        assert_eq!(Hold::of(&State::<()>::Down("gone".into())), Hold::Lost);
    }
}
