//! A language model of arithmetic: the logits of a row are a hash of every token before it, which the model finds
//! through the page table as attention finds keys. A wrong page, length or moved row gives other tokens.

use std::path::Path;
use std::sync::{Arc, Mutex};

use candle_core::{Device, Tensor};
use eyrie_checkpoint::{TargetCheckpoint, TargetConfig};
use eyrie_kernels::{Backend, Cpu, CpuOptions, Isa};
use eyrie_model::{
    Aux, Backing, CaptureSet, ForwardOut, Keep, LatentCache, LogitRows, ModelError, SeqRows, SeqTable,
    SharedWeights, TargetModel, load_target,
};
use eyrie_region::Epoch;
use eyrie_speculation::{Finish, Sampler, SamplingParams, StopRules};
use eyrie_wire::v1::FinishReason;

use crate::rng::{Rng, mix};

pub(crate) const VOCAB: u32 = 259;
pub(crate) const EOS: [u32; 2] = [257, 258];
/// Numbers of a feature row that say something: the position, and the state there in four parts.
const MARKS: usize = 5;

/// Everything the model knows after `tokens`.
fn advance(state: u64, token: u32) -> u64 {
    mix(state.wrapping_mul(31) ^ u64::from(token) ^ 0x1234_5678)
}

pub(crate) fn state_of(tokens: &[u32]) -> u64 {
    tokens.iter().fold(0, |state, &token| advance(state, token))
}

/// A few likely tokens among all others.
fn fill(logits: &mut [f32], state: u64) {
    logits.fill(-6.0);
    let mut rng = Rng::new(state);
    for logit in [3.0, 2.5, 2.0, 1.0] {
        logits[rng.within(0..=VOCAB - 1) as usize] = logit;
    }
}

/// What a feature row of `position` carries in front.
pub(crate) fn marks(position: u32, state: u64) -> [f32; MARKS] {
    let part = |i: u32| (state >> (16 * i)) as u16 as f32;
    [position as f32, part(0), part(1), part(2), part(3)]
}

/// A reply as plain decoding makes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Plain {
    pub(crate) tokens: Vec<u32>,
    pub(crate) finish: FinishReason,
}

pub(crate) fn plain(prompt: &[u32], params: &SamplingParams, rules: &StopRules) -> Plain {
    let mut sampler = Sampler::new();
    let mut logits = vec![0.0; VOCAB as usize];
    let (mut tokens, mut state) = (Vec::new(), state_of(prompt));
    loop {
        fill(&mut logits, state);
        let position = (prompt.len() + tokens.len()) as u32;
        let token = sampler.sample(&logits, params, position).unwrap();
        let admitted = rules.admit(tokens.len() as u32, &[token]);
        tokens.push(token);
        state = advance(state, token);
        match admitted.finish {
            None => {}
            Some(Finish::Stop { .. }) => return Plain { tokens, finish: FinishReason::Stop },
            Some(Finish::Length) => return Plain { tokens, finish: FinishReason::Length },
        }
    }
}

/// The tiny checkpoint that gives names and sizes, loaded once.
#[derive(Debug)]
pub(crate) struct Fixture {
    pub(crate) checkpoint: TargetCheckpoint,
    cpu: Backend,
    /// Only makes caches.
    body: Arc<Mutex<Box<dyn TargetModel>>>,
}

impl Fixture {
    pub(crate) fn load() -> Self {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/v3");
        let checkpoint = TargetCheckpoint::open(&dir).unwrap();
        let shared = SharedWeights::build(&checkpoint, Backing::Local, Epoch::try_from(1).unwrap()).unwrap();
        let cpu: Backend = Cpu::new(CpuOptions { threads: 1, isa: Isa::best() }).unwrap().into();
        let body = load_target(&checkpoint, shared, &cpu, &mut |_| {}).unwrap();
        let config = checkpoint.config();
        assert_eq!((config.vocab_size, config.eos_token_ids.as_slice()), (VOCAB as usize, &EOS[..]));
        Self { checkpoint, cpu, body: Arc::new(Mutex::new(body)) }
    }

    pub(crate) fn model(&self, epoch: Epoch) -> Box<dyn TargetModel> {
        Box::new(HashModel {
            config: self.checkpoint.config().clone(),
            shared: SharedWeights::build(&self.checkpoint, Backing::Memfd, epoch).unwrap(),
            cpu: self.cpu.clone(),
            body: Arc::clone(&self.body),
            capture: None,
        })
    }
}

