//! Target checkpoints: every tensor accounted for, every defect named.

use eyrie_checkpoint::{
    Bytes, FfnTensors, Layout, QueryTensors, SkipRule, TargetCheckpoint, layer_tensors, model_tensors,
};
use eyrie_region::RegionKind;
use serde_json::json;

use crate::support::{Folder, assert_line, demo, fixture, zeros};

fn refused(folder: &Folder, parts: &[&str]) {
    assert_line(TargetCheckpoint::open(folder.write()).expect_err(parts[0]), parts);
}

#[test]
fn every_fixture_is_accounted_for() {
    let rows: [(&str, &[(SkipRule, u64)]); 5] = [
        ("v2_lite", &[]),
        ("v2_group", &[]),
        ("v3", &[(SkipRule::MtpLayer, 26)]),
        ("v3_norope_scaling", &[(SkipRule::MtpLayer, 24)]),
        ("k25_int4", &[(SkipRule::RotaryBuffer, 5), (SkipRule::Vision, 3)]),
    ];
    for (name, skipped) in rows {
        let checkpoint = TargetCheckpoint::open(&fixture(name)).unwrap();
        let account = checkpoint.account();
        let found: Vec<_> = account.skipped.iter().map(|(rule, total)| (*rule, total.tensors)).collect();
        assert_eq!(found, skipped, "{name}");
        let all = account.loaded.tensors + found.iter().map(|(_, n)| n).sum::<u64>();
        assert_eq!(all, checkpoint.index().entries().len() as u64, "{name}");
        let bytes = account.loaded.bytes + account.skipped.iter().map(|(_, t)| t.bytes).sum::<u64>();
        assert_eq!(bytes, checkpoint.index().entries().iter().map(|e| e.bytes()).sum::<u64>(), "{name}");
    }
    let mini = TargetCheckpoint::open(&demo("mini")).unwrap();
    assert_eq!((mini.account().loaded.tensors, mini.account().skipped.len()), (1121, 0));
}

#[test]
fn every_listed_tensor_can_be_viewed() {
    for name in ["v2_lite", "v2_group", "v3", "v3_norope_scaling", "k25_int4"] {
        let checkpoint = TargetCheckpoint::open(&fixture(name)).unwrap();
        let config = checkpoint.config();
        for layer in 0..config.num_hidden_layers {
            let tensors = layer_tensors(config, layer);
            assert_eq!(checkpoint.vector(&tensors.input_norm.name).unwrap().len(), config.hidden_size);
            let query = match &tensors.attention.query {
                QueryTensors::Full(q) => q,
                QueryTensors::LowRank { b, .. } => b,
            };
            let mut linears = vec![query, &tensors.attention.kv_b, &tensors.attention.o];
            match &tensors.ffn {
                FfnTensors::Dense(mlp) => linears.extend([&mlp.gate, &mlp.down]),
                FfnTensors::Moe(moe) => {
                    linears.extend([&moe.router, &moe.experts[7].down, &moe.shared.as_ref().unwrap().up]);
                    let bias = moe.router_bias.as_ref().map(|b| checkpoint.vector(&b.name).unwrap());
                    assert_eq!(bias.is_some(), !name.starts_with("v2"));
                }
            }
            for linear in linears {
                let view = checkpoint.linear(&linear.name).unwrap();
                assert_eq!(view.shape, linear.shape, "{name} {}", linear.name);
                let [out, input] = view.shape;
                match view.layout {
                    Layout::Bf16 => {
                        assert_eq!(
                            (view.bytes().unwrap().len(), view.byte_len()),
                            (out * input * 2, out * input * 2)
                        )
                    }
                    Layout::Int4G32 => {
                        assert_eq!(view.bytes().unwrap().len(), out * input / 2);
                        assert_eq!(view.scale_bytes().unwrap().len(), out * input / 32 * 2);
                    }
                    other => panic!("{name} {}: {other}", linear.name),
                }
                assert!(
                    matches!(view.data, Bytes::Mapped { region, .. } if region.kind() == RegionKind::FileMap)
                );
            }
        }
        let head = checkpoint.linear(&model_tensors(config).head.name).unwrap();
        assert_eq!(head.shape, [259, 96]);
    }
}

