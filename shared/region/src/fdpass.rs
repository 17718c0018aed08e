//! Descriptors over a unix socket, framed so that neither a lost descriptor nor a lost byte goes unnoticed.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// The most descriptors one message can carry.
pub const MAX_FDS: usize = 64;

// Payload length and descriptor count, both u32 in native order: the two ends share a kernel.
const HEADER_BYTES: usize = 8;

/// A message with descriptors that could not be sent or received whole.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FdPassError {
    /// The socket failed or timed out.
    #[error("cannot {action} descriptors: {source}")]
    Io {
        /// `send` or `receive`.
        action: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The peer closed the socket before or within a message.
    #[error("peer closed the socket before the message was complete")]
    Closed,
    /// More bytes than the receiver takes, or the format carries.
    #[error("message payload must be at most {limit} bytes, given {given}")]
    Payload {
        /// The limit.
        limit: usize,
        /// The payload's size.
        given: usize,
    },
    /// More descriptors than the receiver takes, or one message carries.
    #[error("message must carry at most {limit} descriptors, given {given}")]
    TooMany {
        /// The limit.
        limit: usize,
        /// The descriptors given.
        given: usize,
    },
    /// Fewer descriptors arrived than were sent; the kernel drops what exceeds the open-file limit.
    #[error("{received} of {sent} descriptors arrived (is the open-file limit reached?)")]
    Lost {
        /// Descriptors sent, by the message's header.
        sent: usize,
        /// Descriptors that arrived.
        received: usize,
    },
}

impl FdPassError {
    /// Whether the peer had more time than it was to have.
    pub(crate) fn is_timeout(&self) -> bool {
        // The kernel's word for a timeout of a blocking call is EAGAIN.
        matches!(self, Self::Io { source, .. } if source.kind() == io::ErrorKind::WouldBlock)
    }
}

/// Sends `payload` and `fds` as one message.
///
/// # Errors
/// [`FdPassError::TooMany`], [`FdPassError::Payload`], or the socket's error; the stream is useless after the last.
pub(crate) fn send_fds(
    stream: &UnixStream,
    payload: &[u8],
    fds: &[BorrowedFd<'_>],
) -> Result<(), FdPassError> {
    if fds.len() > MAX_FDS {
        return Err(FdPassError::TooMany { limit: MAX_FDS, given: fds.len() });
    }
    let Ok(len) = u32::try_from(payload.len()) else {
        return Err(FdPassError::Payload { limit: u32::MAX as usize, given: payload.len() });
    };
    let mut message = Vec::with_capacity(HEADER_BYTES + payload.len());
    message.extend_from_slice(&len.to_ne_bytes());
    message.extend_from_slice(&(fds.len() as u32).to_ne_bytes());
    message.extend_from_slice(payload);

    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(fds.len()))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(FdPassError::TooMany { limit: MAX_FDS, given: fds.len() });
    }
    let failed = |source: io::Error| FdPassError::Io { action: "send", source };
    let sent = retry(|| sendmsg(stream, &[IoSlice::new(&message)], &mut control, SendFlags::NOSIGNAL))
        .map_err(failed)?;
    // The descriptors went with the first byte; a socket buffer may have been too small for all of the rest.
    (&*stream).write_all(&message[sent..]).map_err(failed)
}

/// Receives one message of at most `max_payload` bytes and `max_fds` descriptors. The descriptors are closed on exec.
///
/// # Errors
/// Any [`FdPassError`]; descriptors that arrived are closed then, and the stream is useless.
pub(crate) fn recv_fds(
    stream: &UnixStream,
    max_payload: usize,
    max_fds: usize,
) -> Result<(Vec<u8>, Vec<OwnedFd>), FdPassError> {
    let (header, fds, truncated) = recv_header(stream, max_fds)?;
    let [l0, l1, l2, l3, c0, c1, c2, c3] = header;
    let len = u32::from_ne_bytes([l0, l1, l2, l3]) as usize;
    let sent = u32::from_ne_bytes([c0, c1, c2, c3]) as usize;
    if sent > max_fds {
        return Err(FdPassError::TooMany { limit: max_fds, given: sent });
    }
    if truncated || fds.len() != sent {
        return Err(FdPassError::Lost { sent, received: fds.len() });
    }
    if len > max_payload {
        return Err(FdPassError::Payload { limit: max_payload, given: len });
    }
    let mut payload = vec![0; len];
    match (&*stream).read_exact(&mut payload) {
        Ok(()) => Ok((payload, fds)),
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => Err(FdPassError::Closed),
        Err(source) => Err(FdPassError::Io { action: "receive", source }),
    }
}

