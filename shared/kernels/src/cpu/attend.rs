//! Attention of a few heads of one row over the same keys: scores and weighted sums of values.
//!
//! A score is one chain in eight lanes; a value sum is one chain a column, keys in order.

use super::exp::softmax_in_place;
use super::{Isa, Kernel, Lanes};

/// Heads that share their loads of keys and values.
pub(crate) const HEADS: usize = 4;

/// Where the keys and values of a row lie: `base[slot * stride + key..][..key_width]` and
/// `base[slot * stride + value..][..value_width]` for each slot in logical order.
#[derive(Clone, Copy)]
pub(crate) struct Keys<'a> {
    pub(crate) base: &'a [f32],
    pub(crate) stride: usize,
    pub(crate) slots: &'a [u32],
    pub(crate) key: usize,
    pub(crate) key_width: usize,
    pub(crate) value: usize,
    pub(crate) value_width: usize,
}

/// Attends `heads` <= [`HEADS`] heads: `queries` is `[heads, key_width]`, `out` `[heads, value_width]`,
/// `scores` scratch of `heads * slots` values.
pub(crate) fn attend(
    isa: Isa,
    heads: usize,
    keys: Keys<'_>,
    queries: &[f32],
    scale: f32,
    scores: &mut [f32],
    out: &mut [f32],
) {
    let count = keys.slots.len();
    assert!(queries.len() == heads * keys.key_width && out.len() == heads * keys.value_width);
    assert!(scores.len() == heads * count && count > 0);
    assert!(keys.key + keys.key_width <= keys.stride && keys.value + keys.value_width <= keys.stride);
    let rows = keys.base.len() / keys.stride;
    assert!(keys.slots.iter().all(|&slot| (slot as usize) < rows));
    match heads {
        1 => attend_heads::<1>(isa, keys, queries, scale, scores, out),
        2 => attend_heads::<2>(isa, keys, queries, scale, scores, out),
        3 => attend_heads::<3>(isa, keys, queries, scale, scores, out),
        _ => attend_heads::<HEADS>(isa, keys, queries, scale, scores, out),
    }
}

fn attend_heads<const H: usize>(
    isa: Isa,
    keys: Keys<'_>,
    queries: &[f32],
    scale: f32,
    scores: &mut [f32],
    out: &mut [f32],
) {
    assert!(queries.len() == H * keys.key_width);
    isa.run(Scores::<H> { keys, queries, scale, scores });
    for head in scores.chunks_exact_mut(keys.slots.len()) {
        softmax_in_place(isa, head);
    }
    isa.run(Values::<H> { keys, weights: scores, out });
}

struct Scores<'a, const H: usize> {
    keys: Keys<'a>,
    queries: &'a [f32],
    scale: f32,
    scores: &'a mut [f32],
}

impl<const H: usize> Scores<'_, H> {
    /// Scores of keys `first..first + K`.
    ///
    /// # Safety
    /// As for [`Lanes`]; the bounds that `attend` checks.
    #[inline(always)]
    unsafe fn block<V: Lanes, const K: usize>(&mut self, first: usize) {
        let keys = self.keys;
        let width = keys.key_width;
        let count = keys.slots.len();
        // SAFETY: slots lie inside `base` and columns inside a slot; `first + K <= count`.
        unsafe {
            let at: [*const f32; K] = std::array::from_fn(|k| {
                let slot = *keys.slots.get_unchecked(first + k) as usize;
                keys.base.as_ptr().add(slot * keys.stride + keys.key)
            });
            let query = self.queries.as_ptr();
            let mut sums = [[V::splat(0.0); K]; H];
            let whole = width / 8 * 8;
            for i in (0..whole).step_by(8) {
                let key: [V; K] = std::array::from_fn(|k| V::load(at[k].add(i)));
                for (h, sums) in sums.iter_mut().enumerate() {
                    let q = V::load(query.add(h * width + i));
                    for (sum, key) in sums.iter_mut().zip(key) {
                        *sum = q.fma(key, *sum);
                    }
                }
            }
            let rest = width - whole;
            if rest > 0 {
                for (h, sums) in sums.iter_mut().enumerate() {
                    let q = V::load_part(query.add(h * width + whole), rest);
                    for (sum, at) in sums.iter_mut().zip(at) {
                        *sum = q.fma(V::load_part(at.add(whole), rest), *sum);
                    }
                }
            }
            for (h, sums) in sums.into_iter().enumerate() {
                for (k, sum) in sums.into_iter().enumerate() {
                    *self.scores.get_unchecked_mut(h * count + first + k) = sum.sum() * self.scale;
                }
            }
        }
    }
}

