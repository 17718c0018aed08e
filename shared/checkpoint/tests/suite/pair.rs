//! The preflight report: what a good pair says, and that every problem of a bad one is in it.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use eyrie_checkpoint::pair::{Report, Status, preflight, preflight_with};
use eyrie_checkpoint::{
    AuxConvention, FfnTensors, LayerTensors, LinearSpec, QueryTensors, TargetConfig, VectorSpec,
    layer_tensors, model_tensors,
};
use serde_json::json;

use crate::support::{Folder, demo, fixture, with_header};

fn find<'a>(report: &'a Report, id: &str) -> &'a eyrie_checkpoint::pair::Check {
    report.checks.iter().find(|c| c.id == id).unwrap_or_else(|| panic!("no check {id} in {report:#?}"))
}

fn expect(report: &Report, id: &str, status: Status, parts: &[&str]) {
    let matching = |c: &&eyrie_checkpoint::pair::Check| {
        c.id == id && c.status == status && parts.iter().all(|p| c.message.contains(p))
    };
    assert!(report.checks.iter().any(|c| matching(&c)), "no {id} {status:?} with {parts:?} in {report:#?}");
    assert!(report.checks.iter().all(|c| !c.message.contains('\n')));
}

#[test]
fn the_demo_pair_passes_with_its_context_named() {
    let report = preflight(&demo("mini"), Some(&demo("mini-eagle3")));
    assert!(report.passes(), "{report:#?}");
    expect(&report, "context", Status::Warn, &["= 2048", "= 4096"]);
    expect(&report, "aux-ids", Status::Ok, &["[2, 4, 5] of 8", "after", "[1, 3, 4]"]);
    expect(&report, "head-source", Status::Ok, &["own lm_head"]);
    expect(&report, "target-tensors", Status::Ok, &["1121 tensors"]);
    let warned: Vec<_> = report.checks.iter().filter(|c| c.status != Status::Ok).map(|c| c.id).collect();
    assert_eq!(warned, ["context"]);
    let json = serde_json::to_value(&report).unwrap();
    assert_eq!(json["checks"][0]["id"], "target-config");
    assert_eq!(json["checks"][0]["status"], "ok");
}

#[test]
fn the_fixture_pairs_pass() {
    for draft in ["v3_eagle3", "v3_eagle3_shared"] {
        let report = preflight(&fixture("v3"), Some(&fixture(draft)));
        assert!(report.passes(), "{report:#?}");
        expect(&report, "target-tensors", Status::Ok, &["skipped multi-token-prediction layers: 26 tensors"]);
    }
    assert!(preflight(&fixture("k25_int4"), None).passes());
}

#[test]
fn every_problem_is_reported_at_once() {
    let mut target = Folder::copy(&fixture("v3"));
    target.remove("model.norm.weight");
    target.remove("model.layers.3.mlp.gate.weight");
    let mut draft = Folder::copy(&demo("mini-eagle3"));
    draft.remove("norm.weight");
    draft.get("t2d").data[0] ^= 1;
    draft.set("/eagle_config/eagle_aux_hidden_state_layer_ids", json!([0, 2, 9]));
    let report = preflight(target.write(), Some(draft.write()));
    assert!(!report.passes());
    expect(&report, "target-tensors", Status::Fail, &["model.norm.weight: is missing"]);
    expect(&report, "target-tensors", Status::Fail, &["model.layers.3.mlp.gate.weight: is missing"]);
    expect(&report, "draft-tensors", Status::Fail, &["norm.weight: is missing"]);
    expect(&report, "d2t", Status::Fail, &["t2d"]);
    expect(&report, "hidden-size", Status::Fail, &["target_hidden_size = 384", "hidden_size = 96"]);
    expect(&report, "vocab", Status::Fail, &["vocab_size = 4096", "vocab_size = 259"]);
    expect(&report, "draft-vocab", Status::Fail, &["draft_vocab_size = 2048", "vocab_size = 259"]);
    expect(&report, "aux-ids", Status::Fail, &["aux id 10", "5 target layers"]);
}

#[test]
fn widths_are_compared_with_the_target() {
    let report = preflight(&demo("mini"), Some(&fixture("v3_eagle3_shared")));
    expect(&report, "fc-width", Status::Fail, &["288 inputs", "1152 wide"]);
    expect(&report, "shared-width", Status::Fail, &["hidden_size = 96", "hidden_size = 384"]);
}

