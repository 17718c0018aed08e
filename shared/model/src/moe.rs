//! The feed-forward half of a layer: a dense SwiGLU, or routed experts beside a shared one.

use candle_core::Tensor;
use eyrie_checkpoint::{FfnTensors, MoeConfig, MoeTensors, TargetConfig};
use eyrie_kernels::{Experts, Mlp, Router, Routing, moe};

use crate::error::{ModelError, Result};
use crate::loader::{Loader, router_spec};

/// One layer's feed-forward part.
#[derive(Debug)]
pub(crate) enum FeedForward {
    Dense(Mlp),
    Moe { router: Box<Router>, experts: Experts, shared: Option<Mlp> },
}

impl FeedForward {
    pub(crate) fn load(loader: &mut Loader<'_>, config: &TargetConfig, tensors: &FfnTensors) -> Result<Self> {
        match (tensors, &config.moe) {
            (FfnTensors::Dense(mlp), _) => Ok(Self::Dense(loader.mlp(mlp)?)),
            (FfnTensors::Moe(moe), Some(config)) => Self::load_moe(loader, config, moe),
            (FfnTensors::Moe(moe), None) => Err(ModelError::Unsupported {
                what: "router without a MoE config",
                value: moe.router.name.clone(),
            }),
        }
    }

    fn load_moe(loader: &mut Loader<'_>, config: &MoeConfig, tensors: &MoeTensors) -> Result<Self> {
        let gate = loader.linear(&tensors.router)?;
        let bias = tensors.router_bias.as_ref().map(|bias| loader.vector(bias)).transpose()?;
        let router = Box::new(Router::new(router_spec(config), gate, bias)?);
        let views =
            tensors.experts.iter().map(|expert| loader.mlp_views(expert)).collect::<Result<Vec<_>>>()?;
        let experts = Experts::pack(loader.backend(), &views)?;
        let shared = tensors.shared.as_ref().map(|mlp| loader.mlp(mlp)).transpose()?;
        Ok(Self::Moe { router, experts, shared })
    }

    /// `x` `[R, H]` normed; returns `[R, H]` and, for a MoE layer, the routes taken.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<(Tensor, Option<Routing>)> {
        match self {
            Self::Dense(mlp) => Ok((mlp.forward(x)?, None)),
            Self::Moe { router, experts, shared } => {
                let routing = router.route(x)?;
                let y = moe(x, &routing, experts, shared.as_ref())?;
                Ok((y, Some(routing)))
            }
        }
    }
}
