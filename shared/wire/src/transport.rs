//! Channels and servers with one set of windows, keepalives and limits.

use std::future::Future;
use std::io;
use std::path::Path;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use eyrie_region::{DoorError, SocketFile};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::time::Sleep;
use tokio_stream::Stream;
use tonic::transport::server::Connected;
use tonic::transport::{Channel, Endpoint, Server};

use crate::{Address, AddressError, Reason, refuse};

/// HTTP/2 flow-control windows. Set explicitly on both sides: the adaptive window of hyper would reset
/// them to 64 KiB, and a frame larger than the connection window stalls every stream beside it.
const STREAM_WINDOW: u32 = 8 << 20;
const CONNECTION_WINDOW: u32 = 16 << 20;
/// Peers ping idle connections so that a half-open one is noticed.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(5);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// A client has this long to say that it speaks HTTP/2; keepalive begins only then.
const GREETING_TIMEOUT: Duration = Duration::from_secs(10);
/// Bytes of the preface (RFC 9113, 3.4) and of the head of the SETTINGS frame that must follow it.
const GREETING: usize = 24 + 9;
/// Calls of one connection at the same time. A client keeps more to itself, so it is above the limits that are told with
/// a status.
const MAX_CALLS: u32 = 2048;
/// Connections that may wait to be accepted on a unix socket; tokio's own figure for TCP.
const UNIX_BACKLOG: i32 = 1024;
/// After a failed accept (no descriptors left) accepting rests: the socket stays readable and would spin otherwise.
const ACCEPT_REST: Duration = Duration::from_millis(100);

fn endpoint(address: &Address) -> Result<Endpoint, tonic::transport::Error> {
    Ok(Endpoint::from_shared(address.to_string())?
        .connect_timeout(CONNECT_TIMEOUT)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(KEEPALIVE_INTERVAL)
        .keep_alive_timeout(KEEPALIVE_TIMEOUT)
        .keep_alive_while_idle(true)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW))
}

/// Connects now.
///
/// # Errors
/// UNAVAILABLE naming the address when nobody answers within five seconds.
pub async fn connect(address: &Address) -> Result<Channel, tonic::Status> {
    let fail = |e: tonic::transport::Error| {
        let mut cause: &dyn std::error::Error = &e;
        while let Some(deeper) = cause.source() {
            cause = deeper;
        }
        refuse(Reason::Unreachable, format!("cannot reach {address}: {cause}"))
    };
    endpoint(address).map_err(fail)?.connect().await.map_err(fail)
}

/// A channel that connects on first use and reconnects by itself.
///
/// # Errors
/// When the address is not a valid URI.
pub fn channel(address: &Address) -> Result<Channel, tonic::transport::Error> {
    Ok(endpoint(address)?.connect_lazy())
}

/// A server builder with the same windows and keepalives, and a limit of calls a connection.
pub fn server() -> Server {
    Server::builder()
        .tcp_nodelay(true)
        .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
        .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT))
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_concurrent_streams(MAX_CALLS)
        .http2_adaptive_window(Some(false))
}

/// A bound socket, before it is served.
#[derive(Debug)]
pub struct Listener {
    socket: Socket,
    address: Address,
}

#[derive(Debug)]
enum Socket {
    Tcp(TcpListener),
    Unix(UnixSocket),
}

/// A listening unix socket; its file is removed before it closes, unless another one has taken its place.
#[derive(Debug)]
struct UnixSocket {
    listener: UnixListener,
    file: SocketFile,
}

impl Drop for UnixSocket {
    fn drop(&mut self) {
        self.file.remove();
    }
}

