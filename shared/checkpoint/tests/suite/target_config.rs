//! `config.json` of the target families: values, defaults and refusals.

use std::path::Path;

use crate::support::{Folder, assert_line, fixture};
use eyrie_checkpoint::{Architecture, QuantFormat, RopeConfig, Scoring, TargetConfig, TopkMethod, Yarn};
use serde_json::{Value, json};

fn parse(value: &Value) -> eyrie_checkpoint::Result<TargetConfig> {
    TargetConfig::from_json(Path::new("some/config.json"), &value.to_string())
}

/// The least a config must say.
fn bare(architecture: &str) -> Value {
    json!({
        "architectures": [architecture], "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 6,
        "num_attention_heads": 2, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
        "v_head_dim": 16, "intermediate_size": 96, "max_position_embeddings": 1024,
        "n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 24
    })
}

#[test]
fn absent_fields_take_their_family_defaults() {
    let v2 = parse(&bare("DeepseekV2ForCausalLM")).unwrap();
    let moe = v2.moe.as_ref().unwrap();
    assert_eq!((moe.scoring, moe.method), (Scoring::Softmax, TopkMethod::Greedy));
    assert_eq!((moe.n_group, moe.topk_group, moe.first_k_dense_replace), (1, 1, 0));
    assert_eq!((moe.norm_topk_prob, moe.routed_scaling_factor, moe.n_shared_experts), (false, 1.0, 0));
    let v3 = parse(&bare("DeepseekV3ForCausalLM")).unwrap();
    let moe = v3.moe.as_ref().unwrap();
    assert_eq!((moe.scoring, moe.method), (Scoring::Sigmoid, TopkMethod::NoAuxTc));
    assert_eq!((moe.n_group, moe.topk_group, moe.first_k_dense_replace), (8, 4, 3));
    assert_eq!((moe.norm_topk_prob, moe.routed_scaling_factor, moe.moe_layer_freq), (true, 2.5, 1));
    assert_eq!((v3.rms_norm_eps, v3.latent_norm_eps, v3.q_lora_rank), (1e-6, 1e-6, None));
    assert_eq!(v3.rope, RopeConfig { theta: 10_000.0, yarn: None });
    assert_eq!((v3.tie_word_embeddings, v3.quantisation), (false, QuantFormat::None));
    assert_eq!((v3.bos_token_id, v3.eos_token_ids), (None, vec![]));
}

#[test]
fn the_wrapper_is_read_from_its_text_config() {
    let config = TargetConfig::from_dir(&fixture("k25_int4")).unwrap();
    assert_eq!(config.architecture, Architecture::KimiK25);
    assert_eq!((config.hidden_size, config.rms_norm_eps, config.latent_norm_eps), (96, 1e-5, 1e-6));
    assert_eq!(config.quantisation, QuantFormat::Int4G32);
    let yarn = config.rope.yarn.unwrap();
    assert_eq!((config.rope.theta, yarn.factor, yarn.beta_slow), (50_000.0, 64.0, 1.0));
    for name in ["Kimi_K25ForConditionalGeneration", "KimiK25ForConditionalGeneration"] {
        for model_type in ["kimi_k2", "deepseek_v3"] {
            let mut text = bare("DeepseekV3ForCausalLM");
            text["model_type"] = json!(model_type);
            let wrapper = json!({"architectures": [name], "model_type": "kimi_k25", "text_config": text});
            assert_eq!(parse(&wrapper).unwrap().architecture, Architecture::KimiK25);
        }
    }
}

#[test]
fn both_rope_spellings_mean_the_same() {
    let yarn = json!({"factor": 40, "original_max_position_embeddings": 64, "mscale": 0.707, "mscale_all_dim": 0.707});
    let wanted = RopeConfig {
        theta: 50_000.0,
        yarn: Some(Yarn {
            factor: 40.0,
            original_max_position_embeddings: 64,
            beta_fast: 32.0,
            beta_slow: 1.0,
            mscale: 0.707,
            mscale_all_dim: 0.707,
        }),
    };
    for (key, type_key, inner_theta) in [
        ("rope_scaling", "type", false),
        ("rope_scaling", "rope_type", false),
        ("rope_parameters", "rope_type", true),
    ] {
        let mut config = bare("DeepseekV3ForCausalLM");
        config[key] = yarn.clone();
        config[key][type_key] = json!("yarn");
        config["rope_theta"] = json!(if inner_theta { 7.0 } else { 50_000.0 });
        if inner_theta {
            config[key]["rope_theta"] = json!(50_000);
        }
        assert_eq!(parse(&config).unwrap().rope, wanted, "{key} {type_key}");
    }
    for plain in
        [json!(null), json!({"rope_type": "default"}), json!({"type": "default", "rope_type": "default"})]
    {
        let mut config = bare("DeepseekV3ForCausalLM");
        config["rope_scaling"] = plain;
        assert_eq!(parse(&config).unwrap().rope.yarn, None);
    }
}

