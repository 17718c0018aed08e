//! A `Propose` on its way through the engine, and the answers of a step by stream.

use eyrie_model::{Aux, ModelError};
use eyrie_wire::v1::DraftOut;
use eyrie_wire::v1::draft_out::Body;

use super::growth::Wanted;
use super::mailbox::{Replies, StreamId};
use super::sequence::{SeqKey, Sequence};
use crate::inline::HeldRoom;

/// Whose round it is and where its answer goes.
#[derive(Debug, Clone)]
pub(super) struct Origin {
    pub(super) key: SeqKey,
    pub(super) stream: StreamId,
    pub(super) unary: bool,
    pub(super) round: u32,
    pub(super) replies: Replies,
    /// Room for the rows that came with the round.
    pub(super) _held: HeldRoom,
}

/// A round being worked on. It owns its sequence meanwhile.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) origin: Origin,
    pub(super) base_len: u32,
    pub(super) wanted: Wanted,
    pub(super) sequence: Sequence,
    /// Captured rows from the sequence's first unbuilt position on, and how many of them were taken.
    rows: Option<Aux>,
    taken: usize,
}

impl Job {
    pub(super) fn new(
        origin: Origin,
        base_len: u32,
        wanted: Wanted,
        sequence: Sequence,
        rows: Option<Aux>,
    ) -> Self {
        Self { origin, base_len, wanted, sequence, rows, taken: 0 }
    }

    /// Captured rows that no slot was built from yet.
    pub(super) fn rows_left(&self) -> usize {
        self.rows.as_ref().map_or(0, |rows| rows.rows() - self.taken)
    }

    /// The next `rows` captured rows, at most [`Job::rows_left`]; `None` for none.
    pub(super) fn take_rows(&mut self, rows: usize) -> Result<Option<Aux>, ModelError> {
        let start = self.taken;
        self.taken += rows;
        self.rows.as_ref().filter(|_| rows > 0).map(|all| all.slice(start..self.taken)).transpose()
    }

    /// The first position without a slot, when one below `base_len` is missing.
    pub(super) fn lacks_from(&self) -> Option<u32> {
        Some(self.sequence.built()).filter(|&built| built < self.base_len)
    }
}

/// Answers, one frame a stream.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    frames: Vec<(StreamId, Replies, Vec<DraftOut>)>,
}

impl Outbox {
    pub(super) fn push(&mut self, origin: &Origin, body: Body) {
        let out = DraftOut { seq: origin.key.seq, round: origin.round, body: Some(body) };
        match self.frames.iter_mut().find(|(stream, ..)| *stream == origin.stream) {
            Some((_, _, outs)) => outs.push(out),
            None => self.frames.push((origin.stream, origin.replies.clone(), vec![out])),
        }
    }

    pub(super) fn flush(&mut self) {
        for (_, replies, outs) in self.frames.drain(..) {
            replies.send(outs);
        }
    }
}
