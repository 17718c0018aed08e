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
    /// Another stream of the same sender took over.
    Replaced,
    /// The deadline passed.
    Deadline,
    /// Not built yet or not possible with this model.
    Unsupported,
    /// A fault of ours.
    Internal,
}

const ALL: [Reason; 17] = [
    Reason::InvalidArgument,
    Reason::TokenRange,
    Reason::Context,
    Reason::KvCapacity,
    Reason::BaseLen,
    Reason::StaleEpoch,
    Reason::ProtocolVersion,
    Reason::UnknownSeq,
    Reason::DuplicateSeq,
    Reason::Busy,
    Reason::Loading,
    Reason::Draining,
    Reason::Unreachable,
    Reason::Replaced,
    Reason::Deadline,
    Reason::Unsupported,
    Reason::Internal,
];

impl Reason {
    /// The stable name.
    pub fn as_str(self) -> &'static str {
        self.parts().0
    }

    /// The gRPC code that goes with it.
    pub fn code(self) -> Code {
        self.parts().1
    }

    /// How long a caller should wait before it tries again, where trying again may help.
    pub fn retry_after(self) -> Option<Duration> {
        self.parts().2.map(Duration::from_millis)
    }

    /// The reason of that stable name.
    fn named(name: &str) -> Option<Self> {
        ALL.into_iter().find(|reason| reason.as_str() == name)
    }

    /// Name, code, and milliseconds before a retry: what clears by itself soon, a place or a connection, after a
    /// moment; what takes a process to load or to go away after seconds.
    fn parts(self) -> (&'static str, Code, Option<u64>) {
        match self {
            Self::InvalidArgument => ("INVALID_ARGUMENT", Code::InvalidArgument, None),
            Self::TokenRange => ("TOKEN_RANGE", Code::InvalidArgument, None),
            Self::Context => ("CONTEXT", Code::InvalidArgument, None),
            Self::KvCapacity => ("KV_CAPACITY", Code::InvalidArgument, None),
            Self::BaseLen => ("BASE_LEN", Code::FailedPrecondition, None),
            Self::StaleEpoch => ("STALE_EPOCH", Code::FailedPrecondition, None),
            Self::ProtocolVersion => ("PROTOCOL_VERSION", Code::FailedPrecondition, None),
            Self::UnknownSeq => ("UNKNOWN_SEQ", Code::NotFound, None),
            Self::DuplicateSeq => ("DUPLICATE_SEQ", Code::AlreadyExists, None),
            Self::Busy => ("BUSY", Code::ResourceExhausted, Some(100)),
            Self::Loading => ("LOADING", Code::Unavailable, Some(1000)),
            Self::Draining => ("DRAINING", Code::Unavailable, Some(1000)),
            Self::Unreachable => ("UNREACHABLE", Code::Unavailable, Some(1000)),
            Self::Replaced => ("REPLACED", Code::Aborted, None),
            Self::Deadline => ("DEADLINE", Code::DeadlineExceeded, None),
            Self::Unsupported => ("UNSUPPORTED", Code::Unimplemented, None),
            Self::Internal => ("INTERNAL", Code::Internal, None),
        }
    }
}

/// A status with `reason` as `ErrorInfo`, a `RetryInfo` where trying again may help, and `message` cut to 1 KiB at a
/// character boundary.
pub fn refuse(reason: Reason, message: impl Into<String>) -> Status {
    let message = truncate(message.into());
    Status::with_error_details(reason.code(), message, details(reason.as_str(), reason.retry_after()))
}

fn details(reason: &str, retry_after: Option<Duration>) -> ErrorDetails {
    let mut details = ErrorDetails::with_error_info(reason, DOMAIN, []);
    if retry_after.is_some() {
        details.set_retry_info(retry_after);
    }
    details
}

/// A status that the transport made of a message it could not take, with the reason that it lacks; any other as it is.
///
/// The transport reports what cannot be decoded as INTERNAL and what is too long as OUT_OF_RANGE; both are the sender's.
pub fn with_reason(status: Status) -> Status {
    if !status.details().is_empty() {
        return status;
    }
    match status.code() {
        Code::Internal | Code::OutOfRange => {
            refuse(Reason::InvalidArgument, format!("message: {}", status.message()))
        }
        Code::Unimplemented if status.message().is_empty() => {
            refuse(Reason::Unsupported, "no such method is served here")
        }
        Code::Unimplemented => refuse(Reason::Unsupported, status.message()),
        _ => status,
    }
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
    let retry_after = Reason::named(&error.reason).and_then(Reason::retry_after);
    let details = details(&error.reason, retry_after);
    Status::with_error_details(Code::from_i32(error.code), truncate(error.message.clone()), details)
}

/// The stable reason of a status that [`refuse`] made, here or in another process.
pub fn reason_of(status: &Status) -> Option<String> {
    status.get_details_error_info().map(|info| info.reason)
}

/// How long the sender of a status wants a retry to wait.
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
        assert_eq!(retry_after(&status), Some(Duration::from_millis(100)));
    }

    #[test]
    fn exactly_what_may_go_better_later_carries_a_delay() {
        for reason in ALL {
            assert_eq!(Reason::named(reason.as_str()), Some(reason));
            let status = refuse(reason, "x");
            assert_eq!(retry_after(&status), reason.retry_after());
            let transient = matches!(reason.code(), Code::Unavailable | Code::ResourceExhausted);
            assert_eq!(reason.retry_after().is_some(), transient, "{reason:?}");
            assert_eq!(reason_of(&status).as_deref(), Some(reason.as_str()));
        }
    }

    #[test]
    fn what_the_transport_refused_gets_a_reason_and_all_else_stays() {
        for (status, code, reason) in [
            (Status::internal("failed to decode"), Code::InvalidArgument, Some("INVALID_ARGUMENT")),
            (Status::out_of_range("found 9 bytes"), Code::InvalidArgument, Some("INVALID_ARGUMENT")),
            (Status::unimplemented(""), Code::Unimplemented, Some("UNSUPPORTED")),
            (Status::cancelled("gone"), Code::Cancelled, None),
            (refuse(Reason::Internal, "ours"), Code::Internal, Some("INTERNAL")),
        ] {
            let message = status.message().to_owned();
            let told = with_reason(status);
            assert_eq!((told.code(), reason_of(&told).as_deref()), (code, reason));
            assert!(told.message().contains(&message) && !told.message().is_empty());
        }
    }
}
