/// Why a tokenizer cannot be loaded or a text cannot be made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TextError {
    /// A tokenizer file that cannot be read.
    #[error("{path}: {reason}")]
    Read {
        /// Path of the file.
        path: String,
        /// The system's words.
        reason: String,
    },
    /// A directory with no tokenizer in a format that is served.
    #[error("{dir}: no tokenizer.json{hint}")]
    Missing {
        /// The directory.
        dir: String,
        /// What was found instead, if anything.
        hint: &'static str,
    },
    /// A tokenizer file that is not what it should be.
    #[error("{file}: {reason}")]
    Malformed {
        /// Name of the file.
        file: &'static str,
        /// What is wrong, as the parser says it.
        reason: String,
    },
    /// A field with a value that is not served.
    #[error("{file}: {field} must be {limit}, given {given}")]
    Field {
        /// Name of the file.
        file: &'static str,
        /// Path of the field in it.
        field: &'static str,
        /// What is accepted.
        limit: String,
        /// The value given.
        given: String,
    },
    /// A token id the tokenizer does not have.
    #[error("token id must be below the tokenizer's size {size}, given {id}")]
    UnknownId {
        /// The id given.
        id: u32,
        /// One more than the greatest id.
        size: usize,
    },
    /// A token id inside the range that no token has.
    #[error("token id {id} has no token in tokenizer.json")]
    Unassigned {
        /// The id given.
        id: u32,
    },
    /// A text the tokenizer cannot encode.
    #[error("text of {bytes} bytes cannot be encoded: {reason}")]
    Encode {
        /// Length of the text.
        bytes: usize,
        /// The tokenizer's words.
        reason: String,
    },
    /// A stop string that would end every text.
    #[error("stop[{index}] must not be empty")]
    EmptyStop {
        /// Index in the request's list.
        index: usize,
    },
}
