//! Anonymous memory that is filled once, sealed, and then shared read-only by descriptor.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;

use memmap2::{Mmap, MmapMut, MmapOptions};
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};

use crate::memory::{available_memory, check_fits};
use crate::{Region, RegionError, RegionKind};

/// A memfd while it is being filled.
#[derive(Debug)]
pub struct MemfdBuilder {
    name: String,
    fd: OwnedFd,
    map: MmapMut,
}

impl MemfdBuilder {
    /// Makes a zeroed memfd of `len` bytes. Its pages are allocated here, so memory that runs out is an error now
    /// and not a SIGBUS at some later write. `name` shows in `/proc/PID/maps`.
    ///
    /// # Errors
    /// [`RegionError::Empty`] for no bytes, otherwise the kernel's answer with the name.
    pub fn new(name: &str, len: u64) -> Result<Self, RegionError> {
        let fd = create(name, len)?;
        // SAFETY: the descriptor was made above and is private to this builder, so no other mapping aliases this one.
        let map = unsafe { MmapMut::map_mut(&fd) }.map_err(failed(name, "map it"))?;
        Ok(Self { name: name.to_owned(), fd, map })
    }

    /// The bytes, zero at first.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.map
    }

    /// Drops the writable mapping and seals the memory: from here on nobody, this process included, can change it.
    ///
    /// # Errors
    /// The kernel's answer with the name.
    pub fn seal(self) -> Result<Memfd, RegionError> {
        let Self { name, fd, map } = self;
        drop(map);
        seal(&fd, write_seal()?).map_err(failed(&name, "seal it"))?;
        // Populated, because a page that only an importer has touched counts as that importer's private memory in
        // /proc/PID/smaps, and the accounting of shared bytes would show a copy that does not exist.
        // SAFETY: the pages are sealed against writes and against a change of size, so they are immutable.
        let map = unsafe { MmapOptions::new().populate().map(&fd) }.map_err(failed(&name, "map it"))?;
        Ok(Memfd { name, fd, map })
    }
}

/// A sealed memfd in the process that made it.
#[derive(Debug)]
pub struct Memfd {
    name: String,
    fd: OwnedFd,
    map: Mmap,
}

impl Memfd {
    /// The descriptor, to be passed to importers.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// The name it was made with.
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl Region for Memfd {
    fn host(&self) -> Option<&[u8]> {
        Some(&self.map)
    }

    fn kind(&self) -> RegionKind {
        RegionKind::Memfd
    }
}

/// A sealed memfd in a process that was given its descriptor. Unmapped on drop.
#[derive(Debug)]
pub struct ImportedMemfd {
    map: Mmap,
}

impl ImportedMemfd {
    /// Maps `fd` read-only. The descriptor is closed once it is mapped.
    ///
    /// A write through the mapping faults, and neither `mprotect` nor a second mapping can make it writable: the
    /// seals are checked here and no process can take them off.
    ///
    /// # Errors
    /// [`RegionError::Unsealed`] where the exporter could still resize or write it, [`RegionError::Length`] where it is
    /// not exactly `expected_len` bytes, otherwise the kernel's answer.
    pub fn import(fd: OwnedFd, expected_len: u64) -> Result<Self, RegionError> {
        check_import(&fd, expected_len, write_seal()?)?;
        // SAFETY: the seals verified above rule out resizing and, with F_SEAL_WRITE, every write. A kernel that cannot
        // map such memory leaves F_SEAL_FUTURE_WRITE, under which nobody can start to write; that the exporter dropped
        // its own mapping, as `MemfdBuilder::seal` does, is then the exporter's word, as it is for its process at large.
        let map = unsafe { Mmap::map(&fd) }.map_err(failed("import", "map it"))?;
        Ok(Self { map })
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.map
    }
}

impl Region for ImportedMemfd {
    fn host(&self) -> Option<&[u8]> {
        Some(&self.map)
    }

