//! EAGLE-3 drafts: config, tensors, vocabulary map and the meaning of aux layer ids.

use std::path::Path;

use eyrie_checkpoint::{
    AuxConvention, DraftCheckpoint, DraftConfig, EmbedSource, HeadSource, WrittenAuxIds, aux_ids,
};
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::support::{Folder, assert_line, demo, fixture, zeros};

fn refused(folder: &Folder, parts: &[&str]) {
    assert_line(DraftCheckpoint::open(folder.write()).expect_err(parts[0]), parts);
}

fn offsets(values: &[i64]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

#[test]
fn the_demo_draft_and_the_fixtures_open() {
    let mini = DraftCheckpoint::open(&demo("mini-eagle3")).unwrap();
    assert_eq!((mini.embed_source(), mini.head_source()), (EmbedSource::Target, HeadSource::File));
    let ids = mini.target_ids().unwrap();
    assert_eq!(ids.len(), 2048);
    assert!(ids.is_sorted_by(|a, b| a < b) && ids.iter().all(|&id| id < 4096));
    assert_eq!(mini.linear("fc").unwrap().shape, [384, 1152]);
    assert_eq!(aux_ids(mini.config(), 8, None).unwrap().canonical, [2, 4, 5]);

    let own = DraftCheckpoint::open(&fixture("v3_eagle3")).unwrap();
    assert_eq!((own.embed_source(), own.head_source()), (EmbedSource::Target, HeadSource::File));
    assert_eq!((own.config().head_dim, own.config().draft_vocab_size), (20, 100));
    assert_eq!(own.linear("midlayer.self_attn.q_proj").unwrap().shape, [80, 192]);
    assert_eq!(own.vector("midlayer.hidden_norm.weight").unwrap().len(), 96);
    assert_eq!(aux_ids(own.config(), 5, None).unwrap().canonical, [1, 3, 5]);

    let shared = DraftCheckpoint::open(&fixture("v3_eagle3_shared")).unwrap();
    assert_eq!((shared.embed_source(), shared.head_source()), (EmbedSource::Target, HeadSource::Target));
    assert_eq!(shared.target_ids(), None);
    assert_eq!(aux_ids(shared.config(), 5, None).unwrap().canonical, [2, 3, 4]);
}

#[test]
fn target_ids_are_index_plus_offset() {
    let draft = DraftCheckpoint::open(&fixture("v3_eagle3")).unwrap();
    let index = draft.index();
    let d2t = index.read_integers(index.get("d2t").unwrap()).unwrap();
    let t2d = index.data(index.get("t2d").unwrap());
    for (i, &id) in draft.target_ids().unwrap().iter().enumerate() {
        assert_eq!(i64::from(id), i as i64 + d2t[i]);
        assert_eq!(t2d[id as usize], 1);
    }
}

#[test]
fn aliases_mean_the_same_tensors() {
    let plain = DraftCheckpoint::open(&fixture("v3_eagle3")).unwrap();
    let mut folder = Folder::copy(&fixture("v3_eagle3"));
    for t in &mut folder.tensors {
        t.name = format!("model.{}", t.name.replace("midlayer.", "layers.0."));
    }
    folder.get("model.d2t").name = "draft_id_to_target_id".to_owned();
    let renamed = DraftCheckpoint::open(folder.write()).unwrap();
    assert_eq!(renamed.target_ids(), plain.target_ids());
    let module = "midlayer.mlp.down_proj";
    assert_eq!(
        renamed.linear(module).unwrap().bytes().unwrap(),
        plain.linear(module).unwrap().bytes().unwrap()
    );
    folder.tensors.push(zeros("midlayer.hidden_norm.weight", "BF16", &[96], 2));
    refused(&folder, &["midlayer.hidden_norm.weight: is another spelling of model.layers.0.hidden_norm"]);
}

#[test]
fn narrow_integers_and_absent_membership_are_fine() {
    let plain = DraftCheckpoint::open(&fixture("v3_eagle3")).unwrap();
    let mut folder = Folder::copy(&fixture("v3_eagle3"));
    let d2t = plain.index().read_integers(plain.index().get("d2t").unwrap()).unwrap();
    let narrow = d2t.iter().flat_map(|&v| i32::try_from(v).unwrap().to_le_bytes()).collect::<Vec<_>>();
    *folder.get("d2t") = crate::support::tensor("d2t", "I32", &[100], &narrow);
    folder.remove("t2d");
    assert_eq!(DraftCheckpoint::open(folder.write()).unwrap().target_ids(), plain.target_ids());
}

#[test]
fn broken_vocabulary_maps_are_refused() {
    let base = || Folder::copy(&fixture("v3_eagle3"));
    let mut folder = base();
    folder.remove("d2t");
    refused(&folder, &["tensor d2t: is missing", "[100]", "vocab_size = 259"]);
    let mut folder = base();
    *folder.get("d2t") = zeros("d2t", "I64", &[100], 8);
    refused(&folder, &["tensor d2t: all zero", "broken export"]);
    *folder.get("d2t") = zeros("d2t", "F32", &[100], 4);
    refused(&folder, &["tensor d2t: F32, expected I32 or I64"]);
    *folder.get("d2t") = zeros("d2t", "I64", &[99], 8);
    refused(&folder, &["tensor d2t: [99], expected draft_vocab_size = [100]"]);
    let mut one_off = vec![0i64; 100];
    one_off[99] = 160;
    folder.get("d2t").shape = vec![100];
    folder.get("d2t").data = offsets(&one_off);
    refused(&folder, &["d2t[99] = 160 maps outside the vocabulary of 259"]);
    one_off[99] = i64::MAX;
    folder.get("d2t").data = offsets(&one_off);
    refused(&folder, &["d2t[99] = 9223372036854775807 maps outside"]);
    one_off[99] = -1;
    folder.get("d2t").data = offsets(&one_off);
    refused(&folder, &["d2t[99] = -1 maps to 98", "strictly increasing"]);

    let mut folder = base();
    let first = folder.get("t2d").data.iter().position(|&m| m == 1).unwrap();
    folder.get("t2d").data[first] = 0;
    refused(&folder, &[&format!("t2d[{first}] is false, but d2t maps to {first}")]);
    let mut folder = base();
    let free = folder.get("t2d").data.iter().position(|&m| m == 0).unwrap();
    folder.get("t2d").data[free] = 1;
    refused(&folder, &["t2d: 101 ids are true, draft_vocab_size = 100"]);
    *folder.get("t2d") = zeros("t2d", "U8", &[259], 1);
    refused(&folder, &["t2d: U8 [259], expected BOOL [259]"]);
}

#[test]
fn heads_and_embeddings_come_from_one_place_or_not_at_all() {
    let mut folder = Folder::copy(&fixture("v3_eagle3"));
    folder.remove("lm_head.weight");
    refused(&folder, &["tensor lm_head.weight: is missing", "equal vocabulary (259)"]);

    let mut folder = Folder::copy(&fixture("v3_eagle3"));
    folder.set("/target_hidden_size", json!(64));
    *folder.get("fc.weight") = zeros("fc.weight", "BF16", &[96, 192], 2);
    refused(
        &folder,
        &["tensor embed_tokens.weight: is missing", "hidden_size = 96", "target_hidden_size = 64"],
    );
    folder.tensors.push(zeros("embed_tokens.weight", "BF16", &[259, 96], 2));
    let draft = DraftCheckpoint::open(folder.write()).unwrap();
    assert_eq!((draft.embed_source(), draft.head_source()), (EmbedSource::File, HeadSource::File));
    folder.get("embed_tokens.weight").shape = vec![96, 259];
    refused(&folder, &["embed_tokens.weight: BF16 [96, 259]", "[259, 96]"]);
}

#[test]
fn wrong_or_unknown_tensors_are_named() {
    let rows: [(&str, &[usize], &[&str]); 7] = [
        ("fc_norm.0.weight", &[96], &["fc_norm.0.weight: norms before fc are not supported yet"]),
        ("input_norm.weight", &[288], &["input_norm.weight: a norm before fc is not supported yet"]),
        ("layers.1.mlp.up_proj.weight", &[84, 96], &["only drafts of 1 layer"]),
        ("midlayer.self_attn.q_proj.bias", &[80], &["biases are not supported yet"]),
        ("midlayer.self_attn.kv_a_proj_with_mqa.weight", &[1], &["latent attention are not supported yet"]),
        ("fc.weight_scale", &[1], &["quantised drafts are not supported yet"]),
        ("junk", &[1], &["tensor junk: is unexpected"]),
    ];
    for (name, shape, parts) in rows {
        let mut folder = Folder::copy(&fixture("v3_eagle3"));
        folder.tensors.push(zeros(name, "BF16", shape, 2));
        refused(&folder, parts);
    }
    let mut folder = Folder::copy(&fixture("v3_eagle3"));
    folder.get("fc.weight").shape = vec![288, 96];
    refused(&folder, &["fc.weight: BF16 [288, 96]", "[96, 288]"]);
    folder.remove("norm.weight");
    folder.get("fc.weight").shape = vec![96, 288];
    refused(&folder, &["tensor norm.weight: is missing, expected float [96]"]);
}

#[test]
fn variants_that_cannot_run_are_refused_by_field() {
    let rows: [(&str, Value, &[&str]); 22] = [
        (
            "/architectures",
            json!(["Eagle3DeepseekV2ForCausalLM"]),
            &["latent attention are not supported yet"],
        ),
        ("/architectures", json!(["DeepseekV3ForCausalLM"]), &["is a target, not an EAGLE-3 draft"]),
        ("/architectures", json!(["Eagle3Speculator"]), &["architectures = [\"Eagle3Speculator\"]"]),
        ("/speculators_model_type", json!("eagle3"), &["speculators layout is not supported yet"]),
        ("/model_type", json!("kimi_k2"), &["model_type = \"kimi_k2\"", "llama"]),
        ("/num_hidden_layers", json!(2), &["num_hidden_layers = 2", "1 layer"]),
        ("/fc_norm", json!(true), &["fc_norm = true"]),
        ("/norm_before_fc", json!(true), &["norm_before_fc = true"]),
        ("/norm_output", json!(true), &["norm_output = true"]),
        ("/bias", json!(true), &["bias = true"]),
        ("/attention_bias", json!(true), &["attention_bias = true"]),
        ("/tie_word_embeddings", json!(true), &["tie_word_embeddings = true"]),
        ("/hidden_act", json!("gelu"), &["hidden_act = \"gelu\""]),
        ("/draft_vocab_size", json!(260), &["draft_vocab_size = 260", "vocab_size = 259"]),
        ("/num_key_value_heads", json!(3), &["num_key_value_heads = 3", "num_attention_heads = 4"]),
        ("/head_dim", json!(19), &["head_dim = 19", "even"]),
        ("/num_aux_hidden_states", json!(2), &["num_aux_hidden_states = 2", "3 aux layer ids"]),
        ("/rope_scaling", json!({"rope_type": "llama3"}), &["rope_scaling.rope_type = \"llama3\""]),
        ("/eagle_config/use_aux_hidden_state", json!(false), &["eagle_config.use_aux_hidden_state = false"]),
        ("/eagle_config/norm_before_fc", json!(true), &["eagle_config.norm_before_fc = true"]),
        ("/eagle_config/eagle_aux_hidden_state_layer_ids", json!([-1]), &["= [-1]", "a list of layer ids"]),
        ("/eagle_config/eagle_aux_hidden_state_layer_ids", json!([]), &["layer_ids = []", "1..=64"]),
    ];
    for (pointer, value, parts) in rows {
        let mut folder = Folder::copy(&fixture("v3_eagle3"));
        folder.set(pointer, value);
        let error = DraftConfig::from_dir(folder.write()).expect_err(pointer);
        assert_line(&error, &["config.json: "]);
        assert_line(error, parts);
    }
}

#[test]
fn flags_the_head_computes_with_are_kept() {
    let mut folder = Folder::copy(&fixture("v3_eagle3"));
    folder.set("/norm_before_residual", json!(true));
    folder.set("/logit_scale", json!(0.5));
    let config = DraftConfig::from_dir(folder.write()).unwrap();
    assert_eq!((config.norm_before_residual, config.logit_scale), (true, 0.5));
}

fn with_ids(written: WrittenAuxIds) -> DraftConfig {
    let mut config = DraftConfig::from_dir(&fixture("v3_eagle3")).unwrap();
    config.num_aux_hidden_states = match &written {
        WrittenAuxIds::Absent => 3,
        WrittenAuxIds::Nested(ids) | WrittenAuxIds::TopLevel(ids) => ids.len(),
    };
    config.written_aux_ids = written;
    config
}

#[test]
fn aux_ids_follow_the_rule() {
    use AuxConvention::{After, Entering};
    use WrittenAuxIds::{Absent, Nested, TopLevel};
    let rows = [
        (Absent, 61, None, vec![2, 30, 58], "default"),
        (Nested(vec![1, 29, 57]), 61, None, vec![2, 30, 58], "after"),
        (TopLevel(vec![1, 29, 57]), 61, None, vec![2, 30, 58], "after"),
        (Nested(vec![2, 30, 58]), 61, None, vec![2, 30, 58], "entering"),
        (TopLevel(vec![2, 30, 58]), 61, None, vec![2, 30, 58], "entering"),
        (Nested(vec![3, 20, 60]), 61, None, vec![4, 21, 61], "SpecForge"),
        (TopLevel(vec![3, 20, 61]), 61, Some(Entering), vec![3, 20, 61], "aux convention: entering"),
        (TopLevel(vec![3, 20]), 61, Some(After), vec![4, 21], "aux convention: after"),
        (Nested(vec![1, 29, 57]), 61, Some(Entering), vec![1, 29, 57], "aux convention: entering"),
    ];
    for (written, layers, convention, canonical, rule) in rows {
        let ids = aux_ids(&with_ids(written.clone()), layers, convention).unwrap();
        assert_eq!(ids.canonical, canonical, "{written:?}");
        assert!(ids.rule.contains(rule), "{} lacks {rule}", ids.rule);
    }
}

#[test]
fn aux_ids_that_cannot_be_used_are_refused() {
    use WrittenAuxIds::{Absent, Nested, TopLevel};
    let rows: [(WrittenAuxIds, usize, &[&str]); 5] = [
        (TopLevel(vec![3, 20, 50]), 61, &["[3, 20, 50]", "61", "entering or after"]),
        (Nested(vec![3, 3, 20]), 61, &["[4, 4, 21]", "strictly increasing"]),
        (Nested(vec![3, 20, 61]), 61, &["aux id 62", "61 target layers"]),
        (Absent, 3, &["3 target layers are too few"]),
        (Absent, 6, &["[2, 3, 3]", "strictly increasing"]),
    ];
    for (written, layers, parts) in rows {
        assert_line(aux_ids(&with_ids(written), layers, None).unwrap_err(), parts);
    }
    let mut config = with_ids(Absent);
    config.num_aux_hidden_states = 4;
    assert_line(aux_ids(&config, 61, None).unwrap_err(), &["3 aux ids", "num_aux_hidden_states = 4"]);
}

proptest! {
    #[test]
    fn resolved_ids_are_increasing_and_in_range(
        ids in prop::collection::vec(0usize..70, 1..6), layers in 1usize..64, nested in any::<bool>()
    ) {
        let written = if nested { WrittenAuxIds::Nested(ids) } else { WrittenAuxIds::TopLevel(ids) };
        if let Ok(found) = aux_ids(&with_ids(written), layers, None) {
            prop_assert!(found.canonical.is_sorted_by(|a, b| a < b));
            prop_assert!(found.canonical.iter().all(|&id| id <= layers));
        }
    }
}

#[test]
fn pickled_drafts_are_refused() {
    let folder = Folder::copy(&fixture("v3_eagle3"));
    let dir: &Path = folder.write();
    std::fs::rename(dir.join("model.safetensors"), dir.join("pytorch_model.bin")).unwrap();
    assert_line(DraftCheckpoint::open(dir).unwrap_err(), &["pytorch_model.bin: pickled weights"]);
}
