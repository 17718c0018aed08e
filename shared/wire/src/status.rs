//! Statuses: a stable machine reason beside one readable line, cut to what fits in a header.

use std::time::Duration;

use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};

use crate::v1::ItemError;

/// Longest status message in bytes. Statuses travel in HTTP/2 headers, and an oversized header is a
/// connection error instead of an answer.
const MAX_MESSAGE: usize = 1024;

/// Domain of the `ErrorInfo` detail.
const DOMAIN: &str = "eyrie";

/// Why something was refused; stable across releases.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// A request field is out of its range.
    InvalidArgument,
    /// A token id is not below the vocabulary size.
    TokenRange,
    /// Prompt and wanted tokens do not fit the context.
    Context,
    /// The request can never fit the KV cache.
    KvCapacity,
    /// `base_len` or `round` is not the one the engine holds.
    BaseLen,
    /// The sender knows another boot of the target.
    StaleEpoch,
    /// Unknown frame protocol version.
    ProtocolVersion,
    /// The sequence is not open here.
    UnknownSeq,
    /// The sequence is open already.
    DuplicateSeq,
    /// Too many streams or sequences, or a full mailbox.
    Busy,
    /// Still loading.
    Loading,
    /// Draining: no new sequences.
    Draining,
    /// The peer service cannot be reached.
    Unreachable,
    /// The deadline passed.
    Deadline,
    /// Not built yet or not possible with this model.
    Unsupported,
    /// A fault of ours.
    Internal,
}

impl Reason {
    /// The stable name.
    pub fn as_str(self) -> &'static str {
        self.parts().0
    }

    /// The gRPC code that goes with it.
    pub fn code(self) -> Code {
        self.parts().1
    }

    fn parts(self) -> (&'static str, Code) {
        match self {
            Self::InvalidArgument => ("INVALID_ARGUMENT", Code::InvalidArgument),
            Self::TokenRange => ("TOKEN_RANGE", Code::InvalidArgument),
            Self::Context => ("CONTEXT", Code::InvalidArgument),
            Self::KvCapacity => ("KV_CAPACITY", Code::InvalidArgument),
            Self::BaseLen => ("BASE_LEN", Code::FailedPrecondition),
            Self::StaleEpoch => ("STALE_EPOCH", Code::FailedPrecondition),
            Self::ProtocolVersion => ("PROTOCOL_VERSION", Code::FailedPrecondition),
            Self::UnknownSeq => ("UNKNOWN_SEQ", Code::NotFound),
            Self::DuplicateSeq => ("DUPLICATE_SEQ", Code::AlreadyExists),
            Self::Busy => ("BUSY", Code::ResourceExhausted),
            Self::Loading => ("LOADING", Code::Unavailable),
            Self::Draining => ("DRAINING", Code::Unavailable),
            Self::Unreachable => ("UNREACHABLE", Code::Unavailable),
            Self::Deadline => ("DEADLINE", Code::DeadlineExceeded),
            Self::Unsupported => ("UNSUPPORTED", Code::Unimplemented),
            Self::Internal => ("INTERNAL", Code::Internal),
        }
    }
}

/// A status with `reason` as `ErrorInfo` and `message` cut to 1 KiB at a character boundary.
pub fn refuse(reason: Reason, message: impl Into<String>) -> Status {
    let message = truncate(message.into());
    let details = ErrorDetails::with_error_info(reason.as_str(), DOMAIN, []);
    Status::with_error_details(reason.code(), message, details)
}

/// The same of something that passes, with `retry_after` as `RetryInfo`.
pub fn refuse_for_now(reason: Reason, message: impl Into<String>, retry_after: Duration) -> Status {
    let mut details = ErrorDetails::with_error_info(reason.as_str(), DOMAIN, []);
    details.set_retry_info(Some(retry_after));
    Status::with_error_details(reason.code(), truncate(message.into()), details)
}

/// The same refusal for one item of a frame.
pub fn item_error(reason: Reason, message: impl Into<String>) -> ItemError {
    ItemError {
        code: reason.code() as i32,
        reason: reason.as_str().to_owned(),
        message: truncate(message.into()),
        ..Default::default()
    }
}

/// The status of a call that one item's failure ends, with code, reason and message kept.
pub fn status_of(error: &ItemError) -> Status {
    let details = ErrorDetails::with_error_info(error.reason.clone(), DOMAIN, []);
    Status::with_error_details(Code::from_i32(error.code), truncate(error.message.clone()), details)
}

/// The stable reason of a status that [`refuse`] made, here or in another process.
pub fn reason_of(status: &Status) -> Option<String> {
    status.get_details_error_info().map(|info| info.reason)
}

/// When to try again, of a status that [`refuse_for_now`] made, here or in another process.
pub fn retry_after(status: &Status) -> Option<Duration> {
    status.get_details_retry_info()?.retry_delay
}

fn truncate(mut message: String) -> String {
    if message.len() > MAX_MESSAGE {
        let mut end = MAX_MESSAGE - "…".len();
        while !message.is_char_boundary(end) {
            end -= 1;
        }
        message.truncate(end);
        message.push('…');
    }
    message
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reason_survives_and_message_is_cut() {
        let status = refuse(Reason::Context, "é".repeat(4000));
        assert_eq!(status.code(), Code::InvalidArgument);
        assert_eq!(reason_of(&status).as_deref(), Some("CONTEXT"));
        assert!(status.message().len() <= MAX_MESSAGE && status.message().ends_with('…'));
        assert_eq!(reason_of(&Status::internal("x")), None);

        let status = status_of(&item_error(Reason::Busy, "64 sequences are open, limit 64"));
        assert_eq!((status.code(), reason_of(&status).as_deref()), (Code::ResourceExhausted, Some("BUSY")));
        assert_eq!(status.message(), "64 sequences are open, limit 64");
        assert_eq!(retry_after(&status), None);

        let status = refuse_for_now(Reason::Unreachable, "nobody is there", Duration::from_millis(1500));
        assert_eq!((status.code(), reason_of(&status).as_deref()), (Code::Unavailable, Some("UNREACHABLE")));
        assert_eq!(retry_after(&status), Some(Duration::from_millis(1500)));
    }
}
