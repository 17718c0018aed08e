//! Black-box tests over the fixtures and bent copies of them.

mod draft;
mod index;
mod pair;
mod support;
mod target;
mod target_config;
