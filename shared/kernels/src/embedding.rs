//! Rows of an embedding matrix, read where the checkpoint lies.

use candle_core::{Device, Tensor};
use eyrie_checkpoint::{Layout, WeightView};

use crate::error::{KernelError, Result, limit};
use crate::tiles::Dense;

const OP: &str = "embedding";

/// An embedding `[vocabulary, hidden]` borrowed from its region.
#[derive(Debug)]
pub struct Embedding {
    view: WeightView,
}

impl Embedding {
    /// Takes a row-major F32, F16 or BF16 weight without copying it.
    ///
    /// # Errors
    /// Another layout, or a byte length that does not fit the shape.
    pub fn new(view: &WeightView) -> Result<Embedding> {
        if !matches!(view.layout, Layout::F32 | Layout::F16 | Layout::Bf16) {
            return Err(KernelError::Layout { op: OP, layout: view.layout, supported: "F32, F16, BF16" });
        }
        Dense::new(OP, view)?;
        Ok(Embedding { view: view.clone() })
    }

    /// Number of ids.
    pub fn vocabulary(&self) -> usize {
        self.view.shape[0]
    }

    /// Width of a row.
    pub fn hidden(&self) -> usize {
        self.view.shape[1]
    }

    /// Rows of `ids` as f32 `[ids, hidden]`.
    ///
    /// # Errors
    /// An id at or above the vocabulary.
    pub fn lookup(&self, ids: &[u32]) -> Result<Tensor> {
        let [vocabulary, hidden] = self.view.shape;
        let dense = Dense::new(OP, &self.view)?;
        let mut values = Vec::with_capacity(ids.len() * hidden);
        for &id in ids {
            if id as usize >= vocabulary {
                return Err(limit(OP, "token id", id, format!("below the vocabulary of {vocabulary}")));
            }
            values.extend((0..hidden).map(|i| dense.get(id as usize, i)));
        }
        Ok(Tensor::from_vec(values, (ids.len(), hidden), &Device::Cpu)?)
    }
}
