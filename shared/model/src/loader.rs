//! Turns checkpoint tensors into kernels' weights and counts the bytes on the way.

use eyrie_checkpoint::{Scoring, TargetCheckpoint, TargetConfig, TopkMethod, WeightView, Yarn};
use eyrie_checkpoint::MoeConfig;
use eyrie_kernels::{
    Cpu, Linear, Mlp, RmsNorm, RopeSpec, RopeStyle, Router, RouterMethod, RouterScoring, RouterSpec, YarnSpec,
};

use crate::error::Result;
use crate::types::Progress;

/// Reads one checkpoint's tensors into packed weights.
pub(crate) struct Loader<'a> {
    checkpoint: &'a TargetCheckpoint,
    cpu: &'a Cpu,
    progress: &'a mut dyn FnMut(Progress),
    done: u64,
    total: u64,
}

impl<'a> Loader<'a> {
    pub(crate) fn new(
        checkpoint: &'a TargetCheckpoint,
        cpu: &'a Cpu,
        progress: &'a mut dyn FnMut(Progress),
    ) -> Self {
        Self { checkpoint, cpu, progress, done: 0, total: checkpoint.account().expected_bytes() }
    }

    pub(crate) fn cpu(&self) -> &Cpu {
        self.cpu
    }

    /// The published form of a weight, unpacked by the caller.
    pub(crate) fn view(&mut self, name: &str) -> Result<WeightView> {
        let view = self.checkpoint.linear(name)?;
        self.count(view.bytes().len() + view.scale_bytes().len());
        Ok(view)
    }

    pub(crate) fn linear(&mut self, name: &str) -> Result<Linear> {
        let view = self.view(name)?;
        Ok(Linear::pack(self.cpu, &view)?)
    }

    pub(crate) fn mlp(&mut self, prefix: &str) -> Result<Mlp> {
        Ok(Mlp {
            gate: self.linear(&format!("{prefix}.gate_proj"))?,
            up: self.linear(&format!("{prefix}.up_proj"))?,
            down: self.linear(&format!("{prefix}.down_proj"))?,
        })
    }

    pub(crate) fn norm(&mut self, name: &str, eps: f64) -> Result<RmsNorm> {
        let weight = self.checkpoint.vector(name)?;
        self.count(weight.len() * 4);
        Ok(RmsNorm::new(weight, eps as f32))
    }

    pub(crate) fn router(&mut self, spec: RouterSpec, name: &str) -> Result<Router> {
        let gate = self.linear(name)?;
        let bias = match spec.method {
            RouterMethod::NoAuxTc => Some(self.checkpoint.vector(&format!("{name}.e_score_correction_bias"))?),
            _ => None,
        };
        Ok(Router::new(spec, gate, bias)?)
    }

    fn count(&mut self, bytes: usize) {
        self.done += bytes as u64;
        (self.progress)(Progress { bytes_done: self.done.min(self.total), bytes_total: self.total });
    }
}
