//! Logits, residual streams and routes against an independent float64 reference, for every architecture.

use crate::common::fixtures::{
    LOGIT_TOLERANCE, RESID_TOLERANCE, VARIANTS, WHOLE, compare, expected, load, run,
};
use crate::common::{Pool, argmax_rows, backend, draft, fixture, max_diff, shared, values};
use eyrie_checkpoint::{DraftCheckpoint, TargetCheckpoint, aux_ids};
use eyrie_model::{CaptureSet, DraftRows, Keep, LogitRows, SeqTable, TargetModel, load_target};

#[test]
fn logits_streams_and_routes_are_the_references() {
    for variant in VARIANTS {
        let expected = expected(variant);
        let mut model = load(variant, 2);
        let run = run(&mut model, &expected, WHOLE);
        let (logits, routes) = compare(&run, &expected);
        assert!(logits < LOGIT_TOLERANCE, "{variant}: logits off by {logits:e}");
        assert!(routes, "{variant}: routes differ");
        assert_eq!(run.trace.resid.len(), model.config().num_hidden_layers + 1);
        for (id, stream) in run.trace.resid.iter().enumerate() {
            let want = expected.floats(&format!("resid.{id}"));
            let largest = want.iter().fold(0.0_f64, |max, x| max.max(x.abs()));
            let diff = max_diff(&values(stream), want);
            assert!(diff < RESID_TOLERANCE * largest, "{variant}: stream {id} of {largest} off by {diff:e}");
        }
        let moe_layers =
            (0..model.config().num_hidden_layers).filter(|&l| model.config().is_moe_layer(l)).count();
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
        let run = run(&mut model, &expected, WHOLE);
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
        let whole = run(&mut load(variant, 2), &expected, WHOLE);
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
        let (mut steps, backend) = (Vec::new(), backend(2));
        let shared = shared(&checkpoint, &backend);
        let mut model = load_target(&checkpoint, shared, &backend, &mut |p| steps.push(p)).unwrap();
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

/// Rows and chain of a draft fixture, fed with this crate's own target features.
fn check_draft(name: &str) {
    let expected = crate::common::Expected::read(&fixture(name).join("expected.safetensors"));
    let mut target = load("v3", 2);
    let layers = target.config().num_hidden_layers;
    let checkpoint = DraftCheckpoint::open(&fixture(name)).unwrap();
    let canonical = aux_ids(checkpoint.config(), layers, None).unwrap().canonical;
    let capture = CaptureSet::new(&canonical, layers).unwrap();
    target.set_capture(&capture).unwrap();
    let mut head = draft(&fixture(name), &capture, target.embed_and_head(), &backend(2));
    for prompt in 0..2 {
        let at = |what: &str| format!("prompt.{prompt}.{what}");
        let close = |got: &[f32], want: &[f64], what: &str| {
            let diff = max_diff(got, want);
            assert!(diff < 2.0 * LOGIT_TOLERANCE, "{name} {prompt} {what}: off by {diff:e}");
        };
        let tokens = expected.ids(&at("tokens"));
        let len = tokens.len() - 1;
        let mut pool = Pool::new(&target, 64);
        let out = pool.feed(&mut target, &mut SeqTable::default(), &tokens[..len], LogitRows::Last);
        assert_eq!(argmax_rows(&out.logits.unwrap()), tokens[len..]);
        let feature = head.fuse(&out.aux.unwrap()).unwrap();
        close(&feature.to_vec().unwrap(), expected.floats(&at("features")), "features");

        let mut cache = head.new_cache(64, crate::common::PAGE_ROWS).unwrap();
        let mut pages = cache.allocator();
        let mut table = SeqTable::default();
        pages.reserve(&mut table, len + 4).unwrap();
        let rows = DraftRows {
            table: &table,
            base_slot: 0,
            origin: 0,
            tokens: &tokens[1..],
            feature: &feature,
            parents: None,
        };
        let out = head.extend(&mut cache, &[rows]).unwrap();
        cache.keep(&mut table, Keep::Len(len as u32)).unwrap();
        close(&out.states.to_vec().unwrap(), expected.floats(&at("states")), "states");

        let (mut state, mut logits) = (out.states.slice(len - 1..len).unwrap(), out.logits);
        let chain = |what: &str| format!("chain.{prompt}.{what}");
        let vocab = head.draft_vocab();
        for step in 0..4 {
            let want = &expected.floats(&chain("logits"))[step * vocab..(step + 1) * vocab];
            close(&values(&logits), want, "chain logits");
            let want = &expected.floats(&chain("states"))[step * state.width()..(step + 1) * state.width()];
            close(&state.to_vec().unwrap(), want, "chain states");
            let id = argmax_rows(&logits)[0];
            assert_eq!(id, expected.ids(&chain("draft_ids"))[step]);
            let token = [head.to_target_id(id).unwrap()];
            assert_eq!(token[0], expected.ids(&chain("tokens"))[step]);
            let rows = DraftRows {
                table: &table,
                base_slot: (len + step) as u32,
                origin: 0,
                tokens: &token,
                feature: &state,
                parents: None,
            };
            let out = head.step(&mut cache, &[rows]).unwrap();
            (state, logits) = (out.states, out.logits);
        }
    }
}

#[test]
fn a_draft_with_its_own_head_is_the_reference() {
    check_draft("v3_eagle3");
}

#[test]
fn a_draft_that_borrows_embedding_and_head_is_the_reference() {
    check_draft("v3_eagle3_shared");
}
