use std::fmt::{self, Display, Write};
use std::path::PathBuf;

/// Why a checkpoint is refused: one line that names the file, the field or tensor, the value and the limit.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// A file that cannot be read.
    #[error("{}: cannot read: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// A file that cannot be mapped.
    #[error(transparent)]
    Map(#[from] eyrie_region::RegionError),
    /// A file that is not JSON, or not of the form it should have.
    #[error("{}: cannot be parsed: {}", path.display(), plain(message))]
    Json {
        /// The file.
        path: PathBuf,
        /// Where and why parsing stopped.
        message: String,
    },
    /// A required field that is absent or null.
    #[error("{}: {} is missing", path.display(), plain(field))]
    MissingField {
        /// The file.
        path: PathBuf,
        /// Dotted path of the field.
        field: String,
    },
    /// A field whose value cannot be served.
    #[error("{}: {} = {}: {}", path.display(), plain(field), plain(value), plain(limit))]
    Field {
        /// The file.
        path: PathBuf,
        /// Dotted path of the field.
        field: String,
        /// The value found, as JSON.
        value: String,
        /// What would be accepted, or what to do.
        limit: String,
    },
    /// A folder or file of the wrong kind.
    #[error("{}: {}", path.display(), plain(problem))]
    File {
        /// The file or folder.
        path: PathBuf,
        /// What is wrong and what is expected.
        problem: String,
    },
    /// A specification of a made-up model that stands for none.
    #[error(transparent)]
    Synth(#[from] crate::SynthError),
    /// A tensor that is missing, unexpected, or of the wrong shape, dtype or content.
    #[error("{}: tensor {}: {}", path.display(), plain(tensor), plain(problem))]
    Tensor {
        /// The file that holds it, or the folder when no file does.
        path: PathBuf,
        /// Name as on disk.
        tensor: String,
        /// Found and wanted.
        problem: String,
    },
}

/// Characters of one text out of a file that an error repeats.
const MOST: usize = 500;

/// What a file says, as a part of one line: without control characters and no longer than anybody reads.
fn plain(text: &str) -> impl Display {
    fmt::from_fn(move |f| {
        let mut characters = text.chars();
        for c in characters.by_ref().take(MOST) {
            match is_plain(c) {
                true => f.write_char(c)?,
                false => write!(f, "{}", c.escape_unicode())?,
            }
        }
        match characters.count() {
            0 => Ok(()),
            more => write!(f, "… and {more} more characters"),
        }
    })
}

/// Whether `c` neither moves a cursor nor turns the direction of a line.
fn is_plain(c: char) -> bool {
    !c.is_control()
        && !matches!(c, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_file_says_stays_one_short_line() {
        assert_eq!(plain("model.layers.0.über").to_string(), "model.layers.0.über");
        assert_eq!(plain("a\n\x1b[2J\u{202e}b").to_string(), "a\\u{a}\\u{1b}[2J\\u{202e}b");
        let long = plain(&"x".repeat(MOST + 7)).to_string();
        assert!(long.ends_with("x… and 7 more characters") && long.len() < MOST + 40, "{long}");
    }
}
