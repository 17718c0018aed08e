//! How much to draft in a round.

use std::time::Duration;

use eyrie_speculation::TreeShape;

/// Plain steps in one credit of a request that does not speculate.
const PLAIN_CREDIT: u32 = 16;
/// Plain steps in one credit while a request that speculates has no draft: short, so that a draft
/// that comes back is asked soon.
const WAITING_CREDIT: u32 = 4;

/// What a request wants of the draft, for its whole life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Plan {
    /// Plain decoding.
    Off,
    /// The gateway chooses.
    Auto,
    /// Exactly this many tokens a round, more than 0.
    Chain(u32),
    /// Exactly this tree a round.
    Tree(TreeShape),
}

impl Plan {
    pub(crate) fn speculates(self) -> bool {
        self != Self::Off
    }

    /// The request fixes what every round drafts.
    pub(crate) fn is_exact(self) -> bool {
        matches!(self, Self::Chain(_) | Self::Tree(_))
    }

    /// Tokens that a draft must be able to propose in a round to be of use.
    pub(crate) fn least(self) -> u32 {
        match self {
            Self::Off => 0,
            Self::Auto => 1,
            Self::Chain(k) => k,
            Self::Tree(shape) => Ask::Tree(shape).tokens() as u32,
        }
    }

    /// How long a proposal may take; an exact plan would rather wait than change the round.
    pub(crate) fn deadline(self, auto: Duration) -> Duration {
        if self.is_exact() { auto.max(crate::GatewayOptions::EXACT_DEADLINE) } else { auto }
    }
}

/// What one round asks of the draft.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ask {
    Chain(u32),
    Tree(TreeShape),
}

impl Ask {
    /// Tokens proposed at most.
    pub(crate) fn tokens(self) -> usize {
        match self {
            Self::Chain(k) => k as usize,
            Self::Tree(shape) => shape.nodes() - 1,
        }
    }
}

/// Where a sequence stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Standing {
    /// Rows with KV; the root stands at this position.
    pub(crate) kv_len: u32,
    /// Tokens that may still be generated.
    pub(crate) remaining: u32,
    /// The model's context length.
    pub(crate) context: u32,
}

/// What this round asks of a draft that can be asked; `None` = a plain round by choice.
pub(crate) fn ask(plan: Plan, at: Standing, default_k: u32) -> Option<Ask> {
    let room = at.context.saturating_sub(at.kv_len).saturating_sub(1);
    let ask = match plan {
        Plan::Off => return None,
        // The last token needs no draft, and what lies beyond it would be thrown away.
        Plan::Auto => Ask::Chain(default_k.min(at.remaining.saturating_sub(1)).min(room)),
        Plan::Chain(k) => Ask::Chain(k),
        Plan::Tree(shape) => Ask::Tree(shape),
    };
    Some(ask).filter(|ask| (1..=room as usize).contains(&ask.tokens()))
}

/// Steps of a plain round's credit. `healing`: the draft lacks rows that are on their way.
pub(crate) fn plain_steps(plan: Plan, at: Standing, healing: bool) -> u32 {
    let credit = match (plan, healing) {
        (Plan::Off, _) => PLAIN_CREDIT,
        (_, true) => 1,
        (_, false) => WAITING_CREDIT,
    };
    credit.min(at.remaining).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(kv_len: u32, remaining: u32) -> Standing {
        Standing { kv_len, remaining, context: 100 }
    }

    #[test]
    fn auto_is_clamped_by_budget_and_context() {
        let k = |kv_len, remaining| ask(Plan::Auto, at(kv_len, remaining), 3).map(Ask::tokens);
        assert_eq!(k(10, 50), Some(3));
        assert_eq!(k(10, 3), Some(2));
        assert_eq!(k(10, 1), None);
        assert_eq!(k(97, 50), Some(2));
        assert_eq!(k(99, 50), None);
        assert_eq!(ask(Plan::Auto, at(10, 50), 0), None);
    }

    #[test]
    fn an_exact_plan_yields_to_the_context_only() {
        assert_eq!(ask(Plan::Chain(7), at(10, 1), 3), Some(Ask::Chain(7)));
        assert_eq!(ask(Plan::Chain(7), at(92, 1), 3), Some(Ask::Chain(7)));
        assert_eq!(ask(Plan::Chain(7), at(93, 1), 3), None);
        let shape = TreeShape::try_new(4, 5, 16).unwrap();
        assert_eq!(ask(Plan::Tree(shape), at(84, 1), 3), Some(Ask::Tree(shape)));
        assert_eq!(ask(Plan::Tree(shape), at(85, 1), 3), None);
    }

    #[test]
    fn credits_are_long_only_without_speculation() {
        assert_eq!(plain_steps(Plan::Off, at(10, 50), false), 16);
        assert_eq!(plain_steps(Plan::Off, at(10, 5), false), 5);
        assert_eq!(plain_steps(Plan::Auto, at(10, 50), false), 4);
        assert_eq!(plain_steps(Plan::Auto, at(10, 50), true), 1);
        assert_eq!(plain_steps(Plan::Chain(3), at(10, 0), false), 1);
    }

    #[test]
    fn an_exact_plan_waits_at_least_a_second() {
        let auto = Duration::from_millis(250);
        assert_eq!(Plan::Auto.deadline(auto), auto);
        assert_eq!(Plan::Chain(3).deadline(auto), Duration::from_secs(1));
        assert_eq!(Plan::Chain(3).deadline(Duration::from_secs(2)), Duration::from_secs(2));
    }
}