impl Listener {
    /// Binds. A unix socket file left by a dead process is replaced; one that still answers is refused, and so is a
    /// file that is no socket. The file is removed when the listener, or what became of it, is dropped.
    ///
    /// # Errors
    /// The operating system's, with the address named.
    pub async fn bind(address: &Address) -> io::Result<Self> {
        let name = |e: io::Error| io::Error::new(e.kind(), format!("cannot listen on {address}: {e}"));
        match address {
            Address::Tcp(host_port) => {
                let socket = TcpListener::bind(host_port).await.map_err(name)?;
                let address = Address::Tcp(socket.local_addr()?.to_string());
                Ok(Self { socket: Socket::Tcp(socket), address })
            }
            Address::Unix(path) => {
                let bind = |path: &Path| SocketFile::bind(path, UNIX_BACKLOG, None);
                let (file, listener) = bind(path).map_err(|e| name(into_io(e)))?;
                let listener =
                    UnixListener::from_std(listener).inspect_err(|_| file.remove()).map_err(name)?;
                let socket = Socket::Unix(UnixSocket { listener, file });
                Ok(Self { socket, address: address.clone() })
            }
        }
    }

    /// Where it listens, with the port that the system chose for port 0.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// The connections, for `serve_with_incoming`.
    pub fn incoming(self) -> Incoming {
        Incoming { socket: self.socket, rest: Rest::default() }
    }
}

fn into_io(error: DoorError) -> io::Error {
    let kind = match &error {
        DoorError::Io { source, .. } => source.kind(),
        DoorError::InUse { .. } => io::ErrorKind::AddrInUse,
        _ => io::ErrorKind::InvalidInput,
    };
    io::Error::new(kind, error.to_string())
}

/// Lets no accept follow a failed one at once.
#[derive(Debug, Default)]
struct Rest(Option<Pin<Box<Sleep>>>);

impl Rest {
    fn poll<T>(
        &mut self,
        cx: &mut Context<'_>,
        accept: impl FnOnce(&mut Context<'_>) -> Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if let Some(rest) = &mut self.0 {
            ready!(rest.as_mut().poll(cx));
            self.0 = None;
        }
        let accepted = accept(cx);
        if let Poll::Ready(Err(_)) = &accepted {
            self.0 = Some(Box::pin(tokio::time::sleep(ACCEPT_REST)));
        }
        accepted
    }
}

/// Stream of accepted connections of either kind; it never ends.
#[derive(Debug)]
pub struct Incoming {
    socket: Socket,
    rest: Rest,
}

impl Stream for Incoming {
    type Item = io::Result<Connection>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let Self { socket, rest } = self.get_mut();
        let accepted = rest.poll(cx, |cx| match socket {
            Socket::Tcp(listener) => listener.poll_accept(cx).map_ok(|(stream, _)| {
                // Frames are small and answered at once: never wait to coalesce them.
                let _ = stream.set_nodelay(true);
                Connection::new(Io::Tcp(stream))
            }),
            Socket::Unix(unix) => {
                unix.listener.poll_accept(cx).map_ok(|(stream, _)| Connection::new(Io::Unix(stream)))
            }
        });
        accepted.map(Some)
    }
}

/// One accepted connection. Reading fails where the client does not greet in time.
#[derive(Debug)]
pub struct Connection {
    io: Io,
    greeting: Option<Greeting>,
}

#[derive(Debug)]
enum Io {
    Tcp(TcpStream),
    Unix(UnixStream),
}

/// What a client still has to send, and until when.
#[derive(Debug)]
struct Greeting {
    left: usize,
    overdue: Pin<Box<Sleep>>,
}

impl Connection {
    fn new(io: Io) -> Self {
        let overdue = Box::pin(tokio::time::sleep(GREETING_TIMEOUT));
        Self { io, greeting: Some(Greeting { left: GREETING, overdue }) }
    }
}

impl Connected for Connection {
    type ConnectInfo = ();
    fn connect_info(&self) {}
}

macro_rules! either {
    ($self:expr, $stream:ident => $call:expr) => {
        match &mut $self.get_mut().io {
            Io::Tcp(stream) => {
                let $stream = Pin::new(stream);
                $call
            }
            Io::Unix(stream) => {
                let $stream = Pin::new(stream);
                $call
            }
        }
    };
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let read = either!(self.as_mut(), s => s.poll_read(cx, buf));
        let Some(greeting) = &mut self.greeting else { return read };
        let got = buf.filled().len() - before;
        if got >= greeting.left {
            self.greeting = None;
            return read;
        }
        greeting.left -= got;
        if read.is_pending() && greeting.overdue.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        read
    }
}

