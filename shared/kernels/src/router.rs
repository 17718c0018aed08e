//! Which experts a row goes to: softmax or sigmoid scores, plain, group-limited or bias-corrected choice.

use candle_core::Tensor;
use eyrie_checkpoint::{Scoring, TopkMethod};

use crate::cpu;
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::error::{Result, limit, shape};
use crate::linear::{Linear, Weight};
use crate::tensor::row_count;

pub(crate) const OP: &str = "router";

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

impl Routes {
    /// Checks these routes of `rows` rows against a number of experts.
    pub(crate) fn check(&self, rows: usize, experts: usize) -> Result<()> {
        let pairs = rows * self.per_token;
        if self.ids.len() != pairs || self.weights.len() != pairs {
            let got = [self.ids.len(), self.weights.len()];
            return Err(shape("moe", "routes", &got, format!("{rows} rows x {} experts", self.per_token)));
        }
        match self.ids.iter().find(|&&id| id as usize >= experts) {
            Some(id) => Err(limit("moe", "expert id", id, format!("below {experts} experts"))),
            None => Ok(()),
        }
    }
}

/// [`Routes`] where the backend keeps them.
#[derive(Debug)]
pub struct Routing(pub(crate) Chosen);

#[derive(Debug)]
pub(crate) enum Chosen {
    Host(Routes),
    #[cfg(feature = "cuda")]
    Cuda(cuda::Routes),
}

impl From<Routes> for Routing {
    fn from(routes: Routes) -> Self {
        Self(Chosen::Host(routes))
    }
}

impl Routing {
    /// A copy of the routes in host memory.
    ///
    /// # Errors
    /// A device that cannot be read.
    pub fn to_host(&self) -> Result<Routes> {
        match &self.0 {
            Chosen::Host(routes) => Ok(routes.clone()),
            #[cfg(feature = "cuda")]
            Chosen::Cuda(routes) => routes.to_host(),
        }
    }
}

/// The router of one layer.
#[derive(Debug)]
pub struct Router {
    spec: RouterSpec,
    hidden: usize,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    Cpu {
        gate: cpu::Linear,
        bias: Option<Vec<f32>>,
    },
    #[cfg(feature = "cuda")]
    Cuda(cuda::Router),
}

impl Router {
    /// A router with gate `[experts, hidden]`; `bias` (one value an expert) is for `NoAuxTc` only.
    ///
    /// # Errors
    /// Counts that do not fit each other, or a bias that is missing, superfluous or of another length.
    pub fn new(spec: RouterSpec, gate: Linear, bias: Option<Vec<f32>>) -> Result<Router> {
        spec.check()?;
        let hidden = gate.in_features();
        if gate.out_features() != spec.experts {
            let got = [gate.out_features(), hidden];
            return Err(shape(OP, "gate", &got, format!("[{}, hidden]", spec.experts)));
        }
        let wanted = if spec.method == TopkMethod::NoAuxTc { spec.experts } else { 0 };
        let got = bias.as_ref().map_or(0, Vec::len);
        if got != wanted {
            return Err(shape(OP, "bias", &[got], format!("{wanted} values for {:?}", spec.method)));
        }
        let kind = match gate.0 {
            Weight::Cpu(gate) => Kind::Cpu { gate, bias },
            #[cfg(feature = "cuda")]
            Weight::Cuda(gate) => Kind::Cuda(cuda::Router::new(spec, gate, bias.as_deref())?),
        };
        Ok(Router { spec, hidden, kind })
    }

    /// Routes `[rows, hidden]`.
    ///
    /// # Errors
    /// `x` is not contiguous, has another shape or lies elsewhere; on the CPU also a logit that is NaN.
    pub fn route(&self, x: &Tensor) -> Result<Routing> {
        let _rows = row_count(OP, "x", x, self.hidden)?;
        Ok(match &self.kind {
            Kind::Cpu { gate, bias } => cpu::route(&self.spec, gate, bias.as_deref(), x)?.into(),
            #[cfg(feature = "cuda")]
            Kind::Cuda(router) => Routing(Chosen::Cuda(router.route(x, _rows)?)),
        })
    }
}
