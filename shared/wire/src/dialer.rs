//! How a service reaches another one, so that whole services can be run against each other without a network.

use std::convert::Infallible;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;

use tonic::Status;
use tonic::body::Body;
use tower::util::BoxCloneSyncService;
use tower::{Service, ServiceExt};

use crate::Address;

/// A connection to a peer: what generated clients are made from.
pub type PeerChannel = BoxCloneSyncService<http::Request<Body>, http::Response<Body>, Status>;

/// A connection to a service of this process, without a network between.
pub fn in_process<S, B>(service: S) -> PeerChannel
where
    S: Service<http::Request<Body>, Response = http::Response<B>, Error = Infallible>,
    S: Clone + Send + Sync + 'static,
    S::Future: Send,
    B: tonic::codegen::Body<Data = bytes::Bytes, Error: Into<tonic::codegen::StdError>> + Send + 'static,
{
    let service = service.map_response(|response| response.map(Body::new));
    PeerChannel::new(service.map_err(|never| -> Status { match never {} }))
}

/// What a dialer returns.
pub type Dialing<'a> = Pin<Box<dyn Future<Output = Result<PeerChannel, Status>> + Send + 'a>>;

/// Makes connections: over the network, unless told otherwise.
#[derive(Clone, Default)]
pub struct Dialer {
    instead: Option<Arc<dyn Dial>>,
}

/// Another way to make connections than the network.
pub trait Dial: Send + Sync {
    /// Connects to `address` now.
    fn dial<'a>(&'a self, address: &'a Address) -> Dialing<'a>;
}

impl Dialer {
    /// Makes connections by `dial` instead of the network.
    pub fn instead(dial: Arc<dyn Dial>) -> Self {
        Self { instead: Some(dial) }
    }

    /// Connects now.
    ///
    /// # Errors
    /// UNAVAILABLE naming the address when nobody answers in time.
    pub async fn connect(&self, address: &Address) -> Result<PeerChannel, Status> {
        match &self.instead {
            Some(dial) => dial.dial(address).await,
            None => {
                let channel = crate::connect(address).await?;
                let status = |e: tonic::transport::Error| Status::from_error(e.into());
                Ok(PeerChannel::new(channel.map_err(status)))
            }
        }
    }
}

impl fmt::Debug for Dialer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.instead.is_some() { "Dialer(instead)" } else { "Dialer(network)" })
    }
}
