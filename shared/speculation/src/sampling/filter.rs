//! Partial selection over a logits row. A token is one `u64` key whose descending order is "higher
//! logit first, then lower id", so selection and sorting compare plain integers.

/// Below this a selection buffer is not worth cutting back.
const MIN_BUFFER: usize = 512;
/// First slice of a nucleus that is sorted; each next one is seven times what is sorted already.
const FIRST_SLICE: usize = 256;

pub(super) fn key(id: u32, logit: f32) -> u64 {
    // −0 and +0 are one logit, so they must tie.
    let bits = (logit + 0.0).to_bits();
    let ordered = if bits >> 31 == 0 { bits | 1 << 31 } else { !bits };
    u64::from(ordered) << 32 | u64::from(!id)
}

pub(super) fn id(key: u64) -> u32 {
    !(key as u32)
}

/// Leaves the `k` greatest keys of `logits` in `keys`, in no particular order.
pub(super) fn top_k(logits: &[f32], k: usize, keys: &mut Vec<u64>) {
    let capacity = (2 * k).max(MIN_BUFFER);
    let mut floor = 0;
    keys.clear();
    for (id, &logit) in logits.iter().enumerate() {
        let key = key(id as u32, logit);
        if key < floor {
            continue;
        }
        keys.push(key);
        if keys.len() == capacity {
            floor = cut(keys, k);
        }
    }
    if keys.len() > k {
        cut(keys, k);
    }
}

/// Keeps the `k` greatest keys (1 ≤ k ≤ len) and returns the least of them.
fn cut(keys: &mut Vec<u64>, k: usize) -> u64 {
    let (_, &mut least, _) = keys.select_nth_unstable_by(k - 1, |a, b| b.cmp(a));
    keys.truncate(k);
    least
}

/// Sorts `keys` in descending order as far as needed and cuts them to the shortest prefix whose
/// weights, summed in that order, reach `mass`.
pub(super) fn nucleus(keys: &mut Vec<u64>, mass: f64, weight: impl Fn(u64) -> f64) {
    let mut sum = 0.0;
    let mut sorted = 0;
    while sorted < keys.len() {
        let slice = (7 * sorted).max(FIRST_SLICE);
        let rest = &mut keys[sorted..];
        if slice < rest.len() {
            rest.select_nth_unstable_by(slice - 1, |a, b| b.cmp(a));
        }
        let end = slice.min(rest.len());
        rest[..end].sort_unstable_by(|a, b| b.cmp(a));
        for i in sorted..sorted + end {
            sum += weight(keys[i]);
            if sum >= mass {
                keys.truncate(i + 1);
                return;
            }
        }
        sorted += end;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_order_by_logit_then_by_lower_id() {
        let row = [(3, 2.0), (1, 0.5), (2, -0.0), (4, 0.0), (0, -1e-30), (5, -7.0), (9, f32::MIN)];
        let keys: Vec<u64> = row.iter().map(|&(id, logit)| key(id, logit)).collect();
        assert!(keys.is_sorted_by(|a, b| a > b));
        assert!(keys.iter().zip(row).all(|(&k, (want, _))| id(k) == want));
    }
}
