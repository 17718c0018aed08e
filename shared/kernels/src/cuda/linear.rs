//! Weights on the device as they were published, and products with them.

use std::sync::Arc;

use candle_core::Tensor;
use eyrie_checkpoint::{Bytes, Layout, WeightView};
use eyrie_region::Region;

use super::{Activations, Buffer, Cuda, Grid, Operand, Output};
use crate::cpu::tiles::Dense;
use crate::error::{KernelError, Result, limit, shape};
use crate::linear::OP;

/// Inputs of a step of dot.cuh.
const STEP: usize = 256;
/// Warps of a block, as `WARPS` in common.cuh.
const WARPS: usize = 8;
/// Warps over all outputs that keep a GPU's memory busy.
const BUSY_WARPS: usize = 2048;

/// How a weight holds its numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    F32,
    F16,
    Bf16,
    Int4,
}

impl Format {
    fn of(op: &'static str, layout: Layout) -> Result<Format> {
        match layout {
            Layout::F32 => Ok(Format::F32),
            Layout::F16 => Ok(Format::F16),
            Layout::Bf16 => Ok(Format::Bf16),
            Layout::Int4G32 => Ok(Format::Int4),
            layout => Err(KernelError::Layout { op, layout, supported: "F32, F16, BF16, INT4 g32" }),
        }
    }

    /// As kernels are named.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Format::F32 => "f32",
            Format::F16 => "f16",
            Format::Bf16 => "bf16",
            Format::Int4 => "int4",
        }
    }
}

/// One or more row-major weights `[outputs, inputs]` of one layout, one after the other.
#[derive(Debug)]
pub(crate) struct Weight {
    pub(crate) format: Format,
    pub(crate) outputs: usize,
    pub(crate) inputs: usize,
    data: Data,
    scales: Option<Buffer<u8>>,
}

#[derive(Debug)]
enum Data {
    Own(Buffer<u8>),
    /// Memory that is exported or imported; it stays mapped for as long as the region lives.
    Lent {
        pointer: u64,
        _region: Arc<dyn Region>,
    },
}

impl Weight {
    /// Uses a F32, F16 or BF16 weight where it lies on this GPU.
    pub(crate) fn borrow(cuda: &Cuda, op: &'static str, view: &WeightView) -> Result<Weight> {
        let format = Format::of(op, view.layout)?;
        let size = match format {
            Format::F32 => 4,
            Format::F16 | Format::Bf16 => 2,
            Format::Int4 => {
                let supported = "F32, F16, BF16 in place";
                return Err(KernelError::Layout { op, layout: view.layout, supported });
            }
        };
        let [outputs, inputs] = view.shape;
        if view.data.len() != outputs * inputs * size || view.data.is_empty() {
            let want = format!("{} bytes for {:?}, not empty", outputs * inputs * size, view.shape);
            return Err(shape(op, "weight bytes", &[view.data.len()], want));
        }
        let (want, what) = (format!("memory of GPU {}", cuda.ordinal()), "weight to be used where it lies");
        let Bytes::Mapped { region, range } = &view.data else {
            return Err(limit(op, what, "made from a seed", want));
        };
        let Some(span) = region.device().filter(|span| span.ordinal == cuda.ordinal()) else {
            return Err(limit(op, what, region.kind(), want));
        };
        if range.end as u64 > span.len {
            return Err(limit(op, "end of the weight", range.end, format!("{} bytes", span.len)));
        }
        let pointer = span.ptr + range.start as u64;
        let data = Data::Lent { pointer, _region: Arc::clone(region) };
        Ok(Weight { format, outputs, inputs, data, scales: None })
    }

    /// Copies a F32, F16, BF16 or INT4-g32 weight to the device, or makes it there.
    pub(crate) fn upload(cuda: &Cuda, op: &'static str, view: &WeightView) -> Result<Weight> {
        Weight::stack(cuda, op, std::iter::once(view))
    }