#[test]
fn a_folder_of_the_wrong_model_is_summed_up() {
    let mut target = Folder::copy(&fixture("v3"));
    target.set("/num_hidden_layers", json!(60));
    let report = preflight(target.write(), None);
    let failed = report.checks.iter().filter(|c| c.status == Status::Fail).count();
    assert_eq!(failed, 21);
    expect(&report, "target-tensors", Status::Fail, &["and ", " more problems"]);
}

/// A config of a few bytes must not make a list of 25 million problems.
#[test]
fn a_boundless_promise_is_summed_up_as_well() {
    let mut target = Folder::copy(&fixture("v3"));
    target.set("/num_hidden_layers", json!(1024));
    target.set("/n_routed_experts", json!(8192));
    let report = preflight(target.write(), None);
    assert_eq!(report.checks.iter().filter(|c| c.status == Status::Fail).count(), 21);
    expect(&report, "target-tensors", Status::Fail, &["and at least ", " more problems"]);
}

#[test]
fn json_files_without_end_are_not_read() {
    let target = Folder::copy(&fixture("v3"));
    for (file, id) in [("config.json", "target-config"), ("model.safetensors.index.json", "target-tensors")] {
        let dir = target.write();
        fs::File::create(dir.join(file)).unwrap().set_len((256 << 20) + 1).unwrap();
        let part = format!("{file}: cannot read: 268435457 bytes, limit 268435456");
        expect(&preflight(dir, None), id, Status::Fail, &[&part]);
        fs::remove_file(dir.join(file)).unwrap();
        fs::create_dir(dir.join(file)).unwrap();
        expect(&preflight(dir, None), id, Status::Fail, &[file, "not a regular file"]);
        fs::remove_dir(dir.join(file)).unwrap();
    }
}

#[test]
fn absent_folders_and_files_are_checks_too() {
    let report = preflight(Path::new("/nonexistent"), Some(Path::new("/nonexistent/draft")));
    assert!(!report.passes());
    for id in ["target-config", "target-tensors", "draft-config", "draft-tensors"] {
        assert_eq!(find(&report, id).status, Status::Fail);
        assert!(find(&report, id).message.contains("/nonexistent"));
    }
    let mut target = Folder::copy(&fixture("v3"));
    target.set("/eos_token_id", json!(null));
    let dir = target.write();
    for file in ["tokenizer.json", "generation_config.json"] {
        fs::remove_file(dir.join(file)).unwrap();
    }
    let report = preflight(dir, None);
    for (id, part) in
        [("tokenizer", "token ids"), ("generation-config", "config.json alone"), ("eos", "limits")]
    {
        expect(&report, id, Status::Warn, &[part]);
    }
}

#[test]
fn an_explicit_convention_settles_open_ids() {
    let mut draft = Folder::copy(&fixture("v3_eagle3"));
    draft.set("/eagle_config", json!({}));
    draft.set("/eagle_aux_hidden_state_layer_ids", json!([0, 2, 5]));
    let dir = draft.write();
    expect(
        &preflight(&fixture("v3"), Some(dir)),
        "aux-ids",
        Status::Fail,
        &["[0, 2, 5]", "entering or after"],
    );
    let report = preflight_with(&fixture("v3"), Some(dir), Some(AuxConvention::Entering));
    expect(&report, "aux-ids", Status::Ok, &["[0, 2, 5] of 5", "aux convention: entering"]);
}

