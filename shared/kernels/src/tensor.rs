//! Between candle tensors and slices: every op takes contiguous f32 rows on the CPU.

use candle_core::{CpuStorage, Layout, Shape, Tensor};

use crate::error::{KernelError, Result, shape};

/// The values of a contiguous f32 operand inside a custom op.
pub(crate) fn operand<'a>(
    op: &'static str,
    storage: &'a CpuStorage,
    layout: &Layout,
) -> candle_core::Result<&'a [f32]> {
    let (start, end) =
        layout.contiguous_offsets().ok_or_else(|| candle_core::Error::RequiresContiguous { op }.bt())?;
    let values = storage.as_slice::<f32>()?;
    Ok(&values[start..end])
}

/// The result of a custom op: `[rows, width]`.
pub(crate) fn rows_of(values: Vec<f32>, rows: usize, width: usize) -> (CpuStorage, Shape) {
    (CpuStorage::F32(values), Shape::from((rows, width)))
}

/// Rows of a `[rows, width]` tensor; an error names both widths.
pub(crate) fn row_count(op: &'static str, what: &'static str, x: &Tensor, width: usize) -> Result<usize> {
    match x.dims() {
        [rows, got] if *got == width => Ok(*rows),
        got => Err(shape(op, what, got, format!("[rows, {width}]"))),
    }
}

/// Passes a kernel error through an op's candle result.
pub(crate) fn wrap(error: KernelError) -> candle_core::Error {
    match error {
        KernelError::Tensor(error) => error,
        other => candle_core::Error::wrap(other),
    }
}
