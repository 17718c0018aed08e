//! Who is at the other end of a unix socket.

use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;

use super::DoorError;

/// Refuses a peer of another user.
pub(super) fn check(stream: &UnixStream) -> io::Result<Result<(), DoorError>> {
    Ok(same_user(rustix::process::geteuid().as_raw(), peer_uid(stream)?))
}

fn same_user(own: u32, peer: u32) -> Result<(), DoorError> {
    if own == peer { Ok(()) } else { Err(DoorError::ForeignPeer { own, peer }) }
}

/// The effective uid under which the peer connected or listened.
///
/// Not `rustix::net::sockopt::socket_peercred`: its pid is a non-zero type, and the kernel reports pid 0 for a peer
/// in another pid namespace, which is what two containers of one pod are.
fn peer_uid(stream: &UnixStream) -> io::Result<u32> {
    let mut cred = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the descriptor is open for the call; `cred` and `len` are valid for writes, and `len` holds the size of
    // `cred`, for which every bit pattern is valid.
    let rc = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut cred).cast(),
            &raw mut len,
        )
    };
    if rc == 0 { Ok(cred.uid) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_user_is_refused_by_both_numbers() {
        assert!(same_user(1000, 1000).is_ok());
        let error = same_user(1000, 1001).unwrap_err().to_string();
        assert!(error.contains("1000") && error.contains("1001"), "{error}");
        assert!(same_user(1000, 0).is_err(), "root is another user too");
    }

    #[test]
    fn the_kernel_names_this_process_as_its_own_peer() {
        let (a, _b) = UnixStream::pair().unwrap();
        assert_eq!(peer_uid(&a).unwrap(), rustix::process::geteuid().as_raw());
        check(&a).unwrap().unwrap();
    }
}
