//! What both engines ask of the frames of a Rounds stream and of its unary twin.

use std::time::Duration;

use tonic::{Status, Streaming};

use crate::v1::Hello;
use crate::{PROTOCOL_VERSION, Reason, refuse, with_reason};

/// Items of one frame at most: an engine takes a frame's items in one go.
pub const MAX_FRAME_ITEMS: usize = 4096;

/// How long a new stream may take to say its first word.
const FIRST_FRAME: Duration = Duration::from_secs(10);

/// The first frame of a new stream, `None` if it ends before.
///
/// # Errors
/// DEADLINE after ten seconds, INVALID_ARGUMENT for what is no such message.
pub async fn first_frame<T>(frames: &mut Streaming<T>) -> Result<Option<T>, Status> {
    let first = tokio::time::timeout(FIRST_FRAME, frames.message()).await.map_err(|_| {
        let limit = FIRST_FRAME.as_secs();
        refuse(Reason::Deadline, format!("the first frame must come within {limit} s"))
    })?;
    first.map_err(with_reason)
}

/// The Hello of a first frame, from a sender that speaks this version and names itself.
///
/// # Errors
/// INVALID_ARGUMENT or PROTOCOL_VERSION.
pub fn check_hello(hello: Option<Hello>) -> Result<Hello, Status> {
    let hello = hello
        .ok_or_else(|| refuse(Reason::InvalidArgument, "the first frame must carry a hello, given none"))?;
    check_version("hello.protocol_version", hello.protocol_version)?;
    if hello.boot_id == 0 {
        return Err(refuse(Reason::InvalidArgument, "hello.boot_id must not be 0"));
    }
    Ok(hello)
}

/// Checks the protocol version in `field`.
///
/// # Errors
/// PROTOCOL_VERSION.
pub fn check_version(field: &str, given: u32) -> Result<(), Status> {
    match given {
        PROTOCOL_VERSION => Ok(()),
        _ => {
            let message = format!("{field} must be {PROTOCOL_VERSION}, given {given}");
            Err(refuse(Reason::ProtocolVersion, message))
        }
    }
}

/// Checks that a sender who names a model means the one that is `served`.
///
/// # Errors
/// STALE_EPOCH.
pub fn check_fingerprint(hello: &Hello, served: &str) -> Result<(), Status> {
    let given = &hello.fingerprint;
    match given.is_empty() || given == served {
        true => Ok(()),
        false => {
            let message = format!("hello.fingerprint must be {served}, the served model's, given {given}");
            Err(refuse(Reason::StaleEpoch, message))
        }
    }
}

/// Checks a frame that is not the first of its stream.
///
/// # Errors
/// INVALID_ARGUMENT for a second `hello` or too many `items`.
pub fn check_frame(hello: Option<&Hello>, items: usize) -> Result<(), Status> {
    match hello {
        Some(_) => Err(refuse(Reason::InvalidArgument, "hello may be in the first frame of a stream only")),
        None => check_items(items),
    }
}

/// Checks the number of items of a frame.
///
/// # Errors
/// INVALID_ARGUMENT above [`MAX_FRAME_ITEMS`].
pub fn check_items(given: usize) -> Result<(), Status> {
    match given {
        0..=MAX_FRAME_ITEMS => Ok(()),
        _ => {
            let message = format!("items: a frame may hold {MAX_FRAME_ITEMS}, given {given}");
            Err(refuse(Reason::InvalidArgument, message))
        }
    }
}
