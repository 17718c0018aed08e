//! Logits, residual streams and routes against an independent float64 reference, for every architecture.

mod common;

use common::{Expected, PAGE_ROWS, Pool, argmax_rows, cpu, deepseek, fixture, max_diff, values};
use eyrie_checkpoint::TargetCheckpoint;
use eyrie_model::{
    CaptureSet, DeepSeek, Keep, LogitRows, SeqRows, SeqTable, TargetModel, Trace, load_target,
};

const LOGIT_TOLERANCE: f64 = 5e-5;
const RESID_TOLERANCE: f64 = 5e-5;
const WEIGHT_TOLERANCE: f64 = 1e-5;
const VARIANTS: [&str; 5] = ["v2_lite", "v2_group", "v3", "v3_norope_scaling", "k25_int4"];

/// Everything one forward over all of a fixture's sequences computed.
struct Run {
    logits: Vec<f32>,
    aux: Option<Vec<f32>>,
    trace: Trace,
}

fn run(model: &mut DeepSeek, expected: &Expected, chunk: usize) -> Run {
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
        chunks.push((end - start, values(&out.logits.unwrap()), out.aux.map(|aux| aux.to_vec().unwrap()), trace));
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

fn load(variant: &str, threads: usize) -> DeepSeek {
    deepseek(&fixture(variant), &cpu(threads))
}

fn expected(variant: &str) -> Expected {
    Expected::read(&fixture(variant).join("expected.safetensors"))
}

/// Largest difference of logits, and whether every route is the expected one.
fn compare(run: &Run, expected: &Expected) -> (f64, bool) {
    let routes = run.trace.routes.iter().all(|layer| {
        let name = format!("route.{}", layer.layer);
        layer.routes.ids == expected.ids(&format!("{name}.ids"))
            && max_diff(&layer.routes.weights, expected.floats(&format!("{name}.w"))) < WEIGHT_TOLERANCE * scale(expected)
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

#[test]
fn logits_streams_and_routes_are_the_references() {
    for variant in VARIANTS {
        let expected = expected(variant);
        let mut model = load(variant, 2);
        let run = run(&mut model, &expected, usize::MAX / 2);
        let (logits, routes) = compare(&run, &expected);
        assert!(logits < LOGIT_TOLERANCE, "{variant}: logits off by {logits:e}");
        assert!(routes, "{variant}: routes differ");
        assert_eq!(run.trace.resid.len(), model.config().num_hidden_layers + 1);
        for (id, stream) in run.trace.resid.iter().enumerate() {
            let diff = max_diff(&values(stream), expected.floats(&format!("resid.{id}")));
            assert!(diff < RESID_TOLERANCE, "{variant}: stream {id} off by {diff:e}");
        }
        let moe_layers = (0..model.config().num_hidden_layers).filter(|&l| model.config().is_moe_layer(l)).count();
        assert!(moe_layers > 0);
        assert_eq!(run.trace.routes.len(), moe_layers);
    }
}

#[test]
fn every_capture_id_is_the_stream_entering_that_layer() {
    for variant in ["v2_lite", "v3", "k25_int4"] {
        let expected = expected(variant);
        let mut model = load(variant, 2);
        let layers = model.config().num_hidden_layers;
        let hidden = model.config().hidden_size;
        let ids: Vec<usize> = (0..=layers).collect();
        model.set_capture(&CaptureSet::new(&ids, layers).unwrap()).unwrap();
        let run = run(&mut model, &expected, usize::MAX / 2);
        let aux = run.aux.unwrap();
        let rows = aux.len() / (ids.len() * hidden);
        assert_eq!(rows, expected.ids("tokens").len());
        for (place, id) in ids.iter().enumerate() {
            let stream: Vec<f32> = aux
                .chunks(ids.len() * hidden)
                .flat_map(|row| &row[place * hidden..(place + 1) * hidden])
                .copied()
                .collect();
            assert_eq!(stream, values(&run.trace.resid[*id]), "{variant} id {id}");
        }
    }
}

#[test]
fn chunked_prompts_are_bit_equal_to_whole_ones() {
    for variant in VARIANTS {
        let expected = expected(variant);
        let whole = run(&mut load(variant, 2), &expected, usize::MAX / 2);
        for chunk in [1, 3, 5, 7] {
            let chunked = run(&mut load(variant, 1), &expected, chunk);
            assert_eq!(chunked.logits, whole.logits, "{variant} in chunks of {chunk}");
        }
    }
}

#[test]
fn greedy_decoding_is_the_references_through_the_loader_of_any_architecture() {
    for variant in VARIANTS {
        let expected = expected(variant);
        let checkpoint = TargetCheckpoint::open(&fixture(variant)).unwrap();
        let mut steps = Vec::new();
        let mut model =
            load_target(&checkpoint, common::shared(&checkpoint), &cpu(2), &mut |p| steps.push(p)).unwrap();
        assert!(steps.is_sorted_by_key(|p| p.bytes_done));
        assert_eq!(steps.last().unwrap().bytes_done, steps.last().unwrap().bytes_total, "{variant}");
        let mut pool = Pool::new(model.as_ref(), 256);
        let mut tables = Vec::new();
        let mut current = Vec::new();
        for prompt in expected.id_rows("tokens") {
            let mut table = SeqTable::default();
            let out = pool.feed(model.as_mut(), &mut table, &prompt, LogitRows::Last);
            current.extend(argmax_rows(&out.logits.unwrap()));
            tables.push(table);
        }
        let wanted = expected.id_rows("greedy");
        for step in 0..wanted[0].len() {
            assert_eq!(current, wanted.iter().map(|g| g[step]).collect::<Vec<_>>(), "{variant} step {step}");
            current = argmax_rows(&pool.feed_each(model.as_mut(), &mut tables, &current).logits.unwrap());
        }
    }
}
