//! A small file that outlives a killed exporter: which processes mapped its memory.
//!
//! The kernel frees a memfd only when its last mapping is gone, so an exporter that starts again beside importers of
//! its previous life would need the memory twice. It looks here whom to wait for.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::OFlags;

use crate::LeaseId;

/// Longest file that is read: far more than all leases of an exporter take.
const MAX_BYTES: u64 = 1 << 20;
/// How often mappings are looked at while somebody is waited for.
const POLL: Duration = Duration::from_millis(20);

/// A process that was given descriptors of exported memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Importer {
    /// Its process id, in the exporter's pid namespace where they share one.
    pub pid: u32,
    /// Name it gave itself; one line.
    pub holder: String,
    /// Inodes of the memfds.
    inodes: Vec<u64>,
}

impl Importer {
    /// The process `pid` that gets `fds`.
    ///
    /// # Errors
    /// The kernel's, when it does not tell a descriptor's inode.
    pub fn new(pid: u32, holder: String, fds: &[OwnedFd]) -> io::Result<Self> {
        let inode = |fd: &OwnedFd| Ok(rustix::fs::fstat(fd.as_fd())?.st_ino);
        let inodes = fds.iter().map(inode).collect::<io::Result<_>>()?;
        Ok(Self { pid, holder, inodes })
    }

    /// Whether it maps any of that memory now, or is still on its way out: the kernel takes a killed process's mappings first
    /// and lets go of its device memory later. False for a process that is gone or cannot be seen from here, as in another
    /// pid namespace.
    pub fn is_mapping(&self) -> bool {
        let process = Path::new("/proc").join(self.pid.to_string());
        let read = |file| std::fs::read_to_string(process.join(file));
        match read("maps") {
            Ok(maps) if maps.is_empty() => read("stat").is_ok_and(|stat| is_ending(&stat)),
            Ok(maps) => self.is_mapped_in(&maps),
            Err(_) => false,
        }
    }

    fn is_mapped_in(&self, maps: &str) -> bool {
        // Address, permissions, offset, device, inode, path.
        maps.lines().any(|line| {
            let mut fields = line.split_ascii_whitespace().skip(4);
            let inode = fields.next().and_then(|inode| inode.parse().ok());
            let memfd = fields.next().is_some_and(|path| path.starts_with("/memfd:"));
            memfd && inode.is_some_and(|inode| self.inodes.contains(&inode))
        })
    }

    fn parse(line: &str) -> Option<Self> {
        let mut fields = line.splitn(3, ' ');
        let pid = fields.next()?.parse().ok()?;
        let inodes = fields.next()?.split(',').map(str::parse).collect::<Result<_, _>>().ok()?;
        Some(Self { pid, holder: fields.next()?.to_owned(), inodes })
    }

    fn line(&self) -> String {
        let inodes: Vec<String> = self.inodes.iter().map(u64::to_string).collect();
        format!("{} {} {}\n", self.pid, inodes.join(","), self.holder)
    }
}

impl fmt::Display for Importer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (pid {})", self.holder, self.pid)
    }
}

/// The file, and what is in it: importers with a lease, and those that still map without one.
#[derive(Debug)]
pub struct Ledger {
    path: PathBuf,
    entries: Mutex<Vec<Entry>>,
}

#[derive(Debug)]
struct Entry {
    lease: Option<LeaseId>,
    importer: Importer,
}

impl Ledger {
    /// Opens the ledger at `path` with what a previous exporter left there; none is an empty one. The file is written
    /// whole at every change and removed when nobody is left in it.
    ///
    /// # Errors
    /// The system's, also for a file of another user.
    pub fn open(path: impl Into<PathBuf>) -> io::Result<Self> {
        let path = path.into();
        let left = read(&path)?;
        let entries = left.lines().filter_map(Importer::parse);
        let entries = entries.map(|importer| Entry { lease: None, importer }).collect();
        Ok(Self { path, entries: Mutex::new(entries) })
    }

    /// Blocks until no importer without a lease maps anything, for at most `timeout`; returns those that still do.
    ///
    /// # Errors
    /// The system's, when the file cannot be written.
    pub fn wait_unmapped(&self, timeout: Duration) -> io::Result<Vec<Importer>> {
        let begun = Instant::now();
        loop {
            let mut entries = self.entries();
            entries.retain(Entry::is_held);
            let unleased = entries.iter().filter(|entry| entry.lease.is_none());
            let left: Vec<Importer> = unleased.map(|entry| entry.importer.clone()).collect();
            if left.is_empty() || begun.elapsed() >= timeout {
                self.write(&entries)?;
                return Ok(left);
            }
            drop(entries);
            std::thread::sleep(POLL);
        }
    }

    /// Enters the holder of a lease.
    ///
    /// # Errors
    /// The system's, when the file cannot be written; the next change tries again.
    pub fn enter(&self, lease: LeaseId, importer: Importer) -> io::Result<()> {
        let mut entries = self.entries();
        entries.retain(Entry::is_held);
        entries.push(Entry { lease: Some(lease), importer });
        self.write(&entries)
    }

    /// Notes that a lease has ended. Its holder stays in the file for as long as it still maps.
    ///
    /// # Errors
    /// As [`enter`](Self::enter).
    pub fn strike(&self, lease: LeaseId) -> io::Result<()> {
        let mut entries = self.entries();
        for entry in entries.iter_mut().filter(|entry| entry.lease == Some(lease)) {
            entry.lease = None;
        }
        entries.retain(Entry::is_held);
        self.write(&entries)
    }

