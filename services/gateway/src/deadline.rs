//! The client's `grpc-timeout` as the gateway keeps it: a little earlier than the transport does, which at that
//! time ends a call with a status that says nothing.

use std::time::Duration;

use eyrie_wire::{Reason, refuse};
use tokio::time::Instant;
use tonic::{Extensions, Request, Status};

/// Least and most that a request is ended before its timeout; in between it is a fifth of that.
const MARGIN_LEAST: Duration = Duration::from_millis(5);
const MARGIN_MOST: Duration = Duration::from_millis(100);

/// When a request ends, whatever it has come to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Deadline {
    /// For the request's own work.
    pub(crate) work: Instant,
    /// For the answer, where the work has not answered for itself by then.
    pub(crate) answer: Instant,
}

impl Deadline {
    /// `None` for a time beyond what the clock can tell.
    fn after(begin: Instant, timeout: Duration) -> Option<Self> {
        let margin = (timeout / 5).clamp(MARGIN_LEAST, MARGIN_MOST).min(timeout);
        let end = begin.checked_add(timeout)?;
        Some(Self { work: end - margin, answer: end - margin / 2 })
    }

    /// What [`stamp`] found in the request.
    pub(crate) fn of(extensions: &Extensions) -> Option<Self> {
        extensions.get().copied()
    }
}

/// Interceptor: notes a request's deadline as soon as its headers are there, when the transport's own clock starts;
/// the message may arrive much later.
///
/// # Errors
/// INVALID_ARGUMENT for a `grpc-timeout` that is none.
pub(crate) fn stamp(mut request: Request<()>) -> Result<Request<()>, Status> {
    let Some(value) = request.metadata().get("grpc-timeout") else { return Ok(request) };
    let timeout = value.to_str().ok().and_then(parse_timeout).ok_or_else(|| {
        let line = format!("grpc-timeout must be up to 8 digits and one of HMSmun, given {value:?}");
        refuse(Reason::InvalidArgument, line)
    })?;
    if let Some(deadline) = Deadline::after(Instant::now(), timeout) {
        request.extensions_mut().insert(deadline);
    }
    Ok(request)
}

fn parse_timeout(value: &str) -> Option<Duration> {
    let (digits, unit) = value.split_at_checked(value.len().checked_sub(1)?)?;
    if digits.len() > 8 || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let n: u64 = digits.parse().ok()?;
    match unit {
        "H" => Some(Duration::from_secs(n * 3600)),
        "M" => Some(Duration::from_secs(n * 60)),
        "S" => Some(Duration::from_secs(n)),
        "m" => Some(Duration::from_millis(n)),
        "u" => Some(Duration::from_micros(n)),
        "n" => Some(Duration::from_nanos(n)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_parse_as_the_protocol_spells_them() {
        assert_eq!(parse_timeout("1H"), Some(Duration::from_secs(3600)));
        assert_eq!(parse_timeout("2M"), Some(Duration::from_secs(120)));
        assert_eq!(parse_timeout("99999999S"), Some(Duration::from_secs(99_999_999)));
        assert_eq!(parse_timeout("250m"), Some(Duration::from_millis(250)));
        assert_eq!(parse_timeout("7u"), Some(Duration::from_micros(7)));
        assert_eq!(parse_timeout("7n"), Some(Duration::from_nanos(7)));
        for bad in ["", "S", "1", "1x", "-1S", "+1S", "100000000S", "1é"] {
            assert_eq!(parse_timeout(bad), None, "{bad}");
        }
    }

    #[test]
    fn work_ends_a_fifth_before_the_timeout_within_bounds() {
        let begin = Instant::now();
        let work = |ms| (Deadline::after(begin, Duration::from_millis(ms)).unwrap().work - begin).as_millis();
        for (timeout, at) in [(3, 0), (20, 15), (100, 80), (1000, 900), (60_000, 59_900)] {
            assert_eq!(work(timeout), at, "{timeout} ms");
        }
        let deadline = Deadline::after(begin, Duration::from_millis(100)).unwrap();
        assert_eq!((deadline.answer - begin).as_millis(), 90);
    }
}
