//! Reasons for the refusals that the transport makes on its own, before a handler sees the call.

use eyrie_wire::with_reason;
use tonic::codegen::http::Response;
use tonic::{Code, Status};

/// An answer that is a status and nothing else gets the reason that it lacks; any other passes unchanged.
pub(crate) fn give_reason<B>(mut response: Response<B>) -> Response<B> {
    let status = Status::from_header_map(response.headers());
    if let Some(status) = status.filter(|status| status.code() != Code::Ok && status.details().is_empty()) {
        // What a status is made of always fits headers.
        let _ = with_reason(status).add_header(response.headers_mut());
    }
    response
}

#[cfg(test)]
mod tests {
    use eyrie_wire::{Reason, reason_of, refuse};

    use super::*;

    #[test]
    fn only_a_refusal_without_a_reason_changes() {
        let told = |status: Status| {
            Status::from_header_map(give_reason(status.into_http::<()>()).headers()).unwrap()
        };
        let garbage = told(Status::internal("failed to decode"));
        assert_eq!((garbage.code(), garbage.message()), (Code::InvalidArgument, "message: failed to decode"));
        assert_eq!(reason_of(&garbage).as_deref(), Some("INVALID_ARGUMENT"));
        let ours = told(refuse(Reason::Internal, "broken"));
        assert_eq!((ours.code(), reason_of(&ours).as_deref()), (Code::Internal, Some("INTERNAL")));
        assert!(give_reason(Response::new(())).headers().is_empty(), "a stream that goes on");
    }
}
