//! Products of rows with INT4 tiles: 16 outputs by groups of 32 inputs with one bf16 scale each.
//!
//! A nibble is used where it lies in its word: the row is scaled by 2^-4j beforehand (exact), and the
//! offset 8 of the unsigned nibbles is one correction a group. Nibble 7 is stored signed.

use super::{Kernel, Lanes};

/// Inputs of one group.
pub(crate) const GROUP: usize = 32;
/// Bytes of one group of a tile: 16 bf16 scales in pairs, then 4 words of 8 nibbles for each output.
pub(crate) const GROUP_BYTES: usize = 32 + 4 * 64;

/// Scales one row in place and writes `-8 * sum` of each group's inputs that meet an unsigned nibble.
pub(crate) fn prepare(row: &mut [f32], corrections: &mut [f32]) {
    for (group, correction) in row.chunks_exact_mut(GROUP).zip(corrections) {
        let mut sums = [0.0_f32; 7];
        for word in group.chunks_exact_mut(8) {
            for (j, x) in word.iter_mut().enumerate() {
                if j < 7 {
                    sums[j] += *x;
                }
                *x *= f32::from_bits((127 - 4 * j as u32) << 23);
            }
        }
        *correction = -8.0 * (((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + sums[3]));
    }
}

/// `R` prepared rows times `T` neighbouring tiles.
pub(crate) struct Int4Tiles<'a, const R: usize, const T: usize> {
    weights: &'a [u8],
    rows: [&'a [f32]; R],
    corrections: [&'a [f32]; R],
    out: [&'a mut [f32]; R],
}

impl<'a, const R: usize, const T: usize> Int4Tiles<'a, R, T> {
    /// `weights` starts at the first tile; `rows` and `corrections` come from [`prepare`]; `out` takes
    /// `16 T` values a row.
    pub(crate) fn new(
        k: usize,
        weights: &'a [u8],
        rows: [&'a [f32]; R],
        corrections: [&'a [f32]; R],
        out: [&'a mut [f32]; R],
    ) -> Self {
        let groups = k / GROUP;
        assert!(k.is_multiple_of(GROUP) && weights.len() >= T * groups * GROUP_BYTES);
        assert!(rows.iter().all(|row| row.len() == k));
        assert!(corrections.iter().all(|row| row.len() == groups));
        assert!(out.iter().all(|out| out.len() >= 16 * T));
        Int4Tiles { weights, rows, corrections, out }
    }
}

type Sums<V, const R: usize, const T: usize> = [[[V; 2]; T]; R];

/// Adds input 8 w + `J` of a group to the sums.
///
/// # Safety
/// As for [`Lanes`]; `rows` point at input 8 w.
#[inline(always)]
unsafe fn step<V: Lanes, const R: usize, const T: usize, const J: u32>(
    words: &[[V::Words; 2]; T],
    rows: &[*const f32; R],
    sums: &mut Sums<V, R, T>,
) {
    // SAFETY: same contract.
    unsafe {
        for t in 0..T {
            let (low, high) = (V::nibble::<J>(words[t][0]), V::nibble::<J>(words[t][1]));
            for r in 0..R {
                let x = V::splat(*rows[r].add(J as usize));
                sums[r][t][0] = low.fma(x, sums[r][t][0]);
                sums[r][t][1] = high.fma(x, sums[r][t][1]);
            }
        }
    }
}

impl<const R: usize, const T: usize> Kernel for Int4Tiles<'_, R, T> {
    type Out = ();

    #[inline(always)]
    unsafe fn run<V: Lanes>(self) {
        let groups = self.corrections[0].len();
        let stride = groups * GROUP_BYTES;
        // SAFETY: `new` checked that T tiles, R rows, R correction rows and R outputs are there.
        unsafe {
            let mut totals: Sums<V, R, T> = [[[V::splat(0.0); 2]; T]; R];
            for g in 0..groups {
                let base = self.weights.as_ptr().add(g * GROUP_BYTES);
                let mut sums: Sums<V, R, T> =
                    std::array::from_fn(|r| [[V::splat(*self.corrections[r].as_ptr().add(g)); 2]; T]);
                for w in 0..4 {
                    let at = base.add(32 + 64 * w);
                    let words: [[V::Words; 2]; T] =
                        std::array::from_fn(|t| [0, 32].map(|half| V::words(at.add(t * stride + half))));
                    let rows = self.rows.map(|row| row.as_ptr().add(g * GROUP + 8 * w));
                    step::<V, R, T, 0>(&words, &rows, &mut sums);
                    step::<V, R, T, 1>(&words, &rows, &mut sums);
                    step::<V, R, T, 2>(&words, &rows, &mut sums);
                    step::<V, R, T, 3>(&words, &rows, &mut sums);
                    step::<V, R, T, 4>(&words, &rows, &mut sums);
                    step::<V, R, T, 5>(&words, &rows, &mut sums);
                    step::<V, R, T, 6>(&words, &rows, &mut sums);
                    step::<V, R, T, 7>(&words, &rows, &mut sums);
                }
                for t in 0..T {
                    let (low, high) = V::bf16_pairs(base.add(t * stride));
                    for r in 0..R {
                        totals[r][t][0] = low.fma(sums[r][t][0], totals[r][t][0]);
                        totals[r][t][1] = high.fma(sums[r][t][1], totals[r][t][1]);
                    }
                }
            }
            for (totals, out) in totals.into_iter().zip(self.out) {
                for (t, [low, high]) in totals.into_iter().enumerate() {
                    low.store(out.as_mut_ptr().add(16 * t));
                    high.store(out.as_mut_ptr().add(16 * t + 8));
                }
            }
        }
    }
}