impl<const H: usize> Kernel for Scores<'_, H> {
    type Out = ();

    #[inline(always)]
    unsafe fn run<V: Lanes>(mut self) {
        let count = self.keys.slots.len();
        let mut first = 0;
        // SAFETY: `attend` checked the bounds; `first + K <= count` in each call.
        unsafe {
            if H <= 2 {
                while first + 4 <= count {
                    self.block::<V, 4>(first);
                    first += 4;
                }
            }
            while first + 2 <= count {
                self.block::<V, 2>(first);
                first += 2;
            }
            if first < count {
                self.block::<V, 1>(first);
            }
        }
    }
}

struct Values<'a, const H: usize> {
    keys: Keys<'a>,
    weights: &'a [f32],
    out: &'a mut [f32],
}

impl<const H: usize> Values<'_, H> {
    /// Columns `column..column + 8 C`, or the last `rest` < 8 columns if `rest` is not 0.
    ///
    /// # Safety
    /// As for [`Lanes`]; the bounds that `attend` checks.
    #[inline(always)]
    unsafe fn block<V: Lanes, const C: usize>(&mut self, column: usize, rest: usize) {
        let keys = self.keys;
        let count = keys.slots.len();
        // SAFETY: slots lie inside `base` and columns inside a slot; weights are `H * count`.
        unsafe {
            let base = keys.base.as_ptr().add(keys.value + column);
            let weights = self.weights.as_ptr();
            let mut sums = [[V::splat(0.0); C]; H];
            for k in 0..count {
                let row = base.add(*keys.slots.get_unchecked(k) as usize * keys.stride);
                let value: [V; C] = if rest > 0 {
                    [V::load_part(row, rest); C]
                } else {
                    std::array::from_fn(|c| V::load(row.add(8 * c)))
                };
                for (h, sums) in sums.iter_mut().enumerate() {
                    let weight = V::splat(*weights.add(h * count + k));
                    for (sum, value) in sums.iter_mut().zip(value) {
                        *sum = value.fma(weight, *sum);
                    }
                }
            }
            for (h, sums) in sums.into_iter().enumerate() {
                let out = self.out.as_mut_ptr().add(h * keys.value_width + column);
                for (c, sum) in sums.into_iter().enumerate() {
                    if rest > 0 { sum.store_part(out, rest) } else { sum.store(out.add(8 * c)) }
                }
            }
        }
    }
}

impl<const H: usize> Kernel for Values<'_, H> {
    type Out = ();

    #[inline(always)]
    unsafe fn run<V: Lanes>(mut self) {
        let width = self.keys.value_width;
        let mut column = 0;
        // SAFETY: `attend` checked the bounds; the columns of each call lie within `width`.
        unsafe {
            if H == 1 {
                while column + 64 <= width {
                    self.block::<V, 8>(column, 0);
                    column += 64;
                }
            }
            if H <= 3 {
                while column + 32 <= width {
                    self.block::<V, 4>(column, 0);
                    column += 32;
                }
            }
            while column + 16 <= width {
                self.block::<V, 2>(column, 0);
                column += 16;
            }
            while column + 8 <= width {
                self.block::<V, 1>(column, 0);
                column += 8;
            }
            if column < width {
                self.block::<V, 1>(column, width - column);
            }
        }
    }
}
