//! The demo target's tokens and features, and the proposals an independent implementation made from them.

use std::path::Path;

use eyrie_checkpoint::TargetCheckpoint;
use eyrie_kernels::{Cpu, CpuOptions, Isa};
use eyrie_model::{Backing, CaptureSet, DeepSeek, LogitRows, SeqRows, SeqTable, SharedWeights, TargetModel};
use eyrie_region::Epoch;
use serde_json::Value;

use super::demo;

/// Canonical capture set of the demo pair.
pub const AUX_LAYERS: [u32; 3] = [2, 4, 5];
/// Values of a captured row of the demo target.
pub const ROW_WIDTH: usize = 3 * 384;

/// One golden text: prompt and greedy continuation, with the feature of every position.
pub struct Text {
    pub golden: Value,
    pub prompt_len: u32,
    pub tokens: Vec<u32>,
    rows: Vec<f32>,
}

impl Text {
    /// Rows of positions `from..end`.
    pub fn rows(&self, from: u32, end: u32) -> &[f32] {
        &self.rows[from as usize * ROW_WIDTH..end as usize * ROW_WIDTH]
    }

    /// Tokens of positions `from..=base_len`.
    pub fn tokens(&self, from: u32, base_len: u32) -> Vec<u32> {
        self.tokens[from as usize..=base_len as usize].to_vec()
    }
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

/// The first `count` golden texts.
pub fn texts(count: usize) -> Vec<Text> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/goldens/goldens_a.jsonl");
    let goldens = std::fs::read_to_string(path).unwrap();
    let mut model = model();
    let texts = goldens.lines().take(count).map(|line| {
        let golden: Value = serde_json::from_str(line).unwrap();
        let prompt = ids(&golden["prompt_ids"]);
        let tokens: Vec<u32> = prompt.iter().copied().chain(ids(&golden["greedy_ids"])).collect();
        let rows = features(&mut model, &tokens);
        Text { golden, prompt_len: prompt.len() as u32, tokens, rows }
    });
    let texts: Vec<Text> = texts.collect();
    assert_eq!(texts.len(), count);
    texts
}

/// Texts of these tokens that no golden is known for, with prompts of `prompt_len` tokens.
pub fn texts_of(tokens: impl IntoIterator<Item = Vec<u32>>, prompt_len: u32) -> Vec<Text> {
    let mut model = model();
    let text = |tokens: Vec<u32>| {
        let rows = features(&mut model, &tokens);
        Text { golden: Value::Null, prompt_len, tokens, rows }
    };
    tokens.into_iter().map(text).collect()
}

fn model() -> DeepSeek {
    let checkpoint = TargetCheckpoint::open(&demo("mini")).unwrap();
    let shared = SharedWeights::build(&checkpoint, Backing::Local, Epoch::random().unwrap()).unwrap();
    let cpu = Cpu::new(CpuOptions { threads: 1, isa: Isa::best() }).unwrap();
    let mut model = DeepSeek::load(&checkpoint, shared, &cpu.into(), &mut |_| {}).unwrap();
    let capture =
        CaptureSet::new(&AUX_LAYERS.map(|id| id as usize), model.config().num_hidden_layers).unwrap();
    model.set_capture(&capture).unwrap();
    model
}

fn features(model: &mut DeepSeek, tokens: &[u32]) -> Vec<f32> {
    let mut cache = model.new_cache(tokens.len(), 16).unwrap();
    let mut table = SeqTable::default();
    cache.allocator().reserve(&mut table, tokens.len()).unwrap();
    let rows = SeqRows { table: &table, base_len: 0, tokens, parents: None, logits: LogitRows::None };
    model.forward(&[rows], &mut cache).unwrap().aux.unwrap().to_vec().unwrap()
}
