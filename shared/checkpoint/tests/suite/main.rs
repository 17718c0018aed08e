//! Black-box tests over the fixtures and bent copies of them.

#[cfg(test)]
mod draft;
#[cfg(test)]
mod index;
#[cfg(test)]
mod pair;
#[cfg(test)]
mod support;
#[cfg(test)]
mod synth;
#[cfg(test)]
mod target;
#[cfg(test)]
mod target_config;
