//! How much memory could be allocated now, and giving back what the heap does not use.

use std::fs;
use std::path::Path;

use crate::RegionError;

/// Bytes that an allocation may take: what the kernel calls available, and no more than the limit of this process's
/// own control group. Never above `isize::MAX`; that much, too, where `/proc` tells nothing.
pub(crate) fn available_memory() -> u64 {
    let machine = fs::read_to_string("/proc/meminfo").ok().and_then(|text| mem_available(&text));
    [machine, cgroup_limit()].into_iter().flatten().fold(isize::MAX as u64, u64::min)
}

fn mem_available(meminfo: &str) -> Option<u64> {
    let value = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = value.trim().strip_suffix("kB")?.trim_end().parse().ok()?;
    kib.checked_mul(1024)
}

fn cgroup_limit() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = groups.lines().find_map(|line| line.strip_prefix("0::/"))?;
    // The word `max`, for no limit, does not parse.
    fs::read_to_string(Path::new("/sys/fs/cgroup").join(path).join("memory.max")).ok()?.trim().parse().ok()
}

/// Allocating more than there is does not fail, it summons the OOM killer upon bystanders: refuse it beforehand.
pub(crate) fn check_fits(name: &str, len: u64, available: u64) -> Result<(), RegionError> {
    if len <= available {
        return Ok(());
    }
    Err(RegionError::OutOfMemory { name: name.to_owned(), bytes: len, available })
}

/// Gives the pages of freed memory back to the system. The allocator keeps them by itself where something that still
/// lives lies behind them, so that a burst would be remembered for ever. Takes milliseconds and the heap's locks.
pub fn trim_heap() {
    // SAFETY: it changes no live allocation and is safe to call from any thread.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::malloc_trim(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_is_read_in_bytes() {
        let text = "MemTotal:       24683520 kB\nMemAvailable:        100 kB\n";
        assert_eq!(mem_available(text), Some(102_400));
        assert_eq!(mem_available("MemTotal: 5 kB\n"), None);
        assert_eq!(mem_available("MemAvailable: much\n"), None);
    }

    #[test]
    fn this_machine_has_some_but_not_all_memory_there_could_be() {
        let available = available_memory();
        assert!((1 << 20..isize::MAX as u64).contains(&available), "{available}");
    }
}
