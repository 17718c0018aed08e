//! Sequences in step: all propose, then all verify, and the clock is read in between.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use anyhow::Context;
use eyrie_wire::v1::draft_out::Body as DraftBody;
use eyrie_wire::v1::target_out::Body as TargetBody;
use eyrie_wire::v1::{
    Close, CloseDraft, Committed, DraftItem, FeatureRef, Features, FetchFeatures, Limits, Open, Propose,
    Sampling, TargetItem, Verify, draft_item, target_item,
};
use eyrie_wire::{Address, Reason};

use super::lane::{self, DraftLane, TargetLane};

/// Asks for the same rows of one sequence before that is taken for a fault: those of other sequences may have overwritten
/// them in the ring before the draft read them.
const MOST_NEEDS: u32 = 8;

/// How much is asked of each sequence.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    pub(super) prompt: u32,
    pub(super) rounds: u32,
    pub(super) k: u32,
}

/// One round of all sequences.
#[derive(Debug, Clone, Copy)]
pub(super) struct Round {
    pub(super) draft: Duration,
    pub(super) verify: Duration,
    /// Committed by all sequences.
    pub(super) tokens: u32,
}

/// One sequence as a gateway keeps it.
#[derive(Debug, Default)]
struct Sequence {
    /// Prompt and committed tokens; the last is the root.
    tokens: Vec<u32>,
    round: u32,
    /// Features that the draft has not been sent.
    pending: Vec<FeatureRef>,
    /// Position of the first token that the draft lacks.
    drafted: u32,
}

/// What the target answered.
#[derive(Debug, PartialEq, Eq)]
enum Heard {
    /// Tokens of a sequence.
    Committed(u32),
    /// Rows of this sequence once more, from this position on.
    Fetched { seq: u64, first_held: u32 },
    /// Anything else.
    Other,
}

/// Asks of a draft for rows that it lacks, by sequence: from where on, and how often without getting further.
#[derive(Debug, Default)]
struct Needs(HashMap<u64, (u32, u32)>);

/// What the target can hold at a time, and the longest sequence.
#[derive(Debug, Clone, Copy)]
struct Limit {
    sequences: u32,
    tokens: u64,
    longest: u32,
}

/// The streams, and the sequences that run on them.
pub(super) struct Bench {
    target: TargetLane,
    draft: Option<DraftLane>,
    limits: Limit,
    vocab: u32,
    sizes: Sizes,
    sequences: HashMap<u64, Sequence>,
    /// Number of the next sequence, which is also where its prompt comes from.
    next: u64,
}

impl Bench {
    pub(super) async fn connect(
        target: &Address,
        draft: Option<&Address>,
        sizes: Sizes,
    ) -> anyhow::Result<Self> {
        let boot_id = (u64::from(std::process::id()) << 32) | 1;
        let (target, card) = lane::target(target, boot_id).await?;
        let draft = match draft {
            Some(address) => Some(lane::draft(address, boot_id, &card).await?),
            None => None,
        };
        let longest = sizes.prompt + sizes.rounds * (sizes.k + 1) + 1;
        anyhow::ensure!(
            longest <= card.context_length,
            "prompt and rounds make {longest} tokens, limit the context of {}",
            card.context_length
        );
        let limits = Limit { sequences: card.max_sequences, tokens: card.kv_capacity, longest };
        Ok(Self { target, draft, limits, vocab: card.vocab_size, sizes, sequences: HashMap::new(), next: 1 })
    }

    /// Refuses a batch that could not run in step: sequences would wait for each other's places or pages.
    fn check(&self, batch: usize) -> anyhow::Result<()> {
        let Limit { sequences, tokens, longest } = self.limits;
        anyhow::ensure!(
            batch <= sequences as usize,
            "batch must be at most {sequences}, the target's --max-sequences, given {batch}"
        );
        let wanted = batch as u64 * u64::from(longest);
        anyhow::ensure!(
            wanted <= tokens,
            "batch {batch} of {longest} tokens each needs {wanted} tokens of KV cache, the target has {tokens} (--kv-tokens)"
        );
        Ok(())
    }

    /// Times of plain steps of `batch` sequences.
    pub(super) async fn plain(&mut self, batch: usize) -> anyhow::Result<Vec<Duration>> {
        self.check(batch)?;
        self.open(batch, false).await?;
        let mut times = Vec::new();
        for _ in 0..self.sizes.rounds {
            let begun = Instant::now();
            self.verify(&HashMap::new()).await?;
            times.push(begun.elapsed());
        }
        self.close().await?;
        Ok(times)
    }

