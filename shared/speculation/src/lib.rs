//! Pure logic of speculative decoding: drafts, verification, sampling, stop rules.
