//! What a draft proposes: a token tree below the root. Node 0 is the root (the committed token that
//! has no target KV yet); node `i + 1` is the i-th proposed token.

/// Most nodes of a proposal, the root included.
pub const MAX_NODES: usize = 64;

const MAX_PROPOSED: usize = MAX_NODES - 1;

/// Why tokens and parents do not form a draft tree.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProposalError {
    /// More tokens than a round may carry.
    #[error("a proposal may have at most {MAX_PROPOSED} tokens, given {given}")]
    TooManyTokens {
        /// Proposed tokens given, without the root.
        given: usize,
    },
    /// The two arrays describe different nodes.
    #[error("parents must have one entry per proposed token: {tokens} tokens, given {parents} parents")]
    LengthMismatch {
        /// Length of `tokens`.
        tokens: usize,
        /// Length of `parents`.
        parents: usize,
    },
    /// A parent that does not precede its child.
    #[error("parents[{index}] must be at most {index} (root 0, first proposal 1), given {given}")]
    ParentAfterChild {
        /// Index into `parents`.
        index: usize,
        /// The parent given.
        given: u16,
    },
    /// Two children of one node with the same token: the second could never be reached.
    #[error(
        "siblings must have distinct tokens: tokens[{first}] and tokens[{second}] are both {token} below node {parent}"
    )]
    DuplicateSibling {
        /// Index of the earlier sibling in `tokens`.
        first: usize,
        /// Index of the later sibling in `tokens`.
        second: usize,
        /// The token both carry.
        token: u32,
        /// Their parent's node index.
        parent: u16,
    },
}

/// A draft tree in verification order: parents precede children, siblings carry distinct tokens.
///
/// `tokens` and `parents` leave the root out; `parents[i]` is the *node* index of proposed token
/// i's parent, so 0 is the root and 1 the first proposed token.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Proposal {
    tokens: Vec<u32>,
    parents: Vec<u16>,
}

impl Proposal {
    /// The proposal of a plain round: the root alone.
    #[must_use]
    pub fn empty() -> Self {
        Self::default()
    }

    /// A chain: token i continues token i − 1.
    ///
    /// # Errors
    /// More than [`MAX_NODES`] − 1 tokens.
    pub fn chain(tokens: Vec<u32>) -> Result<Self, ProposalError> {
        if tokens.len() > MAX_PROPOSED {
            return Err(ProposalError::TooManyTokens { given: tokens.len() });
        }
        let parents = (0..tokens.len() as u16).collect();
        Ok(Self { tokens, parents })
    }

    /// A tree from tokens and parent node indices (root left out of both).
    ///
    /// # Errors
    /// Unequal lengths, more than [`MAX_NODES`] − 1 tokens, a parent that does not precede its
    /// child, or two siblings with one token.
    pub fn try_new(tokens: Vec<u32>, parents: Vec<u16>) -> Result<Self, ProposalError> {
        if tokens.len() > MAX_PROPOSED {
            return Err(ProposalError::TooManyTokens { given: tokens.len() });
        }
        if tokens.len() != parents.len() {
            return Err(ProposalError::LengthMismatch { tokens: tokens.len(), parents: parents.len() });
        }
        for (second, (&token, &parent)) in tokens.iter().zip(&parents).enumerate() {
            if usize::from(parent) > second {
                return Err(ProposalError::ParentAfterChild { index: second, given: parent });
            }
            let twin = (0..second).find(|&i| parents[i] == parent && tokens[i] == token);
            if let Some(first) = twin {
                return Err(ProposalError::DuplicateSibling { first, second, token, parent });
            }
        }
        Ok(Self { tokens, parents })
    }

    /// Proposed tokens, root left out.
    #[must_use]
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Parent node index of each proposed token.
    #[must_use]
    pub fn parents(&self) -> &[u16] {
        &self.parents
    }

    /// Number of proposed tokens.
    #[must_use]
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Whether nothing is proposed (a plain round).
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Number of rows the target computes: the root and every proposed token.
    #[must_use]
    pub fn nodes(&self) -> usize {
        self.tokens.len() + 1
    }

    /// The token at `node`; `None` for the root, which the proposal does not carry, and beyond the
    /// last node.
    #[must_use]
    pub fn token(&self, node: usize) -> Option<u32> {
        self.tokens.get(node.checked_sub(1)?).copied()
    }