#[test]
fn stop_ids_are_the_union_of_every_file() {
    let mut folder = Folder::copy(&fixture("k25_int4"));
    folder.set("/eos_token_id", json!([250, 257]));
    folder.set("/text_config/eos_token_id", json!(249));
    let config = TargetConfig::from_dir(folder.write()).unwrap();
    assert_eq!((config.eos_token_ids, config.bos_token_id), (vec![249, 250, 257, 258], Some(256)));
}

#[test]
fn a_separate_quantisation_file_counts() {
    let folder = Folder::copy(&fixture("v3"));
    let dir = folder.write();
    let quant = json!({"quantization": {"quant_algo": "NVFP4", "group_size": 16}});
    std::fs::write(dir.join("hf_quant_config.json"), quant.to_string()).unwrap();
    assert_eq!(TargetConfig::from_dir(dir).unwrap().quantisation, QuantFormat::Nvfp4 { group: 16 });
}

#[test]
fn fp8_is_recognised() {
    let mut config = bare("DeepseekV3ForCausalLM");
    config["quantization_config"] = json!({"quant_method": "fp8", "weight_block_size": [128, 64]});
    assert_eq!(parse(&config).unwrap().quantisation, QuantFormat::Fp8Block { rows: 128, cols: 64 });
}

#[test]
fn what_cannot_be_served_is_refused_by_field() {
    let yarn = json!({"type": "yarn", "factor": 4, "original_max_position_embeddings": 64});
    let with = |key: &str, value: Value| {
        let mut y = yarn.clone();
        y[key] = value;
        y
    };
    let rows: Vec<(&str, Value, &[&str])> = vec![
        ("architectures", json!(null), &["architectures is missing"]),
        (
            "architectures",
            json!(["KimiK3ForConditionalGeneration"]),
            &["architectures = [", "K3", "supported: "],
        ),
        ("architectures", json!(["DeepseekV32ForCausalLM"]), &["sparse attention is not supported yet"]),
        ("architectures", json!(["KimiK25ForConditionalGeneration"]), &["text_config is missing"]),
        ("model_type", json!("llama"), &["model_type = \"llama\"", "deepseek_v3 or kimi_k2"]),
        ("hidden_size", json!(null), &["hidden_size is missing"]),
        ("hidden_size", json!(0), &["hidden_size = 0", "1..=4194304"]),
        ("hidden_size", json!(-3), &["hidden_size = -3", "integer"]),
        ("hidden_size", json!("64"), &["hidden_size = \"64\"", "integer"]),
        ("num_hidden_layers", json!(1_u64 << 40), &["num_hidden_layers = 1099511627776", "0..=1024"]),
        ("qk_rope_head_dim", json!(7), &["qk_rope_head_dim = 7", "even"]),
        ("num_key_value_heads", json!(1), &["num_key_value_heads = 1", "num_attention_heads = 2"]),
        ("rms_norm_eps", json!(0), &["rms_norm_eps = 0", "above 0"]),
        ("rms_norm_eps", json!(1e308), &["rms_norm_eps = 1e+308", "at most 1e30"]),
        ("rope_theta", json!(1), &["rope_theta = 1", "above 1"]),
        ("index_topk", json!(2048), &["index_topk = 2048", "not supported yet"]),
        ("linear_attn_config", json!({}), &["linear_attn_config", "not supported"]),
        ("mla_use_nope", json!(true), &["mla_use_nope = true"]),
        ("attention_bias", json!(true), &["attention_bias = true", "not supported"]),
        ("rope_interleave", json!(false), &["rope_interleave = false", "interleaved"]),
        ("hidden_act", json!("gelu"), &["hidden_act = \"gelu\"", "silu"]),
        ("tie_word_embeddings", json!("no"), &["tie_word_embeddings = \"no\"", "true or false"]),
        ("scoring_func", json!("tanh"), &["scoring_func = \"tanh\"", "softmax and sigmoid"]),
        ("scoring_func", json!("softmax"), &["scoring_func = \"softmax\"", "noaux_tc needs sigmoid"]),
        ("topk_method", json!("best"), &["topk_method = \"best\"", "noaux_tc"]),
        ("topk_method", json!("greedy"), &["scoring_func = absent", "softmax"]),
        ("n_group", json!(5), &["n_group = 5", "n_routed_experts = 16"]),
        ("n_group", json!(16), &["n_group = 16", "2 experts in a group"]),
        ("topk_group", json!(9), &["topk_group = 9", "n_group = 8"]),
        ("num_experts_per_tok", json!(9), &["num_experts_per_tok = 9", "8 experts in reach"]),
        ("num_experts_per_tok", json!(null), &["num_experts_per_tok is missing"]),
        ("eos_token_id", json!([1, 512]), &["eos_token_id = [1,512]", "vocab_size = 512"]),
        ("eos_token_id", json!("x"), &["eos_token_id = \"x\"", "list of token ids"]),
        ("rope_scaling", json!("yarn"), &["rope_scaling = \"yarn\"", "object"]),
        ("rope_scaling", with("type", json!("longrope")), &["rope_scaling.type = \"longrope\"", "yarn"]),
        ("rope_scaling", with("rope_type", json!("default")), &["rope_scaling.type = \"yarn\"", "disagrees"]),
        ("rope_scaling", with("type", json!(null)), &["rope_scaling.rope_type is missing"]),
        ("rope_scaling", with("factor", json!(0.5)), &["rope_scaling.factor = 0.5", "at least 1"]),
        ("rope_scaling", with("factor", json!(null)), &["rope_scaling.factor is missing"]),
        (
            "rope_scaling",
            with("original_max_position_embeddings", json!(null)),
            &["rope_scaling.original_max_position_embeddings is missing"],
        ),
        (
            "quantization_config",
            json!({"quant_method": "gptq"}),
            &["quantization_config.quant_method = \"gptq\""],
        ),
        (
            "quantization_config",
            json!({"quant_method": "fp8", "weight_block_size": [128]}),
            &["quantization_config.weight_block_size = [128]", "two integers"],
        ),
        (
            "quantization_config",
            json!({"quant_method": "compressed-tensors", "format": "int-quantized"}),
            &["quantization_config.format = \"int-quantized\"", "pack-quantized"],
        ),
    ];
    for (key, value, parts) in rows {
        let mut config = bare("DeepseekV3ForCausalLM");
        config[key] = value;
        let error = parse(&config).expect_err(key);
        assert_line(&error, &["some/config.json: "]);
        assert_line(error, parts);
    }
}

