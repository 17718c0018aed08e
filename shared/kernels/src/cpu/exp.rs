//! exp, SiLU and sigmoid from one polynomial, and the softmax built on it.

use super::{Isa, Kernel, Lanes};

/// Arguments are clamped to this range, in which `2^n` stays a normal number.
const LOW: f32 = -87.3;
const HIGH: f32 = 88.0;
const LOG2_E: f32 = std::f32::consts::LOG2_E;
// ln 2 in two parts: the first has few enough bits that n times it is exact.
const LN2_HIGH: f32 = 0.693_359_4;
const LN2_LOW: f32 = -2.121_944_4e-4;
const POLYNOMIAL: [f32; 6] =
    [1.987_569_1e-4, 1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5];

/// # Safety
/// The machine has the instruction set of `V`.
#[inline(always)]
unsafe fn exp<V: Lanes>(x: V) -> V {
    // SAFETY: same contract; no pointers.
    unsafe {
        // The constant is the first operand, so that a NaN passes the clamp.
        let x = V::splat(HIGH).min(V::splat(LOW).max(x));
        let n = x.mul(V::splat(LOG2_E)).round();
        let r = n.fma(V::splat(-LN2_LOW), n.fma(V::splat(-LN2_HIGH), x));
        let mut p = V::splat(POLYNOMIAL[0]);
        for c in &POLYNOMIAL[1..] {
            p = p.fma(r, V::splat(*c));
        }
        p.fma(r.mul(r), r).add(V::splat(1.0)).mul(n.exp2_integer())
    }
}

/// # Safety
/// The machine has the instruction set of `V`.
#[inline(always)]
unsafe fn sigmoid<V: Lanes>(x: V) -> V {
    // SAFETY: same contract; no pointers.
    unsafe { V::splat(1.0).div(V::splat(1.0).add(exp(x.mul(V::splat(-1.0))))) }
}

/// # Safety
/// The machine has the instruction set of `V`.
#[inline(always)]
unsafe fn silu<V: Lanes>(x: V) -> V {
    // SAFETY: same contract; no pointers.
    unsafe { x.div(V::splat(1.0).add(exp(x.mul(V::splat(-1.0))))) }
}

struct SigmoidInPlace<'a>(&'a mut [f32]);

impl Kernel for SigmoidInPlace<'_> {
    type Out = ();

    #[inline(always)]
    unsafe fn run<V: Lanes>(self) {
        let mut blocks = self.0.chunks_exact_mut(8);
        for block in &mut blocks {
            // SAFETY: the block has 8 values; instruction set by contract.
            unsafe { sigmoid(V::load(block.as_ptr())).store(block.as_mut_ptr()) }
        }
        let rest = blocks.into_remainder();
        // SAFETY: `rest` has fewer than 8 values.
        unsafe { sigmoid(V::load_part(rest.as_ptr(), rest.len())).store_part(rest.as_mut_ptr(), rest.len()) }
    }
}

/// `x = sigmoid(x)`.
pub(crate) fn sigmoid_in_place(isa: Isa, x: &mut [f32]) {
    isa.run(SigmoidInPlace(x));
}

struct SiluMul<'a> {
    gate: &'a [f32],
    up: &'a [f32],
    out: &'a mut [f32],
}

impl Kernel for SiluMul<'_> {
    type Out = ();

    #[inline(always)]
    unsafe fn run<V: Lanes>(self) {
        let SiluMul { gate, up, out } = self;
        let whole = out.len() / 8 * 8;
        let rest = out.len() - whole;
        for i in (0..whole).step_by(8) {
            // SAFETY: the three slices have equal lengths (checked by `silu_mul`), `i + 8` within.
            unsafe {
                let g = silu(V::load(gate.as_ptr().add(i)));
                g.mul(V::load(up.as_ptr().add(i))).store(out.as_mut_ptr().add(i));
            }
        }
        // SAFETY: as above, `rest` values are left.
        unsafe {
            let g = silu(V::load_part(gate.as_ptr().add(whole), rest));
            g.mul(V::load_part(up.as_ptr().add(whole), rest)).store_part(out.as_mut_ptr().add(whole), rest);
        }
    }
}

/// `out = silu(gate) * up`, element by element.
pub(crate) fn silu_mul(isa: Isa, gate: &[f32], up: &[f32], out: &mut [f32]) {
    assert!(gate.len() == out.len() && up.len() == out.len());
    isa.run(SiluMul { gate, up, out });
}

struct Softmax<'a>(&'a mut [f32]);

