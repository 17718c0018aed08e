//! Values and bytes at and beyond every limit, drawn from a seed.

/// A small generator of random numbers (splitmix64): a case is named by its seed.
#[derive(Debug, Clone)]
pub struct Wild(u64);

impl Wild {
    /// The case of this seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Any 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `limit`.
    pub fn below(&mut self, limit: usize) -> usize {
        (self.bits() % limit.max(1) as u64) as usize
    }

    /// True once in `n`.
    pub fn once_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    /// One of `choices`.
    pub fn pick<T: Clone>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())].clone()
    }

    /// `usual` mostly, else a number that is likely to be one too many.
    pub fn number(&mut self, usual: u32) -> u32 {
        const EDGES: [u32; 16] =
            [0, 1, 2, 16, 17, 63, 64, 65, 1024, 1025, 4095, 4096, 70_000, 1 << 31, u32::MAX - 1, u32::MAX];
        match self.below(16) {
            0 => self.pick(&EDGES),
            1 => usual.wrapping_add(self.below(3) as u32).wrapping_sub(1),
            _ => usual,
        }
    }

    /// `usual` mostly, else a number that is hardly one.
    pub fn float(&mut self, usual: f32) -> f32 {
        const EDGES: [f32; 8] =
            [0.0, -0.0, -1.0, 1.0 + f32::EPSILON, 1e30, f32::INFINITY, f32::NAN, f32::MIN_POSITIVE];
        if self.once_in(16) { self.pick(&EDGES) } else { usual }
    }

    /// Up to `most` numbers around `usual`.
    pub fn numbers(&mut self, most: usize, usual: u32) -> Vec<u32> {
        (0..self.below(most + 1)).map(|_| self.number(usual)).collect()
    }

    /// Changes `bytes` in one to four places.
    pub fn spoil(&mut self, bytes: &mut Vec<u8>) {
        for _ in 0..=self.below(4) {
            let at = self.below(bytes.len());
            match self.below(6) {
                0 => bytes.truncate(at),
                1 => bytes.insert(at, self.bits() as u8),
                2 => bytes.splice(at..at, [0xff; 10]).for_each(drop),
                3 => bytes.extend_from_within(at..),
                _ => {
                    let flip = self.pick(&[1, 0x80, 0xff, 0x08]);
                    if let Some(byte) = bytes.get_mut(at) {
                        *byte ^= flip;
                    }
                }
            }
        }
    }
}
