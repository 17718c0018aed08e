//! Multi-head latent attention: queries through a low-rank path, keys and values as one cached latent a token.

use candle_core::Tensor;
use eyrie_checkpoint::TargetConfig;
use eyrie_kernels::{Cpu, Linear, MlaDims, MlaWeights, PagedRows, Ragged, RmsNorm, Rope, mla};

use crate::error::Result;
use crate::loader::Loader;

#[derive(Debug)]
enum Query {
    Direct(Linear),
    LowRank { down: Linear, norm: RmsNorm, up: Linear },
}

impl Query {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Ok(match self {
            Self::Direct(proj) => proj.forward(x)?,
            Self::LowRank { down, norm, up } => up.forward(&norm.forward(&down.forward(x)?)?)?,
        })
    }
}

/// One layer's attention.
#[derive(Debug)]
pub(crate) struct Attention {
    cpu: Cpu,
    query: Query,
    latent: Linear,
    mla: MlaWeights,
    out: Linear,
}

impl Attention {
    pub(crate) fn load(loader: &mut Loader<'_>, config: &TargetConfig, rope: &Rope, prefix: &str) -> Result<Self> {
        // The low-rank norms have their own eps: published models were trained with 1e-6 whatever rms_norm_eps says.
        let eps = config.latent_norm_eps;
        let query = match config.q_lora_rank {
            None => Query::Direct(loader.linear(&format!("{prefix}.q_proj"))?),
            Some(_) => Query::LowRank {
                down: loader.linear(&format!("{prefix}.q_a_proj"))?,
                norm: loader.norm(&format!("{prefix}.q_a_layernorm"), eps)?,
                up: loader.linear(&format!("{prefix}.q_b_proj"))?,
            },
        };
        let dims = MlaDims {
            heads: config.heads,
            nope: config.nope_dim,
            rope: config.rope_dim,
            value: config.v_dim,
            latent: config.kv_lora_rank,
        };
        let kv_norm = loader.norm(&format!("{prefix}.kv_a_layernorm"), eps)?;
        let kv_b = loader.view(&format!("{prefix}.kv_b_proj"))?;
        let scale = rope.softmax_scale(config.nope_dim + config.rope_dim);
        Ok(Self {
            cpu: loader.cpu().clone(),
            query,
            latent: loader.linear(&format!("{prefix}.kv_a_proj_with_mqa"))?,
            mla: MlaWeights::new(loader.cpu(), dims, kv_norm, &kv_b, rope.clone(), scale)?,
            out: loader.linear(&format!("{prefix}.o_proj"))?,
        })
    }

    /// `x` `[R, H]` normed; appends every row's latent to `cache` and returns `[R, H]`.
    pub(crate) fn forward(&self, x: &Tensor, cache: &mut PagedRows, rows: &Ragged) -> Result<Tensor> {
        let q = self.query.forward(x)?;
        let kv = self.latent.forward(x)?;
        let heads = mla(&self.cpu, &self.mla, &q, &kv, cache, rows)?;
        Ok(self.out.forward(&heads)?)
    }
}