    fn kind(&self) -> RegionKind {
        RegionKind::Memfd
    }
}

fn failed<'a, E: Into<io::Error>>(name: &'a str, action: &'static str) -> impl FnOnce(E) -> RegionError + 'a {
    move |source| RegionError::Memfd { name: name.to_owned(), action, source: source.into() }
}

/// A sealable memfd of `len` allocated bytes.
pub(crate) fn create(name: &str, len: u64) -> Result<OwnedFd, RegionError> {
    if len == 0 {
        return Err(RegionError::Empty { name: format!("memfd {name}") });
    }
    check_fits(name, len, available_memory())?;
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = match rustix::fs::memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL) {
        // Kernels before 6.3 do not know the flag; newer ones may be told to insist on it.
        Err(rustix::io::Errno::INVAL) => rustix::fs::memfd_create(name, flags),
        made => made,
    }
    .map_err(failed(name, "create it"))?;
    rustix::fs::ftruncate(&fd, len).map_err(failed(name, "set its length"))?;
    rustix::fs::fallocate(&fd, FallocateFlags::empty(), 0, len)
        .map_err(failed(name, "allocate its pages"))?;
    Ok(fd)
}

/// Fixes size and seals of `fd` for good, with `write` deciding who may still write.
pub(crate) fn seal(fd: &OwnedFd, write: SealFlags) -> rustix::io::Result<()> {
    rustix::fs::fcntl_add_seals(fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL | write)
}

/// Refuses a descriptor of another length, or that its exporter could still resize or write in spite of what the seals
/// `write` forbid.
pub(crate) fn check_import(fd: &OwnedFd, expected_len: u64, write: SealFlags) -> Result<(), RegionError> {
    let found = match rustix::fs::fcntl_get_seals(fd) {
        Ok(seals) => seals,
        // Ordinary files, pipes and sockets have no seals at all.
        Err(rustix::io::Errno::INVAL) => SealFlags::empty(),
        Err(errno) => return Err(failed("import", "read its seals")(errno)),
    };
    // F_SEAL_WRITE forbids all that F_SEAL_FUTURE_WRITE does.
    let implied = if found.contains(SealFlags::WRITE) { SealFlags::FUTURE_WRITE } else { SealFlags::empty() };
    let missing = (SealFlags::SHRINK | SealFlags::GROW | write) - (found | implied);
    if !missing.is_empty() {
        return Err(RegionError::Unsealed { missing: seal_names(missing), found: seal_names(found) });
    }
    let stat = rustix::fs::fstat(fd).map_err(failed("import", "read its length"))?;
    let len = u64::try_from(stat.st_size).unwrap_or(0);
    if len != expected_len {
        return Err(RegionError::Length { expected: expected_len, found: len });
    }
    if len == 0 {
        return Err(RegionError::Empty { name: "imported memfd".to_owned() });
    }
    Ok(())
}

fn seal_names(seals: SealFlags) -> String {
    if seals.is_empty() {
        return "none".to_owned();
    }
    seals.iter_names().map(|(name, _)| name).collect::<Vec<_>>().join("|")
}

