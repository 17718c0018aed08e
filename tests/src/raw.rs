//! Calls made of bytes: what a client that keeps to no contract may send.

use std::time::Duration;

use bytes::{Buf, Bytes};
use http_body_util::{BodyExt, Full};
use tonic::transport::Channel;
use tonic::{Code, Status};
use tower::{Service, ServiceExt};

/// No answer takes this long unless the service hangs.
const PATIENCE: Duration = Duration::from_secs(60);

/// What came back.
#[derive(Debug)]
pub struct Answer {
    /// How the call ended.
    pub status: Status,
    /// The messages that came before.
    pub messages: Vec<Bytes>,
}

/// A message as gRPC puts it on the wire: uncompressed, length first.
pub fn framed(message: &[u8]) -> Vec<u8> {
    let length = u32::try_from(message.len()).expect("a message below 4 GiB");
    [&[0], &length.to_be_bytes()[..], message].concat()
}

/// POSTs `body`, whole and then ended, to `path` ("/package.Service/Method").
///
/// # Panics
/// When nothing comes back.
pub async fn call(channel: &Channel, path: &str, headers: &[(&str, &str)], body: Vec<u8>) -> Answer {
    let answer = tokio::time::timeout(PATIENCE, answer(channel.clone(), path, headers, body)).await;
    match answer.unwrap_or_else(|_| panic!("{path}: no answer within {PATIENCE:?}")) {
        Ok(answer) => answer,
        Err(status) => Answer { status, messages: Vec::new() },
    }
}

async fn answer(
    mut channel: Channel,
    path: &str,
    headers: &[(&str, &str)],
    body: Vec<u8>,
) -> Result<Answer, Status> {
    let mut request =
        http::Request::post(path).header("content-type", "application/grpc").header("te", "trailers");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let body = tonic::body::Body::new(Full::new(Bytes::from(body)));
    let request = request.body(body).expect("a request");
    let broken = |e: &dyn std::error::Error| Status::unknown(format!("the call broke: {e}"));
    let channel = channel.ready().await.map_err(|e| broken(&e))?;
    let (head, body) = channel.call(request).await.map_err(|e| broken(&e))?.into_parts();
    let body = body.collect().await?;
    let status = body.trailers().and_then(Status::from_header_map);
    let status = status.or_else(|| Status::from_header_map(&head.headers));
    let status = status.unwrap_or_else(|| Status::unknown(format!("no status: {head:?}")));
    Ok(Answer { status, messages: unframed(body.to_bytes()) })
}

fn unframed(mut body: Bytes) -> Vec<Bytes> {
    let mut messages = Vec::new();
    while body.len() >= 5 {
        assert_eq!(body.get_u8(), 0, "an answer is not compressed");
        let length = body.get_u32() as usize;
        messages.push(body.split_to(length));
    }
    assert!(body.is_empty(), "an answer ends with a whole message");
    messages
}

impl Answer {
    /// Whether the call ended well.
    pub fn is_ok(&self) -> bool {
        self.status.code() == Code::Ok
    }
}
