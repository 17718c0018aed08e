//! The socket file: made with the right mode, replaced only when stale, removed only when ours.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{FlockOperation, Mode};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::DoorError;

const PROBE_TIME: Duration = Duration::from_secs(1);

/// A bound unix socket path and the file that lies there.
///
/// It is removed by [`remove`](Self::remove), which its owner calls while the listener is still open: a rival then
/// finds a living socket or none, and never one that it would replace just before it is removed here.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    device: u64,
    inode: u64,
}

impl SocketFile {
    /// Binds `path` and listens, non-blocking. `backlog` connections may wait to be accepted; `mode` replaces the
    /// permission bits that the umask would leave. A socket file that nobody answers at is replaced.
    ///
    /// # Errors
    /// [`DoorError::InUse`], [`DoorError::NotASocket`], [`DoorError::PathTooLong`], or the kernel's answer.
    pub fn bind(path: &Path, backlog: i32, mode: Option<u32>) -> Result<(Self, UnixListener), DoorError> {
        let failed = |action| move |source| DoorError::Io { path: path.to_owned(), action, source };
        let address = address(path)?;
        // Two processes that find the same stale file must not each remove what they find: the second one would
        // remove the first one's new socket. The directory is the lock, so no lock file is left behind.
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let directory = File::open(parent).map_err(failed("open its directory"))?;
        rustix::io::retry_on_intr(|| rustix::fs::flock(&directory, FlockOperation::LockExclusive))
            .map_err(|e| failed("lock its directory")(e.into()))?;
        clear_stale(path)?;
        let listener = listen(&address, backlog, mode).map_err(|e| failed("bind it")(e.into()))?;
        let listener = UnixListener::from(listener);
        listener.set_nonblocking(true).map_err(failed("make it non-blocking"))?;
        let meta = std::fs::symlink_metadata(path).map_err(failed("read its metadata"))?;
        Ok((Self { path: path.to_owned(), device: meta.dev(), inode: meta.ino() }, listener))
    }

    /// The path it was bound to.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes the file, unless another one has taken its place.
    pub fn remove(&self) {
        if let Ok(meta) = std::fs::symlink_metadata(&self.path)
            && (meta.dev(), meta.ino()) == (self.device, self.inode)
        {
            // It may be gone already with its directory; there is nobody to tell on the way out.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Connects to `path`; `timeout` covers the wait for a place in the listener's queue.
pub(super) fn connect(path: &Path, timeout: Duration) -> Result<UnixStream, DoorError> {
    let address = address(path)?;
    try_connect(&address, timeout).map_err(|errno| {
        // The kernel's word for a timeout of a blocking connect.
        let source = if errno == Errno::AGAIN { io::ErrorKind::TimedOut.into() } else { errno.into() };
        DoorError::Io { path: path.to_owned(), action: "connect to it", source }
    })
}

fn try_connect(address: &SocketAddrUnix, timeout: Duration) -> rustix::io::Result<UnixStream> {
    let socket = stream_socket()?;
    set_socket_timeout(&socket, Timeout::Send, Some(timeout.max(Duration::from_millis(1))))?;
    rustix::io::retry_on_intr(|| rustix::net::connect(&socket, address))?;
    Ok(UnixStream::from(socket))
}

fn listen(address: &SocketAddrUnix, backlog: i32, mode: Option<u32>) -> rustix::io::Result<OwnedFd> {
    let socket = stream_socket()?;
    if let Some(mode) = mode {
        // Linux makes the file with the socket's own mode, so there is no moment at which others could connect.
        rustix::fs::fchmod(&socket, Mode::from_raw_mode(mode))?;
    }
    rustix::net::bind(&socket, address)?;
    rustix::net::listen(&socket, backlog)?;
    Ok(socket)
}

fn stream_socket() -> rustix::io::Result<OwnedFd> {
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
}

fn address(path: &Path) -> Result<SocketAddrUnix, DoorError> {
    SocketAddrUnix::new(path).map_err(|errno| match errno {
        Errno::NAMETOOLONG => {
            DoorError::PathTooLong { path: path.to_owned(), given: path.as_os_str().as_bytes().len() }
        }
        errno => {
            DoorError::Io { path: path.to_owned(), action: "use it as an address", source: errno.into() }
        }
    })
}

fn clear_stale(path: &Path) -> Result<(), DoorError> {
    let failed = |action| move |source| DoorError::Io { path: path.to_owned(), action, source };
    let meta = match std::fs::symlink_metadata(path) {
        Ok(meta) => meta,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(failed("read its metadata")(e)),
    };
    if !meta.file_type().is_socket() {
        return Err(DoorError::NotASocket { path: path.to_owned() });
    }
    match try_connect(&address(path)?, PROBE_TIME) {
        // A full queue is a busy door, not a dead one.
        Ok(_) | Err(Errno::AGAIN) => Err(DoorError::InUse { path: path.to_owned() }),
        Err(Errno::CONNREFUSED) => std::fs::remove_file(path).map_err(failed("remove the stale socket")),
        Err(errno) => Err(failed("find out who serves it")(errno.into())),
    }
}
