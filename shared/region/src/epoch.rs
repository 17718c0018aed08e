//! The boot number that tells one life of an exporter from the next.

use std::fmt;
use std::io;
use std::num::NonZeroU64;

use rustix::rand::{GetRandomFlags, getrandom};

/// One life of an exporting process: random, never zero, so a grant of an earlier boot cannot pass for a current one.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Epoch(NonZeroU64);

impl Epoch {
    /// Draws a new epoch from the kernel's random source.
    ///
    /// # Errors
    /// The kernel's error, when it has no randomness to give.
    pub fn random() -> io::Result<Self> {
        loop {
            let mut bytes = [0; 8];
            fill_random(&mut bytes)?;
            if let Some(value) = NonZeroU64::new(u64::from_ne_bytes(bytes)) {
                return Ok(Self(value));
            }
        }
    }

    /// The epoch as it travels in messages and memory.
    pub fn get(self) -> u64 {
        self.0.get()
    }
}

impl From<NonZeroU64> for Epoch {
    fn from(value: NonZeroU64) -> Self {
        Self(value)
    }
}

impl TryFrom<u64> for Epoch {
    type Error = std::num::TryFromIntError;

    /// Fails for zero, which is what an unset field of a message reads as.
    fn try_from(value: u64) -> Result<Self, Self::Error> {
        NonZeroU64::try_from(value).map(Self)
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl fmt::Debug for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Epoch({self})")
    }
}

pub(crate) fn fill_random(mut out: &mut [u8]) -> io::Result<()> {
    while !out.is_empty() {
        match getrandom(&mut *out, GetRandomFlags::empty()) {
            Ok(filled) => out = &mut out[filled..],
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn epochs_differ_print_as_hex_and_refuse_zero() {
        let (a, b) = (Epoch::random().unwrap(), Epoch::random().unwrap());
        assert_ne!(a, b);
        assert_eq!(u64::from_str_radix(&a.to_string(), 16).unwrap(), a.get());
        assert_eq!(a.to_string().len(), 16);
        assert!(Epoch::try_from(0).is_err());
        assert_eq!(Epoch::try_from(a.get()).unwrap(), a);
    }
}