    /// Rounds with drafted tokens of `batch` sequences; `None` without a draft.
    pub(super) async fn drafted(&mut self, batch: usize) -> anyhow::Result<Option<Vec<Round>>> {
        if self.draft.is_none() {
            return Ok(None);
        }
        self.open(batch, true).await?;
        let mut rounds = Vec::new();
        for _ in 0..self.sizes.rounds {
            let begun = Instant::now();
            let seqs: Vec<u64> = self.sequences.keys().copied().collect();
            let proposals = self.propose(&seqs, self.sizes.k).await?;
            let draft = begun.elapsed();
            let tokens = self.verify(&proposals).await?;
            rounds.push(Round { draft, verify: begun.elapsed() - draft, tokens });
        }
        self.close().await?;
        Ok(Some(rounds))
    }

    /// Opens sequences with prompts of random tokens. With features one after the other: a draft takes in a prompt before the
    /// ring overwrites it.
    async fn open(&mut self, batch: usize, features: bool) -> anyhow::Result<()> {
        let seqs: Vec<u64> = (self.next..).take(batch).collect();
        self.next += batch as u64;
        let group = if features { 1 } else { batch };
        for group in seqs.chunks(group) {
            let items = group.iter().map(|&seq| self.begin(seq, features)).collect();
            self.target.send(items).await?;
            self.committed(group.len()).await?;
            if features {
                self.propose(group, 0).await?;
            }
        }
        Ok(())
    }

    fn begin(&mut self, seq: u64, features: bool) -> TargetItem {
        let tokens: Vec<u32> = (0..self.sizes.prompt).map(|at| random(seq, at) % self.vocab).collect();
        let sequence = Sequence { tokens: tokens.clone(), ..Sequence::default() };
        self.sequences.insert(seq, sequence);
        let max_tokens = self.sizes.rounds * (self.sizes.k + 1) + 1;
        let limits = Limits { max_tokens, stop_ids: Vec::new(), ignore_eos: true };
        let sampling = Sampling { top_p: 1.0, ..Sampling::default() };
        let open =
            Open { tokens, sampling: Some(sampling), limits: Some(limits), features, ..Open::default() };
        TargetItem { seq, op: Some(target_item::Op::Open(open)) }
    }

    /// Asks for `k` tokens of each sequence and waits for all, with the rows that the draft lacks.
    async fn propose(&mut self, seqs: &[u64], k: u32) -> anyhow::Result<HashMap<u64, Vec<u32>>> {
        let items = seqs.iter().map(|&seq| self.propose_item(seq, k)).collect::<anyhow::Result<Vec<_>>>()?;
        self.lane()?.send(items).await?;
        let (mut proposals, mut needs) = (HashMap::new(), Needs::default());
        while proposals.len() < seqs.len() {
            let out = self.lane()?.next().await?;
            match out.body {
                Some(DraftBody::Proposal(proposal)) => {
                    proposals.insert(out.seq, proposal.tokens);
                }
                Some(DraftBody::Need(need)) => {
                    needs.add(out.seq, need.from)?;
                    self.fetch(out.seq, need.from).await?;
                    let item = self.propose_item(out.seq, k)?;
                    self.lane()?.send(vec![item]).await?;
                }
                Some(DraftBody::Error(error)) => return Err(self.lane()?.refused(&error)),
                None => anyhow::bail!("the draft answered with nothing"),
            }
        }
        Ok(proposals)
    }

    fn lane(&mut self) -> anyhow::Result<&mut DraftLane> {
        self.draft.as_mut().context("there is no draft")
    }

    fn propose_item(&mut self, seq: u64, k: u32) -> anyhow::Result<DraftItem> {
        let sequence = self.sequence(seq)?;
        let base_len = sequence.base_len();
        let token_from = sequence.drafted.min(base_len);
        sequence.drafted = base_len + 1;
        let propose = Propose {
            round: sequence.round + 1,
            base_len,
            token_from,
            tokens: sequence.tokens[token_from as usize..].to_vec(),
            features: std::mem::take(&mut sequence.pending),
            k,
            ..Propose::default()
        };
        Ok(DraftItem { seq, op: Some(draft_item::Op::Propose(propose)) })
    }

    /// Has the target publish rows again.
    async fn fetch(&mut self, seq: u64, from: u32) -> anyhow::Result<()> {
        let op = Some(target_item::Op::FetchFeatures(FetchFeatures { from }));
        self.target.send(vec![TargetItem { seq, op }]).await?;
        let sequence = self.sequence(seq)?;
        sequence.drafted = sequence.drafted.min(from);
        let first_held = loop {
            match self.hear().await? {
                Heard::Fetched { seq: of, first_held } if of == seq => break first_held,
                _ => {}
            }
        };
        anyhow::ensure!(
            first_held <= from,
            "the target keeps feature rows from position {first_held} on, the draft needs them from {from} on: \
             --aux-cache-bytes is too small"
        );
        Ok(())
    }

