//! The gateway service: client API, sessions, round clock and failure policy.
