//! Eight f32 lanes: the operations every kernel is written in, and their plain Rust spelling.

/// Eight f32 lanes of one instruction set.
///
/// # Safety
/// Every method needs the instruction set of `Self`; pointers must be valid for what the method
/// names, with no alignment needed.
pub(crate) trait Lanes: Copy {
    /// Eight 32-bit words as loaded, before nibbles are taken out.
    type Words: Copy;

    unsafe fn splat(value: f32) -> Self;
    /// Loads 8 values.
    unsafe fn load(from: *const f32) -> Self;
    /// Loads `count` < 8 values, zero in the other lanes.
    unsafe fn load_part(from: *const f32, count: usize) -> Self;
    /// Stores 8 values.
    unsafe fn store(self, to: *mut f32);
    /// Stores the first `count` < 8 values.
    unsafe fn store_part(self, to: *mut f32, count: usize);
    unsafe fn add(self, other: Self) -> Self;
    unsafe fn mul(self, other: Self) -> Self;
    unsafe fn div(self, other: Self) -> Self;
    /// `self * factor + addend`, rounded once.
    unsafe fn fma(self, factor: Self, addend: Self) -> Self;
    /// `self > other ? self : other`: a NaN in `other` stays.
    unsafe fn max(self, other: Self) -> Self;
    /// `self < other ? self : other`: a NaN in `other` stays.
    unsafe fn min(self, other: Self) -> Self;
    /// Nearest integer, ties to even.
    unsafe fn round(self) -> Self;
    /// `2^self` for integers in -126..=127.
    unsafe fn exp2_integer(self) -> Self;
    /// 8 words of two bf16 each: the low halves and the high halves, widened.
    unsafe fn bf16_pairs(from: *const u8) -> (Self, Self);
    /// Loads 8 words.
    unsafe fn words(from: *const u8) -> Self::Words;
    /// Nibble `J` of each word left in its place, as a number: `u * 2^(4 J)`, signed for `J` = 7.
    unsafe fn nibble<const J: u32>(words: Self::Words) -> Self;
    /// `((0+4)+(2+6)) + ((1+5)+(3+7))`.
    unsafe fn sum(self) -> f32;
}

/// Plain Rust lanes.
#[derive(Clone, Copy)]
pub(crate) struct Scalar([f32; 8]);

impl Scalar {
    #[inline(always)]
    fn zip(self, other: Self, op: impl Fn(f32, f32) -> f32) -> Self {
        Scalar(std::array::from_fn(|i| op(self.0[i], other.0[i])))
    }
}

impl Lanes for Scalar {
    type Words = [u32; 8];

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        Scalar([value; 8])
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller gives 8 readable values.
        Scalar(unsafe { from.cast::<[f32; 8]>().read_unaligned() })
    }

    #[inline(always)]
    unsafe fn load_part(from: *const f32, count: usize) -> Self {
        let mut lanes = [0.0; 8];
        // SAFETY: the caller gives `count` < 8 readable values.
        unsafe { std::ptr::copy_nonoverlapping(from, lanes.as_mut_ptr(), count) };
        Scalar(lanes)
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller gives room for 8 values.
        unsafe { to.cast::<[f32; 8]>().write_unaligned(self.0) }
    }

    #[inline(always)]
    unsafe fn store_part(self, to: *mut f32, count: usize) {
        // SAFETY: the caller gives room for `count` < 8 values.
        unsafe { std::ptr::copy_nonoverlapping(self.0.as_ptr(), to, count) }
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        self.zip(other, |a, b| a + b)
    }

    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        self.zip(other, |a, b| a * b)
    }

    #[inline(always)]
    unsafe fn div(self, other: Self) -> Self {
        self.zip(other, |a, b| a / b)
    }

    #[inline(always)]
    unsafe fn fma(self, factor: Self, addend: Self) -> Self {
        Scalar(std::array::from_fn(|i| self.0[i].mul_add(factor.0[i], addend.0[i])))
    }

    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        self.zip(other, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    unsafe fn min(self, other: Self) -> Self {
        self.zip(other, |a, b| if a < b { a } else { b })
    }

    #[inline(always)]
    unsafe fn round(self) -> Self {
        Scalar(self.0.map(f32::round_ties_even))
    }

    #[inline(always)]
    unsafe fn exp2_integer(self) -> Self {
        Scalar(self.0.map(|n| f32::from_bits(((n as i32).wrapping_add(127) as u32) << 23)))
    }

    #[inline(always)]
    unsafe fn bf16_pairs(from: *const u8) -> (Self, Self) {
        // SAFETY: the caller gives 32 readable bytes.
        let words = unsafe { Self::words(from) };
        let low = words.map(|w| f32::from_bits(w << 16));
        let high = words.map(|w| f32::from_bits(w & 0xffff_0000));
        (Scalar(low), Scalar(high))
    }

    #[inline(always)]
    unsafe fn words(from: *const u8) -> [u32; 8] {
        // SAFETY: the caller gives 32 readable bytes.
        unsafe { from.cast::<[u32; 8]>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn nibble<const J: u32>(words: [u32; 8]) -> Self {
        Scalar(words.map(|w| (w & (0xf << (4 * J))) as i32 as f32))
    }

    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        let v = self.0;
        ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]))
    }
}
