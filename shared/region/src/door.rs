//! The door: a unix socket at which an importer changes a token for descriptors.

mod peer;
mod socket;

use std::collections::HashMap;
use std::fmt;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

pub use self::socket::SocketFile;
use crate::epoch::fill_random;
use crate::fdpass::{FdPassError, MAX_FDS, recv_fds, send_fds};

/// A client has this long to send its token; the door serves one client at a time.
const CLIENT_TIME: Duration = Duration::from_secs(1);
/// After a failed accept (no descriptors left) the door rests, where poll would return at once for ever.
const ACCEPT_REST: Duration = Duration::from_millis(100);
/// Clients that may wait while one is served; the kernel holds back the others in `connect`.
const BACKLOG: i32 = 128;
/// Only this user's processes may connect.
const MODE: u32 = 0o600;
const TOKEN_BYTES: usize = 32;
const GRANTED: u8 = b'+';
const REFUSED: u8 = b'-';
const MAX_ANSWER: usize = 256;

/// A secret that stands for a set of descriptors. Its `Debug` form does not show it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Token([u8; TOKEN_BYTES]);

impl Token {
    /// A new token that cannot be guessed.
    ///
    /// # Errors
    /// The kernel's error, when it has no randomness to give.
    pub fn random() -> io::Result<Self> {
        let mut bytes = [0; TOKEN_BYTES];
        fill_random(&mut bytes)?;
        Ok(Self(bytes))
    }

    /// The token as it travels in messages.
    pub fn as_bytes(&self) -> &[u8; TOKEN_BYTES] {
        &self.0
    }
}

impl From<[u8; TOKEN_BYTES]> for Token {
    fn from(bytes: [u8; TOKEN_BYTES]) -> Self {
        Self(bytes)
    }
}

impl TryFrom<&[u8]> for Token {
    type Error = std::array::TryFromSliceError;