    /// Copies weights of one shape and layout, one after the other.
    pub(crate) fn stack<'a>(
        cuda: &Cuda,
        op: &'static str,
        views: impl ExactSizeIterator<Item = &'a WeightView> + Clone,
    ) -> Result<Weight> {
        let Some(first) = views.clone().next() else { return Err(limit(op, "weights", 0, "at least 1")) };
        let format = Format::of(op, first.layout)?;
        let count = views.len();
        let mut data = cuda.alloc(op, count * first.data.len())?;
        let mut scales = match &first.scales {
            None => None,
            Some(scales) => Some(cuda.alloc(op, count * scales.data.len())?),
        };
        for (index, view) in views.enumerate() {
            Dense::check(op, view)?;
            if view.shape != first.shape || view.layout != first.layout {
                let want = format!("{:?} in {} as the first", first.shape, first.layout);
                return Err(shape(op, "weight", &view.shape, want));
            }
            cuda.put(op, &view.data, &mut data, index)?;
            if let (Some(from), Some(to)) = (&view.scales, &mut scales) {
                cuda.put(op, &from.data, to, index)?;
            }
        }
        let [outputs, inputs] = first.shape;
        Ok(Weight { format, outputs, inputs, data: Data::Own(data), scales })
    }

    /// A float32 weight from its values.
    pub(crate) fn from_f32(
        cuda: &Cuda,
        op: &'static str,
        values: &[f32],
        [outputs, inputs]: [usize; 2],
    ) -> Result<Weight> {
        if values.len() != outputs * inputs || values.is_empty() {
            let want = format!("{outputs} x {inputs}, not empty");
            return Err(shape(op, "weight values", &[values.len()], want));
        }
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let data = Data::Own(cuda.upload(op, &bytes)?);
        Ok(Weight { format: Format::F32, outputs, inputs, data, scales: None })
    }

    pub(crate) fn data(&self) -> u64 {
        match &self.data {
            Data::Own(buffer) => buffer.pointer(),
            Data::Lent { pointer, .. } => *pointer,
        }
    }

    /// 0 where the format has none.
    pub(crate) fn scales(&self) -> u64 {
        self.scales.as_ref().map_or(0, Buffer::pointer)
    }

    /// Whether kernels may read 16 bytes at a time from this weight and from rows at `x` that lie `strides` numbers
    /// apart. Both ways add up in the same order.
    pub(crate) fn vectors(&self, x: u64, strides: &[usize]) -> bool {
        let aligned = [self.data(), x].iter().all(|pointer| pointer.is_multiple_of(16));
        aligned && self.inputs.is_multiple_of(8) && strides.iter().all(|stride| stride.is_multiple_of(8))
    }
}

/// As `LinearArgs` in linear.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct LinearArgs {
    x: u64,
    weights: u64,
    scales: u64,
    y: u64,
    rows: u32,
    inputs: u32,
    outputs: u32,
    x_stride: u32,
    y_stride: u32,
    first: u32,
    w_group: u32,
    x_group: u32,
    y_group: u32,
    parts: u32,
    wide: u32,
}

/// A product of rows with a weight, or with groups of its rows.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Product {
    pub(crate) x: Operand,
    pub(crate) rows: usize,
    /// Weight rows of a group, of which the first `first` are left out, and which of the others are outputs.
    pub(crate) group_rows: usize,
    pub(crate) first: usize,
    pub(crate) outputs: usize,
    pub(crate) groups: usize,
}

impl Product {
    /// `x` `[rows, inputs]` with all of a weight.
    pub(crate) fn plain(x: Operand, rows: usize, weight: &Weight) -> Product {
        Product { x, rows, group_rows: weight.outputs, first: 0, outputs: weight.outputs, groups: 1 }
    }

    /// `x` is `[rows, groups, inputs]`, `y` `[rows, groups, outputs]` in `numbers`.
    pub(crate) fn launch(self, cuda: &Cuda, weight: &Weight, y: u64, numbers: Activations) -> Result<()> {
        let Product { x, rows, group_rows, first, outputs, groups } = self;
        let inputs = weight.inputs;
        if rows * groups * inputs > u32::MAX as usize {
            return Err(limit("linear", "x", rows * groups * inputs, "2^32 - 1 numbers"));
        }
        let parts = parts(outputs * groups, inputs);
        let args = LinearArgs {
            x: x.pointer,
            weights: weight.data(),
            scales: weight.scales(),
            y,
            rows: rows as u32,
            inputs: inputs as u32,
            outputs: outputs as u32,
            x_stride: (groups * inputs) as u32,
            y_stride: (groups * outputs) as u32,
            first: first as u32,
            w_group: group_rows as u32,
            x_group: inputs as u32,
            y_group: outputs as u32,
            parts: parts as u32,
            wide: u32::from(numbers == Activations::F32),
        };
        let (name, block_rows, block_outputs) = match weight.vectors(x.pointer, &[inputs]) {
            true => row_block(rows),
            false => ("scalar", 4, 2),
        };
        let name = format!("linear_{}_{}_{name}", x.numbers.name(), weight.format.name());
        let columns = outputs.div_ceil(WARPS / parts * block_outputs);
        let grid = Grid::new(rows.div_ceil(block_rows), columns, groups);
        // SAFETY: `args` are the kernel's; x, the weight and y hold what the sizes say, which the callers checked.
        unsafe { cuda.launch(&name, grid, (args,)) }
    }
}

