//! A tower layer that logs calls: what was asked, how soon the answer began, and why it was refused.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Instant;

use tonic::Code;
use tonic::codegen::http::{HeaderMap, Request, Response};
use tower::{Layer, Service};

/// Logs every call of the service it wraps, refusals and answers at debug level, faults of ours as errors.
///
/// A stream is logged when it begins; how it ends is its handler's to tell.
#[derive(Debug, Clone, Copy, Default)]
pub struct LogCalls;

impl<S> Layer<S> for LogCalls {
    type Service = LoggedCalls<S>;

    fn layer(&self, inner: S) -> Self::Service {
        LoggedCalls { inner }
    }
}

/// The service that [`LogCalls`] makes.
#[derive(Debug, Clone)]
pub struct LoggedCalls<S> {
    inner: S,
}

impl<S, Q, A> Service<Request<Q>> for LoggedCalls<S>
where
    S: Service<Request<Q>, Response = Response<A>>,
    S::Future: Send + 'static,
    A: 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Q>) -> Self::Future {
        let method = request.uri().path().to_owned();
        let began = Instant::now();
        let answer = self.inner.call(request);
        Box::pin(async move {
            let answer = answer.await;
            if let Ok(response) = &answer {
                log(&method, began, response.headers());
            }
            answer
        })
    }
}

fn log(method: &str, began: Instant, headers: &HeaderMap) {
    let milliseconds = began.elapsed().as_micros() as f64 / 1e3;
    match refusal(headers) {
        None => tracing::debug!(method, milliseconds, "call"),
        Some((code @ (Code::Internal | Code::Unknown | Code::DataLoss), why)) => {
            tracing::error!(method, milliseconds, ?code, why, "call failed");
        }
        Some((code, why)) => tracing::debug!(method, milliseconds, ?code, why, "call refused"),
    }
}

/// Code and message of an answer that is a status and nothing else: such an answer has it in the headers.
fn refusal(headers: &HeaderMap) -> Option<(Code, String)> {
    let status = tonic::Status::from_header_map(headers)?;
    (status.code() != Code::Ok).then(|| (status.code(), status.message().to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tower::ServiceExt;

    async fn answer(with: Result<Response<()>, &'static str>) -> Result<Response<()>, &'static str> {
        let inner = tower::service_fn(move |_: Request<()>| {
            let with = with.clone();
            async move { with }
        });
        LogCalls.layer(inner).oneshot(Request::new(())).await
    }

    #[tokio::test]
    async fn answers_and_errors_pass_unchanged() {
        let mut refused = Response::new(());
        refused.headers_mut().insert("grpc-status", "5".parse().unwrap());
        assert_eq!(answer(Ok(refused)).await.unwrap().headers()["grpc-status"], "5");
        assert_eq!(answer(Err("broken")).await.unwrap_err(), "broken");
    }

    #[test]
    fn only_a_status_in_the_headers_is_a_refusal() {
        let mut headers = HeaderMap::new();
        assert!(refusal(&headers).is_none(), "a stream that goes on");
        headers.insert("grpc-status", "0".parse().unwrap());
        assert!(refusal(&headers).is_none());
        headers.insert("grpc-status", "13".parse().unwrap());
        headers.insert("grpc-message", "wrong%20turn".parse().unwrap());
        assert_eq!(refusal(&headers), Some((Code::Internal, "wrong turn".to_owned())));
    }
}
