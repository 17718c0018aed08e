//! One step: bring the sequences of all jobs up to date together, then grow the proposals together.

use std::time::Instant;

use candle_core::{Device, Tensor};
use eyrie_model::{Aux, DraftCache, DraftRows, DraftState, Eagle3Head, Feature, Keep};
use eyrie_wire::v1::{self, draft_out::Body};
use eyrie_wire::{Reason, item_error};

use super::EngineError;
use super::growth::{Growth, StepRows};
use super::job::{Job, Outbox};
use super::pace::Pace;
use super::store::Store;

/// Head and caches for the length of a step.
#[derive(Debug)]
pub(super) struct Step<'a> {
    pub(super) head: &'a mut Eagle3Head,
    pub(super) cache: &'a mut DraftCache,
    pub(super) store: &'a mut Store,
    pub(super) pace: &'a mut Pace,
    /// Jobs that failed so far.
    pub(super) failures: &'a mut u64,
    pub(super) outbox: &'a mut Outbox,
    /// After what nothing can be computed any more.
    pub(super) ended: Option<EngineError>,
}

/// A job whose slots are all built, and its proposal.
struct Growing {
    job: Job,
    growth: Growth,
}

/// Output of one proposal's rows of a draft step: a state and a row of logits over draft ids for each.
struct Drafted {
    states: DraftState,
    logits: Vec<Vec<f32>>,
}

/// What one job contributes to an extend.
struct Part {
    first: u32,
    end: u32,
    feature: Feature,
}

