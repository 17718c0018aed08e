//! Norms and embeddings on the device.

use candle_core::Tensor;
use eyrie_checkpoint::WeightView;

use super::{Buffer, Cuda, Grid, Weight};
use crate::embedding;
use crate::error::Result;
use crate::norm;

/// The weight of a norm.
#[derive(Debug)]
pub(crate) struct RmsNorm {
    cuda: Cuda,
    pub(super) weight: Buffer<f32>,
    pub(super) eps: f32,
}

impl RmsNorm {
    pub(crate) fn new(cuda: &Cuda, weight: &[f32], eps: f32) -> Result<RmsNorm> {
        Ok(RmsNorm { cuda: cuda.clone(), weight: cuda.upload(norm::OP, weight)?, eps })
    }

    pub(crate) fn width(&self) -> usize {
        self.weight.len()
    }

    /// The width of `x` has been checked.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = self.cuda.operand_of(norm::OP, x)?;
        let width = self.width();
        let rows = x.len / width;
        let y = self.cuda.output(norm::OP, x.numbers, x.len)?;
        let name = format!("rms_norm_{}", x.numbers.name());
        let arguments = (x.pointer, self.weight.pointer(), y.pointer, width as u32, self.eps);
        // SAFETY: x and y hold whole rows of `width` numbers, the weight one.
        unsafe { self.cuda.launch(&name, Grid::new(rows, 1, 1), arguments) }?;
        Ok(y.into_tensor(rows, width))
    }
}

/// An embedding `[vocabulary, hidden]` on the device.
#[derive(Debug)]
pub(crate) struct Embedding {
    cuda: Cuda,
    table: Weight,
}

impl Embedding {
    pub(crate) fn new(cuda: &Cuda, view: &WeightView) -> Result<Embedding> {
        let table = match view.data.device() {
            Some(_) => Weight::borrow(cuda, embedding::OP, view)?,
            None => Weight::upload(cuda, embedding::OP, view)?,
        };
        Ok(Embedding { cuda: cuda.clone(), table })
    }

    /// `ids` are below the vocabulary.
    pub(crate) fn lookup(&self, ids: &[u32]) -> Result<Tensor> {
        let Weight { outputs: vocabulary, inputs: width, format, .. } = self.table;
        let numbers = self.cuda.numbers();
        let y = self.cuda.output(embedding::OP, numbers, ids.len() * width)?;
        let name = format!("embedding_{}_{}", format.name(), numbers.name());
        let ids = self.cuda.upload(embedding::OP, ids)?;
        let arguments = (self.table.data(), ids.pointer(), y.pointer, vocabulary as u32, width as u32);
        // SAFETY: the table has `vocabulary` rows of `width` numbers, y a row an id; the kernel reads no row outside.
        unsafe { self.cuda.launch(&name, Grid::new(ids.len(), 1, 1), arguments) }?;
        Ok(y.into_tensor(ids.len(), width))
    }
}