    /// The parent of `node`; `None` for the root and beyond the last node.
    #[must_use]
    pub fn parent(&self, node: usize) -> Option<usize> {
        self.parents.get(node.checked_sub(1)?).map(|&p| usize::from(p))
    }

    /// Edges between `node` and the root: the node's position minus the root's.
    #[must_use]
    pub fn depth(&self, node: usize) -> usize {
        std::iter::successors(self.parent(node), |&n| self.parent(n)).count()
    }

    /// Depth of every node in node order, the root's 0 first.
    #[must_use]
    pub fn depths(&self) -> Vec<usize> {
        let mut depths = Vec::with_capacity(self.nodes());
        depths.push(0);
        for &parent in &self.parents {
            depths.push(depths[usize::from(parent)] + 1);
        }
        depths
    }

    /// The longest path below the root, in edges.
    #[must_use]
    pub fn max_depth(&self) -> usize {
        self.depths().into_iter().max().unwrap_or(0)
    }

    /// The nodes `node` attends to inside the tree, by depth: the root first, `node` itself last.
    #[must_use]
    pub fn ancestors(&self, node: usize) -> Vec<usize> {
        let mut path: Vec<usize> = std::iter::successors(Some(node), |&n| self.parent(n)).collect();
        path.reverse();
        path
    }

    /// Children of `node` in node order.
    pub fn children(&self, node: usize) -> impl Iterator<Item = usize> + '_ {
        // A child's index is above its parent's, so the entries before `node` need no look.
        (node..self.parents.len()).filter(move |&i| usize::from(self.parents[i]) == node).map(|i| i + 1)
    }

    /// Whether each token continues the one before it. True for an empty proposal.
    #[must_use]
    pub fn is_chain(&self) -> bool {
        self.parents.iter().enumerate().all(|(i, &p)| usize::from(p) == i)
    }

    /// For a tree whose construction guarantees what [`Proposal::try_new`] checks.
    pub(crate) fn from_grown(tokens: Vec<u32>, parents: Vec<u16>) -> Self {
        Self { tokens, parents }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree() -> Proposal {
        Proposal::try_new(vec![10, 11, 12, 10, 13, 14], vec![0, 0, 1, 2, 3, 1]).unwrap()
    }

    #[test]
    fn helpers_follow_the_parents() {
        let t = tree();
        assert_eq!(t.depths(), [0, 1, 1, 2, 2, 3, 2]);
        assert!((0..t.nodes()).all(|n| t.depth(n) == t.depths()[n]));
        assert_eq!(t.max_depth(), 3);
        assert_eq!(t.ancestors(5), [0, 1, 3, 5]);
        assert_eq!(t.ancestors(0), [0]);
        assert_eq!(t.children(0).collect::<Vec<_>>(), [1, 2]);
        assert_eq!(t.children(1).collect::<Vec<_>>(), [3, 6]);
        assert_eq!(t.children(6).count(), 0);
        assert_eq!((t.token(0), t.token(4), t.token(7)), (None, Some(10), None));
        assert!(!t.is_chain());
    }

    #[test]
    fn a_chain_is_the_tree_with_running_parents() {
        let c = Proposal::chain(vec![5, 6, 7]).unwrap();
        assert_eq!(c, Proposal::try_new(vec![5, 6, 7], vec![0, 1, 2]).unwrap());
        assert!(c.is_chain() && Proposal::empty().is_chain());
        assert_eq!(c.depths(), [0, 1, 2, 3]);
    }

    #[test]
    fn refusals_name_index_limit_and_value() {
        let text = |r: Result<Proposal, ProposalError>| r.unwrap_err().to_string();
        assert_eq!(text(Proposal::chain(vec![0; 64])), "a proposal may have at most 63 tokens, given 64");
        assert!(Proposal::chain((0..63).collect()).is_ok());
        assert_eq!(
            text(Proposal::try_new(vec![1, 2], vec![0])),
            "parents must have one entry per proposed token: 2 tokens, given 1 parents"
        );
        assert_eq!(
            text(Proposal::try_new(vec![1, 2], vec![0, 2])),
            "parents[1] must be at most 1 (root 0, first proposal 1), given 2"
        );
        assert_eq!(
            text(Proposal::try_new(vec![1, 2, 1], vec![0, 0, 0])),
            "siblings must have distinct tokens: tokens[0] and tokens[2] are both 1 below node 0"
        );
    }
}
