//! The tensors of a made-up model: names and shapes of a published one, numbers that keep activations sane.

use super::{Numbers, SynthSpec};
use crate::tensors::{LinearSpec, Spec, layer_tensors, model_tensors};
use crate::{Dtype, TargetConfig, TensorEntry};

/// Part of the name of every routed expert's tensor.
const EXPERTS: &str = ".experts.";
/// Standard deviation of a nibble that is evenly one of -7..=7.
const NIBBLE_DEVIATION: f32 = 4.32;

/// Every tensor of a target of `config`.
pub(crate) fn target_entries(spec: &SynthSpec, config: &TargetConfig) -> Vec<TensorEntry> {
    let mut entries = Vec::new();
    let mut add = |tensor: Spec<'_>| add_tensor(spec, config, tensor, &mut entries);
    model_tensors(config).visit(&mut add);
    for layer in 0..config.num_hidden_layers {
        layer_tensors(config, layer).visit(&mut add);
    }
    entries
}

fn add_tensor(spec: &SynthSpec, config: &TargetConfig, tensor: Spec<'_>, entries: &mut Vec<TensorEntry>) {
    let prefix = config.architecture.tensor_prefix();
    let mut add =
        |name: String, dtype, shape| entries.push(TensorEntry::made(prefix.to_owned() + &name, dtype, shape));
    match tensor {
        Spec::Vector(vector) => {
            let is_bias = vector.name.ends_with("_bias");
            add(vector.name.clone(), if is_bias { Dtype::F32 } else { spec.float() }, vec![vector.len]);
        }
        Spec::Linear(LinearSpec { name, shape: [out, input], .. })
            if spec.packs_experts() && name.contains(EXPERTS) =>
        {
            add(format!("{name}.weight_packed"), Dtype::I32, vec![*out, input / 8]);
            add(format!("{name}.weight_scale"), Dtype::Bf16, vec![*out, input / 32]);
        }
        Spec::Linear(linear) => add(format!("{}.weight", linear.name), spec.float(), linear.shape.to_vec()),
    }
}

/// The numbers of a tensor, by its name and shape.
///
/// Products of weights with a deviation of one over the root of their inputs keep the size of what they are given, norms
/// and scales are near one value, and embeddings are as large as what layers add to them.
pub(crate) fn numbers_of(entry: &TensorEntry) -> Numbers {
    let inputs = entry.shape.last().map_or(1.0, |&inputs| inputs as f32);
    let (mean, deviation) = match entry.shape.as_slice() {
        [_] if entry.name.ends_with("_bias") => (0.0, 0.01),
        [_] => (1.0, 0.05),
        _ if entry.name.ends_with("_scale") => {
            let scale = 1.0 / (NIBBLE_DEVIATION * (inputs * 32.0).sqrt());
            (scale, scale / 8.0)
        }
        _ if entry.name.ends_with("embed_tokens.weight") => (0.0, 1.0),
        _ => (0.0, 1.0 / inputs.sqrt()),
    };
    Numbers::spread(entry.dtype, mean, deviation)
}
