//! Tokenizers, incremental detokenisation and stop strings. Text is defined on bytes: the text of a
//! run of ids is the UTF-8 reading of their bytes, so streams and whole replies agree by construction.
#![forbid(unsafe_code)]

mod bytelevel;
mod detokenizer;
mod error;
mod files;
mod stop;
mod stream;
mod tokenizer;

pub use detokenizer::Detokenizer;
pub use error::TextError;
pub use files::TokenizerFiles;
pub use stop::{Emit, Matched, StopMatcher};
pub use stream::TextStream;
pub use tokenizer::Tokenizer;
