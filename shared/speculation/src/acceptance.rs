//! Running acceptance statistics, counted by draft position as the field's engines report them.

/// Counters over rounds. Mean length includes the bonus token, rates do not.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Acceptance {
    proposed: Vec<u64>,
    accepted: Vec<u64>,
    rounds: u64,
    emitted: u64,
}

impl Acceptance {
    /// Adds a verified round: a proposal `depth` levels deep ([`crate::Proposal::max_depth`], for a
    /// chain its length) of which `accepted` tokens were accepted. A plain round (depth 0) proposes
    /// nothing and is left out, so that it cannot dilute the mean.
    pub fn record(&mut self, depth: usize, accepted: usize) {
        if depth == 0 {
            return;
        }
        let accepted = accepted.min(depth);
        if self.proposed.len() < depth {
            self.proposed.resize(depth, 0);
            self.accepted.resize(depth, 0);
        }
        self.proposed[..depth].iter_mut().for_each(|n| *n += 1);
        self.accepted[..accepted].iter_mut().for_each(|n| *n += 1);
        self.rounds += 1;
        self.emitted += accepted as u64 + 1;
    }

    /// Adds another's counts to these.
    pub fn merge(&mut self, other: &Self) {
        for (mine, theirs) in [(&mut self.proposed, &other.proposed), (&mut self.accepted, &other.accepted)] {
            mine.resize(mine.len().max(theirs.len()), 0);
            mine.iter_mut().zip(theirs).for_each(|(m, t)| *m += t);
        }
        self.rounds += other.rounds;
        self.emitted += other.emitted;
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

    /// Speculative rounds recorded.
    #[must_use]
    pub fn rounds(&self) -> u64 {
        self.rounds
    }

    /// Tokens those rounds emitted: accepted tokens and one bonus each.
    #[must_use]
    pub fn emitted(&self) -> u64 {
        self.emitted
    }

    /// Tokens emitted per round, bonus included; `None` before the first round.
    #[must_use]
    pub fn mean_length(&self) -> Option<f64> {
        (self.rounds > 0).then(|| self.emitted as f64 / self.rounds as f64)
    }

    /// Share of rounds that accepted position i among those that proposed it, for i from 0.
    pub fn rates(&self) -> impl Iterator<Item = f64> + '_ {
        self.accepted.iter().zip(&self.proposed).map(|(&a, &p)| a as f64 / p as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_by_position_with_the_bonus_in_the_length_only() {
        let mut stats = Acceptance::default();
        assert_eq!(stats.mean_length(), None);
        stats.record(3, 3);
        stats.record(3, 1);
        stats.record(1, 0);
        stats.record(0, 0);
        assert_eq!(stats.proposed(), [3, 2, 2]);
        assert_eq!(stats.accepted(), [2, 1, 1]);
        assert_eq!((stats.rounds(), stats.emitted()), (3, 7));
        assert_eq!(stats.mean_length(), Some(7.0 / 3.0));
        assert_eq!(stats.rates().collect::<Vec<_>>(), [2.0 / 3.0, 0.5, 0.5]);
    }

    #[test]
    fn merging_equals_recording_in_one_place() {
        let rounds = [(3, 2), (1, 1), (5, 0), (2, 2)];
        let (mut whole, mut left, mut right) = <(Acceptance, Acceptance, Acceptance)>::default();
        for (i, &(depth, accepted)) in rounds.iter().enumerate() {
            whole.record(depth, accepted);
            if i % 2 == 0 { &mut left } else { &mut right }.record(depth, accepted);
        }
        left.merge(&right);
        assert_eq!(left, whole);
    }
}