impl AsyncWrite for Connection {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        either!(self, s => s.poll_write(cx, buf))
    }
    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self, s => s.poll_flush(cx))
    }
    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self, s => s.poll_shutdown(cx))
    }
}

impl From<AddressError> for tonic::Status {
    fn from(e: AddressError) -> Self {
        refuse(Reason::InvalidArgument, e.to_string())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tonic::service::Routes;

    use super::*;

    async fn bind(path: &Path) -> io::Result<Listener> {
        Listener::bind(&Address::Unix(path.to_owned())).await
    }

    #[tokio::test]
    async fn a_path_is_taken_from_the_dead_only() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("service.sock");
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        assert!(path.exists(), "a killed process leaves its file");
        let living = bind(&path).await.unwrap();
        let error = bind(&path).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        assert!(error.to_string().starts_with("cannot listen on unix:"), "{error}");
        drop(living.incoming());
        assert!(!path.exists());

        std::fs::write(&path, "precious").unwrap();
        let error = bind(&path).await.unwrap_err().to_string();
        assert!(error.contains("not a socket"), "{error}");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
    }

    #[tokio::test]
    async fn a_connection_is_told_how_many_calls_it_may_make() {
        let dir = tempfile::tempdir().unwrap();
        let listener = bind(&dir.path().join("service.sock")).await.unwrap();
        let serving = server().add_routes(Routes::default()).serve_with_incoming(listener.incoming());
        let settings = async {
            let mut stream = UnixStream::connect(dir.path().join("service.sock")).await.unwrap();
            stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await.unwrap();
            let mut header = [0; 9];
            stream.read_exact(&mut header).await.unwrap();
            let mut settings = vec![0; usize::from(header[2])];
            stream.read_exact(&mut settings).await.unwrap();
            settings
        };
        let settings = tokio::select! {
            settings = settings => settings,
            served = serving => panic!("{served:?}"),
        };
        // SETTINGS_MAX_CONCURRENT_STREAMS.
        let told = [&[0, 3], MAX_CALLS.to_be_bytes().as_slice()].concat();
        assert!(settings.chunks(6).any(|setting| setting == told), "{settings:?}");
    }

    #[tokio::test]
    async fn a_successor_keeps_its_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("service.sock");
        let former = bind(&path).await.unwrap();
        std::fs::remove_file(&path).unwrap();
        let successor = bind(&path).await.unwrap();
        drop(former);
        assert!(UnixStream::connect(&path).await.is_ok());
        drop(successor);
        assert!(!path.exists());
    }

    #[tokio::test(start_paused = true)]
    async fn who_does_not_greet_is_shut_out() {
        for sent in [0, GREETING - 1] {
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            let mut connection = Connection::new(Io::Unix(ours));
            theirs.write_all(&vec![b'x'; sent]).await.unwrap();
            let begun = tokio::time::Instant::now();
            let mut heard = Vec::new();
            let error = connection.read_to_end(&mut heard).await.unwrap_err();
            assert_eq!((error.kind(), heard.len()), (io::ErrorKind::TimedOut, sent));
            assert!(begun.elapsed() >= GREETING_TIMEOUT);
        }
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let mut connection = Connection::new(Io::Unix(ours));
        theirs.write_all(&[b'x'; GREETING]).await.unwrap();
        connection.read_exact(&mut [0; GREETING]).await.unwrap();
        tokio::time::sleep(2 * GREETING_TIMEOUT).await;
        theirs.write_all(b"y").await.unwrap();
        assert_eq!(connection.read_u8().await.unwrap(), b'y', "rest is no fault after the greeting");
    }

    #[tokio::test]
    async fn a_failed_accept_is_not_tried_again_at_once() {
        let (mut rest, mut accepts) = (Rest::default(), 0);
        let begun = Instant::now();
        for _ in 0..3 {
            let failed: io::Result<()> = std::future::poll_fn(|cx| {
                rest.poll(cx, |_| {
                    accepts += 1;
                    Poll::Ready(Err(io::Error::other("no descriptors left")))
                })
            })
            .await;
            assert!(failed.is_err());
        }
        assert_eq!(accepts, 3);
        assert!(begun.elapsed() >= 2 * ACCEPT_REST, "{:?}", begun.elapsed());
    }
}
