//! Logs on standard error: readable on a terminal, JSON for machines.

use std::io::IsTerminal;
use std::sync::OnceLock;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::FmtSpan;

use crate::lines::Lines;

const LEVELS: &str = "EYRIE_LOG";
const DEFAULT: &str = "info";

static LINES: OnceLock<Lines> = OnceLock::new();

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LogFormat {
    /// Readable lines, coloured on a terminal.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

/// Installs the process-wide log subscriber; `EYRIE_LOG` selects levels, default `info`: a level for our own
/// crates (`debug`), or a filter as in `RUST_LOG` (`h2=debug,eyrie_draft=trace`). A value that is neither is
/// reported and leaves the default. A second call changes nothing.
///
/// Lines are written by a thread of their own and are lost where they cannot be written; see [`flush_telemetry`].
///
/// # Errors
/// The thread cannot be started.
pub fn init_telemetry(format: LogFormat) -> std::io::Result<()> {
    let lines = Lines::start(std::io::stderr())?;
    let lines = LINES.get_or_init(|| lines).clone();
    let wanted = std::env::var(LEVELS).unwrap_or_default();
    let parsed = EnvFilter::builder().parse(directives(&wanted));
    let (filter, problem) = match parsed {
        Ok(filter) => (filter, None),
        Err(e) => (EnvFilter::new(DEFAULT), Some(e)),
    };
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_span_events(FmtSpan::NONE)
        .with_target(false)
        .with_writer(move || lines.clone())
        // It would be said on the very stream that failed, by a macro that panics when it does.
        .log_internal_errors(false)
        .with_ansi(std::io::stderr().is_terminal());
    // Only fails when a subscriber is installed already, as in tests that start services in one process.
    let _ = match format {
        LogFormat::Text => builder.try_init(),
        LogFormat::Json => builder.json().try_init(),
    };
    if let Some(problem) = problem {
        tracing::warn!(given = wanted, %problem, "{LEVELS} is not a log filter: using {DEFAULT}");
    }
    Ok(())
}

/// Waits until what was logged is written, half a second at most: for the end of a process.
pub fn flush_telemetry() {
    if let Some(lines) = LINES.get() {
        lines.flush();
    }
}

/// The filter that `wanted` means: a bare level leaves out what the transport says of every frame.
fn directives(wanted: &str) -> String {
    match wanted.parse::<tracing::Level>() {
        Ok(level) if level > tracing::Level::INFO => format!("{DEFAULT},eyrie={wanted}"),
        _ if wanted.is_empty() => DEFAULT.to_owned(),
        _ => wanted.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_bare_level_is_for_our_own_crates() {
        assert_eq!(directives(""), "info");
        assert_eq!(directives("debug"), "info,eyrie=debug");
        assert_eq!(directives("error"), "error");
        assert_eq!(directives("h2=debug"), "h2=debug");
    }

    /// In a process of its own, since subscriber and environment are the process's.
    #[test]
    fn a_value_that_is_no_filter_is_said() {
        const CHILD: &str = "EYRIE_TELEMETRY_CHILD";
        if std::env::var_os(CHILD).is_some() {
            init_telemetry(LogFormat::Text).unwrap();
            flush_telemetry();
            return;
        }
        let said = |levels: &str| {
            let mut child = Command::new(std::env::current_exe().unwrap());
            child.args(["telemetry::tests::a_value_that_is_no_filter_is_said", "--exact", "--nocapture"]);
            let output = child.env(CHILD, "1").env(LEVELS, levels).output().unwrap();
            assert!(output.status.success());
            String::from_utf8(output.stderr).unwrap()
        };
        let line = said("eyrie=loud");
        assert!(line.contains("EYRIE_LOG is not a log filter") && line.contains("eyrie=loud"), "{line}");
        assert_eq!(said("eyrie=debug"), "");
    }
}