impl Step<'_> {
    /// Runs `jobs` one step further and answers those that are complete; returns those with rows left to take in.
    pub(super) fn run(&mut self, mut jobs: Vec<Job>) -> Vec<Job> {
        let computed = self.extend(&mut jobs);
        let (logits, states) = match computed {
            Ok(out) => out,
            Err(error) => {
                self.fail(jobs, error);
                return Vec::new();
            }
        };
        let (mut unfinished, mut growing) = (Vec::new(), Vec::new());
        for (row, job) in jobs.into_iter().enumerate() {
            if job.rows_left() > 0 {
                unfinished.push(job);
                continue;
            }
            if let Some(from) = job.lacks_from() {
                self.finish(job, Body::Need(v1::Need { from }));
                continue;
            }
            match Growth::start(job.wanted, &logits[row], states[row].clone(), self.head) {
                Ok(Some(growth)) => growing.push(Growing { job, growth }),
                Ok(None) => self.propose(job, Vec::new(), &[]),
                Err(error) => self.fail(vec![job], error),
            }
        }
        // Answers that need no drafting do not wait for those that do.
        self.outbox.flush();
        self.grow(growing);
        unfinished
    }

    /// Builds the next slots of every job; returns logits and output of the last row of each.
    fn extend(&mut self, jobs: &mut [Job]) -> Result<(Vec<Vec<f32>>, Vec<DraftState>), EngineError> {
        let begun = Instant::now();
        let parts = self.parts(jobs)?;
        let mut batch = Vec::with_capacity(jobs.len());
        for (job, part) in jobs.iter().zip(&parts) {
            let sequence = &job.sequence;
            let tokens = sequence
                .slot_tokens(part.first, part.end)
                .ok_or(EngineError::Invariant("tokens of every slot to build are known"))?;
            batch.push(DraftRows {
                table: &sequence.table,
                base_slot: sequence.slot(part.first),
                origin: sequence.origin(),
                tokens,
                feature: &part.feature,
                parents: None,
            });
        }
        let out = self.head.extend(self.cache, &batch)?;
        let logits = rows_of(&out.logits)?;
        let mut states = Vec::with_capacity(jobs.len());
        for ((job, part), rows) in jobs.iter_mut().zip(&parts).zip(&out.rows) {
            let last = part.feature.slice(part.feature.rows() - 1..part.feature.rows())?;
            let committed = job.sequence.slot(part.end);
            self.cache.keep(&mut job.sequence.table, Keep::Len(committed))?;
            job.sequence.advance(part.end, last);
            states.push(out.states.slice(rows.end - 1..rows.end)?);
        }
        self.pace.observe(out.states.rows(), begun.elapsed());
        Ok((logits, states))
    }

    /// Fuses the rows that each job takes in now; a job that has all of its slots runs its last one again.
    fn parts(&mut self, jobs: &mut [Job]) -> Result<Vec<Part>, EngineError> {
        let share = self.pace.share(jobs.len());
        let mut aux = Vec::with_capacity(jobs.len());
        let mut counts = Vec::with_capacity(jobs.len());
        for job in jobs.iter_mut() {
            let rows = job.rows_left().min(share);
            aux.extend(job.take_rows(rows)?);
            counts.push(rows);
        }
        let fused = match aux.is_empty() {
            true => None,
            false => {
                let aux: Vec<&Aux> = aux.iter().collect();
                Some(self.head.fuse(&Aux::concat(self.head.backend(), &aux)?)?)
            }
        };
        let mut next = 0;
        let mut parts = Vec::with_capacity(jobs.len());
        for (job, rows) in jobs.iter().zip(counts) {
            let built = job.sequence.built();
            let part = match (&fused, &job.sequence.tip) {
                (Some(fused), _) if rows > 0 => {
                    let feature = fused.slice(next..next + rows)?;
                    Part { first: built, end: built + rows as u32, feature }
                }
                (_, Some(tip)) => Part { first: built - 1, end: built, feature: tip.clone() },
                _ => return Err(EngineError::Invariant("a job has rows to take in or a tip to run again")),
            };
            next += rows;
            parts.push(part);
        }
        Ok(parts)
    }

    fn grow(&mut self, mut growing: Vec<Growing>) {
        loop {
            let mut stepping = Vec::with_capacity(growing.len());
            for mut grown in growing {
                match grown.growth.next(self.head) {
                    Ok(Some(rows)) => stepping.push((grown, rows)),
                    Ok(None) => self.complete(grown),
                    Err(error) => self.fail(vec![grown.job], error),
                }
            }
            self.outbox.flush();
            if stepping.is_empty() {
                return;
            }
            growing = match self.draft(&stepping) {
                Ok(outs) => self.take(stepping, outs),
                Err(error) => {
                    self.fail(stepping.into_iter().map(|(grown, _)| grown.job).collect(), error);
                    return;
                }
            };
        }
    }

    /// Runs one draft step; returns states and logits of the rows of each proposal.
    fn draft(&mut self, stepping: &[(Growing, StepRows)]) -> Result<Vec<Drafted>, EngineError> {
        let batch: Vec<_> = stepping
            .iter()
            .map(|(grown, rows)| {
                let sequence = &grown.job.sequence;
                DraftRows {
                    table: &sequence.table,
                    base_slot: sequence.table.len() + rows.offset as u32,
                    origin: sequence.origin(),
                    tokens: &rows.tokens,
                    feature: &rows.states,
                    parents: rows.parents.as_deref(),
                }
            })
            .collect();
        let out = self.head.step(self.cache, &batch)?;
        let mut logits = rows_of(&out.logits)?.into_iter();
        out.rows
            .iter()
            .map(|rows| {
                let states = out.states.slice(rows.clone())?;
                Ok(Drafted { states, logits: logits.by_ref().take(rows.len()).collect() })
            })
            .collect()
    }

    fn take(&mut self, stepping: Vec<(Growing, StepRows)>, outs: Vec<Drafted>) -> Vec<Growing> {
        let mut growing = Vec::with_capacity(stepping.len());
        for ((mut grown, _), Drafted { states, logits }) in stepping.into_iter().zip(outs) {
            let rows: Vec<&[f32]> = logits.iter().map(Vec::as_slice).collect();
            match grown.growth.take(states, &rows, self.head) {
                Ok(()) => growing.push(grown),
                Err(error) => self.fail(vec![grown.job], error),
            }
        }
        growing
    }

    fn complete(&mut self, grown: Growing) {
        let Growing { job, growth } = grown;
        match growth.finish() {
            Ok(proposal) if proposal.is_chain() => self.propose(job, proposal.tokens().to_vec(), &[]),
            Ok(proposal) => self.propose(job, proposal.tokens().to_vec(), proposal.parents()),
            Err(error) => self.fail(vec![job], error),
        }
    }

    fn propose(&mut self, job: Job, tokens: Vec<u32>, parents: &[u16]) {
        let parents = parents.iter().map(|&parent| parent.into()).collect();
        let base_len = job.base_len;
        self.finish(job, Body::Proposal(v1::Proposal { base_len, tokens, parents }));
    }

    fn finish(&mut self, job: Job, body: Body) {
        self.outbox.push(&job.origin, body);
        self.store.put(job.origin.key, job.sequence);
    }

    /// Answers with the error and forgets the sequences: what their caches hold now is not known.
    fn fail(&mut self, jobs: Vec<Job>, error: EngineError) {
        let before = *self.failures;
        *self.failures += jobs.len() as u64;
        // Whoever sends bad features can do so every round: the log gets the first and then ever fewer of them.
        if is_rare(before, *self.failures) {
            tracing::error!(jobs = jobs.len(), failed_so_far = *self.failures, "draft step failed: {error}");
        }
        for job in jobs {
            let body = Body::Error(item_error(Reason::Internal, format!("draft step failed: {error}")));
            self.outbox.push(&job.origin, body);
            self.store.discard(job.sequence);
        }
        if error.is_final() {
            self.ended.get_or_insert(error);
        }
    }
}

/// Whether a power of two lies in `before + 1..=now`.
fn is_rare(before: u64, now: u64) -> bool {
    now > 0 && (before == 0 || before.ilog2() < now.ilog2())
}

fn rows_of(logits: &Tensor) -> Result<Vec<Vec<f32>>, EngineError> {
    Ok(logits
        .to_device(&Device::Cpu)
        .and_then(|logits| logits.to_vec2())
        .map_err(eyrie_model::ModelError::from)?)
}

#[cfg(test)]
mod tests {
    use super::is_rare;

    #[test]
    fn repeated_failures_are_logged_ever_more_rarely() {
        let logged: Vec<u64> = (1..40).filter(|&now| is_rare(now - 1, now)).collect();
        assert_eq!(logged, [1, 2, 4, 8, 16, 32]);
        assert!(is_rare(3, 6) && !is_rare(4, 7) && !is_rare(5, 5));
    }
}
