//! One sequence at one boot of a target, with its place at a draft.

use std::sync::Arc;

use eyrie_wire::v1::target_item::Op;
use eyrie_wire::v1::target_out::Body;
use eyrie_wire::v1::{FetchFeatures, ItemError};
use eyrie_wire::{Reason, refuse, status_of};
use tokio::time::{Instant, timeout_at};
use tonic::Status;

use crate::link::{Route, TargetPeer};
use crate::pool::{Hold, Member, Place, Seat};
use crate::round::{Commit, Rounds};
use crate::stats::{Stats, add};

/// Why a sequence at the target ended before the request did.
#[derive(Debug)]
pub(crate) enum Halt {
    /// The sequence is lost but the request can go on with another one.
    Lost(String),
    /// The target does not take the sequence now; it may in a moment, or another one.
    Refused(Status),
    /// The request ends with this.
    Fatal(Status),
    /// Nobody reads the reply any more.
    ClientGone,
}

/// The request's sequence at one boot of a target.
pub(crate) struct Sequence {
    pub(crate) rounds: Rounds,
    pub(crate) context: u32,
    /// The target publishes what a draft needs.
    pub(crate) captured: bool,
    pub(crate) member: Arc<Member>,
    target: Route<TargetPeer>,
    pub(crate) seat: Option<Seat>,
}

impl Sequence {
    /// A sequence to be opened with `tokens`.
    pub(crate) fn at(place: Place, tokens: Vec<u32>) -> Self {
        let card = &place.ready.served.card;
        Self {
            rounds: Rounds::opening(tokens, card.vocab_size),
            context: card.context_length,
            captured: !card.aux_layers.is_empty(),
            member: place.member,
            target: place.route,
            seat: None,
        }
    }

    /// Sees to a place at a draft that answers: the one it has, or another draft's, which then begins with nothing.
    /// False if no draft that answers proposes `tokens`, and while its own is silent only for a moment.
    pub(crate) fn take_seat(&mut self, tokens: u32, stats: &Stats) -> bool {
        match self.seat.as_ref().map(|seat| self.member.hold(seat)) {
            Some(Hold::Answers) => return true,
            Some(Hold::Silent) => return false,
            Some(Hold::Lost) | None => {}
        }
        let Some(seat) = self.member.seat(tokens) else { return false };
        if self.seat.as_ref().is_some_and(|old| old.draft != seat.draft) {
            add(&stats.draft_moves, 1);
        }
        self.seat = Some(seat);
        self.rounds.draft.joined();
        true
    }

    /// Takes in what the draft said without being waited for.
    pub(crate) fn overhear(&mut self) {
        let next = self.rounds.next();
        while let Some(late) = self.seat.as_mut().and_then(|seat| seat.route.try_recv()) {
            self.rounds.draft.overhear(late, next);
        }
    }

    /// Asks the target for rows that the draft lacks.
    pub(crate) async fn fetch(&mut self) -> Result<(), Halt> {
        match self.rounds.draft.fetch() {
            Some(from) => self.ask_target(Op::FetchFeatures(FetchFeatures { from })).await,
            None => Ok(()),
        }
    }

    /// Fetches what the draft lacks and waits for it, at most until `until`.
    pub(crate) async fn heal(&mut self, until: Instant) -> Result<(), Halt> {
        self.fetch().await?;
        while self.rounds.draft.is_healing() {
            let Ok(heard) = timeout_at(until, self.hear_target()).await else { return Ok(()) };
            heard?;
        }
        Ok(())
    }

    pub(crate) async fn ask_target(&self, op: Op) -> Result<(), Halt> {
        let stopping = |_| Halt::Lost("the gateway stops".to_owned());
        self.target.send(op).await.map_err(stopping)
    }

    /// The next reply; `None` if it was no commit.
    pub(crate) async fn hear_target(&mut self) -> Result<Option<Commit>, Halt> {
        let Some(out) = self.target.recv().await else {
            return Err(Halt::Lost("the stream to the target broke".to_owned()));
        };
        self.take_in(out.body)
    }

    /// Takes in what the target said between rounds.
    pub(crate) fn catch_up(&mut self) -> Result<(), Halt> {
        while let Some(out) = self.target.try_recv() {
            self.take_in(out.body)?;
        }
        Ok(())
    }

    fn take_in(&mut self, body: Option<Body>) -> Result<Option<Commit>, Halt> {
        match body {
            Some(Body::Committed(committed)) => {
                let commit = self.rounds.committed(committed);
                commit.map_err(|e| Halt::Fatal(refuse(Reason::Internal, e.to_string())))
            }
            Some(Body::Features(features)) => {
                self.rounds.draft.features(features);
                Ok(None)
            }
            Some(Body::Error(error)) => match halt(&error) {
                // The target answers in order and a fetch is asked before the round it goes with: this is its answer.
                // The draft only makes things faster, so a fetch that fails must not end the request.
                Halt::Fatal(why) | Halt::Refused(why)
                    if may_answer_fetch(&error, self.rounds.is_opening())
                        && self.rounds.draft.fetch_failed() =>
                {
                    tracing::warn!("rows for the draft cannot be had: {}", why.message());
                    Ok(None)
                }
                halt => Err(halt),
            },
            Some(Body::Closed(_)) | None => Ok(None),
        }
    }
}

/// Whether `error` can be the answer to a fetch. While the sequence `is_opening`, any other than a refusal of the fetch
/// itself is the answer to Open, which comes whenever the prompt is computed.
fn may_answer_fetch(error: &ItemError, is_opening: bool) -> bool {
    let refusals = [Reason::Unsupported, Reason::InvalidArgument];
    !is_opening || refusals.iter().any(|reason| reason.as_str() == error.reason)
}

/// An error about where the sequence stands is mended by opening it again, one about the target's own state or size
/// by time or another target; any other is the client's.
fn halt(error: &ItemError) -> Halt {
    let lost = [Reason::BaseLen, Reason::UnknownSeq, Reason::DuplicateSeq, Reason::StaleEpoch];
    let elsewhere = [
        Reason::Busy,
        Reason::Loading,
        Reason::Draining,
        Reason::Unreachable,
        Reason::Context,
        Reason::KvCapacity,
    ];
    let is_one_of = |reasons: &[Reason]| reasons.iter().any(|reason| reason.as_str() == error.reason);
    if is_one_of(&lost) {
        Halt::Lost(error.message.clone())
    } else if is_one_of(&elsewhere) {
        Halt::Refused(status_of(error))
    } else {
        Halt::Fatal(status_of(error))
    }
}

#[cfg(test)]
mod tests {
    use eyrie_wire::item_error;

    use super::*;

    #[test]
    fn while_a_sequence_is_opened_only_refusals_of_a_fetch_answer_one() {
        for (reason, opening) in [
            (Reason::Unsupported, true),
            (Reason::InvalidArgument, true),
            (Reason::Internal, false),
            (Reason::Busy, false),
        ] {
            let error = item_error(reason, "no");
            assert_eq!(may_answer_fetch(&error, true), opening, "{reason:?}");
            assert!(may_answer_fetch(&error, false), "{reason:?}");
        }
    }
}
