//! Memory of one process that is there from the start.

use std::ops::{Deref, DerefMut};

use memmap2::{Advice, MmapMut, MmapOptions};

use crate::RegionError;
use crate::memory::check_memory;

/// Zeroed numbers whose pages are taken when it is made: memory that runs out is an error then, no later write waits
/// for a page, and what the process uses does not depend on how much of it was written.
pub struct Resident {
    map: MmapMut,
    // Invariant: the mapping has at least 4 * len bytes.
    len: usize,
}

impl Resident {
    /// `len` zeros; `name` is for messages.
    ///
    /// # Errors
    /// [`RegionError::Empty`] for none, [`RegionError::OutOfMemory`] for more than there is, otherwise the kernel's
    /// answer.
    pub fn zeroed(name: &str, len: usize) -> Result<Self, RegionError> {
        if len == 0 {
            return Err(RegionError::Empty { name: name.to_owned() });
        }
        let bytes = len.saturating_mul(size_of::<f32>());
        check_memory(name, bytes as u64)?;
        let failed = |source| RegionError::Resident { name: name.to_owned(), bytes, source };
        // Not of huge pages: they are taken faster where there are some, but on a machine whose memory is full of cached
        // files the kernel may spend seconds on making them.
        let map = MmapOptions::new().len(bytes).map_anon().map_err(failed)?;
        let mut resident = Self { map, len };
        // Kernels before 5.14 do not know the advice.
        if resident.map.advise(Advice::PopulateWrite).is_err() {
            resident.fill(std::hint::black_box(0.0));
        }
        Ok(resident)
    }
}

impl Deref for Resident {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        // SAFETY: a mapping starts at a page, has at least 4 * len bytes by the invariant, all of them initialised and
        // owned by this value, and every bit pattern is an f32.
        unsafe { std::slice::from_raw_parts(self.map.as_ptr().cast(), self.len) }
    }
}

impl DerefMut for Resident {
    fn deref_mut(&mut self) -> &mut [f32] {
        // SAFETY: as in `deref`, with an exclusive borrow.
        unsafe { std::slice::from_raw_parts_mut(self.map.as_mut_ptr().cast(), self.len) }
    }
}

impl std::fmt::Debug for Resident {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Resident").field("len", &self.len).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Resident memory of this process, in KiB.
    fn resident_kib() -> u64 {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().strip_suffix(" kB").unwrap().parse().unwrap()
    }

    #[test]
    fn every_page_is_there_before_it_is_written() {
        let before = resident_kib();
        let mut resident = Resident::zeroed("pool", (32 << 20) / 4).unwrap();
        let taken = resident_kib() - before;
        assert!((31 << 10..).contains(&taken), "{taken} KiB");
        assert!(resident.iter().all(|&value| value == 0.0));
        resident[7] = 1.5;
        assert_eq!((resident[7], resident.len()), (1.5, (32 << 20) / 4));
    }

    #[test]
    fn no_memory_and_too_much_of_it_are_refused() {
        assert!(matches!(Resident::zeroed("none", 0), Err(RegionError::Empty { .. })));
        let error = Resident::zeroed("pool", usize::MAX).unwrap_err();
        assert!(error.to_string().starts_with("pool: 18446744073709551615 bytes exceed the "), "{error}");
    }
}
