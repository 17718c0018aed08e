//! Rows of an embedding matrix, read where the checkpoint lies.

use candle_core::Tensor;
use eyrie_checkpoint::{Layout, WeightView};

use crate::backend::Backend;
use crate::cpu;
#[cfg(feature = "cuda")]
use crate::cuda;
use crate::error::{KernelError, Result, limit};

pub(crate) const OP: &str = "embedding";

/// An embedding `[vocabulary, hidden]` borrowed from its region.
#[derive(Debug)]
pub struct Embedding {
    shape: [usize; 2],
    table: Table,
}

#[derive(Debug)]
enum Table {
    Cpu(cpu::Embedding),
    #[cfg(feature = "cuda")]
    Cuda(cuda::Embedding),
}

impl Embedding {
    /// Takes a row-major F32, F16 or BF16 weight. It is read where it lies, unless it lies in host memory and the
    /// backend is a GPU, which then gets a private copy.
    ///
    /// # Errors
    /// Another layout, or a byte length that does not fit the shape.
    pub fn new(backend: &Backend, view: &WeightView) -> Result<Embedding> {
        if !matches!(view.layout, Layout::F32 | Layout::F16 | Layout::Bf16) {
            return Err(KernelError::Layout { op: OP, layout: view.layout, supported: "F32, F16, BF16" });
        }
        let table = match backend {
            Backend::Cpu(_) => Table::Cpu(cpu::Embedding::new(view)?),
            #[cfg(feature = "cuda")]
            Backend::Cuda(cuda) => Table::Cuda(cuda::Embedding::new(cuda, view)?),
        };
        Ok(Embedding { shape: view.shape, table })
    }

    /// Number of ids.
    pub fn vocabulary(&self) -> usize {
        self.shape[0]
    }

    /// Width of a row.
    pub fn hidden(&self) -> usize {
        self.shape[1]
    }

    /// Rows of `ids` as activations `[ids, hidden]`.
    ///
    /// # Errors
    /// An id at or above the vocabulary.
    pub fn lookup(&self, ids: &[u32]) -> Result<Tensor> {
        let vocabulary = self.vocabulary();
        if let Some(id) = ids.iter().find(|&&id| id as usize >= vocabulary) {
            return Err(limit(OP, "token id", id, format!("below the vocabulary of {vocabulary}")));
        }
        match &self.table {
            Table::Cpu(table) => table.lookup(ids),
            #[cfg(feature = "cuda")]
            Table::Cuda(table) => table.lookup(ids),
        }
    }
}
