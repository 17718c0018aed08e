//! The items of a frame, taken between steps: what needs no computing is answered here.

use eyrie_wire::v1::{self, ItemError, target_item::Op, target_out::Body};
use eyrie_wire::{Reason, item_error};
use tokio::time::Instant;

use super::admission::refuse;
use super::sequence::{Key, Sequence, Turn};
use super::{Engine, StreamId};

/// Sequences that may be open without pages, as a multiple of those that may hold some.
const WAITING_FACTOR: usize = 4;

impl Engine {
    /// Takes the items of one frame in order. Each is answered now, or by the step that computes it.
    pub(super) fn take_items(&mut self, stream: StreamId, items: Vec<v1::TargetItem>) {
        let Some(boot) = self.streams.boot_of(stream) else { return };
        for item in items {
            if !self.streams.takes_items(stream) {
                return;
            }
            let key = Key { boot, seq: item.seq };
            let closing = matches!(item.op, Some(Op::Close(_)));
            if let Err(error) = self.claim(key, stream, closing) {
                self.streams.reply(stream, item.seq, Body::Error(error));
                continue;
            }
            let answers = match item.op {
                Some(Op::Open(open)) => self.open(key, stream, open),
                Some(Op::Verify(verify)) => self.verify(key, &verify),
                Some(Op::FetchFeatures(fetch)) => self.fetch_features(key, fetch.from),
                Some(Op::Revoke(v1::Revoke {})) => self.find(key).map(|sequence| {
                    sequence.revoke();
                    Vec::new()
                }),
                Some(Op::Close(v1::Close {})) => {
                    self.close(key);
                    Ok(vec![Body::Closed(v1::Closed {})])
                }
                None => Err(refuse("op must be set")),
            };
            for body in answers.unwrap_or_else(|error| vec![Body::Error(error)]) {
                self.streams.reply(stream, item.seq, body);
            }
        }
    }

    /// Sends further replies of `key` to `stream`. A unary Round that waits for one is not left waiting for ever.
    fn claim(&mut self, key: Key, stream: StreamId, closing: bool) -> Result<(), ItemError> {
        let Some(sequence) = self.sequences.get_mut(&key) else { return Ok(()) };
        let waits = sequence.route != stream && sequence.has_work() && self.streams.is_unary(sequence.route);
        if waits && !closing {
            let message = format!("sequence {} is computing for another call", key.seq);
            return Err(item_error(Reason::Busy, message));
        }
        if waits {
            let message = format!("sequence {} was closed by another call", key.seq);
            let body = Body::Error(item_error(Reason::UnknownSeq, message));
            self.streams.reply(sequence.route, key.seq, body);
        }
        sequence.route = stream;
        sequence.active = Instant::now();
        sequence.expires = None;
        Ok(())
    }

    fn find(&mut self, key: Key) -> Result<&mut Sequence, ItemError> {
        self.sequences.get_mut(&key).ok_or_else(|| {
            let message = format!("sequence {} of boot {:016x} is not open", key.seq, key.boot);
            item_error(Reason::UnknownSeq, message)
        })
    }

    fn open(&mut self, key: Key, stream: StreamId, open: v1::Open) -> Result<Vec<Body>, ItemError> {
        if let Some(sequence) = self.sequences.get(&key) {
            // Sent again after a broken stream: answered once more, or by the prefill that still runs.
            return match sequence.is_reopened_by(&open.tokens) {
                true => Ok(sequence.opened().map(Body::Committed).into_iter().collect()),
                false => Err(item_error(
                    Reason::DuplicateSeq,
                    format!("sequence {} is open already, with other tokens or further rounds", key.seq),
                )),
            };
        }
        if self.drain.is_draining() {
            return Err(item_error(Reason::Draining, "the target is draining: no new sequences"));
        }
        let request = self.limits.request(open)?;
        self.make_waiting_room(request.priority)?;
        self.sequences.insert(key, Sequence::new(request, stream, self.arrivals));
        self.arrivals += 1;
        Ok(Vec::new())
    }

    /// Sees to it that one more of priority `class` may wait: where as many wait as may, the last of those that have not
    /// begun and are of a worse priority is refused in its place.
    fn make_waiting_room(&mut self, class: i32) -> Result<(), ItemError> {
        let limit = self.max_sequences.saturating_mul(WAITING_FACTOR);
        if self.sequences.len() - self.finished.len() - self.holders() < limit {
            return Ok(());
        }
        let busy =
            item_error(Reason::Busy, format!("{limit} sequences may wait for KV pages, and as many do"));
        let is_worse = |s: &Sequence| s.waits() && !s.has_begun() && s.rank.class > class;
        let worse = self.sequences.iter().filter(|(_, sequence)| is_worse(sequence));
        let Some((&last, sequence)) = worse.max_by_key(|(_, sequence)| sequence.rank) else {
            return Err(busy);
        };
        self.streams.reply(sequence.route, last.seq, Body::Error(busy));
        self.close(last);
        Ok(())
    }

    fn verify(&mut self, key: Key, verify: &v1::Verify) -> Result<Vec<Body>, ItemError> {
        match self.find(key)?.turn(verify.round, verify.base_len) {
            Turn::Next => {}
            Turn::Repeated(replies) => return Ok(replies.into_iter().map(Body::Committed).collect()),
            Turn::Wrong { expected_len, expected_round } => {
                return Err(wrong_turn(verify, self.find(key)?, expected_len, expected_round));
            }
        }
        let proposal = self.limits.proposal(verify)?;
        let sequence = self.find(key)?;
        match sequence.root() {
            Some(root) if root == verify.root => {
                sequence.begin_round(root, proposal, verify.steps);
                Ok(Vec::new())
            }
            root => Err(refuse(format!(
                "root must be the token emitted for position {}, {}, given {}",
                verify.base_len,
                root.unwrap_or_default(),
                verify.root
            ))),
        }
    }

    fn fetch_features(&mut self, key: Key, from: u32) -> Result<Vec<Body>, ItemError> {
        let sequence = self.find(key)?;
        let (kv_len, wanted) = (sequence.kv_len, sequence.features);
        let Some(features) = self.features.as_mut().filter(|_| wanted) else {
            let message = format!("sequence {} was opened without features", key.seq);
            return Err(item_error(Reason::Unsupported, message));
        };
        if from > kv_len {
            return Err(refuse(format!("from must be at most kv_len = {kv_len}, given {from}")));
        }
        let (refs, first_held) = features
            .publish_again(key, from, kv_len)
            .map_err(|e| item_error(Reason::Internal, e.to_string()))?;
        Ok(vec![Body::Features(v1::Features { refs, first_held, fetched: true })])
    }
}

fn wrong_turn(verify: &v1::Verify, sequence: &Sequence, expected_len: u32, expected_round: u32) -> ItemError {
    let v1::Verify { round, base_len, .. } = verify;
    let message = match (sequence.is_finished(), sequence.has_work()) {
        (true, _) => format!("the sequence has finished at kv_len {expected_len}: it can only be closed"),
        (_, true) => format!(
            "the sequence is computing: round {expected_round} is not answered yet, given round {round} at base_len {base_len}"
        ),
        _ => format!(
            "round {expected_round} at base_len {expected_len} is next, given round {round} at base_len {base_len}"
        ),
    };
    ItemError { expected_len, expected_round, ..item_error(Reason::BaseLen, message) }
}
