//! Routing on the CPU.

use candle_core::Tensor;
use eyrie_checkpoint::{Scoring, TopkMethod};

use super::Linear;
use super::exp::{sigmoid_in_place, softmax_in_place};
use crate::error::{KernelError, Result};
use crate::router::{OP, RouterSpec, Routes};

/// Routes `x` `[rows, hidden]` by `gate`; the spec, the bias and the shapes have been checked.
pub(crate) fn route(spec: &RouterSpec, gate: &Linear, bias: Option<&[f32]>, x: &Tensor) -> Result<Routes> {
    let mut logits = gate.forward(x)?.flatten_all()?.to_vec1::<f32>()?;
    let per_token = spec.per_token;
    let room = logits.len() / spec.experts * per_token;
    let mut routes = Routes { ids: Vec::with_capacity(room), weights: Vec::with_capacity(room), per_token };
    let row = Row { spec, gate, bias };
    for logits in logits.chunks_exact_mut(spec.experts) {
        row.route(logits, &mut routes)?;
    }
    Ok(routes)
}

struct Row<'a> {
    spec: &'a RouterSpec,
    gate: &'a Linear,
    bias: Option<&'a [f32]>,
}

impl Row<'_> {
    fn route(&self, row: &mut [f32], routes: &mut Routes) -> Result<()> {
        if let Some(index) = row.iter().position(|x| x.is_nan()) {
            return Err(KernelError::NotANumber { op: OP, index });
        }
        let isa = self.gate.cpu().isa();
        match self.spec.scoring {
            Scoring::Softmax => softmax_in_place(isa, row),
            Scoring::Sigmoid => sigmoid_in_place(isa, row),
        }
        let mut choice = row.to_vec();
        if let Some(bias) = self.bias {
            choice.iter_mut().zip(bias).for_each(|(c, b)| *c += b);
        }
        if self.spec.method != TopkMethod::Greedy && self.spec.groups > 1 {
            self.mask_groups(&mut choice);
        }
        let mut ids = best(&choice, self.spec.per_token);
        ids.sort_unstable();
        let mut weights: Vec<f32> = ids.iter().map(|&id| row[id as usize]).collect();
        if self.spec.normalise {
            let sum = weights.iter().sum::<f32>() + 1e-20;
            weights.iter_mut().for_each(|w| *w /= sum);
        }
        weights.iter_mut().for_each(|w| *w *= self.spec.scale as f32);
        routes.ids.extend(ids);
        routes.weights.extend(weights);
        Ok(())
    }

    /// Only -inf masks safely: a biased score can be negative, and zero would beat it.
    fn mask_groups(&self, choice: &mut [f32]) {
        let size = self.spec.experts / self.spec.groups;
        let two = self.spec.method == TopkMethod::NoAuxTc;
        let scores: Vec<f32> = choice.chunks_exact(size).map(|group| group_score(group, two)).collect();
        let kept = best(&scores, self.spec.top_groups);
        for (index, group) in choice.chunks_exact_mut(size).enumerate() {
            if !kept.contains(&(index as u32)) {
                group.fill(f32::NEG_INFINITY);
            }
        }
    }
}

/// The best score of a group, or the sum of its two best.
fn group_score(group: &[f32], two: bool) -> f32 {
    let (mut first, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
    for &c in group {
        if c > first {
            (first, second) = (c, first);
        } else if c > second {
            second = c;
        }
    }
    if two && group.len() > 1 { first + second } else { first }
}

/// Indices of the `count` largest values, the lower index first among equals.
fn best(values: &[f32], count: usize) -> Vec<u32> {
    let mut ids: Vec<u32> = Vec::with_capacity(count + 1);
    for (id, &value) in values.iter().enumerate() {
        let place = ids.partition_point(|&other| values[other as usize] >= value);
        if place < count {
            ids.insert(place, id as u32);
            ids.truncate(count);
        }
    }
    ids
}