#[test]
fn int4_is_refused_unless_symmetric_in_groups_of_32() {
    let rows: [(&str, Value, &[&str]); 6] = [
        ("num_bits", json!(8), &["weights.num_bits = 8", "only 4"]),
        ("group_size", json!(128), &["weights.group_size = 128", "only 32"]),
        ("type", json!("float"), &["weights.type = \"float\"", "int"]),
        ("symmetric", json!(false), &["weights.symmetric = false", "zero points"]),
        ("strategy", json!("channel"), &["weights.strategy = \"channel\"", "group"]),
        ("actorder", json!("group"), &["weights.actorder = \"group\"", "not supported"]),
    ];
    for (key, value, parts) in rows {
        let mut folder = Folder::copy(&fixture("k25_int4"));
        let pointer = format!("/text_config/quantization_config/config_groups/group_0/weights/{key}");
        folder.set(&pointer, value);
        assert_line(TargetConfig::from_dir(folder.write()).unwrap_err(), parts);
    }
}

#[test]
fn files_that_are_not_json_objects_are_refused() {
    let folder = Folder::copy(&fixture("v3"));
    let config = folder.write().join("config.json");
    for (text, parts) in [
        ("{", &["config.json: cannot be parsed", "line 1"][..]),
        ("[]", &["config.json: the file = []", "must be an object"][..]),
    ] {
        std::fs::write(&config, text).unwrap();
        assert_line(TargetConfig::from_dir(folder.dir.path()).unwrap_err(), parts);
    }
    std::fs::remove_file(&config).unwrap();
    assert_line(TargetConfig::from_dir(folder.dir.path()).unwrap_err(), &["config.json: cannot read"]);
}
