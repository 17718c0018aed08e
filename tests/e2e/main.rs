//! Cross-service tests: real processes, real sockets, the real pair.

/// The binary under test.
#[cfg(test)]
const EYRIE: &str = env!("CARGO_BIN_EXE_eyrie");

#[cfg(test)]
mod bad_input;
#[cfg(test)]
mod demo;
#[cfg(test)]
mod disconnect;
#[cfg(test)]
mod draft_down;
#[cfg(test)]
mod ending;
#[cfg(test)]
mod faults;
#[cfg(test)]
mod fuzz;
#[cfg(test)]
mod goldens;
#[cfg(test)]
mod killed;
#[cfg(test)]
mod licences;
#[cfg(test)]
mod limits;
#[cfg(test)]
mod lossless;
#[cfg(test)]
mod matrix;
#[cfg(test)]
mod memory;
#[cfg(test)]
mod pools;
#[cfg(test)]
mod prefix;
#[cfg(test)]
mod remote;
#[cfg(test)]
mod resident;
#[cfg(test)]
mod sampling;
#[cfg(test)]
mod services;
#[cfg(test)]
mod synth;
#[cfg(test)]
mod zero_copy;
