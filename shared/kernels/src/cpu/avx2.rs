//! The eight lanes as one AVX2 register; multiply-add needs FMA.
#![cfg(target_arch = "x86_64")]

use std::arch::x86_64::*;

use super::{Kernel, Lanes};

/// # Safety
/// The machine has AVX2 and FMA.
#[target_feature(enable = "avx2,fma")]
pub(crate) unsafe fn run<K: Kernel>(kernel: K) -> K::Out {
    // SAFETY: the machine has the features, by this function's own contract.
    unsafe { kernel.run::<Avx2>() }
}

#[derive(Clone, Copy)]
pub(crate) struct Avx2(__m256);

/// An intrinsic inside a [`Lanes`] method, whose contract is what the intrinsic needs.
macro_rules! lanes {
    ($op:expr) => {
        // SAFETY: the caller of a `Lanes` method has AVX2 and FMA and gives pointers valid for its width.
        unsafe { $op }
    };
}

/// The mask of the first `count` lanes.
///
/// # Safety
/// As for [`Lanes`].
#[inline(always)]
unsafe fn first(count: usize) -> __m256i {
    const MASKS: [i32; 16] = [-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0];
    let count = count.min(8);
    lanes!(_mm256_loadu_si256(MASKS.as_ptr().add(8 - count).cast()))
}

impl Lanes for Avx2 {
    type Words = __m256i;

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        Avx2(lanes!(_mm256_set1_ps(value)))
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        Avx2(lanes!(_mm256_loadu_ps(from)))
    }

    #[inline(always)]
    unsafe fn load_part(from: *const f32, count: usize) -> Self {
        Avx2(lanes!(_mm256_maskload_ps(from, first(count))))
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        lanes!(_mm256_storeu_ps(to, self.0))
    }

    #[inline(always)]
    unsafe fn store_part(self, to: *mut f32, count: usize) {
        lanes!(_mm256_maskstore_ps(to, first(count), self.0))
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        Avx2(lanes!(_mm256_add_ps(self.0, other.0)))
    }

    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        Avx2(lanes!(_mm256_mul_ps(self.0, other.0)))
    }

    #[inline(always)]
    unsafe fn div(self, other: Self) -> Self {
        Avx2(lanes!(_mm256_div_ps(self.0, other.0)))
    }

    #[inline(always)]
    unsafe fn fma(self, factor: Self, addend: Self) -> Self {
        Avx2(lanes!(_mm256_fmadd_ps(self.0, factor.0, addend.0)))
    }

    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        Avx2(lanes!(_mm256_max_ps(self.0, other.0)))
    }

    #[inline(always)]
    unsafe fn min(self, other: Self) -> Self {
        Avx2(lanes!(_mm256_min_ps(self.0, other.0)))
    }

    #[inline(always)]
    unsafe fn round(self) -> Self {
        Avx2(lanes!(_mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self.0)))
    }

    #[inline(always)]
    unsafe fn exp2_integer(self) -> Self {
        let biased = lanes!(_mm256_add_epi32(_mm256_cvttps_epi32(self.0), _mm256_set1_epi32(127)));
        Avx2(lanes!(_mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased))))
    }

    #[inline(always)]
    unsafe fn bf16_pairs(from: *const u8) -> (Self, Self) {
        let pairs = lanes!(_mm256_loadu_si256(from.cast()));
        let low = lanes!(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(pairs)));
        let high = lanes!(_mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(!0xffff))));
        (Avx2(low), Avx2(high))
    }

    #[inline(always)]
    unsafe fn words(from: *const u8) -> __m256i {
        lanes!(_mm256_loadu_si256(from.cast()))
    }

    #[inline(always)]
    unsafe fn nibble<const J: u32>(words: __m256i) -> Self {
        let mask = (0xf_u32 << (4 * J)) as i32;
        Avx2(lanes!(_mm256_cvtepi32_ps(_mm256_and_si256(words, _mm256_set1_epi32(mask)))))
    }

    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        let four = lanes!(_mm_add_ps(_mm256_castps256_ps128(self.0), _mm256_extractf128_ps::<1>(self.0)));
        let two = lanes!(_mm_add_ps(four, _mm_movehl_ps(four, four)));
        lanes!(_mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two))))
    }
}
