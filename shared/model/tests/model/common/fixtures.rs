//! Runs a fixture's sequences and compares with what its independent reference computed.

use eyrie_model::{DeepSeek, Keep, LogitRows, SeqRows, SeqTable, TargetModel, Trace};

use super::{Expected, PAGE_ROWS, Pool, backend, deepseek, fixture, max_diff, values};

pub(crate) const LOGIT_TOLERANCE: f64 = 5e-5;
/// Of a stream's largest value: streams grow with depth and with the routed scale.
pub(crate) const RESID_TOLERANCE: f64 = 5e-6;
const WEIGHT_TOLERANCE: f64 = 1e-5;
/// A chunk larger than any fixture.
pub(crate) const WHOLE: usize = 1 << 20;
pub(crate) const VARIANTS: [&str; 5] = ["v2_lite", "v2_group", "v3", "v3_norope_scaling", "k25_int4"];

/// Everything one forward over all of a fixture's sequences computed.
pub(crate) struct Run {
    pub(crate) logits: Vec<f32>,
    pub(crate) aux: Option<Vec<f32>>,
    pub(crate) trace: Trace,
}

pub(crate) fn run(model: &mut DeepSeek, expected: &Expected, chunk: usize) -> Run {
    let sequences = expected.id_rows("tokens");
    let length = sequences[0].len();
    let mut pool = Pool::new(model, sequences.len() * (length + PAGE_ROWS));
    let mut tables = vec![SeqTable::default(); sequences.len()];
    for table in &mut tables {
        pool.pages.reserve(table, length).unwrap();
    }
    let mut chunks = Vec::new();
    for start in (0..length).step_by(chunk) {
        let end = (start + chunk).min(length);
        let batch: Vec<SeqRows<'_>> = std::iter::zip(&tables, &sequences)
            .map(|(table, tokens)| SeqRows {
                table,
                base_len: start as u32,
                tokens: &tokens[start..end],
                parents: None,
                logits: LogitRows::All,
            })
            .collect();
        let mut trace = Trace::default();
        let out = model.forward_traced(&batch, &mut pool.cache, Some(&mut trace)).unwrap();
        for table in &mut tables {
            model.rollback(&mut pool.cache, table, Keep::Len(end as u32)).unwrap();
        }
        chunks.push((
            end - start,
            values(&out.logits.unwrap()),
            out.aux.map(|aux| aux.to_vec().unwrap()),
            trace,
        ));
    }
    if chunks.len() == 1 {
        let (_, logits, aux, trace) = chunks.remove(0);
        return Run { logits, aux, trace };
    }
    let parts: Vec<(usize, &[f32])> = chunks.iter().map(|(n, logits, ..)| (*n, logits.as_slice())).collect();
    Run { logits: by_sequence(&parts, sequences.len()), aux: None, trace: Trace::default() }
}

/// Chunk outputs `[sequence][row]` as one output `[sequence][all rows]`.
fn by_sequence(chunks: &[(usize, &[f32])], sequences: usize) -> Vec<f32> {
    let mut out = Vec::new();
    for sequence in 0..sequences {
        for (_, values) in chunks {
            let size = values.len() / sequences;
            out.extend_from_slice(&values[sequence * size..(sequence + 1) * size]);
        }
    }
    out
}

pub(crate) fn load(variant: &str, threads: usize) -> DeepSeek {
    deepseek(&fixture(variant), &backend(threads))
}

pub(crate) fn expected(variant: &str) -> Expected {
    Expected::read(&fixture(variant).join("expected.safetensors"))
}

/// Largest difference of logits, and whether every route is the expected one.
pub(crate) fn compare(run: &Run, expected: &Expected) -> (f64, bool) {
    let routes = run.trace.routes.iter().all(|layer| {
        let name = format!("route.{}", layer.layer);
        layer.routes.ids == expected.ids(&format!("{name}.ids"))
            && max_diff(&layer.routes.weights, expected.floats(&format!("{name}.w")))
                < WEIGHT_TOLERANCE * scale(expected)
    });
    (max_diff(&run.logits, expected.floats("logits")), routes)
}

/// Combine weights go up to the routed scale; the tolerance goes with them.
fn scale(expected: &Expected) -> f64 {
    let largest = |layer: usize| {
        let name = format!("route.{layer}.w");
        expected.has(&name).then(|| expected.floats(&name).iter().copied().fold(1.0, f64::max))
    };
    (0..64).filter_map(largest).fold(1.0, f64::max)
}
