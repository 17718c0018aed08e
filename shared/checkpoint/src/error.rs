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
    #[error("{}: cannot be parsed: {message}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// Where and why parsing stopped.
        message: String,
    },
    /// A required field that is absent or null.
    #[error("{}: {field} is missing", path.display())]
    MissingField {
        /// The file.
        path: PathBuf,
        /// Dotted path of the field.
        field: String,
    },
    /// A field whose value cannot be served.
    #[error("{}: {field} = {value}: {limit}", path.display())]
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
    #[error("{}: {problem}", path.display())]
    File {
        /// The file or folder.
        path: PathBuf,
        /// What is wrong and what is expected.
        problem: String,
    },
    /// A tensor that is missing, unexpected, or of the wrong shape, dtype or content.
    #[error("{}: tensor {tensor}: {problem}", path.display())]
    Tensor {
        /// The file that holds it, or the folder when no file does.
        path: PathBuf,
        /// Name as on disk.
        tensor: String,
        /// Found and wanted.
        problem: String,
    },
}
