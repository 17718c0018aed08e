//! How a proposal grows from the last committed slot: a chain, or an EAGLE-2 tree.

use eyrie_kernels::{argmax, top_k_softmax};
use eyrie_model::{DraftState, Eagle3Head};
use eyrie_speculation::{Proposal, TreeGrower, TreeShape};

use super::EngineError;

/// What a round asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// Take in tokens and features only.
    Nothing,
    /// A chain of this many tokens, at least 1.
    Chain(usize),
    /// A dynamic tree.
    Tree(TreeShape),
}

impl Wanted {
    /// Slots that drafting writes behind the committed ones.
    pub(crate) fn scratch_slots(self) -> usize {
        match self {
            Self::Nothing => 0,
            Self::Chain(tokens) => tokens - 1,
            Self::Tree(shape) => (shape.levels() - 1) * shape.top_k(),
        }
    }

    /// Positions that the longest path proposes.
    pub(crate) fn depth(self) -> usize {
        match self {
            Self::Nothing => 0,
            Self::Chain(tokens) => tokens,
            Self::Tree(shape) => shape.levels(),
        }
    }
}

/// The rows of one draft step, owned.
#[derive(Debug)]
pub(crate) struct StepRows {
    /// Scratch slots used before these rows.
    pub(crate) offset: usize,
    pub(crate) tokens: Vec<u32>,
    pub(crate) states: DraftState,
    /// As `DraftRows::parents`.
    pub(crate) parents: Option<Vec<u16>>,
}

/// A proposal that is being grown.
#[derive(Debug)]
pub(crate) enum Growth {
    Chain(Chain),
    Tree(Tree),
}

#[derive(Debug)]
pub(crate) struct Chain {
    wanted: usize,
    tokens: Vec<u32>,
    state: DraftState,
}

#[derive(Debug)]
pub(crate) struct Tree {
    grower: TreeGrower,
    top_k: usize,
    /// Output of the rows stepped last; of the last committed slot at first.
    states: DraftState,
    /// Parent node of every node stepped so far; node 0 is the last committed slot.
    parents: Vec<u16>,
    /// Node of row 0 of `states`.
    first_node: usize,
}

impl Growth {
    /// Starts from the last committed slot: its `logits` over draft ids and its output `state`, one row.
    pub(crate) fn start(
        wanted: Wanted,
        logits: &[f32],
        state: DraftState,
        head: &Eagle3Head,
    ) -> Result<Option<Self>, EngineError> {
        Ok(match wanted {
            Wanted::Nothing => None,
            Wanted::Chain(wanted) => {
                Some(Self::Chain(Chain { wanted, tokens: vec![best(logits, head)?], state }))
            }
            Wanted::Tree(shape) => {
                let top_k = shape.top_k();
                let mut grower = TreeGrower::new(shape);
                grower.level0(&children(logits, top_k, head)?)?;
                Some(Self::Tree(Tree { grower, top_k, states: state, parents: Vec::new(), first_node: 0 }))
            }
        })
    }

    /// The rows to run next; `None` when the proposal is complete.
    pub(crate) fn next(&mut self, head: &Eagle3Head) -> Result<Option<StepRows>, EngineError> {
        match self {
            Self::Chain(chain) => Ok(chain.next()),
            Self::Tree(tree) => tree.next(head),
        }
    }

    /// Takes the output of the rows that [`Growth::next`] gave: a row of `logits` for each.
    pub(crate) fn take(
        &mut self,
        states: DraftState,
        logits: &[&[f32]],
        head: &Eagle3Head,
    ) -> Result<(), EngineError> {
        match self {
            Self::Chain(chain) => {
                for row in logits {
                    chain.tokens.push(best(row, head)?);
                }
                chain.state = states;
            }
            Self::Tree(tree) => {
                let rows: Result<Vec<_>, _> =
                    logits.iter().map(|row| children(row, tree.top_k, head)).collect();
                tree.grower.expand(&rows?)?;
                tree.states = states;
            }
        }
        Ok(())
    }

    /// The proposal, with target token ids.
    pub(crate) fn finish(self) -> Result<Proposal, EngineError> {
        match self {
            Self::Chain(chain) => Ok(Proposal::chain(chain.tokens)?),
            Self::Tree(tree) => Ok(tree.grower.finish()),
        }
    }
}

impl Chain {
    fn next(&self) -> Option<StepRows> {
        let last = *self.tokens.last().filter(|_| self.tokens.len() < self.wanted)?;
        let offset = self.tokens.len() - 1;
        Some(StepRows { offset, tokens: vec![last], states: self.state.clone(), parents: None })
    }
}

impl Tree {
    fn next(&mut self, head: &Eagle3Head) -> Result<Option<StepRows>, EngineError> {
        let beam = self.grower.beam();
        if beam.is_empty() {
            return Ok(None);
        }
        let rows: Vec<usize> = beam.iter().map(|node| node.parent_row).collect();
        let tokens = beam.iter().map(|node| node.token).collect();
        let states = self.states.select(head.backend(), &rows)?;
        let offset = self.parents.len();
        // `TreeShape` bounds levels and beam, so every node number fits.
        self.parents.extend(rows.iter().map(|row| (self.first_node + row) as u16));
        self.first_node = offset + 1;
        Ok(Some(StepRows { offset, tokens, states, parents: Some(self.parents.clone()) }))
    }
}

fn best(logits: &[f32], head: &Eagle3Head) -> Result<u32, EngineError> {
    Ok(head.to_target_id(argmax(logits)?)?)
}

/// The `top_k` most probable target ids. Target ids rise with draft ids, so ties stay with the lower draft id.
fn children(logits: &[f32], top_k: usize, head: &Eagle3Head) -> Result<Vec<(u32, f32)>, EngineError> {
    let top = top_k_softmax(logits, top_k)?;
    top.into_iter().map(|(id, prob)| Ok((head.to_target_id(id)?, prob))).collect()
}
