//! Knowing when a reply has gone out: what a call holds must bound replies that wait for the network too.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use http_body::{Frame, SizeHint};
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::http::Response;

/// Lasts, among the extensions of a reply, until the network has taken the reply or its caller is gone.
#[derive(Debug, Clone)]
pub struct UntilSent {
    _guard: Arc<DropGuard>,
}

/// A mark for one reply, and what resolves when that was sent or given up.
pub fn until_sent() -> (UntilSent, impl Future<Output = ()> + Send + 'static) {
    let sent = CancellationToken::new();
    (UntilSent { _guard: Arc::new(sent.clone().drop_guard()) }, sent.cancelled_owned())
}

/// Moves the mark of a reply to its body, which lasts as long as there is something to send.
pub(crate) fn mark_body(mut response: Response<Body>) -> Response<Body> {
    match response.extensions_mut().remove::<UntilSent>() {
        None => response,
        Some(mark) => response.map(|body| Body::new(Marked { body, _mark: mark })),
    }
}

struct Marked {
    body: Body,
    _mark: UntilSent,
}

impl http_body::Body for Marked {
    type Data = <Body as http_body::Body>::Data;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Status>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
