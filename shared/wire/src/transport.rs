//! Channels and servers with one set of windows, keepalives and limits.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
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

/// A server builder with the same windows and keepalives.
pub fn server() -> Server {
    Server::builder()
        .tcp_nodelay(true)
        .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
        .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT))
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
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
    Unix(UnixListener),
}

impl Listener {
    /// Binds. A unix socket file left by a dead process is replaced; one that still answers is refused.
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
                if path.exists() {
                    if UnixStream::connect(path).await.is_ok() {
                        let taken = io::Error::new(io::ErrorKind::AddrInUse, "another process answers there");
                        return Err(name(taken));
                    }
                    std::fs::remove_file(path).map_err(name)?;
                }
                let socket = UnixListener::bind(path).map_err(name)?;
                Ok(Self { socket: Socket::Unix(socket), address: address.clone() })
            }
        }
    }

    /// Where it listens, with the port that the system chose for port 0.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// The connections, for `serve_with_incoming`.
    pub fn incoming(self) -> Incoming {
        Incoming(self.socket)
    }
}

/// Stream of accepted connections of either kind.
#[derive(Debug)]
pub struct Incoming(Socket);

impl Stream for Incoming {
    type Item = io::Result<Connection>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let accepted = match &self.get_mut().0 {
            Socket::Tcp(listener) => listener.poll_accept(cx).map_ok(|(stream, _)| {
                // Frames are small and answered at once: never wait to coalesce them.
                let _ = stream.set_nodelay(true);
                Connection::Tcp(stream)
            }),
            Socket::Unix(listener) => listener.poll_accept(cx).map_ok(|(stream, _)| Connection::Unix(stream)),
        };
        accepted.map(Some)
    }
}

/// One accepted connection.
#[derive(Debug)]
pub enum Connection {
    /// Over TCP.
    Tcp(TcpStream),
    /// Over a unix socket.
    Unix(UnixStream),
}

impl Connected for Connection {
    type ConnectInfo = ();
    fn connect_info(&self) {}
}

macro_rules! either {
    ($self:ident, $stream:ident => $call:expr) => {
        match $self.get_mut() {
            Connection::Tcp(stream) => {
                let $stream = Pin::new(stream);
                $call
            }
            Connection::Unix(stream) => {
                let $stream = Pin::new(stream);
                $call
            }
        }
    };
}

impl AsyncRead for Connection {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        either!(self, s => s.poll_read(cx, buf))
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
