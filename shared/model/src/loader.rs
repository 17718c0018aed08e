//! Turns checkpoint tensors into kernels' weights and counts the bytes on the way.

use eyrie_checkpoint::{
    LinearSpec, MlpTensors, MoeConfig, RopeConfig, TargetCheckpoint, VectorSpec, WeightView, model_tensors,
};
use eyrie_kernels::{Backend, ExpertViews, Linear, Mlp, RmsNorm, RopeSpec, RopeStyle, RouterSpec};

use crate::error::Result;
use crate::types::Progress;

/// Reads one checkpoint's tensors into packed weights.
pub(crate) struct Loader<'a> {
    checkpoint: &'a TargetCheckpoint,
    backend: &'a Backend,
    progress: &'a mut dyn FnMut(Progress),
    done: u64,
    total: u64,
}

impl<'a> Loader<'a> {
    /// A loader of everything but the embedding and head: shared weights hold them, and they count as read.
    pub(crate) fn new(
        checkpoint: &'a TargetCheckpoint,
        backend: &'a Backend,
        progress: &'a mut dyn FnMut(Progress),
    ) -> Result<Self> {
        let shared = model_tensors(checkpoint.config());
        let mut done = checkpoint.linear(&shared.embed.name)?.byte_len() as u64;
        if shared.head != shared.embed {
            done += checkpoint.linear(&shared.head.name)?.byte_len() as u64;
        }
        Ok(Self { checkpoint, backend, progress, done, total: checkpoint.account().loaded.bytes })
    }

    pub(crate) fn backend(&self) -> &Backend {
        self.backend
    }

    /// A weight where it lies in its file, to be packed by the caller.
    pub(crate) fn view(&mut self, spec: &LinearSpec) -> Result<WeightView> {
        let view = self.checkpoint.linear(&spec.name)?;
        self.count(view.byte_len());
        Ok(view)
    }

    pub(crate) fn linear(&mut self, spec: &LinearSpec) -> Result<Linear> {
        let view = self.view(spec)?;
        Ok(Linear::pack(self.backend, &view)?)
    }

    pub(crate) fn mlp(&mut self, spec: &MlpTensors) -> Result<Mlp> {
        Ok(Mlp::pack(self.backend, &self.mlp_views(spec)?)?)
    }

    pub(crate) fn mlp_views(&mut self, spec: &MlpTensors) -> Result<ExpertViews> {
        Ok(ExpertViews {
            gate: self.view(&spec.gate)?,
            up: self.view(&spec.up)?,
            down: self.view(&spec.down)?,
        })
    }

    pub(crate) fn vector(&mut self, spec: &VectorSpec) -> Result<Vec<f32>> {
        let vector = self.checkpoint.vector(&spec.name)?;
        self.count(vector.len() * size_of::<f32>());
        Ok(vector)
    }

    pub(crate) fn norm(&mut self, spec: &VectorSpec, eps: f64) -> Result<RmsNorm> {
        Ok(RmsNorm::new(self.backend, self.vector(spec)?, eps)?)
    }

    fn count(&mut self, bytes: usize) {
        self.done = (self.done + bytes as u64).min(self.total);
        (self.progress)(Progress { bytes_done: self.done, bytes_total: self.total });
    }
}

pub(crate) fn rope_spec(config: &RopeConfig, dim: usize, style: RopeStyle) -> RopeSpec {
    RopeSpec { dim, theta: config.theta, yarn: config.yarn, style }
}

pub(crate) fn router_spec(config: &MoeConfig) -> RouterSpec {
    RouterSpec {
        experts: config.n_routed_experts,
        per_token: config.num_experts_per_tok,
        scoring: config.scoring,
        method: config.method,
        groups: config.n_group,
        top_groups: config.topk_group,
        normalise: config.norm_topk_prob,
        scale: config.routed_scaling_factor,
    }
}