    fn write(&self, entries: &[Entry]) -> io::Result<()> {
        if entries.is_empty() {
            return match std::fs::remove_file(&self.path) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
                _ => Ok(()),
            };
        }
        let mut fresh = self.path.clone().into_os_string();
        fresh.push(format!(".{}", std::process::id()));
        let fresh = PathBuf::from(fresh);
        let lines: String = entries.iter().map(|entry| entry.importer.line()).collect();
        // Whole or not at all: a reader never sees half a line.
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(0o600).custom_flags(no_follow());
        options.open(&fresh)?.write_all(lines.as_bytes())?;
        std::fs::rename(&fresh, &self.path)
    }

    // No code panics while it holds the lock, and each change of the list is complete in itself.
    fn entries(&self) -> MutexGuard<'_, Vec<Entry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entry {
    /// A lease counts as held even before its holder has mapped anything.
    fn is_held(&self) -> bool {
        self.lease.is_some() || self.importer.is_mapping()
    }
}

/// Of a process without mappings: it has begun to end and is not yet the zombie that holds nothing any more.
fn is_ending(stat: &str) -> bool {
    // The name before the state is the process's own choice, brackets included.
    let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    state.is_some_and(|state| !matches!(state, 'Z' | 'X'))
}

fn no_follow() -> i32 {
    OFlags::NOFOLLOW.bits() as i32
}

fn read(path: &Path) -> io::Result<String> {
    let file = match OpenOptions::new().read(true).custom_flags(no_follow()).open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(String::new()),
        Err(e) => return Err(e),
    };
    check_owner(&file)?;
    let mut text = String::new();
    file.take(MAX_BYTES).read_to_string(&mut text)?;
    Ok(text)
}

/// In a folder for everybody, anybody may have put the file there.
fn check_owner(file: &File) -> io::Result<()> {
    let (own, owner) = (rustix::process::geteuid().as_raw(), file.metadata()?.uid());
    if own == owner {
        return Ok(());
    }
    let message = format!("the file must be of uid {own}, it is of uid {owner}");
    Err(io::Error::new(io::ErrorKind::PermissionDenied, message))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ImportedMemfd, Memfd, MemfdBuilder};

    fn memfd() -> Memfd {
        MemfdBuilder::new("ledger", 4096).unwrap().seal().unwrap()
    }

    fn importer(of: &Memfd, pid: u32) -> Importer {
        Importer::new(pid, "a draft".to_owned(), &[of.fd().try_clone_to_owned().unwrap()]).unwrap()
    }

    fn names(left: &[Importer]) -> Vec<String> {
        left.iter().map(Importer::to_string).collect()
    }

    #[test]
    fn a_successor_names_who_still_maps_and_forgets_who_does_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("importers");
        let (exported, own) = (memfd(), std::process::id());
        let mapped = ImportedMemfd::import(exported.fd().try_clone_to_owned().unwrap(), 4096).unwrap();
        let killed = Ledger::open(&path).unwrap();
        killed.enter(LeaseId::from(1), importer(&exported, own)).unwrap();
        // Alive, but it maps nothing of ours.
        killed.enter(LeaseId::from(2), importer(&exported, 1)).unwrap();
        drop(exported);

        let named = vec![format!("a draft (pid {own})")];
        for _ in 0..2 {
            let successor = Ledger::open(&path).unwrap();
            assert_eq!(names(&successor.wait_unmapped(Duration::ZERO).unwrap()), named);
        }
        drop(mapped);
        let successor = Ledger::open(&path).unwrap();
        assert_eq!(names(&successor.wait_unmapped(Duration::from_secs(60)).unwrap()), [""; 0]);
        assert!(!path.exists());
    }

    #[test]
    fn a_zombie_holds_nothing_and_a_process_on_its_way_out_does() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let (exported, pid) = (memfd(), child.id());
        let begun = Instant::now();
        let is_zombie = || {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
            stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('Z'))
        };
        // It stays one until it is waited for.
        while !is_zombie() && begun.elapsed() < Duration::from_secs(20) {
            std::thread::yield_now();
        }
        assert!(is_zombie() && !importer(&exported, pid).is_mapping());
        child.wait().unwrap();
        assert!(is_ending("7 (a) Z) D 1 7 7") && is_ending("7 (draft) R 1") && !is_ending("7 (draft) Z 1"));
    }

    #[test]
    fn an_ended_lease_leaves_the_file_with_its_mapping() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("importers");
        let exported = memfd();
        let ledger = Ledger::open(&path).unwrap();
        ledger.enter(LeaseId::from(1), importer(&exported, std::process::id())).unwrap();
        ledger.strike(LeaseId::from(1)).unwrap();
        assert!(path.exists(), "this process maps it as its exporter");
        drop(exported);
        ledger.strike(LeaseId::from(1)).unwrap();
        assert!(!path.exists());
    }

    #[test]
    fn garbage_and_links_are_not_believed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("importers");
        std::fs::write(&path, "x 1 a\n7\n7 1,x a\n\n").unwrap();
        assert!(Ledger::open(&path).unwrap().wait_unmapped(Duration::ZERO).unwrap().is_empty());
        std::os::unix::fs::symlink("/etc/passwd", &path).unwrap();
        assert!(Ledger::open(&path).is_err());
        let importer = importer(&memfd(), 7);
        assert_eq!(Importer::parse(importer.line().trim_end()), Some(importer));
    }
}
