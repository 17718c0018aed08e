//! Tokenizers, incremental detokenisation and stop strings.