    /// Fails for any other length than 32 bytes.
    fn try_from(bytes: &[u8]) -> Result<Self, Self::Error> {
        bytes.try_into().map(Self)
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

/// A socket that could not be opened, or descriptors that a door did not give out.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DoorError {
    /// A system call failed.
    #[error("{}: cannot {action}: {source}", path.display())]
    Io {
        /// The socket.
        path: PathBuf,
        /// What was tried, as a verb phrase.
        action: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The path is longer than a socket address holds.
    #[error("{}: a socket path must be at most 107 bytes, given {given}", path.display())]
    PathTooLong {
        /// The path.
        path: PathBuf,
        /// Its length in bytes.
        given: usize,
    },
    /// A living process answers at the path.
    #[error("{}: another process serves this socket", path.display())]
    InUse {
        /// The socket.
        path: PathBuf,
    },
    /// Something that is no socket lies at the path; it is left alone.
    #[error("{}: exists and is not a socket", path.display())]
    NotASocket {
        /// The path.
        path: PathBuf,
    },
    /// The other end runs as another user.
    #[error("peer must run as uid {own}, it runs as uid {peer}")]
    ForeignPeer {
        /// The uid of this process.
        own: u32,
        /// The uid of the peer.
        peer: u32,
    },
    /// More descriptors than one answer carries.
    #[error("a token stands for at most {limit} descriptors, given {given}")]
    TooMany {
        /// The limit.
        limit: usize,
        /// The descriptors given.
        given: usize,
    },
    /// The door did not answer in time.
    #[error("{}: no answer within {} ms", path.display(), timeout.as_millis())]
    Silent {
        /// The socket.
        path: PathBuf,
        /// The time it had.
        timeout: Duration,
    },
    /// The door said no.
    #[error("{}: refused: {reason}", path.display())]
    Refused {
        /// The socket.
        path: PathBuf,
        /// The door's reason.
        reason: String,
    },
    /// The door's answer did not arrive whole.
    #[error("{}: {source}", path.display())]
    Answer {
        /// The socket.
        path: PathBuf,
        /// What was wrong with it.
        source: FdPassError,
    },
}

/// Serves descriptors to processes of the same user. Dropping it ends the thread and removes the socket file.
#[derive(Debug)]
pub struct FdDoor {
    shared: Arc<Shared>,
    file: SocketFile,
    thread: Option<JoinHandle<UnixListener>>,
}

#[derive(Debug)]
struct Shared {
    offers: Mutex<HashMap<Token, Arc<[OwnedFd]>>>,
    stop: OwnedFd,
    refused: AtomicU64,
}

impl FdDoor {
    /// Binds `path` with mode 0600 and serves it on a thread of its own. A socket file that nobody answers at is
    /// replaced.
    ///
    /// # Errors
    /// [`DoorError::InUse`], [`DoorError::NotASocket`], [`DoorError::PathTooLong`], or the kernel's answer.
    pub fn bind(path: impl AsRef<Path>) -> Result<Self, DoorError> {
        let path = path.as_ref();
        let failed = |action| move |source| DoorError::Io { path: path.to_owned(), action, source };
        let stop = eventfd(0, EventfdFlags::CLOEXEC)
            .map_err(|e| failed("make its stop event")(io::Error::from(e)))?;
        let shared = Arc::new(Shared { offers: Mutex::default(), stop, refused: AtomicU64::new(0) });
        let (file, listener) = SocketFile::bind(path, BACKLOG, Some(MODE))?;
        let thread = std::thread::Builder::new()
            .name("eyrie-fd-door".to_owned())
            .spawn({
                let shared = Arc::clone(&shared);
                move || shared.serve(listener)
            })
            .map_err(failed("start its thread"));
        match thread {
            Ok(thread) => Ok(Self { shared, file, thread: Some(thread) }),
            Err(error) => {
                file.remove();
                Err(error)
            }
        }
    }

    /// The socket's path.
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// Lets whoever knows `token` fetch `fds`, as often as it asks, until [`revoke`](Self::revoke). An earlier offer
    /// of the same token is replaced.
    ///
    /// # Errors
    /// [`DoorError::TooMany`] above [`MAX_FDS`] descriptors.
    pub fn offer(&self, token: Token, fds: Vec<OwnedFd>) -> Result<(), DoorError> {
        if fds.len() > MAX_FDS {
            return Err(DoorError::TooMany { limit: MAX_FDS, given: fds.len() });
        }
        self.shared.offers().insert(token, fds.into());
        Ok(())
    }

    /// Ends an offer; false where there is none. Descriptors that were fetched stay with those who have them.
    pub fn revoke(&self, token: &Token) -> bool {
        self.shared.offers().remove(token).is_some()
    }

    /// Clients turned away so far: wrong token, other user, garbage, or too slow.
    pub fn refused(&self) -> u64 {
        self.shared.refused.load(Ordering::Relaxed)
    }

    /// Fetches the descriptors that `token` stands for from the door at `path`, within `timeout`.
    ///
    /// # Errors
    /// [`DoorError::Refused`] with the door's reason, [`DoorError::ForeignPeer`] where the door is another user's,
    /// or why the answer did not arrive.
    pub fn fetch(
        path: impl AsRef<Path>,
        token: &Token,
        timeout: Duration,
    ) -> Result<Vec<OwnedFd>, DoorError> {
        let path = path.as_ref();
        let failed = |action| move |source| DoorError::Io { path: path.to_owned(), action, source };
        let begun = Instant::now();
        let mut stream = socket::connect(path, timeout)?;
        peer::check(&stream).map_err(failed("read its peer's uid"))??;
        // A zero timeout would mean none at all.
        let left = timeout.saturating_sub(begun.elapsed()).max(Duration::from_millis(1));
        stream.set_write_timeout(Some(left)).map_err(failed("set its timeout"))?;
        stream.set_read_timeout(Some(left)).map_err(failed("set its timeout"))?;
        stream.write_all(token.as_bytes()).map_err(failed("send the token"))?;
        let (answer, fds) =
            recv_fds(&stream, MAX_ANSWER, MAX_FDS).map_err(|source| match source.is_timeout() {
                true => DoorError::Silent { path: path.to_owned(), timeout },
                false => DoorError::Answer { path: path.to_owned(), source },
            })?;
        if answer.first() == Some(&GRANTED) {
            return Ok(fds);
        }
        let reason = String::from_utf8_lossy(answer.get(1..).unwrap_or_default()).into_owned();
        Err(DoorError::Refused { path: path.to_owned(), reason })
    }
}

impl Drop for FdDoor {
    fn drop(&mut self) {
        // An eventfd that is written once cannot be full.
        let _ = rustix::io::write(&self.shared.stop, &1_u64.to_ne_bytes());
        let listener = self.thread.take().and_then(|thread| thread.join().ok());
        self.file.remove();
        drop(listener);
    }
}

#[derive(PartialEq, Eq)]
enum Woken {
    Ready,
    Stop,
    Late,
}

impl Shared {
    // The map is changed by single calls that leave it whole.
    fn offers(&self) -> MutexGuard<'_, HashMap<Token, Arc<[OwnedFd]>>> {
        self.offers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn serve(&self, listener: UnixListener) -> UnixListener {
        while self.wait(Some(listener.as_fd()), None) != Woken::Stop {
            match listener.accept() {
                Ok((stream, _)) => match self.answer(&stream) {
                    Ok(true) => {}
                    // What a client did wrong is told to the client and counted; it is never the door's fault.
                    Ok(false) | Err(_) => {
                        self.refused.fetch_add(1, Ordering::Relaxed);
                    }
                },
                Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
                Err(_) => {
                    self.wait(None, Some(Instant::now() + ACCEPT_REST));
                }
            }
        }
        listener
    }

    fn answer(&self, stream: &UnixStream) -> Result<bool, FdPassError> {
        let verdict = self.judge(stream);
        let (mut message, fds) = match &verdict {
            Ok(fds) => (vec![GRANTED], &fds[..]),
            Err(reason) => ([&[REFUSED], reason.as_bytes()].concat(), &[][..]),
        };
        message.truncate(MAX_ANSWER);
        let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
        // The socket is non-blocking and its buffer empty: this does not wait for the client.
        send_fds(stream, &message, &fds)?;
        Ok(verdict.is_ok())
    }

    fn judge(&self, stream: &UnixStream) -> Result<Arc<[OwnedFd]>, String> {
        stream.set_nonblocking(true).map_err(|e| e.to_string())?;
        peer::check(stream).map_err(|e| e.to_string())?.map_err(|e| e.to_string())?;
        let token = self.read_token(stream).map_err(|e| format!("no token: {e}"))?;
        self.offers().get(&token).cloned().ok_or_else(|| "token is not known".to_owned())
    }

    fn read_token(&self, mut stream: &UnixStream) -> io::Result<Token> {
        let deadline = Instant::now() + CLIENT_TIME;
        let (mut token, mut filled) = ([0; TOKEN_BYTES], 0);
        while filled < TOKEN_BYTES {
            match stream.read(&mut token[filled..]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => filled += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    if self.wait(Some(stream.as_fd()), Some(deadline)) != Woken::Ready {
                        return Err(io::ErrorKind::TimedOut.into());
                    }
                }
                Err(e) => return Err(e),
            }
        }
        Ok(Token(token))
    }

    /// Waits until `fd` can be read, the door stops, or the deadline passes.
    fn wait(&self, fd: Option<BorrowedFd<'_>>, deadline: Option<Instant>) -> Woken {
        loop {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let timeout = left.and_then(|left| Timespec::try_from(left).ok());
            let mut fds = vec![PollFd::new(&self.stop, PollFlags::IN)];
            fds.extend(fd.as_ref().map(|fd| PollFd::new(fd, PollFlags::IN)));
            match poll(&mut fds, timeout.as_ref()) {
                Ok(_) if !fds[0].revents().is_empty() => return Woken::Stop,
                Ok(0) => return Woken::Late,
                Ok(_) => return Woken::Ready,
                Err(rustix::io::Errno::INTR) => {}
                // Kernel memory is exhausted; there is no event to wait for, so try again at a measured pace.
                Err(_) => std::thread::park_timeout(ACCEPT_REST),
            }
        }
    }
}

#[cfg(test)]
mod tests;