/// Writes the header of one shard over a hole of the right length, so that no data has to be written.
fn write_hollow(path: &Path, linears: &[&LinearSpec], vectors: &[&VectorSpec], prefix: &str) -> Vec<String> {
    let mut entries: Vec<(String, &str, Vec<usize>, usize)> = Vec::new();
    for l in linears {
        let [out, input] = l.shape;
        if l.name.contains(".experts.") {
            let names =
                ["weight_packed", "weight_scale", "weight_shape"].map(|s| format!("{prefix}{}.{s}", l.name));
            let [packed, scale, shape] = names;
            entries.push((packed, "I32", vec![out, input / 8], out * input / 2));
            entries.push((scale, "BF16", vec![out, input / 32], out * input / 16));
            entries.push((shape, "I32", vec![2], 8));
        } else {
            entries.push((format!("{prefix}{}.weight", l.name), "BF16", vec![out, input], out * input * 2));
        }
    }
    entries.extend(vectors.iter().map(|v| (format!("{prefix}{}", v.name), "F32", vec![v.len], v.len * 4)));
    let (mut header, mut at) = (serde_json::Map::new(), 0);
    for (name, dtype, shape, bytes) in &entries {
        header
            .insert(name.clone(), json!({"dtype": dtype, "shape": shape, "data_offsets": [at, at + bytes]}));
        at += bytes;
    }
    fs::write(path, with_header(&serde_json::Value::Object(header).to_string(), &[])).unwrap();
    let file = fs::OpenOptions::new().write(true).open(path).unwrap();
    file.set_len(file.metadata().unwrap().len() + at as u64).unwrap();
    entries.into_iter().map(|(name, ..)| name).collect()
}

fn parts_of(layer: &LayerTensors) -> (Vec<&LinearSpec>, Vec<&VectorSpec>) {
    let a = &layer.attention;
    let mut linears = vec![&a.kv_a, &a.kv_b, &a.o];
    let mut vectors = vec![&layer.input_norm, &layer.post_attention_norm, &a.kv_a_norm];
    match &a.query {
        QueryTensors::Full(q) => linears.push(q),
        QueryTensors::LowRank { a, norm, b } => {
            linears.extend([a, b]);
            vectors.push(norm);
        }
    }
    match &layer.ffn {
        FfnTensors::Dense(mlp) => linears.extend([&mlp.gate, &mlp.up, &mlp.down]),
        FfnTensors::Moe(moe) => {
            linears.push(&moe.router);
            let mlps = moe.experts.iter().chain(&moe.shared);
            linears.extend(mlps.flat_map(|mlp| [&mlp.gate, &mlp.up, &mlp.down]));
            vectors.extend(&moe.router_bias);
        }
    }
    (linears, vectors)
}

#[test]
fn two_hundred_thousand_tensors_take_a_moment() {
    let mut folder = Folder::copy(&fixture("k25_int4"));
    for (key, value) in [("num_hidden_layers", 61), ("n_routed_experts", 384), ("num_experts_per_tok", 8)] {
        folder.set(&format!("/text_config/{key}"), json!(value));
    }
    let dir = folder.dir.path();
    fs::write(dir.join("config.json"), folder.config.to_string()).unwrap();
    let config = TargetConfig::from_dir(dir).unwrap();
    let mut map = serde_json::Map::new();
    let mut shard = |file: String, linears: &[&LinearSpec], vectors: &[&VectorSpec]| {
        let names = write_hollow(&dir.join(&file), linears, vectors, "language_model.");
        map.extend(names.into_iter().map(|name| (name, json!(file))));
    };
    for i in 0..config.num_hidden_layers {
        let layer = layer_tensors(&config, i);
        let (linears, vectors) = parts_of(&layer);
        shard(format!("model-{i}.safetensors"), &linears, &vectors);
    }
    let outer = model_tensors(&config);
    shard("model-61.safetensors".to_owned(), &[&outer.embed, &outer.head], &[&outer.norm]);
    let tensors = map.len();
    assert!(tensors > 200_000, "{tensors}");
    fs::write(dir.join("model.safetensors.index.json"), json!({"weight_map": map}).to_string()).unwrap();
    // As a ratio, since wall time on a busy machine says nothing: parsing the index alone takes some 60 ms on an idle
    // one, so this bound is a second there.
    let index = fs::read(dir.join("model.safetensors.index.json")).unwrap();
    let (mut best, mut parse) = (Duration::MAX, Duration::MAX);
    for _ in 0..4 {
        let start = Instant::now();
        let value: serde_json::Value = serde_json::from_slice(&index).unwrap();
        parse = parse.min(start.elapsed());
        assert!(value.is_object());
        let start = Instant::now();
        let report = preflight(dir, None);
        best = best.min(start.elapsed());
        assert!(report.passes(), "{report:#?}");
        expect(&report, "target-tensors", Status::Ok, &[&format!("{tensors} tensors")]);
    }
    println!("{tensors} tensors in {best:?}, plain parse of the index {parse:?}");
    assert!(best < parse * 16, "{best:?} against {parse:?}");
}
