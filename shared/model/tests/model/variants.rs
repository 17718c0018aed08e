//! Checkpoints that differ from the fixtures in one published way: tied heads, float32 heads, draft options.

use std::path::Path;

use eyrie_checkpoint::{DraftCheckpoint, TargetCheckpoint};
use eyrie_model::{
    Aux, CaptureSet, DraftCache, DraftOut, DraftRows, Eagle3Head, Feature, ForwardOut, LatentCache,
    LogitRows, SeqTable, SharedWeights, TargetModel,
};

use crate::common::fixtures::{LOGIT_TOLERANCE, WHOLE, expected, load, run};
use crate::common::rewrite::rewrite;
use crate::common::{PAGE_ROWS, Pool, backend, cpu, deepseek, draft, fixture, max_diff, values};

/// Engines own models and caches on a thread of their own.
#[test]
fn models_and_caches_move_between_threads() {
    fn is_send<T: Send>() {}
    is_send::<Box<dyn TargetModel>>();
    is_send::<(Eagle3Head, LatentCache, DraftCache)>();
    is_send::<(ForwardOut, DraftOut, Aux)>();
    fn is_shared<T: Send + Sync + Clone>() {}
    is_shared::<SharedWeights>();
}

#[test]
fn a_tied_head_is_the_embedding() {
    let dir = rewrite(&fixture("v3"), |config, tensors| {
        config["tie_word_embeddings"] = true.into();
        tensors.remove("lm_head.weight").unwrap();
    });
    let mut model = deepseek(dir.path(), &backend(2));
    let expected = expected("v3");
    let tied = run(&mut model, &expected, WHOLE);
    let last = tied.trace.resid.last().unwrap();
    let checkpoint = TargetCheckpoint::open(dir.path()).unwrap();
    let norm = checkpoint.vector("model.norm.weight").unwrap();
    let (hidden, vocab) = (model.config().hidden_size, model.config().vocab_size);
    let mut embed = Vec::new();
    rewrite(dir.path(), |_, tensors| embed = tensors["model.embed_tokens.weight"].widened());
    let mut want = Vec::new();
    for row in values(last).chunks(hidden) {
        let square: f64 = row.iter().map(|x| f64::from(*x).powi(2)).sum();
        let root = (square / hidden as f64 + model.config().rms_norm_eps).sqrt();
        let normed: Vec<f64> =
            row.iter().zip(&norm).map(|(x, w)| f64::from(*x) / root * f64::from(*w)).collect();
        for token in embed.chunks(hidden) {
            want.push(token.iter().zip(&normed).map(|(e, x)| f64::from(*e) * x).sum::<f64>());
        }
    }
    assert_eq!(want.len(), vocab * expected.ids("tokens").len());
    assert!(max_diff(&tied.logits, &want) < LOGIT_TOLERANCE);
}

#[test]
fn a_float32_embedding_and_head_give_the_same_bits() {
    let dir = rewrite(&fixture("v3"), |_, tensors| {
        for name in ["model.embed_tokens.weight", "lm_head.weight"] {
            let wide = tensors[name].as_f32();
            tensors.insert(name.to_owned(), wide);
        }
    });
    // The CPU's promise: on a GPU the order of a sum follows from the weight's format too.
    let (cpu, expected) = (cpu(2), expected("v3"));
    let wide = run(&mut deepseek(dir.path(), &cpu), &expected, WHOLE);
    assert_eq!(wide.logits, run(&mut deepseek(&fixture("v3"), &cpu), &expected, WHOLE).logits);
}

/// One extend of the draft in `dir` over features of the v3 fixture; also returns the features.
fn extend(dir: &Path) -> (Feature, DraftOut) {
    let mut target = load("v3", 1);
    let capture = CaptureSet::new(&[1, 3, 5], 5).unwrap();
    target.set_capture(&capture).unwrap();
    let tokens = &expected("v3").id_rows("tokens")[0];
    let mut pool = Pool::new(&target, 64);
    let out = pool.feed(&mut target, &mut SeqTable::default(), &tokens[..8], LogitRows::None);
    let mut head = draft(dir, &capture, target.embed_and_head(), &backend(1));
    let feature = head.fuse(&out.aux.unwrap()).unwrap();
    let mut cache = head.new_cache(64, PAGE_ROWS).unwrap();
    let mut table = SeqTable::default();
    cache.allocator().reserve(&mut table, 8).unwrap();
    let rows = DraftRows {
        table: &table,
        base_slot: 0,
        origin: 0,
        tokens: &tokens[1..9],
        feature: &feature,
        parents: None,
    };
    let out = head.extend(&mut cache, &[rows]).unwrap();
    (feature, out)
}

#[test]
fn the_residual_is_taken_before_or_after_the_norm_as_configured() {
    let residual = |normed: bool| {
        // With both outputs zeroed, what is left of the layer is its residual.
        let dir = rewrite(&fixture("v3_eagle3"), |config, tensors| {
            config["norm_before_residual"] = normed.into();
            for name in ["midlayer.self_attn.o_proj.weight", "midlayer.mlp.down_proj.weight"] {
                tensors.get_mut(name).unwrap().data.fill(0);
            }
        });
        let (feature, out) = extend(dir.path());
        let norm = DraftCheckpoint::open(dir.path()).unwrap().vector("midlayer.hidden_norm.weight").unwrap();
        (feature.to_vec().unwrap(), out.states.to_vec().unwrap(), norm)
    };
    let (feature, state, _) = residual(false);
    assert_eq!(state, feature);
    let (feature, state, norm) = residual(true);
    let mut want = Vec::new();
    for row in feature.chunks(norm.len()) {
        let square: f64 = row.iter().map(|x| f64::from(*x).powi(2)).sum();
        let root = (square / norm.len() as f64 + 1e-6).sqrt();
        want.extend(row.iter().zip(&norm).map(|(x, w)| f64::from(*x) / root * f64::from(*w)));
    }
    assert!(max_diff(&state, &want) < LOGIT_TOLERANCE);
}

#[test]
fn logit_scale_multiplies_the_logits() {
    let dir = rewrite(&fixture("v3_eagle3"), |config, _| config["logit_scale"] = 0.5.into());
    let plain = values(&extend(&fixture("v3_eagle3")).1.logits);
    let scaled = values(&extend(dir.path()).1.logits);
    assert_eq!(scaled, plain.iter().map(|x| x * 0.5).collect::<Vec<_>>());
}

#[test]
fn a_draft_with_its_own_embedding_does_not_use_the_targets() {
    let other = rewrite(&fixture("v3_eagle3"), |_, tensors| {
        let mut embed = None;
        rewrite(&fixture("v3"), |_, target| embed = target.remove("model.embed_tokens.weight"));
        let mut embed = embed.unwrap();
        embed.data.rotate_left(2 * 96);
        tensors.insert("embed_tokens.weight".to_owned(), embed);
    });
    let shared = values(&extend(&fixture("v3_eagle3")).1.logits);
    let own = values(&extend(other.path()).1.logits);
    assert_ne!(own, shared);
}
