//! Numbers that follow from a seed, a name and a place, so that any of them can be made anywhere, in any order.
//!
//! Element `i` of a tensor is made of `mix(key + i · γ)`, the generator SplitMix64 (Steele, Lea and Flood 2014) with the
//! place as its counter. The CUDA kernel `fill` makes the same bits.

use crate::Dtype;

/// The increment of SplitMix64: 2⁶⁴ over the golden ratio.
const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;
/// Values of a fraction, on both sides of zero: what float32 holds exactly.
const FRACTION_BITS: u32 = 24;

/// What the elements of a tensor are.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Numbers {
    /// float32 `mean + n · step`, with n odd and evenly spread over ±2²⁴.
    F32 {
        /// Their mean.
        mean: f32,
        /// Half the distance of neighbours.
        step: f32,
    },
    /// The same rounded to bfloat16.
    Bf16 {
        /// Their mean before rounding.
        mean: f32,
        /// Half the distance of neighbours before rounding.
        step: f32,
    },
    /// Words of eight nibbles in 1..=15: with 8 taken off, as INT4 weights are, they are spread around zero.
    Nibbles,
}

/// A tensor that nobody stored: every byte of it can be told from this.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Fill {
    /// Of the seed and the tensor's name.
    pub key: u64,
    /// What each element is.
    pub numbers: Numbers,
    /// How many there are.
    pub elements: usize,
}

/// A bijection of 64 bits that leaves no pattern.
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl Numbers {
    /// Bytes of an element.
    pub fn size(self) -> usize {
        match self {
            Self::F32 { .. } | Self::Nibbles => 4,
            Self::Bf16 { .. } => 2,
        }
    }

    /// Evenly spread around `mean` with a standard deviation of `deviation`; words of nibbles for an integer type.
    pub(crate) fn spread(dtype: Dtype, mean: f32, deviation: f32) -> Self {
        let step = deviation * 3.0_f32.sqrt() / (1 << FRACTION_BITS) as f32;
        match dtype {
            Dtype::F32 => Self::F32 { mean, step },
            Dtype::I32 => Self::Nibbles,
            _ => Self::Bf16 { mean, step },
        }
    }
}

impl Fill {
    /// The tensor of that name.
    pub(crate) fn new(seed: u64, name: &str, numbers: Numbers, elements: usize) -> Self {
        // FNV-1a.
        let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
        });
        Self { key: mix(mix(hash).wrapping_add(seed)), numbers, elements }
    }

    /// Bytes of all elements.
    pub fn byte_len(&self) -> usize {
        self.elements * self.numbers.size()
    }

    /// Writes the elements from the first on, as many whole ones as `out` holds.
    pub fn write(&self, out: &mut [u8]) {
        match self.numbers {
            Numbers::F32 { mean, step } => {
                let words = out.as_chunks_mut().0.iter_mut().enumerate();
                words.for_each(|(i, word)| *word = self.float(i, mean, step).to_le_bytes());
            }
            Numbers::Bf16 { mean, step } => {
                let words = out.as_chunks_mut().0.iter_mut().enumerate();
                words.for_each(|(i, word)| {
                    *word = half::bf16::from_f32(self.float(i, mean, step)).to_le_bytes();
                });
            }
            Numbers::Nibbles => {
                let words = out.as_chunks_mut().0.iter_mut().enumerate();
                words.for_each(|(i, word)| *word = self.nibbles(i).to_le_bytes());
            }
        }
    }

    fn bits(&self, element: usize) -> u64 {
        mix(self.key.wrapping_add((element as u64).wrapping_mul(GAMMA)))
    }

    fn float(&self, element: usize, mean: f32, step: f32) -> f32 {
        let fraction = (self.bits(element) >> (64 - FRACTION_BITS)) as i32;
        mean + (2 * fraction + 1 - (1 << FRACTION_BITS)) as f32 * step
    }

    fn nibbles(&self, element: usize) -> u32 {
        let nibble = |byte: u8| 1 + ((u32::from(byte) * 15) >> 8);
        let bytes = self.bits(element).to_le_bytes();
        bytes.into_iter().rev().fold(0, |word, byte| (word << 4) | nibble(byte))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn floats(fill: &Fill) -> Vec<f32> {
        let mut bytes = vec![0; fill.byte_len()];
        fill.write(&mut bytes);
        bytes.as_chunks().0.iter().map(|&word| f32::from_le_bytes(word)).collect()
    }

    #[test]
    fn floats_have_the_mean_and_spread_they_were_asked_for() {
        let numbers = Numbers::spread(Dtype::F32, 1.0, 0.25);
        let values = floats(&Fill::new(7, "a", numbers, 100_000));
        let mean = values.iter().sum::<f32>() / 1e5;
        let deviation = (values.iter().map(|v| (v - mean).powi(2)).sum::<f32>() / 1e5).sqrt();
        assert!((mean - 1.0).abs() < 0.005 && (deviation - 0.25).abs() < 0.005, "{mean} {deviation}");
        assert!(values.iter().all(|v| (v - 1.0).abs() <= 0.25 * 1.733));
    }

    #[test]
    fn seed_and_name_make_another_tensor() {
        let numbers = Numbers::spread(Dtype::F32, 0.0, 1.0);
        let of = |seed, name| floats(&Fill::new(seed, name, numbers, 4));
        assert_eq!(of(1, "a"), of(1, "a"));
        assert!(of(1, "a") != of(2, "a") && of(1, "a") != of(1, "b"));
    }

    /// What every build on every machine makes, so that a model has one identity.
    #[test]
    fn the_bits_never_change() {
        let of = |numbers| {
            let fill = Fill::new(1, "model.norm.weight", numbers, 3);
            let mut bytes = vec![0; fill.byte_len()];
            fill.write(&mut bytes);
            bytes
        };
        assert_eq!(
            of(Numbers::F32 { mean: 0.5, step: 1e-7 }),
            [186, 46, 141, 190, 204, 231, 115, 190, 216, 72, 65, 191]
        );
        assert_eq!(of(Numbers::Bf16 { mean: 0.5, step: 1e-7 }), [141, 190, 116, 190, 65, 191]);
        assert_eq!(of(Numbers::Nibbles), [161, 93, 183, 77, 215, 153, 72, 91, 92, 139, 247, 36]);
    }

    #[test]
    fn nibbles_are_spread_around_zero() {
        let fill = Fill::new(3, "w", Numbers::Nibbles, 10_000);
        let mut bytes = vec![0; fill.byte_len()];
        fill.write(&mut bytes);
        let nibbles = bytes.iter().flat_map(|byte| [byte & 15, byte >> 4]);
        let mut counts = [0_u32; 16];
        nibbles.for_each(|nibble| counts[usize::from(nibble)] += 1);
        assert_eq!(counts[0], 0);
        assert!(counts[1..].iter().all(|count| (4900..5900).contains(count)), "{counts:?}");
    }
}
