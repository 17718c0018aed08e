//! How many rows an extend takes, so that a long prompt never holds up the rounds beside it for long.

use std::time::Duration;

/// Time an extend should take at most; also bounds how long a lost lease stays mapped.
const EXTEND_TIME: Duration = Duration::from_millis(50);
/// Rows of one extend: at least enough to use the weights well, at most enough to bound the activations.
const MIN_ROWS: usize = 32;
const MAX_ROWS: usize = 512;
/// Rows that every sequence gets in an extend, however many there are.
const MIN_SHARE: usize = 8;

/// Rows an extend may take, learnt from how long the last ones took. Results do not depend on it.
#[derive(Debug)]
pub(super) struct Pace {
    rows: usize,
}

impl Pace {
    pub(super) fn new() -> Self {
        Self { rows: MIN_ROWS }
    }

    /// Rows for each of `sequences` sequences.
    pub(super) fn share(&self, sequences: usize) -> usize {
        (self.rows / sequences.max(1)).max(MIN_SHARE)
    }

    /// Learns that `rows` rows took `taken`.
    pub(super) fn observe(&mut self, rows: usize, taken: Duration) {
        // Few rows cost what the weights' reading costs: they say nothing about more rows.
        if rows < MIN_ROWS {
            return;
        }
        let fitting = EXTEND_TIME.as_secs_f64() / taken.as_secs_f64().max(1e-9) * rows as f64;
        // Grows by steps: one lucky measurement must not become one long step.
        self.rows = (fitting as usize).clamp(MIN_ROWS, MAX_ROWS).min(2 * rows.max(self.rows));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fast_head_takes_more_rows_and_a_slow_one_fewer() {
        let mut pace = Pace::new();
        assert_eq!(pace.share(1), MIN_ROWS);
        pace.observe(32, Duration::from_millis(1));
        assert_eq!(pace.share(1), 64);
        for _ in 0..9 {
            pace.observe(pace.share(1), Duration::from_millis(1));
        }
        assert_eq!((pace.share(1), pace.share(4), pace.share(1000)), (MAX_ROWS, 128, MIN_SHARE));
        pace.observe(MIN_ROWS - 1, Duration::from_secs(9));
        assert_eq!(pace.share(1), MAX_ROWS, "a short extend says nothing");
        pace.observe(MAX_ROWS, Duration::from_millis(400));
        assert_eq!(pace.share(1), 64);
        pace.observe(64, Duration::ZERO);
        assert_eq!(pace.share(1), 128);
    }
}
