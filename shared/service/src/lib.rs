//! What every service shares: telemetry, health and reflection, drain.
#![forbid(unsafe_code)]

mod calls;
mod drain;
mod lines;
mod reasons;
mod sent;
mod serve;
mod telemetry;

pub use calls::{LogCalls, LoggedCalls};
pub use drain::Drain;
pub use sent::{UntilSent, until_sent};
pub use serve::{Health, ServeError, serve};
pub use telemetry::{LogFormat, flush_telemetry, init_telemetry};