#[test]
fn a_missing_tensor_is_named() {
    for (fixture_name, name) in [
        ("v3", "model.embed_tokens.weight"),
        ("v3", "model.norm.weight"),
        ("v3", "model.layers.2.mlp.gate.e_score_correction_bias"),
        ("v3", "model.layers.4.mlp.experts.15.up_proj.weight"),
        ("v3", "model.layers.0.self_attn.q_a_layernorm.weight"),
        ("k25_int4", "language_model.lm_head.weight"),
        ("k25_int4", "language_model.model.layers.1.mlp.experts.3.up_proj.weight_scale"),
        ("k25_int4", "language_model.model.layers.1.mlp.experts.3.up_proj.weight_shape"),
    ] {
        let mut folder = Folder::copy(&fixture(fixture_name));
        folder.remove(name);
        refused(&folder, &[&format!("tensor {name}: is missing")]);
    }
}

#[test]
fn a_tensor_no_rule_knows_is_named() {
    for (name, parts) in [
        ("model.layers.1.self_attn.q_a_proj.bias", &["q_a_proj.bias: is unexpected"][..]),
        ("model.layers.1.self_attn.rotary_emb.other", &["is unexpected"]),
        ("model.layers.3.mlp.experts.16.up_proj.weight", &["experts.16.up_proj.weight: is unexpected"]),
        ("model.layers.3.mlp.experts.gate_up_proj", &["not supported yet: experts fused"]),
        ("model.layers.3.mlp.experts.0.up_proj.qweight", &["not supported yet: GPTQ or AWQ"]),
        ("junk", &["tensor junk: is unexpected"]),
    ] {
        let mut folder = Folder::copy(&fixture("v3"));
        folder.tensors.push(zeros(name, "BF16", &[4], 2));
        refused(&folder, parts);
    }
}

#[test]
fn junk_of_published_checkpoints_is_skipped_by_rule() {
    let mut folder = Folder::copy(&fixture("v3"));
    for name in ["k_proj.k_scale", "k_scale", "v_scale", "kv_scale"] {
        folder.tensors.push(zeros(&format!("model.layers.0.self_attn.{name}"), "F32", &[], 4));
    }
    for name in ["inv_freq", "cos_cached", "sin_cached"] {
        folder.tensors.push(zeros(&format!("model.layers.0.self_attn.rotary_emb.{name}"), "F32", &[2], 4));
    }
    let checkpoint = TargetCheckpoint::open(folder.write()).unwrap();
    let skipped: Vec<_> = checkpoint.account().skipped.iter().map(|(r, t)| (*r, t.tensors)).collect();
    assert_eq!(skipped, [(SkipRule::MtpLayer, 26), (SkipRule::RotaryBuffer, 3), (SkipRule::KvCacheScale, 4)]);
}

#[test]
fn wrong_shapes_and_dtypes_are_named() {
    let mut folder = Folder::copy(&fixture("v3"));
    *folder.get("model.norm.weight") = zeros("model.norm.weight", "BF16", &[95], 2);
    refused(&folder, &["tensor model.norm.weight: BF16 [95], expected F32, F16 or BF16 [96]"]);

    let name = "model.layers.1.self_attn.o_proj.weight";
    let mut folder = Folder::copy(&fixture("v3"));
    folder.get(name).shape = vec![36, 96];
    refused(&folder, &[name, "BF16 [36, 96]", "[96, 36]"]);
    *folder.get(name) = zeros(name, "I32", &[96, 36], 4);
    refused(&folder, &[name, "I32 [96, 36]", "expected F32, F16 or BF16"]);

    let scale = "language_model.model.layers.1.mlp.experts.0.up_proj.weight_scale";
    let mut folder = Folder::copy(&fixture("k25_int4"));
    *folder.get(scale) = zeros(scale, "F16", &[32, 3], 2);
    refused(&folder, &[scale, "F16 [32, 3], expected BF16 [32, 3]"]);
    *folder.get(scale) = zeros(scale, "BF16", &[32, 6], 2);
    refused(&folder, &[scale, "BF16 [32, 6], expected BF16 [32, 3]"]);
}