/// Kernel, rows and outputs a warp for `rows` rows; all of them give the same bits.
fn row_block(rows: usize) -> (&'static str, usize, usize) {
    match rows {
        0 | 1 => ("1", 1, 1),
        2 => ("2", 2, 2),
        3 | 4 => ("4", 4, 2),
        5..=8 => ("8", 8, 4),
        _ => ("16", 16, 4),
    }
}

/// Warps that share an output, by the weight's shape alone: enough to keep the memory busy with one row, each with two
/// steps at least.
fn parts(outputs: usize, inputs: usize) -> usize {
    let steps = inputs.div_ceil(STEP);
    let mut parts = 1;
    while parts < WARPS && outputs * parts < BUSY_WARPS && steps >= 4 * parts {
        parts *= 2;
    }
    parts
}

/// `x` `[rows, inputs]` times all of a weight: `[rows, outputs]` in `numbers`.
pub(crate) fn linear(
    cuda: &Cuda,
    op: &'static str,
    weight: &Weight,
    x: Operand,
    numbers: Activations,
) -> Result<Output> {
    let rows = x.len / weight.inputs;
    let y = cuda.output(op, numbers, rows * weight.outputs)?;
    Product::plain(x, rows, weight).launch(cuda, weight, y.pointer, numbers)?;
    Ok(y)
}

/// A weight `[out, in]` on the device.
#[derive(Debug)]
pub(crate) struct Linear {
    pub(super) cuda: Cuda,
    pub(super) weight: Weight,
}

impl Linear {
    pub(crate) fn pack(cuda: &Cuda, view: &WeightView) -> Result<Linear> {
        Ok(Linear { cuda: cuda.clone(), weight: Weight::upload(cuda, OP, view)? })
    }

    pub(crate) fn from_f32(cuda: &Cuda, values: &[f32], shape: [usize; 2]) -> Result<Linear> {
        Ok(Linear { cuda: cuda.clone(), weight: Weight::from_f32(cuda, OP, values, shape)? })
    }

    pub(crate) fn borrow(cuda: &Cuda, view: &WeightView) -> Result<Linear> {
        Ok(Linear { cuda: cuda.clone(), weight: Weight::borrow(cuda, OP, view)? })
    }

    pub(crate) fn out_features(&self) -> usize {
        self.weight.outputs
    }

    pub(crate) fn in_features(&self) -> usize {
        self.weight.inputs
    }

    /// The width of `x` has been checked.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = self.cuda.operand_of(OP, x)?;
        self.product(x, x.numbers)
    }

    pub(crate) fn forward_f32(&self, x: &Tensor) -> Result<Tensor> {
        self.product(self.cuda.operand_of(OP, x)?, Activations::F32)
    }

    fn product(&self, x: Operand, numbers: Activations) -> Result<Tensor> {
        let y = linear(&self.cuda, OP, &self.weight, x, numbers)?;
        Ok(y.into_tensor(x.len / self.weight.inputs, self.weight.outputs))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_outputs_are_shared_by_warps_with_two_steps_each() {
        assert_eq!(parts(163_840, 7168), 1);
        assert_eq!(parts(2048, 7168), 1);
        assert_eq!(parts(576, 7168), 4);
        assert_eq!(parts(256, 7168), 8);
        assert_eq!(parts(64, 2048), 4);
        assert_eq!(parts(16, 384), 1);
        for (outputs, inputs) in [(1, 1), (1, 512), (7, 1024), (300, 4096)] {
            let parts = parts(outputs, inputs);
            assert!(parts == 1 || inputs.div_ceil(STEP) >= 2 * parts);
        }
    }
}
