//! The crate's behaviour from outside, in one binary.

#[cfg(feature = "cuda")]
#[cfg(test)]
mod bf16;
#[cfg(test)]
mod cache;
#[cfg(test)]
mod common;
#[cfg(test)]
mod draft;
#[cfg(test)]
mod goldens;
#[cfg(test)]
mod invariance;
#[cfg(test)]
mod mutations;
#[cfg(test)]
mod parity;
#[cfg(test)]
mod refusals;
#[cfg(test)]
mod shared_weights;
#[cfg(test)]
mod variants;