#[test]
fn stored_shapes_of_packed_weights_are_checked_on_use() {
    let module = "model.layers.1.mlp.experts.0.up_proj";
    let stored = format!("language_model.{module}.weight_shape");
    let mut folder = Folder::copy(&fixture("k25_int4"));
    let wide = [32i64, 96].map(i64::to_le_bytes).concat();
    *folder.get(&stored) = crate::support::tensor(&stored, "I64", &[2], &wide);
    TargetCheckpoint::open(folder.write()).unwrap().linear(module).unwrap();
    folder.get(&stored).data = [96i64, 32].map(i64::to_le_bytes).concat();
    let error = TargetCheckpoint::open(folder.write()).unwrap().linear(module).unwrap_err();
    assert_line(error, &[&stored, "holds [96, 32], the packed tensor is [32, 96]"]);
}

#[test]
fn declared_and_stored_formats_must_agree() {
    let mut folder = Folder::copy(&fixture("k25_int4"));
    folder.set("/text_config/quantization_config", json!(null));
    refused(&folder, &["weight_packed: is packed int4", "declares no quantization_config"]);

    let int4 = Folder::copy(&fixture("k25_int4")).config["text_config"]["quantization_config"].clone();
    let mut folder = Folder::copy(&fixture("v3"));
    folder.set("/quantization_config", int4);
    refused(&folder, &["declares int4 group 32, but no tensor is packed"]);
    folder.set("/quantization_config", json!({"quant_method": "fp8", "weight_block_size": [128, 128]}));
    refused(&folder, &["declares fp8 block 128x128, but no tensor has that format"]);
}

#[test]
fn formats_without_kernels_are_refused_by_tensor() {
    let module = "model.layers.1.self_attn.o_proj";
    let name = format!("{module}.weight");
    let mut folder = Folder::copy(&fixture("v3"));
    folder.set("/quantization_config", json!({"quant_method": "fp8", "weight_block_size": [128, 128]}));
    *folder.get(&name) = zeros(&name, "F8_E4M3", &[96, 36], 1);
    folder.tensors.push(zeros(&format!("{module}.weight_scale_inv"), "F32", &[1, 1], 4));
    refused(&folder, &[&format!("tensor {name}: not supported yet: fp8 block")]);

    *folder.get(&name) = zeros(&name, "U8", &[96, 18], 1);
    refused(&folder, &[&format!("tensor {name}: not supported yet: nvfp4")]);

    let mut folder = Folder::copy(&fixture("v3"));
    folder.tensors.push(zeros(&format!("{module}.weight_scale_inv"), "F32", &[1, 1], 4));
    refused(&folder, &["o_proj.weight_scale_inv: scales a BF16 weight, which needs none"]);
}

#[test]
fn packed_weights_may_only_stand_for_layer_projections() {
    let mut folder = Folder::copy(&fixture("k25_int4"));
    let plain = "language_model.model.layers.1.mlp.experts.0.up_proj.weight";
    folder.tensors.push(zeros(plain, "BF16", &[32, 96], 2));
    refused(&folder, &["up_proj.weight_packed: stands beside a plain weight"]);

    let mut folder = Folder::copy(&fixture("k25_int4"));
    folder.remove("language_model.lm_head.weight");
    folder.tensors.push(zeros("language_model.lm_head.weight_packed", "I32", &[259, 12], 4));
    refused(&folder, &["lm_head.weight_packed: this module must be float"]);
}

#[test]
fn prefixes_without_model_are_understood_and_duplicates_refused() {
    let mut folder = Folder::copy(&fixture("k25_int4"));
    for t in &mut folder.tensors {
        t.name = t.name.replace("language_model.model.layers.", "language_model.layers.");
    }
    TargetCheckpoint::open(folder.write()).unwrap();
    folder.tensors.push(zeros("language_model.model.layers.0.input_layernorm.weight", "BF16", &[96], 2));
    refused(&folder, &["is another spelling of language_model.layers.0.input_layernorm.weight"]);
}

#[test]
fn a_tied_head_is_the_embedding() {
    let mut folder = Folder::copy(&fixture("v3"));
    folder.set("/tie_word_embeddings", json!(true));
    refused(&folder, &["tensor lm_head.weight: is unexpected"]);
    folder.remove("lm_head.weight");
    let checkpoint = TargetCheckpoint::open(folder.write()).unwrap();
    assert_eq!(model_tensors(checkpoint.config()).head.name, "model.embed_tokens");
}
