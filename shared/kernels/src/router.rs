//! Which experts a row goes to: softmax or sigmoid scores, plain, group-limited or bias-corrected choice.

use candle_core::Tensor;
use eyrie_checkpoint::{Scoring, TopkMethod};

use crate::cpu::exp::{sigmoid_in_place, softmax_in_place};
use crate::error::{KernelError, Result, limit, shape};
use crate::linear::Linear;
use crate::tensor::row_count;

const OP: &str = "router";

/// What a [`Router`] is made from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RouterSpec {
    /// Number of experts.
    pub experts: usize,
    /// Experts of one row.
    pub per_token: usize,
    /// Scores.
    pub scoring: Scoring,
    /// Choice.
    pub method: TopkMethod,
    /// Groups of equal size (1 = none).
    pub groups: usize,
    /// Groups a row may use.
    pub top_groups: usize,
    /// Whether a row's weights are divided by their sum.
    pub normalise: bool,
    /// Factor of every weight.
    pub scale: f64,
}

impl RouterSpec {
    fn check(&self) -> Result<()> {
        let counts = [("experts", self.experts), ("groups", self.groups), ("per_token", self.per_token)];
        for (name, value) in counts {
            if value == 0 {
                return Err(limit(OP, name, value, "at least 1"));
            }
        }
        if !self.experts.is_multiple_of(self.groups) {
            return Err(limit(OP, "groups", self.groups, format!("a divisor of {} experts", self.experts)));
        }
        if self.top_groups == 0 || self.top_groups > self.groups {
            return Err(limit(OP, "top_groups", self.top_groups, format!("1..={} groups", self.groups)));
        }
        let reachable = match self.method {
            TopkMethod::Greedy => self.experts,
            _ => self.experts / self.groups * self.top_groups,
        };
        if self.per_token > reachable {
            return Err(limit(OP, "per_token", self.per_token, format!("{reachable} reachable experts")));
        }
        Ok(())
    }
}

/// Chosen experts of some rows.
#[derive(Debug, Clone, PartialEq)]
pub struct Routes {
    /// `[rows, per_token]`, ascending in each row.
    pub ids: Vec<u32>,
    /// `[rows, per_token]`, the factor of each expert's output.
    pub weights: Vec<f32>,
    /// Experts of one row.
    pub per_token: usize,
}

/// The router of one layer.
#[derive(Debug)]
pub struct Router {
    spec: RouterSpec,
    gate: Linear,
    bias: Option<Vec<f32>>,
}

impl Router {
    /// A router with gate `[experts, hidden]`; `bias` (one value an expert) is for `NoAuxTc` only.
    ///
    /// # Errors
    /// Counts that do not fit each other, or a bias that is missing, superfluous or of another length.
    pub fn new(spec: RouterSpec, gate: Linear, bias: Option<Vec<f32>>) -> Result<Router> {
        spec.check()?;
        if gate.out_features() != spec.experts {
            let got = [gate.out_features(), gate.in_features()];
            return Err(shape(OP, "gate", &got, format!("[{}, hidden]", spec.experts)));
        }
        let wanted = if spec.method == TopkMethod::NoAuxTc { spec.experts } else { 0 };
        let got = bias.as_ref().map_or(0, Vec::len);
        if got != wanted {
            return Err(shape(OP, "bias", &[got], format!("{wanted} values for {:?}", spec.method)));
        }
        Ok(Router { spec, gate, bias })
    }

    /// Routes `[rows, hidden]`.
    ///
    /// # Errors
    /// `x` is not a contiguous f32 CPU tensor of that shape, or a logit is NaN.
    pub fn route(&self, x: &Tensor) -> Result<Routes> {
        let rows = row_count(OP, "x", x, self.gate.in_features())?;
        let mut logits = self.gate.forward(x)?.flatten_all()?.to_vec1::<f32>()?;
        let per_token = self.spec.per_token;
        let room = rows * per_token;
        let mut routes =
            Routes { ids: Vec::with_capacity(room), weights: Vec::with_capacity(room), per_token };
        for row in logits.chunks_exact_mut(self.spec.experts) {
            self.route_row(row, &mut routes)?;
        }
        Ok(routes)
    }

    fn route_row(&self, row: &mut [f32], routes: &mut Routes) -> Result<()> {
        if let Some(index) = row.iter().position(|x| x.is_nan()) {
            return Err(KernelError::NotANumber { op: OP, index });
        }
        let isa = self.gate.cpu().isa();
        match self.spec.scoring {
            Scoring::Softmax => softmax_in_place(isa, row),
            Scoring::Sigmoid => sigmoid_in_place(isa, row),
        }
        let mut choice = row.to_vec();
        if let Some(bias) = &self.bias {
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
