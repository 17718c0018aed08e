//! Models that are made up: what a specification may say, and that it gives what a folder would.

use eyrie_checkpoint::{
    DraftCheckpoint, DraftConfig, EmbedSource, HeadSource, Layout, ModelSource, QuantFormat, SynthSpec,
    TargetCheckpoint, TargetConfig, aux_ids,
};

use crate::support::{assert_line, demo};

fn source(text: &str) -> ModelSource {
    text.parse::<SynthSpec>().unwrap().into()
}

fn target(text: &str) -> TargetCheckpoint {
    TargetCheckpoint::from_source(&source(text)).unwrap()
}

#[test]
fn a_specification_that_stands_for_nothing_is_one_line() {
    for (text, line) in [
        (
            "llama",
            "synth: the name must be one of deepseek-v2-lite, deepseek-v3, kimi-k2, mini, eagle3 for a head, given \"llama\"",
        ),
        ("", "given \"\""),
        ("mini:layer=3", "synth: a key must be one of layers, dense-layers, experts, active-experts"),
        ("mini:layers", "synth: a setting must be key=value, given \"layers\""),
        ("mini:layers=x", "synth: layers must be a whole number, given \"x\""),
        ("mini:layers=-1", "given \"-1\""),
        ("mini:layers=3,layers=4", "synth: layers must be set once, given \"layers=4\""),
        ("mini:seed=3,seed=4", "synth: seed must be set once, given \"seed=4\""),
        ("mini:format=f32,format=bf16", "synth: format must be set once, given \"format=bf16\""),
        ("kimi-k2:layers=257", "synth: layers must be at most 256, given \"257\""),
        ("kimi-k2:layers=8,experts=8192", "synth: experts must be at most 512, given \"8192\""),
        ("mini:format=fp8", "synth: format must be bf16, f32 or int4 (experts), given \"fp8\""),
        ("eagle3:format=int4", "synth: format must be bf16 or f32, given \"int4\""),
        ("eagle3:layers=2", "synth: a key must be one of hidden, heads, kv-heads"),
        ("mini:seed=1.5", "synth: seed must be a whole number, given \"1.5\""),
    ] {
        let error = text.parse::<SynthSpec>().unwrap_err().to_string();
        assert!(error.contains(line) && !error.contains('\n'), "{error}");
    }
}

#[test]
fn sizes_that_no_model_has_are_refused_as_in_a_folder() {
    for (text, parts) in [
        ("mini:layers=0", &["synth:mini:layers=0/config.json: num_hidden_layers = 0"][..]),
        ("mini:experts=3", &["n_group = 4: must divide n_routed_experts = 3"]),
        ("kimi-k2:experts=4", &["num_experts_per_tok = 8: must be at most the 4 experts in reach"]),
        ("mini:hidden=100", &["synth:mini:hidden=100: tensor model.layers.1.mlp.experts.0.gate_proj"]),
        ("eagle3", &["synth: the name of a target must be another"]),
        ("mini:layers=1", &["declares int4 group 32, but no tensor is packed"]),
    ] {
        assert_line(TargetCheckpoint::from_source(&source(text)).unwrap_err(), parts);
    }
    let shallow = DraftCheckpoint::from_source(&source("mini:layers=2")).unwrap_err();
    assert_line(shallow, &["synth: layers must be at least 3 for a head, given \"2\""]);
}

#[test]
fn the_made_up_mini_has_the_shape_of_the_bundled_one() {
    let (made, bundled) = (target("mini"), TargetCheckpoint::open(&demo("mini")).unwrap());
    let neutral = |config: &TargetConfig| TargetConfig {
        bos_token_id: None,
        eos_token_ids: Vec::new(),
        ..config.clone()
    };
    assert_eq!(neutral(made.config()), neutral(bundled.config()));
    for entry in made.index().entries() {
        let other = bundled.index().get(&entry.name).unwrap();
        assert_eq!((entry.dtype, &entry.shape), (other.dtype, &other.shape), "{}", entry.name);
    }
    // Those of the folder that are not made are records of shapes.
    let shapes = |checkpoint: &TargetCheckpoint| {
        checkpoint.index().entries().iter().filter(|e| !e.name.ends_with("weight_shape")).count()
    };
    assert_eq!(shapes(&made), shapes(&bundled));
}

#[test]
fn published_sizes_are_met_to_the_byte() {
    for (text, gib) in [("deepseek-v2-lite", 29.26), ("kimi-k2", 553.4)] {
        let bytes = target(text).account().loaded.bytes;
        assert!((bytes as f64 / f64::from(1 << 30) - gib).abs() < 0.1, "{text}: {bytes}");
    }
    let few = target("kimi-k2:layers=3,experts=16,context=4096,seed=9");
    let config = few.config();
    assert_eq!((config.num_hidden_layers, config.max_position_embeddings), (3, 4096));
    assert_eq!(config.quantisation, QuantFormat::Int4G32);
    assert_eq!(few.linear("model.layers.2.mlp.experts.15.down_proj").unwrap().layout, Layout::Int4G32);
    assert_eq!(few.linear("model.layers.2.self_attn.o_proj").unwrap().layout, Layout::Bf16);
    let wide = target("kimi-k2:layers=3,experts=16,format=f32");
    assert_eq!(wide.linear("model.layers.2.mlp.experts.15.down_proj").unwrap().layout, Layout::F32);
}

#[test]
fn a_seed_gives_one_model() {
    let of = |text: &str| {
        let made = target(text);
        let view = made.linear("model.layers.1.self_attn.o_proj").unwrap();
        let norm = made.vector("model.norm.weight").unwrap();
        (view.bytes().unwrap().into_owned(), norm)
    };
    assert_eq!(of("mini:seed=3"), of("mini:seed=3"));
    assert_ne!(of("mini:seed=3"), of("mini"));
    let norm = of("mini").1;
    assert!(norm.iter().all(|v| (0.9..1.1).contains(v)));
}

#[test]
fn a_head_fits_the_target_of_the_same_specification() {
    for text in ["mini", "mini:layers=3", "mini:layers=5,vocab=1024", "deepseek-v2-lite", "kimi-k2:layers=8"]
    {
        let (draft, target) = (DraftCheckpoint::from_source(&source(text)).unwrap(), target(text));
        let (own, config) = (draft.config(), target.config());
        assert_eq!((own.hidden_size, own.vocab_size), (config.hidden_size, config.vocab_size), "{text}");
        assert_eq!((draft.embed_source(), draft.head_source()), (EmbedSource::Target, HeadSource::Target));
        let ids = aux_ids(own, config.num_hidden_layers, None).unwrap();
        assert_eq!(ids.canonical.len(), 3, "{text}: {ids:?}");
    }
    let own =
        DraftConfig::from_source(&source("eagle3:hidden=256,heads=4,kv-heads=2,head-dim=64,aux=5")).unwrap();
    assert_eq!((own.hidden_size, own.num_key_value_heads, own.num_aux_hidden_states), (256, 2, 5));
}

#[test]
fn people_are_told_what_it_is() {
    let spec: SynthSpec = "kimi-k2:layers=8,seed=3".parse().unwrap();
    assert_eq!(spec.label(), "synth kimi-k2 layers 8 int4 seed 3");
    assert_eq!(ModelSource::from(spec).to_string(), "synth:kimi-k2:layers=8,seed=3");
    assert_eq!(source("deepseek-v2-lite").name(), "synth deepseek-v2-lite bf16 seed 1");
}