impl Kernel for Softmax<'_> {
    type Out = ();

    #[inline(always)]
    unsafe fn run<V: Lanes>(self) {
        let x = self.0;
        // The maximum does not depend on the order in which it is taken.
        let top = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let whole = x.len() / 8 * 8;
        let rest = x.len() - whole;
        // SAFETY: all pointers stay within `x`; instruction set by contract.
        unsafe {
            let shift = V::splat(-top);
            let mut sum = V::splat(0.0);
            for i in (0..whole).step_by(8) {
                let e = exp(V::load(x.as_ptr().add(i)).add(shift));
                e.store(x.as_mut_ptr().add(i));
                sum = sum.add(e);
            }
            exp(V::load_part(x.as_ptr().add(whole), rest).add(shift))
                .store_part(x.as_mut_ptr().add(whole), rest);
            // Lane i of the sum owns the indices that are i modulo 8, whatever the length.
            sum = sum.add(V::load_part(x.as_ptr().add(whole), rest));
            let scale = V::splat(1.0 / sum.sum());
            for i in (0..whole).step_by(8) {
                V::load(x.as_ptr().add(i)).mul(scale).store(x.as_mut_ptr().add(i));
            }
            let tail = V::load_part(x.as_ptr().add(whole), rest).mul(scale);
            tail.store_part(x.as_mut_ptr().add(whole), rest);
        }
    }
}

/// `x = exp(x - max x) / sum`, the sum taken in eight lanes by index.
pub(crate) fn softmax_in_place(isa: Isa, x: &mut [f32]) {
    isa.run(Softmax(x));
}

#[cfg(test)]
mod tests {
    use super::*;

    struct ExpInPlace<'a>(&'a mut [f32]);

    impl Kernel for ExpInPlace<'_> {
        type Out = ();

        #[inline(always)]
        unsafe fn run<V: Lanes>(self) {
            for block in self.0.chunks_exact_mut(8) {
                // SAFETY: the block has 8 values.
                unsafe { exp(V::load(block.as_ptr())).store(block.as_mut_ptr()) }
            }
        }
    }

    fn grid() -> Vec<f32> {
        (0..200_000).map(|i| -87.0 + i as f32 * (174.9 / 200_000.0)).collect()
    }

    #[test]
    fn exp_is_accurate_and_the_same_everywhere() {
        let x = grid();
        let mut best = x.clone();
        Isa::best().run(ExpInPlace(&mut best));
        let mut scalar = x.clone();
        Isa::Scalar.run(ExpInPlace(&mut scalar));
        assert_eq!(best, scalar);
        let worst = x.iter().zip(&best).map(|(&x, &y)| (f64::from(y) / f64::from(x).exp() - 1.0).abs());
        let worst = worst.fold(0.0, f64::max);
        assert!(worst < 1.2e-7, "relative error {worst:e}");
    }

    #[test]
    fn sigmoid_is_accurate_and_keeps_nan() {
        let x = grid();
        let mut y = x.clone();
        sigmoid_in_place(Isa::best(), &mut y);
        for (x, y) in x.iter().zip(&y) {
            let want = 1.0 / (1.0 + (-f64::from(*x)).exp());
            assert!((f64::from(*y) / want - 1.0).abs() < 2.5e-7, "sigmoid({x}) = {y}, want {want}");
        }
        for isa in [Isa::Scalar, Isa::best()] {
            let mut y = [f32::NAN, 1e30, -1e30];
            sigmoid_in_place(isa, &mut y);
            assert!(y[0].is_nan() && y[1] == 1.0 && y[2] < 1e-37);
        }
    }

    #[test]
    fn silu_mul_is_accurate_and_the_same_everywhere() {
        for len in [1, 13, 39, 64, 700] {
            let gate: Vec<f32> = (0..len).map(|i| ((i * 37 % 101) as f32 - 50.0) / 4.2).collect();
            let up: Vec<f32> = (0..len).map(|i| ((i * 53 % 97) as f32 - 48.0) / 16.0).collect();
            let (mut a, mut b) = (vec![0.0; len], vec![0.0; len]);
            silu_mul(Isa::Scalar, &gate, &up, &mut a);
            silu_mul(Isa::best(), &gate, &up, &mut b);
            assert_eq!(a, b);
            for ((&g, &u), &y) in gate.iter().zip(&up).zip(&a) {
                let want = f64::from(g) / (1.0 + (-f64::from(g)).exp()) * f64::from(u);
                assert!((f64::from(y) - want).abs() < 8e-6, "silu({g}) * {u} = {y}, want {want}");
            }
        }
    }

    #[test]
    fn softmax_sums_by_index() {
        for len in [1, 7, 8, 9, 64, 133] {
            let x: Vec<f32> = (0..len).map(|i| ((i * 37 % 101) as f32 - 50.0) / 9.0).collect();
            let (mut a, mut b) = (x.clone(), x.clone());
            softmax_in_place(Isa::Scalar, &mut a);
            softmax_in_place(Isa::best(), &mut b);
            assert_eq!(a, b);
            let sum: f64 = x.iter().map(|&v| f64::from(v).exp()).sum();
            for (&x, &p) in x.iter().zip(&a) {
                assert!((f64::from(p) - f64::from(x).exp() / sum).abs() < 1e-6);
            }
        }
    }
}
