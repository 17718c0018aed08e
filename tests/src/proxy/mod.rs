//! Stand-ins between the gateway and a service: they pass everything on, and on command do to it what a broken or
//! malicious peer would.

mod cable;
mod draft;
mod target;

pub use cable::Cable;
pub use draft::{DraftFault, DraftProxy};
pub use target::{Passed, TargetFault, TargetProxy};

use std::future::Future;
use std::sync::Mutex;
use std::time::Duration;

use eyrie_wire::v1::ItemError;
use eyrie_wire::{Address, Listener};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_stream::wrappers::ReceiverStream;
use tonic::service::Routes;
use tonic::{Status, Streaming};

/// Messages under way in a proxy.
const UNDER_WAY: usize = 64;

/// What becomes of one message.
struct Deed<M> {
    after: Duration,
    messages: Vec<M>,
    /// The stream ends behind them.
    breaks: Option<Status>,
}

impl<M> Deed<M> {
    fn pass(messages: impl IntoIterator<Item = M>) -> Self {
        Self { after: Duration::ZERO, messages: messages.into_iter().collect(), breaks: None }
    }
}

/// What a stream ends with that was cut.
fn cut() -> Status {
    Status::unavailable("cut by the proxy")
}

/// An answer of this many bytes that says nothing.
fn padding(bytes: usize) -> ItemError {
    ItemError { message: "~".repeat(bytes), ..ItemError::default() }
}

/// Tasks that end with their proxy.
#[derive(Debug, Default)]
struct Tasks(Mutex<JoinSet<()>>);

impl Tasks {
    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.0.lock().expect("no task panics while it holds the lock").spawn(task);
    }

    /// Serves `routes` at `address`.
    async fn serve(&self, address: &str, routes: Routes) {
        let address: Address = address.parse().expect("an address");
        let listener = Listener::bind(&address).await.expect("a socket to listen on");
        let serving = eyrie_wire::server().add_routes(routes).serve_with_incoming(listener.incoming());
        self.spawn(async move { serving.await.expect("a proxy serves") });
    }

    /// Carries `from` on until either side ends it, each message as `deed` has it.
    fn relay<M: Send + 'static>(
        &self,
        mut from: Streaming<M>,
        mut deed: impl FnMut(M) -> Deed<M> + Send + 'static,
    ) -> ReceiverStream<Result<M, Status>> {
        let (sender, receiver) = mpsc::channel(UNDER_WAY);
        self.spawn(async move {
            loop {
                let message = tokio::select! {
                    message = from.message() => message,
                    () = sender.closed() => return,
                };
                let Deed { after, messages, breaks } = match message {
                    Ok(Some(message)) => deed(message),
                    Ok(None) => return,
                    Err(status) => {
                        let _ = sender.send(Err(status)).await;
                        return;
                    }
                };
                tokio::time::sleep(after).await;
                for message in messages {
                    let _ = sender.send(Ok(message)).await;
                }
                if let Some(status) = breaks {
                    let _ = sender.send(Err(status)).await;
                    return;
                }
            }
        });
        ReceiverStream::new(receiver)
    }
}
