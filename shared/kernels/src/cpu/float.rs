//! Products of rows with float tiles of 16 outputs: lanes along outputs, k in order, one chain an output.

use super::{Kernel, Lanes};

/// One k of a tile of 16 outputs.
pub(crate) trait Format {
    /// Bytes of one k.
    const BYTES: usize;

    /// Outputs 0..8 and 8..16 at one k.
    ///
    /// # Safety
    /// As for [`Lanes`]; `BYTES` readable bytes at `from`.
    unsafe fn load<V: Lanes>(from: *const u8) -> (V, V);
}

/// 8 words a k: output i in the low half of word i, output i + 8 in the high half.
pub(crate) struct Bf16;

impl Format for Bf16 {
    const BYTES: usize = 32;

    #[inline(always)]
    unsafe fn load<V: Lanes>(from: *const u8) -> (V, V) {
        // SAFETY: same contract.
        unsafe { V::bf16_pairs(from) }
    }
}

/// 16 values a k.
pub(crate) struct F32;

impl Format for F32 {
    const BYTES: usize = 64;

    #[inline(always)]
    unsafe fn load<V: Lanes>(from: *const u8) -> (V, V) {
        // SAFETY: same contract: two vectors of 32 bytes.
        unsafe { (V::load(from.cast()), V::load(from.add(32).cast())) }
    }
}

/// `R` rows times `T` neighbouring tiles.
pub(crate) struct FloatTiles<'a, F, const R: usize, const T: usize> {
    weights: &'a [u8],
    rows: [&'a [f32]; R],
    out: [&'a mut [f32]; R],
    format: std::marker::PhantomData<F>,
}

impl<'a, F: Format, const R: usize, const T: usize> FloatTiles<'a, F, R, T> {
    /// `weights` starts at the first tile; `rows` are `k` wide; `out` takes `16 T` values a row.
    pub(crate) fn new(k: usize, weights: &'a [u8], rows: [&'a [f32]; R], out: [&'a mut [f32]; R]) -> Self {
        assert!(weights.len() >= T * k * F::BYTES && rows.iter().all(|row| row.len() == k));
        assert!(out.iter().all(|out| out.len() >= 16 * T));
        FloatTiles { weights, rows, out, format: std::marker::PhantomData }
    }
}

impl<F: Format, const R: usize, const T: usize> Kernel for FloatTiles<'_, F, R, T> {
    type Out = ();

    #[inline(always)]
    unsafe fn run<V: Lanes>(self) {
        let k = self.rows[0].len();
        let rows = self.rows.map(<[f32]>::as_ptr);
        let mut tile = self.weights.as_ptr();
        // SAFETY: `new` checked that T tiles, R rows of k and R outputs of 16 T values are there.
        unsafe {
            let mut sums = [[[V::splat(0.0); 2]; R]; T];
            for i in 0..k {
                for (t, sums) in sums.iter_mut().enumerate() {
                    let (low, high) = F::load::<V>(tile.add(t * k * F::BYTES));
                    for (sum, row) in sums.iter_mut().zip(rows) {
                        let x = V::splat(*row.add(i));
                        sum[0] = low.fma(x, sum[0]);
                        sum[1] = high.fma(x, sum[1]);
                    }
                }
                tile = tile.add(F::BYTES);
            }
            let out = self.out.map(<[f32]>::as_mut_ptr);
            for (t, sums) in sums.into_iter().enumerate() {
                for ([low, high], out) in sums.into_iter().zip(out) {
                    low.store(out.add(16 * t));
                    high.store(out.add(16 * t + 8));
                }
            }
        }
    }
}
