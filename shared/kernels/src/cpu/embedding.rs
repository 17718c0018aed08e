//! Embedding rows on the CPU.

use candle_core::{Device, Tensor};
use eyrie_checkpoint::WeightView;

use super::tiles::Dense;
use crate::embedding::OP;
use crate::error::Result;

#[derive(Debug)]
pub(crate) struct Embedding {
    view: WeightView,
}

impl Embedding {
    pub(crate) fn new(view: &WeightView) -> Result<Embedding> {
        Dense::new(OP, view)?;
        Ok(Embedding { view: view.clone() })
    }

    /// `ids` are below the vocabulary.
    pub(crate) fn lookup(&self, ids: &[u32]) -> Result<Tensor> {
        let [_, hidden] = self.view.shape;
        let dense = Dense::new(OP, &self.view)?;
        let mut values = Vec::with_capacity(ids.len() * hidden);
        for &id in ids {
            values.extend((0..hidden).map(|i| dense.get(id as usize, i)));
        }
        Ok(Tensor::from_vec(values, (ids.len(), hidden), &Device::Cpu)?)
    }
}
