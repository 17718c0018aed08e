//! Feature rows where they lie: in host memory, or on the GPU that computed them.

use std::ops::Range;
use std::sync::Arc;

use eyrie_kernels::{Activations, Backend};
use eyrie_model::{Aux, ModelError};
use eyrie_region::{DeviceBlock, DeviceBuffer, DeviceRows, RegionError, RegionKind, Stream, check_memory};

/// Consecutive rows.
#[derive(Debug, Clone, Copy)]
pub(crate) enum RowSlice<'a> {
    Host { values: &'a [f32], width: usize },
    Device(DeviceRows<'a>),
}

impl<'a> RowSlice<'a> {
    pub(crate) fn rows(&self) -> usize {
        match self {
            Self::Host { values, width } => values.len() / width,
            Self::Device(rows) => rows.rows() as usize,
        }
    }

    /// The rows `range`, which must be there.
    pub(crate) fn slice(&self, range: Range<usize>) -> RowSlice<'a> {
        match *self {
            Self::Host { values, width } => {
                Self::Host { values: &values[range.start * width..range.end * width], width }
            }
            Self::Device(rows) => Self::Device(rows.slice(range.start as u32..range.end as u32)),
        }
    }
}

/// Rows of a step that are to be kept or published, one below the other.
#[derive(Debug)]
pub(crate) enum StepRows {
    Host { values: Vec<f32>, width: usize },
    Device(Aux),
}

impl StepRows {
    /// The rows `indices` of `aux`.
    pub(crate) fn select(backend: &Backend, aux: &Aux, indices: &[usize]) -> Result<Self, ModelError> {
        let all = indices.iter().copied().eq(0..aux.rows());
        let rows = if all { aux.clone() } else { aux.select(backend, indices)? };
        Ok(match backend.device().is_cpu() {
            true => Self::Host { values: rows.to_vec()?, width: aux.width() },
            false => Self::Device(rows),
        })
    }

    pub(crate) fn as_slice(&self, backend: &Backend) -> Result<RowSlice<'_>, ModelError> {
        Ok(match self {
            Self::Host { values, width } => RowSlice::Host { values, width: *width },
            Self::Device(rows) => RowSlice::Device(backend.device_rows(rows.tensor())?),
        })
    }
}

/// Memory for a fixed number of rows, filled from the front.
#[derive(Debug, Default)]
pub(crate) struct RowBlock {
    rows: usize,
    memory: BlockMemory,
}

#[derive(Debug)]
enum BlockMemory {
    Host(Vec<f32>),
    Device(DeviceBlock),
}

impl Default for BlockMemory {
    fn default() -> Self {
        Self::Host(Vec::new())
    }
}

impl RowBlock {
    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    pub(crate) fn clear(&mut self) {
        self.rows = 0;
        if let BlockMemory::Host(values) = &mut self.memory {
            values.clear();
        }
    }
}

/// Where blocks come from.
#[derive(Debug)]
pub(crate) struct RowMemory {
    width: usize,
    numbers: Activations,
    /// `None` for host memory.
    stream: Option<Arc<Stream>>,
}

impl RowMemory {
    /// Memory beside what `backend` computes, for rows of `width` values.
    pub(crate) fn beside(backend: &Backend, width: usize) -> Result<Self, ModelError> {
        Ok(Self { width, numbers: backend.numbers(), stream: backend.stream()?.map(Arc::new) })
    }

    pub(crate) fn row_bytes(&self) -> u64 {
        (self.width * self.numbers.size()) as u64
    }

    /// Whether more may be taken while serving. On a GPU it may not: what is free there is for the steps.
    pub(crate) fn grows(&self) -> bool {
        self.stream.is_none()
    }

    /// Takes the memory for `blocks` blocks of `rows` rows.
    ///
    /// # Errors
    /// [`RegionError::OutOfMemory`] and its like for more than there is.
    pub(crate) fn take(&self, blocks: u64, rows: usize) -> Result<Vec<RowBlock>, RegionError> {
        const NAME: &str = "feature cache";
        let len = rows as u64 * self.row_bytes();
        let block = |memory| RowBlock { rows: 0, memory };
        let Some(stream) = &self.stream else {
            check_memory(NAME, blocks * len)?;
            // Written once, so that there is memory behind it.
            let written = |_| {
                let mut values = vec![1.0; rows * self.width];
                values.clear();
                block(BlockMemory::Host(values))
            };
            return Ok((0..blocks).map(written).collect());
        };
        if blocks == 0 {
            return Ok(Vec::new());
        }
        let memory = DeviceBuffer::zeroed(stream.gpu(), NAME, DeviceBlock::bytes_of(blocks, len))?;
        Ok(DeviceBlock::cut(memory, len, stream).into_iter().map(BlockMemory::Device).map(block).collect())
    }

    /// Copies `rows` behind those that `block` has.
    ///
    /// # Errors
    /// Rows that lie elsewhere than the block, more than it has room for, or the driver's answer.
    pub(crate) fn extend(&self, block: &mut RowBlock, rows: RowSlice<'_>) -> Result<(), RegionError> {
        match (&mut block.memory, rows) {
            (BlockMemory::Host(held), RowSlice::Host { values, .. }) => held.extend_from_slice(values),
            (BlockMemory::Device(held), RowSlice::Device(rows)) => {
                held.begin_write(block.rows as u64 * self.row_bytes(), rows)?;
            }
            (BlockMemory::Host(_), RowSlice::Device(_)) => {
                return Err(RegionError::NotOnHost { kind: RegionKind::CudaVmm });
            }
            (BlockMemory::Device(_), RowSlice::Host { .. }) => {
                return Err(RegionError::NotOnDevice { kind: RegionKind::Local });
            }
        }
        block.rows += rows.rows();
        Ok(())
    }

    /// The rows `range` of `block`, as far as it has them.
    ///
    /// # Errors
    /// None for a block of this memory.
    pub(crate) fn rows<'a>(
        &self,
        block: &'a RowBlock,
        range: Range<usize>,
    ) -> Result<RowSlice<'a>, RegionError> {
        let (start, end) = (range.start.min(block.rows), range.end.min(block.rows));
        Ok(match &block.memory {
            BlockMemory::Host(values) => {
                let values = &values[start * self.width..end * self.width];
                RowSlice::Host { values, width: self.width }
            }
            BlockMemory::Device(held) => {
                let (skip, count) = (start as u64 * self.row_bytes(), end.saturating_sub(start) as u32);
                RowSlice::Device(held.rows(skip, count, self.row_bytes())?)
            }
        })
    }
}

#[cfg(test)]
impl RowSlice<'_> {
    /// The values of rows in host memory.
    pub(crate) fn values(&self) -> &[f32] {
        match self {
            Self::Host { values, .. } => values,
            Self::Device(_) => &[],
        }
    }
}
