//! The feed-forward half of a layer: a dense SwiGLU, or routed experts beside a shared one.

use candle_core::Tensor;
use eyrie_checkpoint::{MoeConfig, TargetConfig};
use eyrie_kernels::{ExpertViews, Experts, Mlp, Router, RouterSpec, Routes, moe};

use crate::error::Result;
use crate::loader::Loader;

/// One layer's feed-forward part.
#[derive(Debug)]
pub(crate) enum FeedForward {
    Dense(Mlp),
    Moe { router: Router, experts: Experts, shared: Option<Mlp> },
}

impl FeedForward {
    pub(crate) fn load(
        loader: &mut Loader<'_>,
        config: &TargetConfig,
        layer: usize,
        prefix: &str,
    ) -> Result<Self> {
        match &config.moe {
            Some(moe) if moe.is_moe_layer(layer) => Self::load_moe(loader, moe, prefix),
            _ => Ok(Self::Dense(loader.mlp(prefix)?)),
        }
    }

    fn load_moe(loader: &mut Loader<'_>, config: &MoeConfig, prefix: &str) -> Result<Self> {
        let router = loader.router(router_spec(config), &format!("{prefix}.gate"))?;
        let mut views = Vec::with_capacity(config.experts);
        for expert in 0..config.experts {
            let name = |part: &str| format!("{prefix}.experts.{expert}.{part}_proj");
            views.push(ExpertViews {
                gate: loader.view(&name("gate"))?,
                up: loader.view(&name("up"))?,
                down: loader.view(&name("down"))?,
            });
        }
        let experts = Experts::pack(loader.cpu(), views)?;
        let shared = match config.shared {
            0 => None,
            _ => Some(loader.mlp(&format!("{prefix}.shared_experts"))?),
        };
        Ok(Self::Moe { router, experts, shared })
    }

    /// `x` `[R, H]` normed; returns `[R, H]` and, for a MoE layer, the routes taken.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<(Tensor, Option<Routes>)> {
        match self {
            Self::Dense(mlp) => Ok((mlp.forward(x)?, None)),
            Self::Moe { router, experts, shared } => {
                let routes = router.route(x)?;
                let y = moe(x, &routes, experts, shared.as_ref())?;
                Ok((y, Some(routes)))
            }
        }
    }
}
