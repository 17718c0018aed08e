//! Counter-based uniforms (Philox4x32-10, Salmon et al. 2011): the number drawn for a position
//! depends on nothing that was drawn before, so batch, draft, restart and migration cannot move it.

const ROUNDS: usize = 10;
const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// The uniform in `[0, 1)`, a multiple of 2⁻⁵³, that decides the token at absolute `position` of
/// completion `choice` of a request with `seed`.
///
/// The mapping is part of the product: a change would alter every seeded output. Key = seed (low
/// word first), counter = `[position, choice, 0, 0]`, result = upper 53 bits of words 1:0.
#[must_use]
pub fn uniform(seed: u64, choice: u32, position: u32) -> f64 {
    let [w0, w1, _, _] = philox([position, choice, 0, 0], [seed as u32, (seed >> 32) as u32]);
    let bits = (u64::from(w1) << 32 | u64::from(w0)) >> 11;
    bits as f64 * (1.0 / (1u64 << 53) as f64)
}

fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..ROUNDS {
        let a = u64::from(MULTIPLIERS[0]) * u64::from(counter[0]);
        let b = u64::from(MULTIPLIERS[1]) * u64::from(counter[2]);
        counter = [
            (b >> 32) as u32 ^ counter[1] ^ key[0],
            b as u32,
            (a >> 32) as u32 ^ counter[3] ^ key[1],
            a as u32,
        ];
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
    }
    counter
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The vectors published with Random123 (kat_vectors, philox4x32 10).
    #[test]
    fn published_known_answers() {
        let cases = [
            ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            ([u32::MAX; 4], [u32::MAX; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ];
        for (counter, key, want) in cases {
            assert_eq!(philox(counter, key), want);
        }
    }

    /// 0xe169c58d_6627e8d5 >> 11, from the first vector above.
    #[test]
    fn uniform_is_the_upper_53_bits() {
        let bits = 0xe169_c58d_6627_e8d5_u64 >> 11;
        assert_eq!(uniform(0, 0, 0), bits as f64 / 9_007_199_254_740_992.0);
    }

    /// Pins which word of key and counter each argument is; computed by a second implementation.
    #[test]
    fn the_mapping_of_arguments_is_fixed() {
        let bits = 0x0004_ac54_21cf_65e4_u64;
        let want = bits as f64 / 9_007_199_254_740_992.0;
        assert_eq!(uniform(0x0123_4567_89ab_cdef, 3, 1000), want);
    }

    #[test]
    fn every_argument_moves_the_result() {
        let base = uniform(7, 0, 100);
        for other in
            [uniform(8, 0, 100), uniform(7 | 1 << 40, 0, 100), uniform(7, 1, 100), uniform(7, 0, 101)]
        {
            assert_ne!(base, other);
        }
    }

    #[test]
    fn positions_fill_the_unit_interval_evenly() {
        const CELLS: usize = 64;
        const DRAWS: u32 = 64_000;
        let mut counts = [0u32; CELLS];
        for position in 0..DRAWS {
            let u = uniform(42, 0, position);
            assert!((0.0..1.0).contains(&u));
            counts[(u * CELLS as f64) as usize] += 1;
        }
        let expected = f64::from(DRAWS) / CELLS as f64;
        let chi2: f64 = counts.iter().map(|&c| (f64::from(c) - expected).powi(2) / expected).sum();
        // 63 degrees of freedom: the 0.1 % point is 103.4.
        assert!(chi2 < 103.4, "chi² {chi2}");
    }
}
