//! Between candle tensors and slices: every op takes contiguous f32 rows on the CPU.

use candle_core::{CpuStorage, Layout, Shape, Storage, Tensor};

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

/// The first row of a `[rows, width]` tensor in host memory that has a value which is no finite number.
pub(crate) fn first_not_finite(x: &Tensor) -> Result<Option<usize>> {
    const OP: &str = "first_not_finite";
    let (_, width) = x.dims2()?;
    let (storage, layout) = x.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else { return Err(KernelError::Mixed { op: OP }) };
    let values = operand(OP, storage, layout)?;
    Ok(values.iter().position(|value| !value.is_finite()).map(|at| at / width))
}

/// Passes a kernel error through an op's candle result.
pub(crate) fn wrap(error: KernelError) -> candle_core::Error {
    match error {
        KernelError::Tensor(error) => error,
        other => candle_core::Error::wrap(other),
    }
}
