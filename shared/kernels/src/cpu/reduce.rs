//! RMS normalisation of one row, the squares summed in fixed lanes.

use super::{Isa, Kernel, Lanes};

struct RmsNorm<'a> {
    x: &'a [f32],
    weight: &'a [f32],
    eps: f32,
    out: &'a mut [f32],
}

/// Vectors of the sum of squares: index i belongs to lane i modulo 32.
const CHAINS: usize = 4;

impl Kernel for RmsNorm<'_> {
    type Out = ();

    #[inline(always)]
    unsafe fn run<V: Lanes>(self) {
        let RmsNorm { x, weight, eps, out } = self;
        let whole = x.len() / 8 * 8;
        let rest = x.len() - whole;
        // SAFETY: the three slices have equal lengths (checked by `rms_norm`); all accesses stay within.
        unsafe {
            let mut squares = [V::splat(0.0); CHAINS];
            for i in (0..whole).step_by(8) {
                let v = V::load(x.as_ptr().add(i));
                let chain = &mut squares[i / 8 % CHAINS];
                *chain = v.fma(v, *chain);
            }
            let tail = V::load_part(x.as_ptr().add(whole), rest);
            squares[0] = tail.fma(tail, squares[0]);
            let sum = squares[0].add(squares[2]).add(squares[1].add(squares[3])).sum();
            let scale = V::splat(1.0 / (sum / x.len() as f32 + eps).sqrt());
            for i in (0..whole).step_by(8) {
                let v = V::load(x.as_ptr().add(i)).mul(scale);
                v.mul(V::load(weight.as_ptr().add(i))).store(out.as_mut_ptr().add(i));
            }
            let v = tail.mul(scale).mul(V::load_part(weight.as_ptr().add(whole), rest));
            v.store_part(out.as_mut_ptr().add(whole), rest);
        }
    }
}

/// `out = weight * (x / sqrt(mean(x^2) + eps))`.
pub(crate) fn rms_norm(isa: Isa, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    assert!(x.len() == weight.len() && x.len() == out.len());
    isa.run(RmsNorm { x, weight, eps, out });
}
