//! Logs on standard error: readable on a terminal, JSON for machines.

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::FmtSpan;

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LogFormat {
    /// Readable lines, coloured on a terminal.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

/// Installs the process-wide log subscriber; `EYRIE_LOG` (as `RUST_LOG`) selects levels, default `info`.
/// A second call changes nothing.
pub fn init_telemetry(format: LogFormat) {
    let filter = EnvFilter::try_from_env("EYRIE_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_span_events(FmtSpan::NONE)
        .with_target(false)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal());
    // Only fails when a subscriber is installed already, as in tests that start services in one process.
    let _ = match format {
        LogFormat::Text => builder.try_init(),
        LogFormat::Json => builder.json().try_init(),
    };
}