#[derive(Debug)]
struct HashModel {
    config: TargetConfig,
    shared: SharedWeights,
    cpu: Backend,
    body: Arc<Mutex<Box<dyn TargetModel>>>,
    capture: Option<CaptureSet>,
}

/// The rows of one forward.
#[derive(Default)]
struct Rows {
    logits: Vec<f32>,
    aux: Vec<f32>,
}

impl HashModel {
    fn width(&self) -> usize {
        self.capture.as_ref().map_or(0, |capture| capture.ids().len() * self.config.hidden_size)
    }

    /// Writes and reads one sequence's rows.
    fn compute(&self, seq: &SeqRows<'_>, cache: &mut LatentCache, rows: &mut Rows) -> Result<(), ModelError> {
        let page_rows = cache.page_rows();
        let pool = |slot: u32| seq.table.pool_slot(slot, page_rows).expect("a reserved slot");
        assert!(seq.base_len <= seq.table.len(), "rows are computed on slots that were never committed");
        let keys = cache.layer(0);
        let mut prefix = 0;
        for slot in 0..seq.base_len {
            // 0 is a row that was never written.
            let token = (keys.row(pool(slot))?[0] as u32).checked_sub(1).expect("a row that was written");
            prefix = advance(prefix, token);
        }
        let mut key = vec![0.0; keys.width()];
        let mut states: Vec<u64> = Vec::with_capacity(seq.tokens.len());
        let mut depths: Vec<u32> = Vec::with_capacity(seq.tokens.len());
        for (row, &token) in seq.tokens.iter().enumerate() {
            let parent = match (row, seq.parents) {
                (0, _) => None,
                (_, Some(parents)) => Some(usize::from(parents[row - 1])),
                (_, None) => Some(row - 1),
            };
            let state = advance(parent.map_or(prefix, |parent| states[parent]), token);
            let depth = parent.map_or(0, |parent| depths[parent] + 1);
            key[0] = (token + 1) as f32;
            keys.write(pool(seq.base_len + row as u32), &key)?;
            let is_last = row + 1 == seq.tokens.len();
            if seq.logits == LogitRows::All || (seq.logits == LogitRows::Last && is_last) {
                let start = rows.logits.len();
                rows.logits.resize(start + VOCAB as usize, 0.0);
                fill(&mut rows.logits[start..], state);
            }
            let start = rows.aux.len();
            rows.aux.resize(start + self.width(), 0.0);
            if self.width() > 0 {
                rows.aux[start..start + MARKS].copy_from_slice(&marks(seq.base_len + depth, state));
            }
            states.push(state);
            depths.push(depth);
        }
        Ok(())
    }
}

impl TargetModel for HashModel {
    fn config(&self) -> &TargetConfig {
        &self.config
    }
    fn embed_and_head(&self) -> &SharedWeights {
        &self.shared
    }
    fn set_capture(&mut self, capture: &CaptureSet) -> Result<(), ModelError> {
        self.capture = Some(capture.clone());
        Ok(())
    }
    fn capture(&self) -> Option<&CaptureSet> {
        self.capture.as_ref()
    }
    fn new_cache(&self, tokens: usize, page_rows: usize) -> Result<LatentCache, ModelError> {
        self.body.lock().unwrap().new_cache(tokens, page_rows)
    }
    fn forward(&mut self, batch: &[SeqRows<'_>], cache: &mut LatentCache) -> Result<ForwardOut, ModelError> {
        let mut rows = Rows::default();
        let mut out = ForwardOut::default();
        let (mut row, mut logit_row) = (0, 0);
        for seq in batch {
            assert!(!seq.tokens.is_empty(), "a piece without rows");
            self.compute(seq, cache, &mut rows)?;
            let logits_end = rows.logits.len() / VOCAB as usize;
            out.rows.push(row..row + seq.tokens.len());
            out.logit_rows.push(logit_row..logits_end);
            (row, logit_row) = (row + seq.tokens.len(), logits_end);
        }
        if logit_row > 0 {
            let shape = (logit_row, VOCAB as usize);
            out.logits = Some(Tensor::from_vec(rows.logits, shape, &Device::Cpu)?);
        }
        if self.width() > 0 {
            out.aux = Some(Aux::from_rows(&self.cpu, rows.aux, self.width())?);
        }
        Ok(out)
    }
    fn rollback(
        &self,
        cache: &mut LatentCache,
        table: &mut SeqTable,
        keep: Keep<'_>,
    ) -> Result<(), ModelError> {
        cache.keep(table, keep)
    }
}
