//! One step: a forward over the planned rows, then sampling, verification and replies, sequence by sequence.

use candle_core::{Device, Tensor};
use eyrie_kernels::KernelError;
use eyrie_model::{ForwardOut, Keep, LogitRows, ModelError, SeqRows};
use eyrie_speculation::{SampleError, Sampler, SamplingParams, Verdict, verify};
use eyrie_wire::v1::{self, target_out::Body};
use eyrie_wire::{Reason, item_error};
use tokio::time::Instant;

use super::Engine;
use super::features::Taken;
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

/// What a step came to for one sequence.
struct Outcome {
    /// Its captured rows.
    taken: Taken,
    /// Rows that its table had before.
    len: u32,
    answer: Answer,
}

enum Answer {
    /// With the last chunk its first token, or why there is none.
    Prompt(Option<Body>),
    Round(Verdict),
    Error(v1::ItemError),
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

    /// Computes `pieces` in one forward; returns the rows computed. Where values turn out not to be numbers, or a GPU has no
    /// memory for all of the rows, each piece is computed alone, which gives the same rows, then without what was drafted,
    /// and only what fails by itself is given up. What a failed forward wrote lies beyond the computed rows and is written
    /// again.
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
            Err(error) if !is_of_the_rows(&error) => Err(error.into()),
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

    /// Draws tokens from the rows of `out`, one piece after the other, keeps the captured rows of all, and answers.
    fn commit(&mut self, pieces: &[Piece], out: &ForwardOut) -> Result<(), TargetError> {
        let mut outcomes = Vec::with_capacity(pieces.len());
        for (index, piece) in pieces.iter().enumerate() {
            let outcome = match piece.rows {
                Rows::Prompt { tokens, last } => self.commit_prompt(piece.key, tokens, last, out, index)?,
                Rows::Round => self.commit_round(piece.key, out, index)?,
            };
            outcomes.extend(outcome);
        }
        let refs = self.take_features(&outcomes, out)?;
        for (outcome, refs) in outcomes.into_iter().zip(refs) {
            let Outcome { taken: Taken { key, .. }, len, answer } = outcome;
            self.answer(key, answer, refs);
            self.publish(key, len);
            self.release_finished(key);
        }
        Ok(())
    }

    /// Keeps and publishes the captured rows of `outcomes`; returns where those of each were published.
    fn take_features(
        &mut self,
        outcomes: &[Outcome],
        out: &ForwardOut,
    ) -> Result<Vec<Vec<v1::FeatureRef>>, TargetError> {
        // Where there is a draft, rows of sequences that want none are kept too, for those to come that begin alike.
        let wanted = self.gauges.has_drafts() || outcomes.iter().any(|outcome| outcome.taken.wanted);
        match (&out.aux, &mut self.features) {
            (Some(aux), Some(features)) if wanted => {
                features.take(aux, outcomes.iter().map(|outcome| &outcome.taken))
            }
            _ => Ok(vec![Vec::new(); outcomes.len()]),
        }
    }

    /// Tells a sequence's gateway what the step came to; `refs` say where its captured rows lie.
    fn answer(&mut self, key: Key, answer: Answer, refs: Vec<v1::FeatureRef>) {
        let Some(sequence) = self.sequences.get_mut(&key) else { return };
        let route = sequence.route;
        match answer {
            Answer::Prompt(last) => {
                if !refs.is_empty() {
                    let body = Body::Features(v1::Features { refs, first_held: 0, fetched: false });
                    self.streams.reply(route, key.seq, body);
                }
                if let Some(body) = last {
                    self.streams.reply(route, key.seq, body);
                }
            }
            Answer::Round(verdict) => {
                let body = Body::Committed(sequence.commit(&verdict, refs));
                self.streams.reply(route, key.seq, body);
            }
            Answer::Error(error) => self.streams.reply(route, key.seq, Body::Error(error)),
        }
    }

    fn commit_prompt(
        &mut self,
        key: Key,
        tokens: usize,
        last: bool,
        out: &ForwardOut,
        index: usize,
    ) -> Result<Option<Outcome>, TargetError> {
        let Some(sequence) = self.sequences.get_mut(&key) else { return Ok(None) };
        let len = sequence.table.len();
        let kv_len = len + tokens as u32;
        self.model.rollback(&mut self.cache, &mut sequence.table, Keep::Len(kv_len))?;
        // Rows that are computed again were published before.
        let first = sequence.advance(kv_len).max(len);
        let rows = out.rows[index].clone().skip(first.min(kv_len).saturating_sub(len) as usize).collect();
        let taken = Taken { key, first, rows, wanted: sequence.features };
        let answer = if last {
            let row = out.logit_rows[index].start;
            match draw(&mut self.sampler, &out.logits, row, &sequence.sampling, kv_len) {
                Ok(token) => Some(Body::Committed(sequence.first_token(token))),
                Err(error) => Some(Body::Error(given_up(sequence, error)?)),
            }
        } else {
            None
        };
        Ok(Some(Outcome { taken, len, answer: Answer::Prompt(answer) }))
    }

    fn commit_round(
        &mut self,
        key: Key,
        out: &ForwardOut,
        index: usize,
    ) -> Result<Option<Outcome>, TargetError> {
        let Some(sequence) = self.sequences.get_mut(&key) else { return Ok(None) };
        let Work::Round { proposal, .. } = &sequence.work else { return Ok(None) };
        let (len, base_len, first_row) = (sequence.table.len(), sequence.kv_len, out.logit_rows[index].start);
        let choose = |node: usize, position| {
            draw(&mut self.sampler, &out.logits, first_row + node, &sequence.sampling, position)
        };
        let mut taken = Taken { key, first: base_len, rows: Vec::new(), wanted: sequence.features };
        let verdict: Verdict = match verify(proposal, base_len, choose) {
            Ok(verdict) => verdict,
            Err(error) => {
                let answer = Answer::Error(given_up(sequence, error)?);
                return Ok(Some(Outcome { taken, len, answer }));
            }
        };
        let kept = sequence.kept(&verdict);
        let nodes: Vec<usize> = std::iter::once(0).chain(verdict.path.iter().copied()).take(kept).collect();
        let keep = match proposal.is_chain() {
            true => Keep::Len(base_len + kept as u32),
            false => Keep::Path { base_len, nodes: &nodes },
        };
        self.model.rollback(&mut self.cache, &mut sequence.table, keep)?;
        taken.rows = nodes.iter().map(|node| out.rows[index].start + node).collect();
        Ok(Some(Outcome { taken, len, answer: Answer::Round(verdict) }))
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
}

/// Ends the work of a sequence whose token could not be drawn; the other sequences go on.
fn given_up(sequence: &mut Sequence, error: DrawError) -> Result<v1::ItemError, TargetError> {
    match error {
        DrawError::Sample(error) => {
            sequence.abandon();
            Ok(item_error(Reason::Internal, format!("sampling: {error}")))
        }
        DrawError::Tensor(error) => Err(error.into()),
    }
}

/// Whether `error` comes from the values of some rows or from their number, and says nothing about others.
fn is_of_the_rows(error: &ModelError) -> bool {
    matches!(error, ModelError::Kernel(KernelError::NotANumber { .. } | KernelError::GpuMemory { .. }))
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
