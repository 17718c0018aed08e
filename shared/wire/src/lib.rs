//! The gRPC contract: generated messages, channel and server builders, status mapping.
