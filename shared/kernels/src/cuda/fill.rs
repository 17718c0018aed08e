//! Tensors that are made in device memory rather than copied there.

use eyrie_checkpoint::{Bytes, Fill, Numbers};
use eyrie_region::DeviceSpanMut;

use super::{Buffer, Cuda, Grid, THREADS};
use crate::error::{Result, limit, shape};

const OP: &str = "fill";
/// Blocks of a launch at most: each then makes several elements a thread.
const MOST_BLOCKS: usize = 1 << 14;

impl Cuda {
    /// Brings `bytes` to place `index` of a buffer of tensors of one size.
    pub(super) fn put(
        &self,
        op: &'static str,
        bytes: &Bytes,
        buffer: &mut Buffer<u8>,
        index: usize,
    ) -> Result<()> {
        let (at, room) = (index * bytes.len(), buffer.len());
        match bytes {
            Bytes::Mapped { .. } => self.write(op, &bytes.on_host()?, buffer, at),
            Bytes::Made(_) if at + bytes.len() > room => {
                Err(shape(OP, op, &[at, bytes.len()], format!("within {room} bytes")))
            }
            // SAFETY: within the buffer, which is borrowed exclusively and used in the stream's order.
            Bytes::Made(fill) => unsafe { self.fill(fill, buffer.pointer() + at as u64) },
        }
    }

    /// Makes `fill` in `memory`, from `offset` on, and waits.
    pub(crate) fn fill_memory(&self, fill: &Fill, memory: &mut DeviceSpanMut<'_>, offset: u64) -> Result<()> {
        let span = memory.span();
        if span.ordinal != self.ordinal() {
            let want = format!("memory of GPU {}", self.ordinal());
            return Err(limit(OP, "memory", format!("of GPU {}", span.ordinal), want));
        }
        if offset.checked_add(fill.byte_len() as u64).is_none_or(|end| end > span.len) {
            let got = [offset as usize, fill.byte_len()];
            return Err(shape(OP, "memory", &got, format!("within {} bytes", span.len)));
        }
        // SAFETY: within memory that is borrowed exclusively until the wait below has returned.
        unsafe { self.fill(fill, span.ptr + offset) }?;
        self.synchronize()
    }

    /// # Safety
    /// `to` starts room for the elements in live memory of this GPU, which nothing else uses until the stream is past this.
    unsafe fn fill(&self, fill: &Fill, to: u64) -> Result<()> {
        let Fill { key, numbers, elements } = *fill;
        if !to.is_multiple_of(numbers.size() as u64) {
            return Err(limit(
                OP,
                "address",
                format!("{to:#x}"),
                format!("a multiple of {}", numbers.size()),
            ));
        }
        let grid = Grid::new(elements.div_ceil(THREADS).min(MOST_BLOCKS), 1, 1);
        // SAFETY: the kernels write `elements` elements of their kind from `to` on, which is the caller's promise.
        unsafe {
            match numbers {
                Numbers::F32 { mean, step } => self.launch("fill_f32", grid, (key, to, mean, step, elements)),
                Numbers::Bf16 { mean, step } => {
                    self.launch("fill_bf16", grid, (key, to, mean, step, elements))
                }
                Numbers::Nibbles => self.launch("fill_nibbles", grid, (key, to, elements)),
            }
        }
    }
}
