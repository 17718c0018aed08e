//! What a `Propose` may ask for, checked before anything is touched.

use eyrie_speculation::TreeShape;
use eyrie_wire::v1::{ItemError, Propose};
use eyrie_wire::{Reason, item_error};

use super::growth::Wanted;

/// What bounds a round.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    pub(super) vocab: usize,
    pub(super) draft_vocab: usize,
    /// Tokens of a sequence at most, as the target serves it.
    pub(super) context: usize,
    pub(super) max_draft_tokens: usize,
}

impl Limits {
    /// What `propose` wants, when it is well-formed.
    ///
    /// # Errors
    /// INVALID_ARGUMENT, TOKEN_RANGE or CONTEXT with the field, the limit and the value.
    pub(super) fn check(&self, propose: &Propose) -> Result<Wanted, ItemError> {
        let invalid = |what: String| item_error(Reason::InvalidArgument, what);
        let &Propose { base_len, token_from, start, .. } = propose;
        if base_len == 0 {
            return Err(invalid("base_len must be at least 1, given 0".to_owned()));
        }
        if start > base_len {
            return Err(invalid(format!("start must be at most base_len {base_len}, given {start}")));
        }
        let end = u64::from(token_from) + propose.tokens.len() as u64;
        if end != u64::from(base_len) + 1 {
            let what = format!(
                "tokens must reach up to and including position {base_len}, given {} from position {token_from}",
                propose.tokens.len()
            );
            return Err(invalid(what));
        }
        if let Some(id) = propose.tokens.iter().find(|&&id| id as usize >= self.vocab) {
            let what = format!("token ids must be below the vocabulary of {}, given {id}", self.vocab);
            return Err(item_error(Reason::TokenRange, what));
        }
        let wanted = self.wanted(propose)?;
        let tokens = base_len as usize + 1 + wanted.depth();
        if tokens > self.context {
            let what = format!(
                "base_len {base_len}, the root and {} drafted tokens are {tokens}, over the context of {}",
                wanted.depth(),
                self.context
            );
            return Err(item_error(Reason::Context, what));
        }
        Ok(wanted)
    }

    fn wanted(&self, propose: &Propose) -> Result<Wanted, ItemError> {
        let over = |field: &str, limit: usize, given: usize| {
            item_error(Reason::InvalidArgument, format!("{field} must be at most {limit}, given {given}"))
        };
        let Some(tree) = propose.tree else {
            return match propose.k as usize {
                0 => Ok(Wanted::Nothing),
                k if k > self.max_draft_tokens => Err(over("k", self.max_draft_tokens, k)),
                k => Ok(Wanted::Chain(k)),
            };
        };
        let shape = TreeShape::try_new(tree.top_k as usize, tree.levels as usize, tree.nodes as usize)
            .map_err(|e| item_error(Reason::InvalidArgument, e.to_string()))?;
        if shape.nodes() - 1 > self.max_draft_tokens {
            return Err(over("tree nodes without the root", self.max_draft_tokens, shape.nodes() - 1));
        }
        if shape.top_k() > self.draft_vocab {
            return Err(over("tree top-k", self.draft_vocab, shape.top_k()));
        }
        Ok(Wanted::Tree(shape))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use eyrie_wire::v1;

    const LIMITS: Limits = Limits { vocab: 100, draft_vocab: 50, context: 20, max_draft_tokens: 7 };

    fn propose() -> Propose {
        Propose { round: 1, base_len: 4, token_from: 2, tokens: vec![1, 2, 3], k: 3, ..Default::default() }
    }

    #[test]
    fn well_formed_rounds_pass() {
        assert_eq!(LIMITS.check(&propose()), Ok(Wanted::Chain(3)));
        assert_eq!(LIMITS.check(&Propose { k: 0, ..propose() }), Ok(Wanted::Nothing));
        let nothing_new = Propose { token_from: 5, tokens: vec![], ..propose() };
        assert_eq!(LIMITS.check(&nothing_new), Ok(Wanted::Chain(3)));
        let tree = Some(v1::TreeShape { top_k: 2, levels: 3, nodes: 8 });
        assert!(matches!(LIMITS.check(&Propose { tree, ..propose() }), Ok(Wanted::Tree(_))));
    }

    #[test]
    fn refusals_name_field_limit_and_value() {
        let tree = |top_k, levels, nodes| Some(v1::TreeShape { top_k, levels, nodes });
        let at = |base_len, k| Propose { base_len, token_from: base_len - 2, k, ..propose() };
        for (bad, reason, part) in [
            (Propose { base_len: 0, ..propose() }, "INVALID_ARGUMENT", "at least 1, given 0"),
            (Propose { start: 5, ..propose() }, "INVALID_ARGUMENT", "at most base_len 4, given 5"),
            (
                Propose { token_from: 3, ..propose() },
                "INVALID_ARGUMENT",
                "position 4, given 3 from position 3",
            ),
            (Propose { token_from: u32::MAX, ..propose() }, "INVALID_ARGUMENT", "position 4"),
            (
                Propose { tokens: vec![1, 100, 3], ..propose() },
                "TOKEN_RANGE",
                "below the vocabulary of 100, given 100",
            ),
            (Propose { k: 8, ..propose() }, "INVALID_ARGUMENT", "k must be at most 7, given 8"),
            (at(17, 3), "CONTEXT", "are 21, over the context of 20"),
            (
                Propose { tree: tree(0, 3, 4), ..propose() },
                "INVALID_ARGUMENT",
                "top-k must be between 1 and 16",
            ),
            (
                Propose { tree: tree(4, 5, 16), ..propose() },
                "INVALID_ARGUMENT",
                "must be at most 7, given 15",
            ),
        ] {
            let error = LIMITS.check(&bad).unwrap_err();
            assert_eq!(error.reason, reason);
            assert!(error.message.contains(part), "{}", error.message);
        }
        assert!(LIMITS.check(&at(16, 3)).is_ok());
    }
}
