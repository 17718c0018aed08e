//! Small operations on activations: candle's own would be compiled for the GPU at their first use, for seconds.

use std::sync::Arc;

use candle_core::Tensor;
use eyrie_region::{DeviceRows, Gpu, Stream, StreamId};

use super::{Activations, Cuda, Grid, failed};
use crate::error::{KernelError, Result, limit, shape};

fn same_shape(op: &'static str, a: &Tensor, b: &Tensor) -> Result<(usize, usize)> {
    let (rows, width) = a.dims2()?;
    if b.dims() != a.dims() || b.dtype() != a.dtype() {
        return Err(shape(op, "b", b.dims(), format!("{:?} in {:?}", a.dims(), a.dtype())));
    }
    Ok((rows, width))
}

impl Cuda {
    /// `a + b` of two tensors `[rows, width]`, added in float32 and rounded once.
    ///
    /// # Errors
    /// Tensors of different shapes or numbers, or not contiguous on this GPU.
    pub fn add(&self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        let (rows, width) = same_shape("add", a, b)?;
        let (a, b) = (self.operand_of("add", a)?, self.operand_of("add", b)?);
        let y = self.output("add", a.numbers, a.len)?;
        let arguments = (a.pointer, b.pointer, y.pointer, a.len);
        // SAFETY: the three hold `a.len` numbers each.
        unsafe { self.launch(&format!("add_{}", a.numbers.name()), Grid::items(a.len), arguments) }?;
        Ok(y.into_tensor(rows, width))
    }

    /// `factor * x` of a tensor `[rows, width]`.
    ///
    /// # Errors
    /// A tensor that is not contiguous on this GPU.
    pub fn scale(&self, x: &Tensor, factor: f32) -> Result<Tensor> {
        let (rows, width) = x.dims2()?;
        let x = self.operand_of("scale", x)?;
        let y = self.output("scale", x.numbers, x.len)?;
        let arguments = (x.pointer, y.pointer, factor, x.len);
        // SAFETY: both hold `x.len` numbers.
        unsafe { self.launch(&format!("scale_{}", x.numbers.name()), Grid::items(x.len), arguments) }?;
        Ok(y.into_tensor(rows, width))
    }

    /// The rows of `x` `[rows, width]` at `indices`.
    ///
    /// # Errors
    /// An index outside `x`, or a tensor that is not contiguous on this GPU.
    pub fn select(&self, x: &Tensor, indices: &[u32]) -> Result<Tensor> {
        let (rows, width) = x.dims2()?;
        if let Some(index) = indices.iter().find(|&&index| index as usize >= rows) {
            return Err(limit("select", "row", index, format!("below {rows} rows")));
        }
        let x = self.operand_of("select", x)?;
        let y = self.output("select", x.numbers, indices.len() * width)?;
        let indices = self.upload("select", indices)?;
        let arguments = (x.pointer, indices.pointer(), y.pointer, width as u32, width as u32, 0_u32);
        let grid = Grid::new(indices.len(), 1, 1);
        // SAFETY: every index is a row of x; y has a row an index.
        unsafe { self.launch(&format!("copy_columns_{}", x.numbers.name()), grid, arguments) }?;
        Ok(y.into_tensor(indices.len(), width))
    }

    /// Tensors `[rows, widths]` side by side.
    ///
    /// # Errors
    /// No tensors, or ones of different rows or numbers, or not contiguous on this GPU.
    pub fn beside(&self, parts: &[&Tensor]) -> Result<Tensor> {
        let Some(first) = parts.first() else { return Err(limit("beside", "tensors", 0, "at least 1")) };
        let rows = first.dims2()?.0;
        let mut width = 0;
        for part in parts {
            let (found, columns) = part.dims2()?;
            if found != rows || part.dtype() != first.dtype() {
                let want = format!("[{rows}, width] in {:?}", first.dtype());
                return Err(shape("beside", "tensor", part.dims(), want));
            }
            width += columns;
        }
        let y = self.output("beside", self.operand_of("beside", first)?.numbers, rows * width)?;
        let mut at = 0;
        for part in parts {
            let x = self.operand_of("beside", part)?;
            let columns = part.dims2()?.1;
            let arguments = (x.pointer, 0_u64, y.pointer, columns as u32, width as u32, at as u32);
            // SAFETY: x has `rows` rows of `columns` numbers, y as many of `width` >= `at + columns`.
            unsafe {
                let name = format!("copy_columns_{}", x.numbers.name());
                self.launch(&name, Grid::new(rows, 1, 1), arguments)
            }?;
            at += columns;
        }
        Ok(y.into_tensor(rows, width))
    }

    /// Tensors `[rows, width]` one below the other.
    ///
    /// # Errors
    /// No tensors, or ones of different widths or numbers, or not contiguous on this GPU.
    pub fn below(&self, parts: &[&Tensor]) -> Result<Tensor> {
        let Some(first) = parts.first() else { return Err(limit("below", "tensors", 0, "at least 1")) };
        let width = first.dims2()?.1;
        let mut rows = 0;
        for part in parts {
            let (found, columns) = part.dims2()?;
            if columns != width || part.dtype() != first.dtype() {
                let want = format!("[rows, {width}] in {:?}", first.dtype());
                return Err(shape("below", "tensor", part.dims(), want));
            }
            rows += found;
        }
        let y = self.output("below", self.operand_of("below", first)?.numbers, rows * width)?;
        let mut to = y.pointer;
        for part in parts {
            let x = self.operand_of("below", part)?;
            let bytes = x.len * x.numbers.size();
            self.copy("below", x.pointer, to, bytes)?;
            to += bytes as u64;
        }
        Ok(y.into_tensor(rows, width))
    }

