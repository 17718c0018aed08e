//! Logs on standard error: readable on a terminal, JSON for machines.

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::FmtSpan;

const LEVELS: &str = "EYRIE_LOG";
const DEFAULT: &str = "info";

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
/// A value that is no filter is reported and leaves the default. A second call changes nothing.
pub fn init_telemetry(format: LogFormat) {
    let wanted = std::env::var(LEVELS).unwrap_or_default();
    let parsed = EnvFilter::builder().parse(if wanted.is_empty() { DEFAULT } else { &wanted });
    let (filter, problem) = match parsed {
        Ok(filter) => (filter, None),
        Err(e) => (EnvFilter::new(DEFAULT), Some(e)),
    };
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
    if let Some(problem) = problem {
        tracing::warn!(given = wanted, %problem, "{LEVELS} is not a log filter: using {DEFAULT}");
    }
}
