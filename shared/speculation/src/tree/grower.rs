use std::cmp::Ordering;

use crate::{Proposal, TreeShape};

/// Why a draft step's output cannot grow the tree.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
pub enum GrowError {
    /// A step with the wrong number of rows.
    #[error("level {level} of the tree takes {want} rows, given {given}")]
    Rows {
        /// The level being grown, from 0.
        level: usize,
        /// Rows the beam has.
        want: usize,
        /// Rows given.
        given: usize,
    },
    /// A row with the wrong number of children.
    #[error("each row of the tree takes top-k = {want} children, given {given} at level {level} row {row}")]
    Children {
        /// The level being grown, from 0.
        level: usize,
        /// Beam row.
        row: usize,
        /// Children per row.
        want: usize,
        /// Children given.
        given: usize,
    },
    /// A value that is no probability.
    #[error(
        "draft probabilities must be between 0 and 1, given {value} for token {token} at level {level} row {row}"
    )]
    Probability {
        /// The level being grown, from 0.
        level: usize,
        /// Beam row.
        row: usize,
        /// Token id.
        token: u32,
        /// The value given.
        value: f32,
    },
    /// Two children of one row carry one token.
    #[error("siblings must have distinct tokens, given {token} twice at level {level} row {row}")]
    DuplicateSibling {
        /// The level being grown, from 0.
        level: usize,
        /// Beam row.
        row: usize,
        /// Token id.
        token: u32,
    },
    /// A step after the last level.
    #[error("the tree has {levels} levels, all grown already")]
    Complete {
        /// Levels of the shape.
        levels: usize,
    },
}

/// A node the draft runs next.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BeamNode {
    /// Token id, as given by the draft.
    pub token: u32,
    /// Row of the previous draft step whose output is this node's feature (0 at level 0, where the
    /// only row is the last committed slot).
    pub parent_row: usize,
    /// The node's candidate number.
    pub candidate: usize,
    /// Product of the draft probabilities on the path from the root.
    pub score: f64,
}

#[derive(Debug, Clone, Copy)]
struct Candidate {
    token: u32,
    parent: Option<usize>,
    score: f64,
}

/// Grows one dynamic tree: `level0`, then for each further level run the draft on [`Self::beam`] and
/// hand its children to [`Self::expand`], then [`Self::finish`].
///
/// Candidates are numbered as SGLang and EAGLE do: level 0 has 0..k, level i has
/// `k + (i − 1)k² + row·k + rank`. Every ranking breaks ties to the lower number; since parents have
/// lower numbers and never lower scores, the selection holds every selected node's ancestors.
#[derive(Debug, Clone)]
pub struct TreeGrower {
    shape: TreeShape,
    candidates: Vec<Candidate>,
    beam: Vec<BeamNode>,
    grown: usize,
}

impl TreeGrower {
    /// A tree with nothing below its root.
    #[must_use]
    pub fn new(shape: TreeShape) -> Self {
        Self { shape, candidates: Vec::new(), beam: Vec::new(), grown: 0 }
    }

    /// Takes the `top_k` most probable tokens after the root, most probable first.
    ///
    /// # Errors
    /// A wrong count, a value outside 0..=1 (NaN included), a repeated token, or a level 0 that was
    /// taken already.
    pub fn level0(&mut self, top: &[(u32, f32)]) -> Result<(), GrowError> {
        if self.is_complete() {
            return Err(GrowError::Complete { levels: self.shape.levels() });
        }
        if self.grown > 0 {
            return Err(GrowError::Rows { level: self.grown, want: self.beam.len(), given: 1 });
        }
        self.check(0, top)?;
        let score = |&(token, prob): &(u32, f32)| Candidate { token, parent: None, score: prob.into() };
        self.candidates.extend(top.iter().map(score));
        self.grown = 1;
        self.beam = self.rank(0, |_| 0);
        Ok(())
    }

    /// The nodes the draft runs next, best first; empty before level 0 and once all levels are grown.
    #[must_use]
    pub fn beam(&self) -> &[BeamNode] {
        if self.is_complete() { &[] } else { &self.beam }
    }

