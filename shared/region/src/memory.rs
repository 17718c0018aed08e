//! How much memory could be allocated now, and giving back what the heap does not use.

use std::fs;
use std::path::Path;

use crate::RegionError;

/// Where control groups are mounted.
const CGROUPS: &str = "/sys/fs/cgroup";

/// Bytes that could be allocated now: what the kernel calls available, and no more than this process's control group and
/// those above it have left. Never above `isize::MAX`; that much, too, where `/proc` tells nothing.
pub fn available_memory() -> u64 {
    available(Path::new("/proc"), Path::new(CGROUPS))
}

fn available(proc: &Path, cgroups: &Path) -> u64 {
    let machine = fs::read_to_string(proc.join("meminfo")).ok().and_then(|text| mem_available(&text));
    let groups = fs::read_to_string(proc.join("self/cgroup")).ok();
    let group = groups.and_then(|groups| cgroup_available(&groups, cgroups));
    [machine, group].into_iter().flatten().fold(isize::MAX as u64, u64::min)
}

fn mem_available(meminfo: &str) -> Option<u64> {
    let value = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = value.trim().strip_suffix("kB")?.trim_end().parse().ok()?;
    kib.checked_mul(1024)
}

fn cgroup_available(groups: &str, root: &Path) -> Option<u64> {
    let path = groups.lines().find_map(|line| line.strip_prefix("0::/"))?;
    least_left(root, path)
}

/// The least that the group at `path` below `root`, or a group above it, has left.
fn least_left(root: &Path, path: &str) -> Option<u64> {
    let group = root.join(path);
    let groups = group.ancestors().take_while(|group| group.starts_with(root));
    groups.filter_map(left_in_group).min()
}

/// What a group's limit leaves beside memory in use, of which cached files that nobody uses make room; `None` without a
/// limit.
fn left_in_group(group: &Path) -> Option<u64> {
    let read = |file| fs::read_to_string(group.join(file)).ok();
    // The word `max`, for no limit, does not parse.
    let limit: u64 = read("memory.max")?.trim().parse().ok()?;
    let used: u64 = read("memory.current")?.trim().parse().ok()?;
    let stat = read("memory.stat").unwrap_or_default();
    let files = stat.lines().find_map(|line| line.strip_prefix("inactive_file ")?.trim().parse().ok());
    Some(limit.saturating_sub(used.saturating_sub(files.unwrap_or(0))))
}

/// Refuses `len` bytes for `name` if they are more than there are. For what is made of several allocations: each by itself
/// may fit where all together do not.
///
/// # Errors
/// [`RegionError::OutOfMemory`].
pub fn check_memory(name: &str, len: u64) -> Result<(), RegionError> {
    check_fits(name, len, available_memory())
}

/// Allocating more than there is does not fail, it summons the OOM killer upon bystanders: refuse it beforehand.
pub(crate) fn check_fits(name: &str, len: u64, available: u64) -> Result<(), RegionError> {
    if len <= available {
        return Ok(());
    }
    Err(RegionError::OutOfMemory { name: name.to_owned(), bytes: len, available })
}

/// Makes all threads of this process share one heap, if it is called before a second one starts. By default the allocator
/// gives threads heaps of their own, and each keeps what its worst moment scattered over it, also from [`trim_heap`].
/// Small allocations are still served from a cache of each thread.
pub fn share_heap() {
    // SAFETY: it sets a limit under the allocator's lock, and touches no allocation.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
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
    fn a_group_has_what_it_and_those_above_leave() {
        let root = tempfile::tempdir().unwrap();
        let group = root.path().join("a/b");
        fs::create_dir_all(&group).unwrap();
        let write = |dir: &Path, max: &str, current: &str| {
            fs::write(dir.join("memory.max"), max).unwrap();
            fs::write(dir.join("memory.current"), current).unwrap();
        };
        assert_eq!(least_left(root.path(), "a/b"), None, "the root has no limit");
        write(&group, "max\n", "900\n");
        assert_eq!(least_left(root.path(), "a/b"), None);
        write(&group, "1000\n", "900\n");
        fs::write(group.join("memory.stat"), "anon 5\ninactive_file 300\nactive_file 7\n").unwrap();
        assert_eq!(least_left(root.path(), "a/b"), Some(400));
        write(&root.path().join("a"), "2000\n", "1990\n");
        assert_eq!(least_left(root.path(), "a/b"), Some(10));
        write(&root.path().join("a"), "2000\n", "2001\n");
        assert_eq!(least_left(root.path(), "a/b"), Some(0));
    }

    #[test]
    fn what_is_left_of_the_own_group_counts_beside_what_the_machine_has() {
        let root = tempfile::tempdir().unwrap();
        let (proc, groups) = (root.path().join("proc"), root.path().join("cgroup"));
        let available = || available(&proc, &groups);
        assert_eq!(available(), isize::MAX as u64, "nothing is known");
        for dir in [proc.join("self"), groups.join("a/b")] {
            fs::create_dir_all(dir).unwrap();
        }
        fs::write(proc.join("meminfo"), "MemAvailable:        100 kB\n").unwrap();
        fs::write(proc.join("self/cgroup"), "1:name=systemd:/x\n0::/a/b\n").unwrap();
        assert_eq!(available(), 102_400);
        fs::write(groups.join("a/b/memory.max"), "5000\n").unwrap();
        fs::write(groups.join("a/b/memory.current"), "900\n").unwrap();
        assert_eq!(available(), 4100);
        fs::write(groups.join("a/b/memory.max"), "500000\n").unwrap();
        assert_eq!(available(), 102_400);
    }

    #[test]
    fn this_machine_has_some_but_not_all_memory_there_could_be() {
        let available = available_memory();
        assert!((1 << 20..isize::MAX as u64).contains(&available), "{available}");
    }
}
