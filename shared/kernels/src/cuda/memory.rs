//! Device memory: buffers, and the way between tensors and pointers.

use candle_core::cuda_backend::CudaStorageSlice;
use candle_core::op::BackpropOp;
use candle_core::{CudaStorage, Layout, Shape, Storage, Tensor};
use cudarc::driver::{CudaSlice, DevicePtr, DeviceRepr, DriverError, result, sys};
use half::bf16;

use super::{Activations, Cuda, failed};
use crate::error::{KernelError, Result, limit, shape};

/// An allocation of the stream's pool; freed in the stream's order.
#[derive(Debug)]
pub(crate) struct Buffer<T> {
    /// One element at least: the driver allocates nothing of no bytes.
    slice: CudaSlice<T>,
    len: usize,
}

impl<T> Buffer<T> {
    /// Address on the device.
    pub(crate) fn pointer(&self) -> u64 {
        self.slice.device_ptr(self.slice.stream()).0
    }

    /// Number of elements.
    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

/// A tensor's values as a kernel reads them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Operand {
    pub(crate) pointer: u64,
    pub(crate) numbers: Activations,
    pub(crate) len: usize,
}

impl Operand {
    /// `len` numbers from number `at` on.
    pub(crate) fn part(self, at: usize, len: usize) -> Operand {
        Operand { pointer: self.pointer + (at * self.numbers.size()) as u64, len, ..self }
    }
}

/// The result of a kernel before it is a tensor.
#[derive(Debug)]
pub(crate) struct Output {
    storage: CudaStorage,
    pub(crate) pointer: u64,
    pub(crate) numbers: Activations,
}

impl Output {
    /// Its first `len` numbers, for the next kernel.
    pub(crate) fn operand(&self, len: usize) -> Operand {
        Operand { pointer: self.pointer, numbers: self.numbers, len }
    }

    /// As a tensor `[rows, width]`.
    pub(crate) fn into_tensor(self, rows: usize, width: usize) -> Tensor {
        Tensor::from_storage(
            Storage::Cuda(self.storage),
            Shape::from((rows, width)),
            BackpropOp::none(),
            false,
        )
    }
}

impl Cuda {
    /// `len` elements of memory as it comes.
    pub(crate) fn alloc<T: DeviceRepr>(&self, what: &'static str, len: usize) -> Result<Buffer<T>> {
        // SAFETY: whoever asks writes before reading, in the stream's order.
        let slice = unsafe { self.stream().alloc::<T>(len.max(1)) };
        match slice {
            Ok(slice) => Ok(Buffer { slice, len }),
            Err(error) => Err(self.no_memory(what, len * size_of::<T>(), error)),
        }
    }

    /// `len` zero elements.
    pub(crate) fn zeros(&self, what: &'static str, len: usize) -> Result<Buffer<u8>> {
        let slice = self.stream().alloc_zeros::<u8>(len.max(1));
        match slice {
            Ok(slice) => Ok(Buffer { slice, len }),
            Err(error) => Err(self.no_memory(what, len, error)),
        }
    }

    fn no_memory(&self, what: &'static str, wanted: usize, error: DriverError) -> KernelError {
        match (error.0, self.memory()) {
            (sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY, Ok((free, total))) => {
                KernelError::GpuMemory { what, wanted, free, total }
            }
            _ => failed(what)(error),
        }
    }

    /// A copy of host values.
    pub(crate) fn upload<T: DeviceRepr>(&self, what: &'static str, values: &[T]) -> Result<Buffer<T>> {
        let mut buffer = self.alloc(what, values.len())?;
        self.write(what, values, &mut buffer, 0)?;
        Ok(buffer)
    }

    /// Copies host values to element `at` of a buffer.
    pub(crate) fn write<T: DeviceRepr>(
        &self,
        what: &'static str,
        values: &[T],
        buffer: &mut Buffer<T>,
        at: usize,
    ) -> Result<()> {
        if values.is_empty() {
            return Ok(());
        }
        let room = buffer.len;
        let Some(mut view) = buffer.slice.try_slice_mut(at..at + values.len()) else {
            return Err(shape("write", what, &[at, values.len()], format!("within {room} elements")));
        };
        self.stream().memcpy_htod(values, &mut view).map_err(failed(what))
    }