    /// Levels grown so far.
    #[must_use]
    pub fn grown(&self) -> usize {
        self.grown
    }

    /// Whether every level of the shape is grown.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.grown == self.shape.levels()
    }

    /// Takes one row per beam node: its `top_k` most probable tokens, most probable first.
    ///
    /// # Errors
    /// A wrong count of rows or children, a value outside 0..=1 (NaN included), a token repeated in a
    /// row, or a tree that is complete. The tree is then unchanged.
    pub fn expand<R: AsRef<[(u32, f32)]>>(&mut self, children: &[R]) -> Result<(), GrowError> {
        let level = self.grown;
        if self.is_complete() {
            return Err(GrowError::Complete { levels: self.shape.levels() });
        }
        if children.len() != self.beam.len() || self.beam.is_empty() {
            return Err(GrowError::Rows { level, want: self.beam.len(), given: children.len() });
        }
        for (row, top) in children.iter().enumerate() {
            self.check(row, top.as_ref())?;
        }
        let first = self.candidates.len();
        for (node, top) in self.beam.iter().zip(children) {
            self.candidates.extend(top.as_ref().iter().map(|&(token, prob)| Candidate {
                token,
                parent: Some(node.candidate),
                score: node.score * f64::from(prob),
            }));
        }
        self.grown += 1;
        let k = self.shape.top_k();
        self.beam = self.rank(first, |candidate| (candidate - first) / k);
        Ok(())
    }

    /// The best `nodes − 1` candidates over all levels grown (fewer if fewer exist), in candidate
    /// order. Levels that were not grown are simply absent.
    #[must_use]
    pub fn finish(self) -> Proposal {
        let keep = self.shape.nodes() - 1;
        let mut chosen = self.ranking(0);
        chosen.truncate(keep);
        chosen.sort_unstable();
        let mut node_of = vec![0u16; self.candidates.len()];
        let mut parents = Vec::with_capacity(chosen.len());
        for (i, &candidate) in chosen.iter().enumerate() {
            node_of[candidate] = i as u16 + 1;
            parents.push(self.candidates[candidate].parent.map_or(0, |parent| node_of[parent]));
        }
        let tokens = chosen.iter().map(|&candidate| self.candidates[candidate].token).collect();
        Proposal::from_grown(tokens, parents)
    }

    /// The best `top_k` candidates from `first` on, as the next beam.
    fn rank(&self, first: usize, parent_row: impl Fn(usize) -> usize) -> Vec<BeamNode> {
        let best = self.ranking(first).into_iter().take(self.shape.top_k());
        best.map(|candidate| {
            let Candidate { token, score, .. } = self.candidates[candidate];
            BeamNode { token, parent_row: parent_row(candidate), candidate, score }
        })
        .collect()
    }

    /// Candidate numbers from `first` on, best score first, ties to the lower number.
    fn ranking(&self, first: usize) -> Vec<usize> {
        let mut numbers: Vec<usize> = (first..self.candidates.len()).collect();
        // A stable sort keeps ties in candidate order. Not total_cmp: −0 must tie with +0.
        numbers.sort_by(|&a, &b| {
            let (a, b) = (self.candidates[a].score, self.candidates[b].score);
            b.partial_cmp(&a).unwrap_or(Ordering::Equal)
        });
        numbers
    }

    fn check(&self, row: usize, top: &[(u32, f32)]) -> Result<(), GrowError> {
        let (level, want) = (self.grown, self.shape.top_k());
        if top.len() != want {
            return Err(GrowError::Children { level, row, want, given: top.len() });
        }
        for (i, &(token, value)) in top.iter().enumerate() {
            if !(0.0..=1.0).contains(&value) {
                return Err(GrowError::Probability { level, row, token, value });
            }
            if top[..i].iter().any(|&(other, _)| other == token) {
                return Err(GrowError::DuplicateSibling { level, row, token });
            }
        }
        Ok(())
    }
}
