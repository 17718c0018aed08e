//! What every service shares: telemetry, health, readiness, drain.