    /// Verifies what was proposed, nothing where nothing was; returns the tokens committed.
    async fn verify(&mut self, proposals: &HashMap<u64, Vec<u32>>) -> anyhow::Result<u32> {
        let item = |(&seq, sequence): (&u64, &Sequence)| {
            let verify = Verify {
                round: sequence.round + 1,
                base_len: sequence.base_len(),
                root: sequence.tokens.last().copied().unwrap_or_default(),
                tokens: proposals.get(&seq).cloned().unwrap_or_default(),
                ..Verify::default()
            };
            TargetItem { seq, op: Some(target_item::Op::Verify(verify)) }
        };
        let items: Vec<_> = self.sequences.iter().map(item).collect();
        let count = items.len();
        self.target.send(items).await?;
        self.committed(count).await
    }

    /// Waits until `count` sequences have committed.
    async fn committed(&mut self, count: usize) -> anyhow::Result<u32> {
        let (mut heard, mut tokens) = (0, 0);
        while heard < count {
            if let Heard::Committed(committed) = self.hear().await? {
                heard += 1;
                tokens += committed;
            }
        }
        Ok(tokens)
    }

    /// Takes in one answer of the target.
    async fn hear(&mut self) -> anyhow::Result<Heard> {
        let out = self.target.next().await?;
        match out.body {
            Some(TargetBody::Committed(committed)) => {
                let count = committed.tokens.len() as u32;
                self.sequence(out.seq)?.commit(committed);
                Ok(Heard::Committed(count))
            }
            Some(TargetBody::Features(Features { refs, first_held, fetched })) => {
                let sequence = self.sequence(out.seq)?;
                sequence.pending.splice(..0, refs);
                sequence.pending.sort_by_key(|part| part.first);
                Ok(if fetched { Heard::Fetched { seq: out.seq, first_held } } else { Heard::Other })
            }
            // Closed, and gone before the target heard of it.
            Some(TargetBody::Error(error))
                if error.reason == Reason::UnknownSeq.as_str() && !self.sequences.contains_key(&out.seq) =>
            {
                Ok(Heard::Other)
            }
            Some(TargetBody::Error(error)) => Err(self.target.refused(&error)),
            Some(TargetBody::Closed(_)) | None => Ok(Heard::Other),
        }
    }

    fn sequence(&mut self, seq: u64) -> anyhow::Result<&mut Sequence> {
        self.sequences
            .get_mut(&seq)
            .with_context(|| format!("an answer for sequence {seq}, which is not open"))
    }

    async fn close(&mut self) -> anyhow::Result<()> {
        let seqs: Vec<u64> = self.sequences.drain().map(|(seq, _)| seq).collect();
        let close = |&seq: &u64| TargetItem { seq, op: Some(target_item::Op::Close(Close {})) };
        self.target.send(seqs.iter().map(close).collect()).await?;
        if let Some(draft) = &self.draft {
            let close = |&seq: &u64| DraftItem { seq, op: Some(draft_item::Op::Close(CloseDraft {})) };
            draft.send(seqs.iter().map(close).collect()).await?;
        }
        Ok(())
    }
}

impl Sequence {
    fn base_len(&self) -> u32 {
        self.tokens.len().saturating_sub(1) as u32
    }

    fn commit(&mut self, committed: Committed) {
        self.round = committed.round;
        self.tokens.extend(committed.tokens);
        self.pending.extend(committed.features);
    }
}

impl Needs {
    fn add(&mut self, seq: u64, from: u32) -> anyhow::Result<()> {
        let (furthest, count) = self.0.entry(seq).or_default();
        if from > *furthest {
            (*furthest, *count) = (from, 0);
        }
        *count += 1;
        anyhow::ensure!(
            *count <= MOST_NEEDS,
            "the draft asked {count} times for the rows of sequence {seq} from position {from} on, limit {MOST_NEEDS}"
        );
        Ok(())
    }
}

/// A token of a prompt: SplitMix64 of sequence and position.
fn random(seq: u64, at: u32) -> u32 {
    let mut z = ((seq << 32) | u64::from(at)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (z >> 32) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn needs_are_counted_by_sequence_while_they_get_no_further() {
        let mut needs = Needs::default();
        for from in 0..100 {
            needs.add(1, from).unwrap();
            needs.add(2, 3 * from).unwrap();
        }
        for _ in 1..MOST_NEEDS {
            needs.add(1, 99).unwrap();
        }
        needs.add(2, 0).unwrap();
        let line = needs.add(1, 99).unwrap_err().to_string();
        assert_eq!(line, "the draft asked 9 times for the rows of sequence 1 from position 99 on, limit 8");
    }
}
