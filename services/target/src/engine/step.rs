//! One step: a forward over the planned rows, then sampling, verification and replies, sequence by sequence.

use std::ops::Range;

use candle_core::{Device, Tensor};
use eyrie_kernels::KernelError;
use eyrie_model::{ForwardOut, Keep, LogitRows, ModelError, SeqRows};
use eyrie_speculation::{SampleError, Sampler, SamplingParams, Verdict, verify};
use eyrie_wire::v1::{self, target_out::Body};
use eyrie_wire::{Reason, item_error};
use tokio::time::Instant;

use super::Engine;
use super::scheduler::{self, Piece, Rows};
use super::sequence::{Key, Sequence, Work};
use crate::TargetError;

/// Why a token could not be drawn.
enum DrawError {
    /// The row is unusable: that sequence's problem.
    Sample(SampleError),
    /// The logits could not be read: everybody's problem.
    Tensor(candle_core::Error),
}

impl Engine {
    /// Computes one step of every sequence that is ready.
    pub(super) fn step(&mut self) -> Result<(), TargetError> {
        let may_run = |sequence: &Sequence| self.streams.is_flowing(sequence.route);
        let mut pieces = scheduler::plan(&self.sequences, self.prefill_chunk, may_run);
        let began = Instant::now();
        self.provide(&mut pieces, began);
        if pieces.is_empty() {
            return Ok(());
        }
        for copy in std::mem::take(&mut self.copies) {
            self.cache.copy(copy)?;
        }
        let rows = self.compute(&pieces)?;
        self.gauges.add_step(rows);
        self.last_step = began.elapsed();
        Ok(())
    }

    /// Computes `pieces` in one forward; returns the rows computed. Where values turn out not to be numbers, each piece
    /// is computed alone, which gives the same rows, then without what was drafted, and only what fails by itself is
    /// given up. What a failed forward wrote lies beyond the computed rows and is written again.
    fn compute(&mut self, pieces: &[Piece]) -> Result<usize, TargetError> {
        let batch: Vec<SeqRows<'_>> =
            pieces.iter().map(|piece| rows_of(&self.sequences[&piece.key], piece.rows)).collect();
        match self.model.forward(&batch, &mut self.cache) {
            Ok(mut out) => {
                // Once for all rows; no copy where they lie there already.
                out.logits = out.logits.map(|logits| logits.to_device(&Device::Cpu)).transpose()?;
                self.commit(pieces, &out)?;
                Ok(out.rows.last().map_or(0, |rows| rows.end))
            }
            Err(error) if !is_numeric(&error) => Err(error.into()),
            Err(error) => match pieces {
                [piece] if piece.rows == Rows::Round && self.drop_drafts(piece.key) => self.compute(pieces),
                [piece] => {
                    self.fail(piece.key, &error);
                    Ok(0)
                }
                _ => pieces.chunks(1).map(|piece| self.compute(piece)).sum(),
            },
        }
    }

    /// Draws tokens from the rows of `out`, one piece after the other, and answers.
    fn commit(&mut self, pieces: &[Piece], out: &ForwardOut) -> Result<(), TargetError> {
        // Where there is a draft, rows of sequences that want none are kept too, for those to come that begin alike.
        let wanted = self.gauges.has_drafts() || pieces.iter().any(|p| self.sequences[&p.key].features);
        let aux = match (&out.aux, &self.features) {
            (Some(aux), Some(_)) if wanted => aux.to_vec()?,
            _ => Vec::new(),
        };
        for (index, piece) in pieces.iter().enumerate() {
            let len = self.sequences[&piece.key].table.len();
            match piece.rows {
                Rows::Prompt { tokens, last } => {
                    self.commit_prompt(piece.key, tokens, last, out, index, &aux)?;
                }
                Rows::Round => self.commit_round(*piece, out, index, &aux)?,
            }
            self.publish(piece.key, len);
            self.release_finished(piece.key);
        }
        Ok(())
    }

    fn commit_prompt(
        &mut self,
        key: Key,
        tokens: usize,
        last: bool,
        out: &ForwardOut,
        index: usize,
        aux: &[f32],
    ) -> Result<(), TargetError> {
        let Some(sequence) = self.sequences.get_mut(&key) else { return Ok(()) };
        let first = sequence.table.len();
        let kv_len = first + tokens as u32;
        self.model.rollback(&mut self.cache, &mut sequence.table, Keep::Len(kv_len))?;
        // Rows that are computed again were published before.
        let first_new = sequence.advance(kv_len).max(first);
        let route = sequence.route;
        if let (true, Some(features)) = (!aux.is_empty() && first_new < kv_len, &mut self.features) {
            let width = features.width();
            let rows = out.rows[index].start + (first_new - first) as usize..out.rows[index].end;
            let rows = &aux[rows.start * width..rows.end * width];
            let refs = features.take(key, first_new, rows, sequence.features)?;
            if sequence.features {
                let body = Body::Features(v1::Features { refs, first_held: 0, fetched: false });
                self.streams.reply(route, key.seq, body);
            }
        }
        if last {
            let row = out.logit_rows[index].start;
            match draw(&mut self.sampler, &out.logits, row, &sequence.sampling, kv_len) {
                Ok(token) => {
                    let reply = sequence.first_token(token);
                    self.streams.reply(route, key.seq, Body::Committed(reply));
                }
                Err(error) => self.give_up(key, error)?,
            }
        }
        Ok(())
    }

