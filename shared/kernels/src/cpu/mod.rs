//! CPU backend: thread pool, instruction sets and the SIMD kernels behind the ops.
//!
//! Each SIMD kernel is written once over [`Lanes`]; the instruction sets differ only in how one lane
//! operation is spelled, so their results are bit-identical.

mod attend;
mod attention;
mod avx2;
mod embedding;
pub(crate) mod exp;
mod float;
mod gqa;
mod int4;
mod lanes;
mod linear;
mod mla;
mod moe;
mod norm;
mod paged;
mod pool;
mod reduce;
mod router;
pub(crate) mod tiles;

use std::ops::Range;
use std::str::FromStr;
use std::sync::Arc;

pub(crate) use attention::Heads;
pub(crate) use embedding::Embedding;
pub(crate) use gqa::gqa;
pub(crate) use lanes::Lanes;
pub(crate) use linear::Linear;
pub(crate) use mla::MlaWeights;
pub(crate) use moe::{Experts, Mlp};
pub(crate) use norm::RmsNorm;
pub(crate) use paged::PagedRows;
pub(crate) use router::route;

use crate::error::{KernelError, Result, limit};

/// Multiply-adds below which waking a second thread costs more than it saves.
const MIN_PART_WORK: usize = 64 * 1024;
const MAX_THREADS: usize = 1024;

/// Instruction set of the CPU kernels; results do not depend on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Isa {
    /// Plain Rust, any machine (slow: `f32::mul_add` without the instruction).
    Scalar,
    /// x86-64 with AVX2 and FMA.
    Avx2,
}

impl Isa {
    /// The fastest instruction set of this machine.
    pub fn best() -> Isa {
        if Isa::Avx2.available() { Isa::Avx2 } else { Isa::Scalar }
    }

    /// `EYRIE_ISA` (`scalar`, `avx2` or `best`) if set, else [`Isa::best`].
    ///
    /// # Errors
    /// The variable names an unknown or unavailable instruction set.
    pub fn from_env() -> Result<Isa> {
        std::env::var_os("EYRIE_ISA").map_or(Ok(Isa::best()), |name| name.to_string_lossy().parse())
    }

    /// Whether this machine has the instruction set.
    pub fn available(self) -> bool {
        match self {
            Isa::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Avx2 => false,
        }
    }

    /// Runs one SIMD kernel; `self` comes from a [`Cpu`] or from [`Isa::best`], so it is available.
    #[inline]
    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Out {
        match self {
            // SAFETY: plain Rust lanes run on any machine.
            Isa::Scalar => unsafe { kernel.run::<lanes::Scalar>() },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `Cpu::new` refuses, and `best` never returns, an instruction set that CPUID lacks.
            Isa::Avx2 => unsafe { avx2::run(kernel) },
            #[cfg(not(target_arch = "x86_64"))]
            // SAFETY: plain Rust lanes run on any machine.
            Isa::Avx2 => unsafe { kernel.run::<lanes::Scalar>() },
        }
    }
}

impl FromStr for Isa {
    type Err = KernelError;

    fn from_str(name: &str) -> Result<Isa> {
        let isa = match name {
            "scalar" => Isa::Scalar,
            "avx2" => Isa::Avx2,
            "best" | "" => Isa::best(),
            other => return Err(KernelError::Isa(format!("{other:?} (known: scalar, avx2, best)"))),
        };
        if isa.available() { Ok(isa) } else { Err(KernelError::Isa(name.to_owned())) }
    }
}

/// A SIMD kernel, generic over the lanes it runs on.
pub(crate) trait Kernel {
    type Out;

    /// # Safety
    /// The machine has the instruction set of `V`. Implementations are `#[inline(always)]`, so that
    /// they are compiled with that instruction set's features.
    unsafe fn run<V: Lanes>(self) -> Self::Out;
}

/// How a [`Cpu`] computes.
#[derive(Debug, Clone, Copy)]
pub struct CpuOptions {
    /// Threads that compute, the caller included (1 = no worker threads).
    pub threads: usize,
    /// Instruction set.
    pub isa: Isa,
}

/// The CPU backend: an instruction set and a pool of threads, shared by everything built on it.
#[derive(Debug, Clone)]
pub struct Cpu {
    isa: Isa,
    threads: usize,
    pool: Arc<pool::Pool>,
}

