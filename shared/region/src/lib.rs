//! Memory shared between processes: memfd, leases, epochs and the feature ring.
