//! The target service: holds the model, verifies and samples.
