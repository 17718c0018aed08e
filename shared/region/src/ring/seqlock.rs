//! The stamp protocol of one ring slot, apart from the memory it lies in.

use std::ops::Range;

// Named by the parent: `tests/loom.rs` compiles this file over atomics that a model checker explores.
use super::atomic::{AtomicU32, AtomicU64, Ordering, fence};

/// The stamps of a sequence lock around a payload that is copied in between, here or on a device.
///
/// Why a copy that passes is whole: the writer makes `before` odd, then fences (release), then stores the payload.
/// A reader that has loaded any word of that payload and then fences (acquire) is ordered after the odd stamp, so
/// its second look at `before` cannot return the earlier stamp. Likewise the stamp that ends a write is a release
/// store: a reader that saw it and fences sees the whole payload. The reader uses relaxed loads and fences, because
/// its mapping is read-only and only relaxed loads are sure not to write. A copy on a device is ordered by its beginning,
/// which follows the odd stamp, and by the wait for its end, which the even stamp follows.
///
/// `after` repeats the stamp behind the payload. It never holds an odd value or a generation whose payload is
/// incomplete, so a writer that died half-way, or a reference that is itself odd, cannot pass.
#[derive(Clone, Copy)]
pub(super) struct Stamps<'a> {
    pub(super) before: &'a AtomicU64,
    pub(super) rows: &'a AtomicU32,
    pub(super) after: &'a AtomicU64,
}

impl Stamps<'_> {
    /// Takes the slot out of use, to be filled with `rows` rows under the even stamp `generation`. There is one writer.
    pub(super) fn begin(&self, generation: u64, rows: u32) {
        debug_assert!(generation != 0 && generation.is_multiple_of(2));
        self.before.store(generation - 1, Ordering::Relaxed);
        fence(Ordering::Release);
        self.rows.store(rows, Ordering::Relaxed);
    }

    /// Puts the slot into use: its payload is complete.
    pub(super) fn end(&self, generation: u64) {
        self.after.store(generation, Ordering::Release);
        self.before.store(generation, Ordering::Release);
    }

    /// The rows stored under the stamp `wanted`, or the stamp found in its place. What is copied from here on counts once
    /// [`leave`](Self::leave) has agreed, the rows included.
    pub(super) fn enter(&self, wanted: u64) -> Result<u32, u64> {
        let found = self.before.load(Ordering::Relaxed);
        if found != wanted || wanted == 0 {
            return Err(found);
        }
        fence(Ordering::Acquire);
        Ok(self.rows.load(Ordering::Relaxed))
    }

    /// Whether all that was copied since [`enter`](Self::enter) is of the stamp `wanted`, or the stamp found.
    pub(super) fn leave(&self, wanted: u64) -> Result<(), u64> {
        fence(Ordering::Acquire);
        for stamp in [self.before, self.after] {
            let found = stamp.load(Ordering::Relaxed);
            if found != wanted {
                return Err(found);
            }
        }
        Ok(())
    }
}

/// A slot whose payload is copied word by word with relaxed atomics, so that a copy that races with the writer is a wrong
/// value to be thrown away and not undefined behaviour.
#[derive(Clone, Copy)]
pub(super) struct Seqlock<'a> {
    pub(super) stamps: Stamps<'a>,
    pub(super) payload: &'a [AtomicU32],
}

impl Seqlock<'_> {
    /// Stores `values`, which fit the payload, under the even stamp `generation`.
    pub(super) fn write(&self, generation: u64, rows: u32, values: &[f32]) {
        debug_assert!(values.len() <= self.payload.len());
        self.stamps.begin(generation, rows);
        for (word, value) in self.payload.iter().zip(values) {
            word.store(value.to_bits(), Ordering::Relaxed);
        }
        self.stamps.end(generation);
    }

    /// Appends the words of `range` to `out` and returns the rows stored with them, or the stamp found in place of
    /// `wanted`; what was appended is then worthless. `range` lies within the payload.
    pub(super) fn read(&self, wanted: u64, range: Range<usize>, out: &mut Vec<f32>) -> Result<u32, u64> {
        let rows = self.stamps.enter(wanted)?;
        out.extend(self.payload[range].iter().map(|word| f32::from_bits(word.load(Ordering::Relaxed))));
        self.stamps.leave(wanted)?;
        Ok(rows)
    }
}
