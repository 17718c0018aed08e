//! What a checkpoint folder says: config, tensor index, layouts and pair checks; no arithmetic.