    /// A tensor `[rows, width]` in other numbers.
    ///
    /// # Errors
    /// A tensor that is not contiguous on this GPU.
    pub fn convert(&self, x: &Tensor, to: Activations) -> Result<Tensor> {
        let (rows, width) = x.dims2()?;
        let from = self.operand_of("convert", x)?;
        let name = match (from.numbers, to) {
            (Activations::Bf16, Activations::F32) => "widen_bf16",
            (Activations::F32, Activations::Bf16) => "narrow_bf16",
            _ => return Ok(x.clone()),
        };
        let y = self.output("convert", to, from.len)?;
        // SAFETY: both hold `from.len` numbers of the kernel's kinds.
        unsafe { self.launch(name, Grid::items(from.len), (from.pointer, y.pointer, from.len)) }?;
        Ok(y.into_tensor(rows, width))
    }

    /// Activations from float32 values, `[rows, width]`.
    ///
    /// # Errors
    /// Values that are no whole number of rows, or memory that cannot be had.
    pub fn activations(&self, values: &[f32], [rows, width]: [usize; 2]) -> Result<Tensor> {
        if values.len() != rows * width {
            return Err(shape("activations", "values", &[values.len()], format!("{rows} rows x {width}")));
        }
        let wide = self.output("activations", Activations::F32, values.len())?;
        self.write_at("activations", values, wide.pointer)?;
        self.convert(&wide.into_tensor(rows, width), self.numbers())
    }

    /// The stream as the shared memory's copies take their place in it.
    pub(crate) fn queue(&self) -> Result<Stream> {
        let opened =
            Gpu::open(self.ordinal()).and_then(|gpu| Stream::of_engine(&gpu, Arc::clone(self.stream())));
        opened.map_err(|e| KernelError::Gpu { ordinal: self.ordinal(), reason: e.to_string() })
    }

    /// A tensor `[rows, width]` where it lies.
    pub(crate) fn device_rows<'a>(&self, x: &'a Tensor) -> Result<DeviceRows<'a>> {
        let (rows, width) = x.dims2()?;
        let x = self.operand_of("device_rows", x)?;
        let row_bytes = (width * x.numbers.size()) as u64;
        // SAFETY: the tensor lives as long as the borrow of it; it is written and freed in this backend's stream's order.
        Ok(unsafe { DeviceRows::new(x.pointer, rows as u32, row_bytes, StreamId::of_engine(self.stream())) })
    }

    /// A copy of rows of numbers `stored`, in the backend's own.
    pub(crate) fn take_in(&self, rows: DeviceRows<'_>, stored: Activations) -> Result<Tensor> {
        if rows.order() != StreamId::of_engine(self.stream()) {
            return Err(KernelError::Mixed { op: "take_in" });
        }
        let (count, width) = (rows.rows() as usize, rows.row_bytes() as usize / stored.size());
        let copy = self.output("take_in", stored, count * width)?;
        self.copy("take_in", rows.ptr(), copy.pointer, count * width * stored.size())?;
        self.convert(&copy.into_tensor(count, width), self.numbers())
    }

    /// The first row with a value that is not finite; waits for everything submitted.
    pub(crate) fn first_not_finite(&self, x: &Tensor) -> Result<Option<usize>> {
        const OP: &str = "first_not_finite";
        let (rows, width) = x.dims2()?;
        let x = self.operand_of(OP, x)?;
        let found = self.upload(OP, &[u32::MAX])?;
        let arguments = (x.pointer, found.pointer(), width as u32);
        // SAFETY: x has `rows` rows of `width` numbers, `found` one word.
        unsafe { self.launch(&format!("{OP}_{}", x.numbers.name()), Grid::new(rows, 1, 1), arguments) }?;
        let found = self.download(OP, &found)?;
        Ok(found.first().filter(|&&row| row != u32::MAX).map(|&row| row as usize))
    }

    /// Index of each row's largest value, the lowest among equals, of float32 `[rows, width]`.
    ///
    /// # Errors
    /// A NaN, other numbers than float32, or a tensor that is not contiguous on this GPU.
    pub fn argmax(&self, x: &Tensor) -> Result<Vec<u32>> {
        let (rows, width) = x.dims2()?;
        let x = self.operand_of("argmax", x)?;
        if x.numbers != Activations::F32 || width == 0 {
            return Err(shape("argmax", "logits", &[rows, width], "float32 rows, not empty"));
        }
        let found = self.alloc::<[u32; 2]>("argmax", rows)?;
        // SAFETY: x has `rows` rows of `width` numbers, `found` a pair a row.
        unsafe {
            let arguments = (x.pointer, found.pointer(), width as u32);
            self.launch("argmax_f32", Grid::new(rows, 1, 1), arguments)
        }?;
        let found = self.download("argmax", &found)?;
        found
            .into_iter()
            .map(|[id, nan]| match nan {
                u32::MAX => Ok(id),
                index => Err(KernelError::NotANumber { op: "argmax", index: index as usize }),
            })
            .collect()
    }

    /// Copies bytes between device addresses.
    pub(super) fn copy(&self, what: &'static str, from: u64, to: u64, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        self.bind(what)?;
        let stream = self.stream().cu_stream();
        // SAFETY: the caller names `bytes` bytes inside live allocations; the copy takes its turn on the stream.
        unsafe { cudarc::driver::result::memcpy_dtod_async(to, from, bytes, stream) }.map_err(failed(what))
    }
}
