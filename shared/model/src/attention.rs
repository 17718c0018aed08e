//! Multi-head latent attention: queries through a low-rank path, keys and values as one cached latent a token.

use std::sync::Arc;

use candle_core::Tensor;
use eyrie_checkpoint::{AttentionTensors, QueryTensors, TargetConfig};
use eyrie_kernels::{Linear, MlaDims, MlaWeights, PagedRows, RmsNorm, Rope, Rows, mla};

use crate::error::Result;
use crate::loader::Loader;

#[derive(Debug)]
struct Query {
    /// To a latent, which is normed: absent where queries are projected directly.
    down: Option<(Linear, RmsNorm)>,
    up: Linear,
}

impl Query {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Ok(match &self.down {
            None => self.up.forward(x)?,
            Some((down, norm)) => self.up.forward(&norm.forward(&down.forward(x)?)?)?,
        })
    }
}

/// One layer's attention.
#[derive(Debug)]
pub(crate) struct Attention {
    query: Query,
    latent: Linear,
    mla: MlaWeights,
    out: Linear,
}

impl Attention {
    pub(crate) fn load(
        loader: &mut Loader<'_>,
        config: &TargetConfig,
        rope: &Arc<Rope>,
        tensors: &AttentionTensors,
    ) -> Result<Self> {
        // The low-rank norms have their own eps: published models were trained with 1e-6 whatever rms_norm_eps says.
        let eps = config.latent_norm_eps;
        let query = match &tensors.query {
            QueryTensors::Full(proj) => Query { down: None, up: loader.linear(proj)? },
            QueryTensors::LowRank { a, norm, b } => {
                Query { down: Some((loader.linear(a)?, loader.norm(norm, eps)?)), up: loader.linear(b)? }
            }
        };
        let dims = MlaDims {
            heads: config.num_attention_heads,
            nope: config.qk_nope_head_dim,
            rope: config.qk_rope_head_dim,
            v: config.v_head_dim,
            kv_lora: config.kv_lora_rank,
        };
        let kv_norm = loader.norm(&tensors.kv_a_norm, eps)?;
        let kv_b = loader.view(&tensors.kv_b)?;
        Ok(Self {
            query,
            latent: loader.linear(&tensors.kv_a)?,
            mla: MlaWeights::new(loader.backend(), dims, kv_norm, &kv_b, Arc::clone(rope))?,
            out: loader.linear(&tensors.o)?,
        })
    }

    /// `x` `[R, H]` normed; appends every row's latent to `cache` and returns `[R, H]`.
    pub(crate) fn forward(&self, x: &Tensor, cache: &mut PagedRows, rows: &Rows) -> Result<Tensor> {
        let q = self.query.forward(x)?;
        let kv = self.latent.forward(x)?;
        let heads = mla(&self.mla, &q, &kv, cache, rows)?;
        Ok(self.out.forward(&heads)?)
    }
}