    /// Copies host values to an address.
    pub(crate) fn write_at<T>(&self, what: &'static str, values: &[T], to: u64) -> Result<()> {
        if values.is_empty() {
            return Ok(());
        }
        self.bind(what)?;
        // SAFETY: the caller names room for the values inside a live allocation; the copy takes its turn on the stream
        // and the driver has read the host's values when it returns.
        unsafe { result::memcpy_htod_async(to, values, self.stream().cu_stream()) }.map_err(failed(what))
    }

    /// `len` values from an address on the host; waits for everything submitted.
    pub(crate) fn read_at<T: DeviceRepr + Default + Copy>(
        &self,
        what: &'static str,
        from: u64,
        len: usize,
    ) -> Result<Vec<T>> {
        let mut values = vec![T::default(); len];
        self.bind(what)?;
        // SAFETY: the caller names `len` values inside a live allocation; the copy is waited for before they are used.
        unsafe { result::memcpy_dtoh_async(&mut values, from, self.stream().cu_stream()) }
            .map_err(failed(what))?;
        self.synchronize()?;
        Ok(values)
    }

    /// The values on the host; waits for everything submitted.
    pub(crate) fn download<T: DeviceRepr>(&self, what: &'static str, buffer: &Buffer<T>) -> Result<Vec<T>> {
        let mut values = self.stream().clone_dtoh(&buffer.slice).map_err(failed(what))?;
        values.truncate(buffer.len);
        Ok(values)
    }

    /// The values of a contiguous operand of a custom op.
    pub(crate) fn operand(
        &self,
        op: &'static str,
        storage: &CudaStorage,
        layout: &Layout,
    ) -> Result<Operand> {
        let (start, end) =
            layout.contiguous_offsets().ok_or_else(|| candle_core::Error::RequiresContiguous { op }.bt())?;
        if storage.device.id() != self.candle().id() {
            return Err(KernelError::Mixed { op });
        }
        let stream = self.stream();
        let (base, numbers) = match &storage.slice {
            CudaStorageSlice::F32(s) => (s.device_ptr(stream).0, Activations::F32),
            CudaStorageSlice::BF16(s) => (s.device_ptr(stream).0, Activations::Bf16),
            _ => {
                let want = candle_core::Error::Msg(format!("{op}: activations must be f32 or bf16"));
                return Err(want.into());
            }
        };
        Ok(Operand { pointer: base + (start * numbers.size()) as u64, numbers, len: end - start })
    }

    /// The same of a tensor.
    pub(crate) fn operand_of(&self, op: &'static str, tensor: &Tensor) -> Result<Operand> {
        let (storage, layout) = tensor.storage_and_layout();
        match &*storage {
            Storage::Cuda(storage) => self.operand(op, storage, layout),
            _ => Err(KernelError::Mixed { op }),
        }
    }

    /// A tensor of activations, in the backend's own numbers: what goes beside a cache.
    pub(crate) fn activation(&self, op: &'static str, tensor: &Tensor) -> Result<Operand> {
        let operand = self.operand_of(op, tensor)?;
        match operand.numbers == self.numbers() {
            true => Ok(operand),
            false => Err(limit(op, "activations", operand.numbers.name(), self.numbers().name())),
        }
    }

    /// Room for a result of `len` numbers.
    pub(crate) fn output(&self, op: &'static str, numbers: Activations, len: usize) -> Result<Output> {
        let device = self.candle().clone();
        let storage = match numbers {
            Activations::F32 => CudaStorage::wrap_cuda_slice(self.alloc::<f32>(op, len)?.slice, device),
            Activations::Bf16 => CudaStorage::wrap_cuda_slice(self.alloc::<bf16>(op, len)?.slice, device),
        };
        let pointer = self.operand(op, &storage, &Layout::contiguous(len))?.pointer;
        Ok(Output { storage, pointer, numbers })
    }
}