/// The strongest write seal under which this kernel still maps the memory shared and read-only.
///
/// Before Linux 6.7 a descriptor sealed with F_SEAL_WRITE cannot be mapped shared at all; F_SEAL_FUTURE_WRITE can,
/// and is as good once the only writable mapping is gone.
fn write_seal() -> Result<SealFlags, RegionError> {
    const NAME: &str = "seal-probe";
    static SEAL: OnceLock<SealFlags> = OnceLock::new();
    if let Some(known) = SEAL.get() {
        return Ok(*known);
    }
    let fd = create(NAME, 1)?;
    seal(&fd, SealFlags::WRITE).map_err(failed(NAME, "seal it"))?;
    let found = match MmapOptions::new().map_raw_read_only(&fd) {
        Ok(_) => SealFlags::WRITE | SealFlags::FUTURE_WRITE,
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied => SealFlags::FUTURE_WRITE,
        Err(e) => return Err(failed(NAME, "map it")(e)),
    };
    Ok(*SEAL.get_or_init(|| found))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sealed(bytes: &[u8]) -> Memfd {
        let mut builder = MemfdBuilder::new("test", bytes.len() as u64).unwrap();
        builder.bytes_mut().copy_from_slice(bytes);
        builder.seal().unwrap()
    }

    #[test]
    fn a_sealed_memfd_cannot_be_resized_written_or_unsealed() {
        let memfd = sealed(b"weights");
        assert!(rustix::fs::ftruncate(memfd.fd(), 1).is_err());
        assert!(rustix::fs::ftruncate(memfd.fd(), 4096).is_err());
        assert!(rustix::io::write(memfd.fd(), b"x").is_err());
        assert!(rustix::fs::fcntl_add_seals(memfd.fd(), SealFlags::GROW).is_err());
        assert!(MmapOptions::new().map_raw(&memfd.fd).is_err());
        assert_eq!(memfd.bytes(), b"weights");
    }

    #[test]
    fn import_maps_the_same_bytes() {
        let memfd = sealed(&[9; 5000]);
        let imported = ImportedMemfd::import(memfd.fd().try_clone_to_owned().unwrap(), 5000).unwrap();
        assert_eq!(imported.bytes(), memfd.bytes());
        assert_ne!(imported.bytes().as_ptr(), memfd.bytes().as_ptr());
        drop(memfd);
        assert_eq!(imported.bytes(), [9; 5000]);
    }

    #[test]
    fn import_refuses_missing_seals_and_other_lengths() {
        let open = create("open", 64).unwrap();
        let error = ImportedMemfd::import(open, 64).unwrap_err();
        assert!(error.to_string().contains("SHRINK|GROW|"), "{error}");

        let resizable = create("resizable", 64).unwrap();
        rustix::fs::fcntl_add_seals(&resizable, SealFlags::WRITE | SealFlags::GROW).unwrap();
        let error = ImportedMemfd::import(resizable, 64).unwrap_err();
        assert!(matches!(&error, RegionError::Unsealed { missing, .. } if missing == "SHRINK"), "{error}");

        let file = OwnedFd::from(tempfile::tempfile().unwrap());
        assert!(matches!(ImportedMemfd::import(file, 64), Err(RegionError::Unsealed { .. })));

        let fd = sealed(b"weights").fd().try_clone_to_owned().unwrap();
        let error = ImportedMemfd::import(fd, 8).unwrap_err();
        assert!(matches!(error, RegionError::Length { expected: 8, found: 7 }), "{error}");
    }

    /// A9: an exporter that keeps its mapping can write what an importer reads as a slice.
    #[test]
    fn import_refuses_memory_that_somebody_may_still_be_writing() {
        if !write_seal().unwrap().contains(SealFlags::WRITE) {
            return;
        }
        let fd = create("written", 64).unwrap();
        let map = MmapOptions::new().map_raw(&fd).unwrap();
        seal(&fd, SealFlags::FUTURE_WRITE).unwrap();
        let error = ImportedMemfd::import(fd, 64).unwrap_err();
        assert!(matches!(&error, RegionError::Unsealed { missing, .. } if missing == "WRITE"), "{error}");
        drop(map);
    }

    // The check alone: were it broken, a real allocation of that size would take the machine down with it.
    #[test]
    fn lengths_beyond_memory_are_refused_before_anything_is_allocated() {
        assert!(matches!(MemfdBuilder::new("none", 0), Err(RegionError::Empty { .. })));
        check_fits("fits", 4096, 4096).unwrap();
        let error = check_fits("huge", 4097, 4096).unwrap_err().to_string();
        assert_eq!(error, "huge: 4097 bytes exceed the 4096 bytes of memory available");
    }
}
