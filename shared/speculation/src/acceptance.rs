//! Running acceptance statistics, counted by draft position as the field's engines report them.

/// Counters over speculative rounds.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Acceptance {
    proposed: Vec<u64>,
    accepted: Vec<u64>,
}

impl Acceptance {
    /// Adds a verified round: a proposal `depth` levels deep ([`crate::Proposal::max_depth`], for a
    /// chain its length) of which `accepted` tokens were accepted. A plain round has depth 0 and
    /// counts nowhere.
    pub fn record(&mut self, depth: usize, accepted: usize) {
        let accepted = accepted.min(depth);
        if self.proposed.len() < depth {
            self.proposed.resize(depth, 0);
            self.accepted.resize(depth, 0);
        }
        self.proposed[..depth].iter_mut().for_each(|n| *n += 1);
        self.accepted[..accepted].iter_mut().for_each(|n| *n += 1);
    }

    /// Rounds that proposed at least i + 1 levels, for i from 0.
    #[must_use]
    pub fn proposed(&self) -> &[u64] {
        &self.proposed
    }

    /// Rounds that accepted at least i + 1 tokens, for i from 0; as long as [`Self::proposed`].
    #[must_use]
    pub fn accepted(&self) -> &[u64] {
        &self.accepted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_are_counted_by_position() {
        let mut stats = Acceptance::default();
        stats.record(3, 3);
        stats.record(3, 1);
        stats.record(1, 0);
        stats.record(0, 0);
        assert_eq!(stats.proposed(), [3, 2, 2]);
        assert_eq!(stats.accepted(), [2, 1, 1]);
    }
}
