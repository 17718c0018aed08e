//! What absorbed MLA and grouped-query attention share: rows times heads over paged keys.

use std::ops::Range;

use super::attend::{HEADS, Keys, attend};
use super::paged::PagedRows;
use super::tiles::even_chunks;
use super::{Cpu, Shared};
use crate::error::Result;
use crate::rows::Ragged;

/// Where the heads find their keys and values inside a cached row.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Heads {
    pub(crate) heads: usize,
    /// Neighbouring heads that read the same key and value.
    pub(crate) sharing: usize,
    pub(crate) key_width: usize,
    pub(crate) value_width: usize,
    /// First column of the values.
    pub(crate) values: usize,
    pub(crate) scale: f32,
}

/// `queries` `[rows, heads, key_width]` to `[rows, heads, value_width]`; `rows` has been checked.
pub(crate) fn attention(
    cpu: &Cpu,
    spec: Heads,
    queries: &[f32],
    cache: &PagedRows,
    rows: &Ragged,
) -> Result<Vec<f32>> {
    let blocks = spec.blocks();
    let mut out = vec![0.0; rows.rows.len() * spec.heads * spec.value_width];
    let shared = Shared::new(&mut out);
    let mut work = 0;
    let mut ends = Vec::with_capacity(rows.rows.len() * blocks.len());
    for row in 0..rows.rows.len() {
        for block in &blocks {
            work += rows.keys(row) * block.len() * (spec.key_width + spec.value_width);
            ends.push(work);
        }
    }
    cpu.split_by(&ends, |range| {
        let (mut slots, mut scores) = (Vec::new(), Vec::new());
        let mut current = usize::MAX;
        for item in range {
            let (row, heads) = (item / blocks.len(), &blocks[item % blocks.len()]);
            if row != current {
                rows.slots(row, &mut slots);
                current = row;
            }
            scores.resize(heads.len() * slots.len(), 0.0);
            let first = row * spec.heads;
            let at = |width: usize| (first + heads.start) * width..(first + heads.end) * width;
            let keys = spec.keys(heads, cache, &slots);
            // SAFETY: an item's row and heads belong to one thread.
            let out = unsafe { shared.slice(at(spec.value_width)) };
            attend(cpu.isa(), heads.len(), keys, &queries[at(spec.key_width)], spec.scale, &mut scores, out);
        }
    })?;
    Ok(out)
}

impl Heads {
    /// Heads in pieces that share keys and fit the kernel.
    fn blocks(&self) -> Vec<Range<usize>> {
        let within = |first: usize| {
            even_chunks(self.sharing, HEADS).map(move |heads| first + heads.start..first + heads.end)
        };
        (0..self.heads).step_by(self.sharing).flat_map(within).collect()
    }

    fn keys<'a>(&self, heads: &Range<usize>, cache: &'a PagedRows, slots: &'a [u32]) -> Keys<'a> {
        let group = heads.start / self.sharing;
        Keys {
            base: cache.values(),
            stride: cache.width(),
            slots,
            key: group * self.key_width,
            key_width: self.key_width,
            value: self.values + group * self.value_width,
            value_width: self.value_width,
        }
    }
}
