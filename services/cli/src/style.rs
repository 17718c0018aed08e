//! Colour where a person looks, none where a program reads.

use std::io::{IsTerminal, Write};

/// ANSI styles, empty when the stream is not a terminal or `NO_COLOR` is set.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Style {
    on: bool,
}

impl Style {
    /// For text on standard output.
    pub(crate) fn stdout() -> Self {
        Self::when(std::io::stdout().is_terminal())
    }

    /// For text on standard error.
    pub(crate) fn stderr() -> Self {
        Self::when(std::io::stderr().is_terminal())
    }

    fn when(terminal: bool) -> Self {
        Self { on: terminal && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty()) }
    }

    fn paint(self, code: &str, text: &str) -> String {
        if self.on { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }

    /// Accepted draft tokens, things that are fine.
    pub(crate) fn good(self, text: &str) -> String {
        self.paint("32", text)
    }

    /// Warnings.
    pub(crate) fn warn(self, text: &str) -> String {
        self.paint("33", text)
    }

    /// Failures.
    pub(crate) fn bad(self, text: &str) -> String {
        self.paint("1;31", text)
    }

    /// Headings.
    pub(crate) fn bold(self, text: &str) -> String {
        self.paint("1", text)
    }

    /// Less important text.
    pub(crate) fn dim(self, text: &str) -> String {
        self.paint("2", text)
    }
}

/// One line on standard error. Where nobody reads it any more there is nobody to tell.
pub(crate) fn note(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// `error: …` on standard error.
pub(crate) fn error(line: &str) {
    note(&format!("{} {line}", Style::stderr().bad("error:")));
}

/// `warning: …` on standard error.
pub(crate) fn warning(line: &str) {
    note(&format!("{} {line}", Style::stderr().warn("warning:")));
}

/// Bytes for people: "30.2 MB".
pub(crate) fn bytes(n: u64) -> String {
    const UNITS: [(&str, u64); 4] =
        [("TB", 1_000_000_000_000), ("GB", 1_000_000_000), ("MB", 1_000_000), ("kB", 1_000)];
    for (unit, size) in UNITS {
        if n >= size {
            return format!("{:.1} {unit}", n as f64 / size as f64);
        }
    }
    format!("{n} B")
}
