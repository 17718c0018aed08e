//! Rows of prompts and trees over sequences whose pages lie scrambled.

use std::ops::Range;

use eyrie_kernels::{Ragged, RowRef};

use crate::common::Rng;

pub(crate) const PAGE: usize = 16;

/// One sequence: its pages, and which key rows (of one flat numbering) each of its rows sees.
#[derive(Debug)]
pub(crate) struct Sequence {
    pages: Vec<u32>,
}

impl Sequence {
    pub(crate) fn slot(&self, index: usize) -> u32 {
        self.pages[index / PAGE] * PAGE as u32 + (index % PAGE) as u32
    }
}

/// Distinct pages in a scrambled order for several sequences.
pub(crate) fn sequences(rng: &mut Rng, lengths: &[usize]) -> (Vec<Sequence>, usize) {
    let counts: Vec<usize> = lengths.iter().map(|len| len.div_ceil(PAGE) + 1).collect();
    let total = counts.iter().sum::<usize>() + 2;
    let mut free: Vec<u32> = (0..total as u32).collect();
    let take = |count: &usize| Sequence {
        pages: (0..*count).map(|_| free.swap_remove(rng.below(free.len()))).collect(),
    };
    (counts.iter().map(take).collect(), total)
}

/// Rows `range` of one sequence as a prompt; the last `tail` keys of each row spelled as tail slots.
pub(crate) fn prompt(out: &mut Ragged, sequence: &Sequence, range: Range<usize>, tail: usize) {
    let table = out.tables.len() as u32..(out.tables.len() + sequence.pages.len()) as u32;
    out.tables.extend(&sequence.pages);
    out.page_rows = PAGE;
    for position in range {
        let tail = tail.min(position + 1);
        let start = out.tails.len() as u32;
        out.tails.extend((position + 1 - tail..=position).map(|p| sequence.slot(p)));
        out.rows.push(RowRef {
            position: position as u32,
            slot: sequence.slot(position),
            table: table.clone(),
            prefix: (position + 1 - tail) as u32,
            tail: start..out.tails.len() as u32,
        });
    }
}

/// Tree nodes after `base` committed keys: node i lies at key index base + i, sees its ancestors only.
pub(crate) fn tree(
    out: &mut Ragged,
    sequence: &Sequence,
    base: usize,
    parents: &[Option<usize>],
) -> Vec<Vec<usize>> {
    let table = out.tables.len() as u32..(out.tables.len() + sequence.pages.len()) as u32;
    out.tables.extend(&sequence.pages);
    out.page_rows = PAGE;
    let mut seen = Vec::new();
    for node in 0..parents.len() {
        let mut path = vec![node];
        while let Some(parent) = parents[path[0]] {
            path.insert(0, parent);
        }
        let start = out.tails.len() as u32;
        out.tails.extend(path.iter().map(|&n| sequence.slot(base + n)));
        out.rows.push(RowRef {
            position: (base + path.len() - 1) as u32,
            slot: sequence.slot(base + node),
            table: table.clone(),
            prefix: base as u32,
            tail: start..out.tails.len() as u32,
        });
        seen.push((0..base).chain(path.iter().map(|&n| base + n)).collect());
    }
    seen
}