impl Cpu {
    /// Starts `options.threads - 1` worker threads; they park when idle and end with the last clone.
    ///
    /// # Errors
    /// No threads or too many, an instruction set this machine lacks, or a thread that cannot start.
    pub fn new(options: CpuOptions) -> Result<Cpu> {
        if options.threads == 0 || options.threads > MAX_THREADS {
            return Err(limit("cpu", "threads", options.threads, format!("1..={MAX_THREADS}")));
        }
        if !options.isa.available() {
            return Err(KernelError::Isa(format!("{:?}", options.isa).to_lowercase()));
        }
        let pool = Arc::new(pool::Pool::start(options.threads)?);
        Ok(Cpu { isa: options.isa, threads: options.threads, pool })
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Threads that compute, the caller included.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Runs `body` over `0..items` cut into at most one range a thread; `work` is the multiply-adds
    /// of all items together.
    pub(crate) fn split(&self, items: usize, work: usize, body: impl Fn(Range<usize>) + Sync) -> Result<()> {
        let parts = self.parts(work).min(items);
        if parts <= 1 {
            return self.pool.run(1, &|_| body(0..items));
        }
        self.pool.run(parts, &|part| body(items * part / parts..items * (part + 1) / parts))
    }

    /// As [`Cpu::split`] for items of unequal work: `ends[i]` is the work of items `0..=i`.
    pub(crate) fn split_by(&self, ends: &[usize], body: impl Fn(Range<usize>) + Sync) -> Result<()> {
        let total = ends.last().copied().unwrap_or(0);
        let parts = self.parts(total).min(ends.len());
        if parts <= 1 {
            return self.pool.run(1, &|_| body(0..ends.len()));
        }
        let cut = |part: usize| match part {
            0 => 0,
            _ if part == parts => ends.len(),
            _ => ends.partition_point(|&end| end <= total * part / parts),
        };
        self.pool.run(parts, &|part| body(cut(part)..cut(part + 1)))
    }

    fn parts(&self, work: usize) -> usize {
        (work / MIN_PART_WORK + 1).min(self.threads)
    }
}

/// A buffer that several threads write at places of their own.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shared<'a> {
    start: *mut f32,
    len: usize,
    buffer: std::marker::PhantomData<&'a mut [f32]>,
}

// SAFETY: only `slice` reaches the memory, and its callers keep to disjoint ranges.
unsafe impl Send for Shared<'_> {}
// SAFETY: as for `Send`.
unsafe impl Sync for Shared<'_> {}

impl<'a> Shared<'a> {
    pub(crate) fn new(buffer: &'a mut [f32]) -> Shared<'a> {
        Shared { start: buffer.as_mut_ptr(), len: buffer.len(), buffer: std::marker::PhantomData }
    }

    /// # Safety
    /// No other live slice of this buffer overlaps `range`.
    #[inline]
    #[expect(clippy::mut_from_ref, reason = "disjointness is the caller's duty, as documented")]
    pub(crate) unsafe fn slice(&self, range: Range<usize>) -> &mut [f32] {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: inside the borrowed buffer by the assertion, exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instruction_sets_have_names() {
        assert_eq!("scalar".parse::<Isa>().unwrap(), Isa::Scalar);
        assert_eq!("best".parse::<Isa>().unwrap(), Isa::best());
        assert_eq!("avx2".parse::<Isa>().is_ok(), Isa::Avx2.available());
        let error = "avx9".parse::<Isa>().unwrap_err().to_string();
        assert_eq!(
            error,
            "instruction set \"avx9\" (known: scalar, avx2, best) is not available on this machine"
        );
    }

    #[test]
    fn thread_counts_are_bounded() {
        let error = Cpu::new(CpuOptions { threads: 0, isa: Isa::Scalar }).unwrap_err().to_string();
        assert_eq!(error, "cpu: threads is 0, limit 1..=1024");
        assert!(Cpu::new(CpuOptions { threads: 1025, isa: Isa::Scalar }).is_err());
    }

    #[test]
    fn ranges_cover_every_item_once_whatever_their_work() {
        for threads in 1..=3 {
            let cpu = Cpu::new(CpuOptions { threads, isa: Isa::best() }).unwrap();
            for count in [0, 1, 2, 5, 40] {
                let mut hits = vec![0.0; count];
                let shared = Shared::new(&mut hits);
                let hit = |range: Range<usize>| {
                    for i in range {
                        // SAFETY: each item is in one range, which is what the test checks.
                        let hit = unsafe { shared.slice(i..i + 1) };
                        hit[0] += 1.0;
                    }
                };
                cpu.split(count, 1 << 20, hit).unwrap();
                // One item holds nearly all the work.
                let ends: Vec<usize> = (0..count).map(|i| i + if i >= 1 { 1 << 20 } else { 0 }).collect();
                cpu.split_by(&ends, hit).unwrap();
                assert_eq!(hits, vec![2.0; count], "{threads} threads");
            }
        }
    }
}
