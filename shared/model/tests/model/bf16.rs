//! bfloat16 beside float32 on one GPU, teacher-forced over the goldens: both are fed the reference's tokens.

use crate::common::{GPU, Pool, deepseek, demo, gpu, values};
use crate::goldens::{goldens, ids};
use eyrie_kernels::{Activations, argmax};
use eyrie_model::{DeepSeek, LogitRows, SeqTable, TargetModel};
use eyrie_region::Gpu;

// What tests/fixtures/rounded.py prints: the reference over the same tokens with the result of every operation rounded to
// bfloat16, against itself without. Means, since the largest errors come from an expert that is chosen in place of
// another, which differs between two correct programs.
const REFERENCE_MEAN: f64 = 0.0322;
const REFERENCE_RMS: f64 = 0.0557;
const REFERENCE_DIVERGENCE: f64 = 2.9e-4;
/// Rows whose top-1 is another.
const REFERENCE_CHANGED: f64 = 10.0;
/// For other places of rounding than the reference's.
const SLACK: f64 = 2.0;

/// How far rows of logits are from those they stand for.
#[derive(Debug, Default)]
struct Error {
    rows: usize,
    values: usize,
    sum: f64,
    squares: f64,
    largest: f64,
    /// Kullback-Leibler, in nats, over all rows.
    divergence: f64,
    /// Rows whose top-1 is another, and the widest gap of top-1 and top-2 among them.
    changed: usize,
    closed: f64,
}

impl Error {
    fn row(&mut self, want: &[f32], got: &[f32]) {
        self.rows += 1;
        self.values += want.len();
        for (&want, &got) in std::iter::zip(want, got) {
            let off = (f64::from(got) - f64::from(want)).abs();
            // A NaN fails every bound.
            self.largest = if off <= self.largest { self.largest } else { off };
            self.sum += off;
            self.squares += off * off;
        }
        let (p, q) = (log_softmax(want), log_softmax(got));
        self.divergence += std::iter::zip(p, q).map(|(p, q)| p.exp() * (p - q)).sum::<f64>();
        if argmax(want).unwrap() != argmax(got).unwrap() {
            self.changed += 1;
            self.closed = self.closed.max(gap(want));
        }
    }

    fn mean(&self) -> f64 {
        self.sum / self.values as f64
    }

    fn rms(&self) -> f64 {
        (self.squares / self.values as f64).sqrt()
    }

    fn mean_divergence(&self) -> f64 {
        self.divergence / self.rows as f64
    }
}

fn log_softmax(row: &[f32]) -> Vec<f64> {
    let top = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let shifted = row.iter().map(|&x| f64::from(x) - f64::from(top));
    let total = shifted.clone().map(f64::exp).sum::<f64>().ln();
    shifted.map(|x| x - total).collect()
}

fn gap(row: &[f32]) -> f64 {
    let mut sorted = row.to_vec();
    sorted.sort_unstable_by(|a, b| b.total_cmp(a));
    f64::from(sorted[0]) - f64::from(sorted[1])
}

fn logits(model: &mut DeepSeek, tokens: &[u32]) -> Vec<f32> {
    let mut pool = Pool::new(model, tokens.len());
    values(&pool.feed(model, &mut SeqTable::default(), tokens, LogitRows::All).logits.unwrap())
}

#[test]
fn bfloat16_is_as_near_to_float32_as_the_references_is() {
    let mut wide = deepseek(&demo("mini"), &gpu(Activations::F32));
    let mut narrow = deepseek(&demo("mini"), &gpu(Activations::Bf16));
    let vocab = wide.config().vocab_size;
    let mut error = Error::default();
    for golden in goldens() {
        let (mut tokens, greedy) = (ids(&golden["prompt_ids"]), ids(&golden["greedy_ids"]));
        let prompt = tokens.len();
        tokens.extend(&greedy[..greedy.len() - 1]);
        let (want, got) = (logits(&mut wide, &tokens), logits(&mut narrow, &tokens));
        let (want, got) = (want.chunks(vocab), got.chunks(vocab));
        let chosen: Vec<u32> = want.clone().skip(prompt - 1).map(|row| argmax(row).unwrap()).collect();
        assert_eq!(chosen, greedy, "{}: float32 is the reference", golden["id"]);
        std::iter::zip(want, got).for_each(|(want, got)| error.row(want, got));
    }
    println!(
        "measured: teacher-forced bf16 against f32 on {}, {} rows: logits off by {:.4} mean, {:.4} rms, {:.3} at most, \
         KL {:.2e}, {} other top-1 up to a gap of {:.3}",
        Gpu::open(GPU).unwrap(),
        error.rows,
        error.mean(),
        error.rms(),
        error.largest,
        error.mean_divergence(),
        error.changed,
        error.closed
    );
    assert!(error.mean() > 0.0, "bfloat16 rounds");
    assert!(error.mean() < SLACK * REFERENCE_MEAN && error.rms() < SLACK * REFERENCE_RMS, "{error:?}");
    assert!(error.mean_divergence() < SLACK * REFERENCE_DIVERGENCE, "{error:?}");
    assert!(error.changed as f64 <= SLACK * REFERENCE_CHANGED, "{error:?}");
}
