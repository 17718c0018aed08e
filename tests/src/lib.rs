//! Cross-service tests: real processes, real sockets, the real pair.