fn recv_header(
    stream: &UnixStream,
    max_fds: usize,
) -> Result<([u8; HEADER_BYTES], Vec<OwnedFd>, bool), FdPassError> {
    let mut header = [0; HEADER_BYTES];
    let (mut filled, mut fds, mut truncated) = (0, Vec::new(), false);
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(max_fds.min(MAX_FDS)))];
    while filled < HEADER_BYTES {
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let into = &mut [IoSliceMut::new(&mut header[filled..])];
        let received = retry(|| recvmsg(stream, into, &mut control, RecvFlags::CMSG_CLOEXEC))
            .map_err(|source| FdPassError::Io { action: "receive", source })?;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
        truncated |= received.flags.contains(ReturnFlags::CTRUNC);
        if received.bytes == 0 {
            return Err(FdPassError::Closed);
        }
        filled += received.bytes;
    }
    Ok((header, fds, truncated))
}

fn retry<T>(mut call: impl FnMut() -> rustix::io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(rustix::io::Errno::INTR) => {}
            done => return Ok(done?),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    fn files(n: usize) -> Vec<std::fs::File> {
        (0..n)
            .map(|i| {
                let mut file = tempfile::tempfile().unwrap();
                write!(file, "file {i}").unwrap();
                file
            })
            .collect()
    }

    fn borrowed(files: &[std::fs::File]) -> Vec<BorrowedFd<'_>> {
        files.iter().map(AsFd::as_fd).collect()
    }

    #[test]
    fn messages_arrive_whole_and_in_order() {
        let (a, b) = UnixStream::pair().unwrap();
        let sent = files(3);
        send_fds(&a, b"three", &borrowed(&sent)).unwrap();
        send_fds(&a, b"", &[]).unwrap();
        send_fds(&a, b"one", &borrowed(&sent[..1])).unwrap();
        let (payload, fds) = recv_fds(&b, 16, 3).unwrap();
        assert_eq!((payload.as_slice(), fds.len()), (b"three".as_slice(), 3));
        for (i, fd) in fds.into_iter().enumerate() {
            assert!(rustix::io::fcntl_getfd(&fd).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
            let mut file = std::fs::File::from(fd);
            let mut text = String::new();
            io::Seek::rewind(&mut file).unwrap();
            file.read_to_string(&mut text).unwrap();
            assert_eq!(text, format!("file {i}"));
        }
        let (payload, fds) = recv_fds(&b, 16, 3).unwrap();
        assert!(payload.is_empty() && fds.is_empty());
        let (payload, fds) = recv_fds(&b, 16, 3).unwrap();
        assert_eq!((payload.as_slice(), fds.len()), (b"one".as_slice(), 1));
        drop(a);
        assert!(matches!(recv_fds(&b, 16, 3), Err(FdPassError::Closed)));
    }

    #[test]
    fn more_than_the_receiver_takes_is_an_error() {
        for (sent, max) in [(5, 2), (4, 3), (1, 0)] {
            let (a, b) = UnixStream::pair().unwrap();
            send_fds(&a, b"x", &borrowed(&files(sent))).unwrap();
            let error = recv_fds(&b, 16, max).unwrap_err();
            assert!(
                matches!(error, FdPassError::TooMany { limit, given } if limit == max && given == sent),
                "{error}"
            );
        }
        let (a, b) = UnixStream::pair().unwrap();
        send_fds(&a, b"seventeen bytes!!", &[]).unwrap();
        assert!(matches!(recv_fds(&b, 16, 0), Err(FdPassError::Payload { limit: 16, given: 17 })));
        let error = send_fds(&a, b"", &borrowed(&files(MAX_FDS + 1))).unwrap_err();
        assert!(matches!(error, FdPassError::TooMany { limit: MAX_FDS, given } if given == MAX_FDS + 1));
    }

    /// A header that promises other descriptors than come with it, as the kernel leaves it when it drops some.
    #[test]
    fn lost_descriptors_are_noticed() {
        for (promised, carried) in [(2_u32, 0), (1, 2)] {
            let (a, b) = UnixStream::pair().unwrap();
            let message = [0_u32.to_ne_bytes(), promised.to_ne_bytes()].concat();
            let files = files(carried);
            let fds = borrowed(&files);
            let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            assert!(carried == 0 || control.push(SendAncillaryMessage::ScmRights(&fds)));
            sendmsg(&a, &[IoSlice::new(&message)], &mut control, SendFlags::NOSIGNAL).unwrap();
            let error = recv_fds(&b, 0, 2).unwrap_err();
            assert!(matches!(error, FdPassError::Lost { received, .. } if received == carried), "{error}");
        }
    }

    #[test]
    fn a_large_payload_crosses_a_small_socket_buffer() {
        let (a, b) = UnixStream::pair().unwrap();
        let payload: Vec<u8> = (0..4 << 20).map(|i| (i % 253) as u8).collect();
        let file = files(1);
        std::thread::scope(|scope| {
            scope.spawn(|| send_fds(&a, &payload, &borrowed(&file)).unwrap());
            let (received, fds) = recv_fds(&b, payload.len(), 1).unwrap();
            assert!(received == payload);
            assert_eq!(fds.len(), 1);
        });
    }
}
