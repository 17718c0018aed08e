//! The `eyrie` command.
fn main() {}
