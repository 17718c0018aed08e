//! Routes on the device.

use candle_core::Tensor;
use eyrie_checkpoint::{Scoring, TopkMethod};

use super::linear::linear;
use super::{Activations, Buffer, Cuda, Grid, Linear, Weight};
use crate::error::{KernelError, Result};
use crate::router::{self, OP, RouterSpec};

/// Chosen experts of some rows.
#[derive(Debug)]
pub(crate) struct Routes {
    cuda: Cuda,
    /// `[rows, per_token]`, ascending in each row.
    ids: Buffer<u32>,
    /// `[rows, per_token]`.
    weights: Buffer<f32>,
    pub(super) per_token: usize,
    /// Number of experts that `ids` are below.
    pub(super) experts: usize,
}

impl Routes {
    pub(super) fn rows(&self) -> usize {
        self.ids.len() / self.per_token
    }

    /// Addresses of the ids and weights of row `row`.
    pub(super) fn at_row(&self, row: usize) -> (u64, u64) {
        let at = (row * self.per_token * 4) as u64;
        (self.ids.pointer() + at, self.weights.pointer() + at)
    }

    /// # Errors
    /// A row that could not be routed: its weights are NaN.
    pub(crate) fn to_host(&self) -> Result<router::Routes> {
        let routes = router::Routes {
            ids: self.cuda.download(OP, &self.ids)?,
            weights: self.cuda.download(OP, &self.weights)?,
            per_token: self.per_token,
        };
        match routes.weights.iter().position(|weight| weight.is_nan()) {
            Some(index) => Err(KernelError::NotANumber { op: OP, index }),
            None => Ok(routes),
        }
    }
}

/// As `RouterArgs` in router.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct RouterArgs {
    logits: u64,
    bias: u64,
    ids: u64,
    weights: u64,
    experts: u32,
    per_token: u32,
    scoring: u32,
    grouping: u32,
    groups: u32,
    top_groups: u32,
    normalise: u32,
    scale: f32,
}

/// The router of one layer; what it was made from has been checked.
#[derive(Debug)]
pub(crate) struct Router {
    cuda: Cuda,
    spec: RouterSpec,
    gate: Weight,
    bias: Option<Buffer<f32>>,
}

impl Router {
    pub(crate) fn new(spec: RouterSpec, gate: Linear, bias: Option<&[f32]>) -> Result<Router> {
        let Linear { cuda, weight: gate } = gate;
        let bias = bias.map(|bias| cuda.upload(OP, bias)).transpose()?;
        Ok(Router { cuda, spec, gate, bias })
    }

    /// A row with a NaN gets NaN weights.
    pub(crate) fn route(&self, x: &Tensor, rows: usize) -> Result<Routes> {
        let (cuda, spec) = (&self.cuda, &self.spec);
        let logits = linear(cuda, OP, &self.gate, cuda.operand_of(OP, x)?, Activations::F32)?;
        let count = rows * spec.per_token;
        let routes = Routes {
            cuda: cuda.clone(),
            ids: cuda.alloc(OP, count)?,
            weights: cuda.alloc(OP, count)?,
            per_token: spec.per_token,
            experts: spec.experts,
        };
        let (ids, weights) = routes.at_row(0);
        let args = RouterArgs {
            logits: logits.pointer,
            bias: self.bias.as_ref().map_or(0, Buffer::pointer),
            ids,
            weights,
            experts: spec.experts as u32,
            per_token: spec.per_token as u32,
            scoring: u32::from(spec.scoring == Scoring::Sigmoid),
            grouping: match spec.method {
                TopkMethod::Greedy => 0,
                TopkMethod::GroupLimitedGreedy => 1,
                TopkMethod::NoAuxTc => 2,
            },
            groups: spec.groups as u32,
            top_groups: spec.top_groups as u32,
            normalise: u32::from(spec.normalise),
            scale: spec.scale as f32,
        };
        let shared = (2 * spec.experts + spec.groups + spec.per_token) * 4;
        let grid = Grid { blocks: [rows, 1, 1], threads: 32, shared };
        // SAFETY: logits are `[rows, experts]`, routes `[rows, per_token]`, the bias one value an expert or absent.
        unsafe { cuda.launch(OP, grid, (args,)) }?;
        Ok(routes)
    }
}
