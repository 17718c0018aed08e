//! Hidden states that look alike and must not be mixed: [`Aux`], [`Feature`] and [`DraftState`].
//! A draft that takes one for the other still runs, with an accept length of 1.00, so they are types.

use std::ops::Range;

use candle_core::{DType, Device, Tensor};
use eyrie_kernels::{Backend, Routes};

use crate::error::{ModelError, Result};

/// Float32 values in host memory, whatever and wherever `rows` are.
pub(crate) fn to_host(rows: &Tensor) -> candle_core::Result<Tensor> {
    rows.to_device(&Device::Cpu)?.to_dtype(DType::F32)
}

macro_rules! rows_type {
    ($(#[$doc:meta])* $name:ident, $what:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone)]
        pub struct $name(Tensor);

        impl $name {
            #[doc = concat!("Wraps a contiguous tensor `[rows, width]`; errors unless it has rank 2 and width `width`.")]
            pub fn new(rows: Tensor, width: usize) -> Result<Self> {
                let (_, got) = rows.dims2()?;
                if got != width {
                    return Err(ModelError::Mismatch { what: $what, expected: width, got });
                }
                Ok(Self(rows.contiguous()?))
            }

            /// Wraps row-major f32 values; errors unless they are a whole number of rows of `width`.
            pub fn from_rows(backend: &Backend, values: Vec<f32>, width: usize) -> Result<Self> {
                if width == 0 || values.len() % width != 0 {
                    return Err(ModelError::Mismatch { what: $what, expected: width, got: values.len() });
                }
                Ok(Self(backend.activations(values, width)?))
            }

            /// The values, `[rows, width]`.
            pub fn tensor(&self) -> &Tensor {
                &self.0
            }

            /// Number of rows.
            pub fn rows(&self) -> usize {
                self.0.dims().first().copied().unwrap_or(0)
            }

            /// Values a row.
            pub fn width(&self) -> usize {
                self.0.dims().get(1).copied().unwrap_or(0)
            }

            /// Rows `range` without a copy; errors when it is outside.
            pub fn slice(&self, range: Range<usize>) -> Result<Self> {
                Ok(Self(self.0.narrow(0, range.start, range.len())?))
            }

            /// The rows at `indices`, in that order, repeats allowed; errors when one is outside.
            pub fn select(&self, backend: &Backend, indices: &[usize]) -> Result<Self> {
                let rows: Vec<u32> = indices.iter().map(|&i| i as u32).collect();
                Ok(Self(backend.select(&self.0, &rows)?))
            }

            /// All rows of `parts`, one below the other; errors on an empty list or different widths.
            pub fn concat(backend: &Backend, parts: &[&Self]) -> Result<Self> {
                let parts: Vec<&Tensor> = parts.iter().map(|part| &part.0).collect();
                Ok(Self(backend.below(&parts)?))
            }

            /// The values in row-major order.
            pub fn to_vec(&self) -> Result<Vec<f32>> {
                Ok(to_host(&self.0)?.flatten_all()?.to_vec1()?)
            }
        }
    };
}

rows_type!(
    /// Captured residual streams of the target, `[rows, A·Ht]`: the capture set's ids by depth, side by side.
    Aux,
    "aux row width"
);
rows_type!(
    /// [`Aux`] rows after the draft's `fc`, `[rows, H]`: what an extend takes.
    Feature,
    "feature row width"
);
rows_type!(
    /// The draft's own output before its final norm, `[rows, H]`: what a step takes.
    DraftState,
    "draft state row width"
);

/// Canonical ids of the residual streams to capture: id `i` enters layer `i`, id `n` enters the final norm.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CaptureSet(Vec<usize>);

impl CaptureSet {
    /// Errors unless `ids` is non-empty, strictly increasing and within `0..=layers`.
    pub fn new(ids: &[usize], layers: usize) -> Result<Self> {
        let refuse = |reason: String| Err(ModelError::Capture { ids: ids.to_vec(), reason });
        match ids.last() {
            None => return refuse("the set is empty".to_owned()),
            Some(&last) if last > layers => {
                return refuse(format!("the largest allowed id is {layers}, got {last}"));
            }
            Some(_) => {}
        }
        if !ids.is_sorted_by(|a, b| a < b) {
            return refuse("ids must be strictly increasing".to_owned());
        }
        Ok(Self(ids.to_vec()))
    }

    /// The ids, strictly increasing.
    pub fn ids(&self) -> &[usize] {
        &self.0
    }
}

/// Bytes read so far while loading.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Checkpoint bytes packed so far.
    pub bytes_done: u64,
    /// Checkpoint bytes the model needs in all.
    pub bytes_total: u64,
}

/// Records what a forward computed inside, for parity tests; the path through the model is the same.
#[derive(Debug, Default)]
pub struct Trace {
    /// Residual stream `[rows, H]` entering each layer, then the one entering the final norm.
    pub resid: Vec<Tensor>,
    /// Router input `[rows, H]` and decision of each MoE layer, with the layer's index.
    pub routes: Vec<LayerRoutes>,
}

/// One MoE layer's routing of every row.
#[derive(Debug)]
pub struct LayerRoutes {
    /// The layer.
    pub layer: usize,
    /// What the router saw, `[rows, H]`.
    pub input: Tensor,
    /// What it chose.
    pub routes: Routes,
}