    fn commit_round(
        &mut self,
        piece: Piece,
        out: &ForwardOut,
        index: usize,
        aux: &[f32],
    ) -> Result<(), TargetError> {
        let key = piece.key;
        let Some(sequence) = self.sequences.get_mut(&key) else { return Ok(()) };
        let Work::Round { proposal, .. } = &sequence.work else { return Ok(()) };
        let (base_len, first_row) = (sequence.kv_len, out.logit_rows[index].start);
        let choose = |node: usize, position| {
            draw(&mut self.sampler, &out.logits, first_row + node, &sequence.sampling, position)
        };
        let verdict: Verdict = match verify(proposal, base_len, choose) {
            Ok(verdict) => verdict,
            Err(error) => return self.give_up(key, error),
        };
        let kept = sequence.kept(&verdict);
        let nodes: Vec<usize> = std::iter::once(0).chain(verdict.path.iter().copied()).take(kept).collect();
        let keep = match proposal.is_chain() {
            true => Keep::Len(base_len + kept as u32),
            false => Keep::Path { base_len, nodes: &nodes },
        };
        self.model.rollback(&mut self.cache, &mut sequence.table, keep)?;
        let refs = match &mut self.features {
            Some(features) if !aux.is_empty() => {
                let rows = gather(aux, features.width(), &out.rows[index], &nodes);
                features.take(key, base_len, &rows, sequence.features)?
            }
            _ => Vec::new(),
        };
        let (reply, route) = (sequence.commit(&verdict, refs), sequence.route);
        self.streams.reply(route, key.seq, Body::Committed(reply));
        Ok(())
    }

    fn drop_drafts(&mut self, key: Key) -> bool {
        self.sequences.get_mut(&key).is_some_and(Sequence::drop_drafts)
    }

    /// Ends a sequence whose rows cannot be computed.
    fn fail(&mut self, key: Key, error: &ModelError) {
        let Some(sequence) = self.sequences.get_mut(&key) else { return };
        sequence.fail();
        let body = Body::Error(item_error(Reason::Internal, format!("computing the sequence: {error}")));
        self.streams.reply(sequence.route, key.seq, body);
        tracing::warn!(boot = key.boot, seq = key.seq, %error, "a sequence could not be computed and is given up");
        self.release_finished(key);
    }

    /// Answers a sequence whose token could not be drawn; the other sequences go on.
    fn give_up(&mut self, key: Key, error: DrawError) -> Result<(), TargetError> {
        let error = match error {
            DrawError::Sample(error) => error,
            DrawError::Tensor(error) => return Err(error.into()),
        };
        if let Some(sequence) = self.sequences.get_mut(&key) {
            sequence.abandon();
            let body = Body::Error(item_error(Reason::Internal, format!("sampling: {error}")));
            self.streams.reply(sequence.route, key.seq, body);
        }
        Ok(())
    }
}

/// Whether `error` comes from the values of some rows, and says nothing about the others.
fn is_numeric(error: &ModelError) -> bool {
    matches!(error, ModelError::Kernel(KernelError::NotANumber { .. }))
}

/// The model's view of one piece.
fn rows_of(sequence: &Sequence, rows: Rows) -> SeqRows<'_> {
    let (table, base_len) = (&sequence.table, sequence.table.len());
    match (&sequence.work, rows) {
        (Work::Round { proposal, rows, .. }, Rows::Round) => {
            let parents = (!proposal.is_chain()).then(|| proposal.parents());
            SeqRows { table, base_len, tokens: rows, parents, logits: LogitRows::All }
        }
        (_, Rows::Prompt { tokens, last }) => {
            let from = base_len as usize;
            let tokens = &sequence.tokens[from..from + tokens];
            let logits = if last { LogitRows::Last } else { LogitRows::None };
            SeqRows { table, base_len, tokens, parents: None, logits }
        }
        // Not planned; the model refuses a piece without rows.
        (_, Rows::Round) => SeqRows { table, base_len, tokens: &[], parents: None, logits: LogitRows::None },
    }
}

/// Draws the token for absolute `position` from row `row` of `logits`.
fn draw(
    sampler: &mut Sampler,
    logits: &Option<Tensor>,
    row: usize,
    params: &SamplingParams,
    position: u32,
) -> Result<u32, DrawError> {
    let read = |logits: &Tensor| logits.narrow(0, row, 1)?.flatten_all()?.to_vec1::<f32>();
    let values = match logits {
        Some(logits) => read(logits).map_err(DrawError::Tensor)?,
        None => Vec::new(),
    };
    sampler.sample(&values, params, position).map_err(DrawError::Sample)
}

/// The rows of tree `nodes` out of a batch whose sequence has `rows`.
fn gather(aux: &[f32], width: usize, rows: &Range<usize>, nodes: &[usize]) -> Vec<f32> {
    let row = |node: &usize| {
        let at = (rows.start + node) * width;
        &aux[at..at + width]
    };
    nodes.iter().flat_map(row).copied().collect()
}
