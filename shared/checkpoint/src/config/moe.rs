use super::{Family, MAX_EXPERTS, MAX_WIDTH};
use crate::Result;
use crate::json::Fields;

/// How router logits become scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scoring {
    /// Softmax over the experts.
    Softmax,
    /// Sigmoid per expert.
    Sigmoid,
}

/// How experts are chosen from scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TopkMethod {
    /// The highest scores.
    Greedy,
    /// The highest scores within the groups of the highest maxima.
    GroupLimitedGreedy,
    /// Scores plus a learned bias; groups by the sum of their two best; weights from the unbiased scores.
    NoAuxTc,
}

/// Geometry and routing of the mixture-of-experts layers.
#[derive(Debug, Clone, PartialEq)]
pub struct MoeConfig {
    /// Routed experts.
    pub n_routed_experts: usize,
    /// Experts each token visits.
    pub num_experts_per_tok: usize,
    /// Experts every token visits, stored as one MLP; 0 for none.
    pub n_shared_experts: usize,
    /// Inner width of one expert.
    pub moe_intermediate_size: usize,
    /// Leading layers with a dense MLP.
    pub first_k_dense_replace: usize,
    /// Every how many layers the MLP is a mixture.
    pub moe_layer_freq: usize,
    /// Score function.
    pub scoring: Scoring,
    /// Choice of experts.
    pub method: TopkMethod,
    /// Groups the experts are divided into; 1 for none.
    pub n_group: usize,
    /// Groups a token may use.
    pub topk_group: usize,
    /// Whether the chosen weights are divided by their sum.
    pub norm_topk_prob: bool,
    /// Multiplies the chosen weights, normalised or not.
    pub routed_scaling_factor: f64,
}

impl MoeConfig {
    pub(super) fn read(f: &Fields<'_>, family: Family) -> Result<Option<Self>> {
        let Some(experts) = f.opt_count("n_routed_experts", MAX_EXPERTS)?.filter(|&n| n > 0) else {
            return Ok(None);
        };
        let v3 = family == Family::V3;
        let groups = f.opt_size("n_group", MAX_EXPERTS)?.unwrap_or(if v3 { 8 } else { 1 });
        let top_groups = f.opt_size("topk_group", MAX_EXPERTS)?.unwrap_or(if v3 { 4 } else { 1 });
        let moe = Self {
            n_routed_experts: experts,
            num_experts_per_tok: f.size("num_experts_per_tok", MAX_EXPERTS)?,
            n_shared_experts: f.opt_count("n_shared_experts", MAX_EXPERTS)?.unwrap_or(0),
            moe_intermediate_size: f.size("moe_intermediate_size", MAX_WIDTH)?,
            first_k_dense_replace: f
                .opt_count("first_k_dense_replace", super::MAX_LAYERS)?
                .unwrap_or(if v3 { 3 } else { 0 }),
            moe_layer_freq: f.opt_size("moe_layer_freq", super::MAX_LAYERS)?.unwrap_or(1),
            scoring: read_scoring(f, family)?,
            method: read_method(f, family)?,
            n_group: groups,
            topk_group: top_groups,
            norm_topk_prob: f.flag("norm_topk_prob", v3)?,
            routed_scaling_factor: f.positive("routed_scaling_factor", if v3 { 2.5 } else { 1.0 })?,
        };
        moe.check(f)?;
        Ok(Some(moe))
    }

    fn check(&self, f: &Fields<'_>) -> Result<()> {
        let (experts, groups) = (self.n_routed_experts, self.n_group);
        if !experts.is_multiple_of(groups) {
            return Err(f.refuse("n_group", format!("must divide n_routed_experts = {experts}")));
        }
        if self.topk_group > groups {
            return Err(f.refuse("topk_group", format!("must be at most n_group = {groups}")));
        }
        let per_group = experts / groups;
        let open = if self.method == TopkMethod::Greedy { experts } else { self.topk_group * per_group };
        if self.num_experts_per_tok > open {
            return Err(
                f.refuse("num_experts_per_tok", format!("must be at most the {open} experts in reach"))
            );
        }
        if self.method == TopkMethod::NoAuxTc && groups > 1 && per_group < 2 {
            let limit = format!("noaux_tc needs 2 experts in a group, n_routed_experts = {experts}");
            return Err(f.refuse("n_group", limit));
        }
        match (self.method, self.scoring) {
            (TopkMethod::NoAuxTc, Scoring::Softmax) => {
                Err(f.refuse("scoring_func", "topk_method noaux_tc needs sigmoid"))
            }
            (TopkMethod::Greedy | TopkMethod::GroupLimitedGreedy, Scoring::Sigmoid) => {
                Err(f.refuse("scoring_func", "greedy topk methods need softmax"))
            }
            _ => Ok(()),
        }
    }

    /// Whether that layer's MLP is a mixture.
    pub fn is_moe_layer(&self, layer: usize) -> bool {
        layer >= self.first_k_dense_replace && layer.is_multiple_of(self.moe_layer_freq)
    }
}

fn read_scoring(f: &Fields<'_>, family: Family) -> Result<Scoring> {
    match f.text("scoring_func")? {
        Some("softmax") => Ok(Scoring::Softmax),
        Some("sigmoid") => Ok(Scoring::Sigmoid),
        Some(_) => Err(f.refuse("scoring_func", "only softmax and sigmoid are supported")),
        None => Ok(if family == Family::V3 { Scoring::Sigmoid } else { Scoring::Softmax }),
    }
}

fn read_method(f: &Fields<'_>, family: Family) -> Result<TopkMethod> {
    match f.text("topk_method")? {
        Some("greedy") => Ok(TopkMethod::Greedy),
        Some("group_limited_greedy") => Ok(TopkMethod::GroupLimitedGreedy),
        Some("noaux_tc") => Ok(TopkMethod::NoAuxTc),
        Some(_) => {
            Err(f.refuse("topk_method", "only greedy, group_limited_greedy and noaux_tc are supported"))
        }
        None => Ok(if family == Family::V3 { TopkMethod::NoAuxTc } else { TopkMethod::Greedy }),
    }
}
