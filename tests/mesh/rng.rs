//! The one source of chance of a seed: splitmix64, forked for each part so that parts do not disturb each other.

use std::ops::RangeInclusive;
use std::time::Duration;

#[derive(Debug, Clone)]
pub(crate) struct Rng(u64);

/// splitmix64's finaliser.
pub(crate) fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl Rng {
    pub(crate) fn new(seed: u64) -> Self {
        Self(mix(seed ^ 0x6d65_7368))
    }

    pub(crate) fn fork(&mut self) -> Self {
        Self(self.next())
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    pub(crate) fn within(&mut self, range: RangeInclusive<u32>) -> u32 {
        let span = u64::from(range.end() - range.start()) + 1;
        range.start() + (self.next() % span) as u32
    }

    /// True `per_mille` times in a thousand.
    pub(crate) fn chance(&mut self, per_mille: u32) -> bool {
        self.within(1..=1000) <= per_mille
    }

    pub(crate) fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.within(0..=of.len() as u32 - 1) as usize]
    }

    pub(crate) fn millis(&mut self, range: RangeInclusive<u32>) -> Duration {
        Duration::from_millis(self.within(range).into())
    }
}
