//! Auxiliary rows kept for drafts that lack them, in blocks that cover a KV page each.
//!
//! A sequence refers to the blocks of its rows, or, if it wants no features, to that of the page it is filling. A block
//! that is full is also entered for the KV page that the prefix cache knows, so that sequences that start with that page
//! share it, and it stays for as long as the page is known.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use eyrie_model::{PageAllocator, SeqTable};
use eyrie_region::RegionError;

use super::rows::{RowBlock, RowMemory, RowSlice};
use super::sequence::Key;

/// A sequence's reference to rows of consecutive positions.
#[derive(Debug, Default)]
struct Block {
    rows: Arc<RowBlock>,
    /// The KV page whose rows they were when it became known.
    page: Option<u32>,
}

/// Rows under a byte limit. Over it, first those go that no sequence refers to, unused longest first and of one prefix
/// the end before the beginning, then the oldest rows of the longest sequence that has them alone.
#[derive(Debug)]
pub(super) struct Kept {
    memory: RowMemory,
    page_rows: usize,
    limit: u64,
    sequences: BTreeMap<Key, Rows>,
    pages: BTreeMap<u32, PageRows>,
    /// Pages whose rows no sequence refers to, by when the last one let go.
    unused: BTreeMap<u64, u32>,
    /// Blocks in use, and the memory of those that were.
    blocks: usize,
    spare: Vec<RowBlock>,
    clock: u64,
    /// What [`PageAllocator::given_up`] was when blocks of pages were dropped last.
    swept: u64,
    rows_let_go: u64,
}

/// The rows `first..end` of a sequence. A block ends where the KV page does, and only the first may begin later than it.
#[derive(Debug, Default)]
struct Rows {
    first: u32,
    end: u32,
    blocks: VecDeque<Block>,
}

/// The rows of a known KV page.
#[derive(Debug)]
struct PageRows {
    generation: u64,
    /// Its place in `unused` while no sequence refers to them.
    unused: Option<u64>,
    rows: Arc<RowBlock>,
}

/// Sizes of what is kept.
#[derive(Debug, Clone, Copy)]
pub(crate) struct KeptSizes {
    /// Slots of a KV page.
    pub(crate) page_rows: usize,
    /// KV pages, and sequences that may hold some.
    pub(crate) pages: usize,
    pub(crate) sequences: usize,
    /// Bytes at most.
    pub(crate) limit: u64,
}

impl Kept {
    /// Takes `memory` for the blocks of every KV page, and of the page that each sequence is filling, as far as the limit
    /// goes: a target that has served for long needs no more than one that has just begun to. Only rows of sequences that
    /// gave up their pages may need more, which host memory has and a GPU's has not.
    ///
    /// # Errors
    /// [`RegionError::OutOfMemory`] and its like for more than there is.
    pub(super) fn new(memory: RowMemory, sizes: KeptSizes) -> Result<Self, RegionError> {
        let KeptSizes { page_rows, pages, sequences, limit } = sizes;
        let block_bytes = page_rows as u64 * memory.row_bytes();
        let blocks = (limit / block_bytes.max(1)).min((pages + sequences) as u64);
        let spare = memory.take(blocks, page_rows)?;
        Ok(Self {
            memory,
            page_rows,
            limit,
            sequences: BTreeMap::new(),
            pages: BTreeMap::new(),
            unused: BTreeMap::new(),
            blocks: 0,
            spare,
            clock: 0,
            swept: 0,
            rows_let_go: 0,
        })
    }

    pub(super) fn bytes(&self) -> u64 {
        self.blocks as u64 * self.block_bytes()
    }

    /// Bytes of the rows that no sequence refers to.
    pub(super) fn unused_bytes(&self) -> u64 {
        self.unused.len() as u64 * self.block_bytes()
    }

    /// Rows of sequences that were let go because there was no room for more.
    pub(super) fn rows_let_go(&self) -> u64 {
        self.rows_let_go
    }

    /// Keeps `rows`, the first of which belongs to position `first` of `key`. Where there is no room for them they are let
    /// go: only a draft that lacks them needs them.
    ///
    /// # Errors
    /// Memory that cannot be written.
    pub(super) fn append(&mut self, key: Key, first: u32, rows: RowSlice<'_>) -> Result<(), RegionError> {
        if self.sequences.get(&key).is_none_or(|kept| kept.end != first || kept.blocks.is_empty()) {
            self.forget(key);
            self.sequences.insert(key, Rows { first, end: first, blocks: VecDeque::new() });
        }
        let mut taken = 0;
        while taken < rows.rows() {
            let room = self.room(key);
            let part = rows.slice(taken..rows.rows().min(taken + room));
            taken += part.rows();
            let Some(kept) = self.sequences.get_mut(&key) else { break };
            kept.end += part.rows() as u32;
            // Only full blocks are shared, so one that is being filled is its sequence's own.
            match kept.blocks.back_mut().and_then(|block| Arc::get_mut(&mut block.rows)) {
                Some(filling) => self.memory.extend(filling, part)?,
                None => {
                    kept.first = kept.end;
                    let left = std::mem::take(&mut kept.blocks);
                    left.into_iter().rev().for_each(|block| self.release(block));
                    self.rows_let_go += part.rows() as u64;
                }
            }
        }
        Ok(())
    }

    /// Rows that the last block of `key` has room for, behind a new one where it is full and there is one.
    fn room(&mut self, key: Key) -> usize {
        let Some(kept) = self.sequences.get(&key) else { return self.page_rows };
        let room = self.page_rows - kept.end as usize % self.page_rows;
        if (room == self.page_rows || kept.blocks.is_empty())
            && let Some(block) = self.allocate()
            && let Some(kept) = self.sequences.get_mut(&key)
        {
            kept.blocks.push_back(block);
        }
        room
    }

    /// The first position kept of `key` (`None` without any), where the rows start, and up to `most` rows of `from..to`.
    ///
    /// # Errors
    /// As [`RowMemory::rows`].
    pub(super) fn read(
        &self,
        key: Key,
        from: u32,
        to: u32,
        most: u32,
    ) -> Result<(Option<u32>, u32, Vec<RowSlice<'_>>), RegionError> {
        let Some(rows) = self.sequences.get(&key).filter(|rows| !rows.blocks.is_empty()) else {
            return Ok((None, to, Vec::new()));
        };
        let start = from.max(rows.first);
        let mut wanted = to.saturating_sub(start).min(most) as usize;
        let mut skip = (start - rows.first) as usize;
        let mut parts = Vec::new();
        for block in &rows.blocks {
            let part = self.memory.rows(&block.rows, skip..skip + wanted)?;
            skip = skip.saturating_sub(block.rows.rows());
            wanted -= part.rows();
            if part.rows() > 0 {
                parts.push(part);
            }
        }
        Ok((Some(rows.first), start, parts))
    }

    /// Lets go of all rows of `key`; those of known pages stay.
    pub(super) fn forget(&mut self, key: Key) {
        if let Some(rows) = self.sequences.remove(&key) {
            rows.blocks.into_iter().rev().for_each(|block| self.release(block));
        }
    }

    /// Leading slots of the known pages of `table` whose rows are kept. All of its slots if the rows of the sequence, which
    /// is to fill `slots`, are more than could be kept: to compute them again would not help.
    pub(super) fn reach(&mut self, table: &SeqTable, slots: usize, pages: &PageAllocator) -> u32 {
        self.sweep(pages);
        if slots.div_ceil(self.page_rows) as u64 * self.block_bytes() > self.limit {
            return table.len();
        }
        let run = table.pages().iter().take_while(|page| self.pages.contains_key(page)).count();
        table.len().min((run * self.page_rows) as u32)
    }

    /// Gives `key`, which begins with the known pages of `table`, the rows that are kept of them: as many as reach up to
    /// the table's end without a gap, or without `all` those of the page that it goes on to fill.
    pub(super) fn adopt(&mut self, key: Key, table: &SeqTable, all: bool, pages: &PageAllocator) {
        self.sweep(pages);
        self.forget(key);
        let end = table.len();
        let reaches = |page: &&u32| self.pages.contains_key(page);
        let run = table.pages().iter().rev().take_while(reaches).count();
        let from = if all { 0 } else { end as usize / self.page_rows };
        let first_page = from.max(table.pages().len() - run);
        let first = end.min((first_page * self.page_rows) as u32);
        let mut rows = Rows { first, end, blocks: VecDeque::with_capacity(run) };
        for (index, &page) in table.pages().iter().enumerate().skip(first_page) {
            let inside = (end as usize - index * self.page_rows).min(self.page_rows);
            let Some(whole) = self.hold(page) else { continue };
            if inside == self.page_rows {
                rows.blocks.push_back(whole);
                continue;
            }
            match self.part(whole, inside) {
                Ok(Some(part)) => rows.blocks.push_back(part),
                without => {
                    if let Err(error) = without {
                        tracing::warn!(%error, "feature rows of a known prefix could not be copied");
                    }
                    rows.blocks.drain(..).rev().for_each(|block| self.release(block));
                    rows.first = end;
                }
            }
        }
        self.sequences.insert(key, rows);
        self.touch(table);
    }

    /// Enters the rows of `key` for those of its whole pages, from page number `from` on, that are known by now. Without
    /// `all` the sequence then has only those of the page that it is filling.
    pub(super) fn share(
        &mut self,
        key: Key,
        table: &SeqTable,
        from: usize,
        all: bool,
        pages: &PageAllocator,
    ) {
        self.sweep(pages);
        let Some(mut rows) = self.sequences.remove(&key) else { return };
        let first_page = rows.first as usize / self.page_rows;
        let whole = table.len() as usize / self.page_rows;
        for (index, &page) in table.pages().iter().enumerate().take(whole).skip(from.max(first_page)) {
            let Some(block) = rows.blocks.get_mut(index - first_page) else { break };
            if block.rows.rows() < self.page_rows || !pages.is_known(page) {
                continue;
            }
            let own = std::mem::take(block);
            *block = self.enter(page, pages.generation(page), own);
        }
        if !all && whole > first_page {
            let done = rows.blocks.len().min(whole - first_page);
            rows.blocks.drain(..done).for_each(|block| self.release(block));
            rows.first = rows.end.min((whole * self.page_rows) as u32);
            self.touch(table);
        }
        self.sequences.insert(key, rows);
    }

    /// Drops the rows of pages that are not what they were.
    pub(super) fn sweep(&mut self, pages: &PageAllocator) {
        if self.swept == pages.given_up() {
            return;
        }
        self.swept = pages.given_up();
        let stale = |page: &u32, rows: &mut PageRows| pages.generation(*page) != rows.generation;
        let gone: Vec<_> = self.pages.extract_if(.., |page, rows| stale(page, rows)).collect();
        gone.into_iter().for_each(|(_, rows)| self.drop_rows(rows));
    }

    fn block_bytes(&self) -> u64 {
        self.page_rows as u64 * self.memory.row_bytes()
    }

    /// An empty block, if need be that of rows that are let go; `None` where the limit is below one.
    fn allocate(&mut self) -> Option<Block> {
        let rows = loop {
            if let Some(rows) = self.spare.pop() {
                break rows;
            }
            let within = (self.blocks as u64 + 1).saturating_mul(self.block_bytes()) <= self.limit;
            if within
                && self.memory.grows()
                && let Ok(blocks) = self.memory.take(1, self.page_rows)
            {
                self.spare = blocks;
            } else if !(self.drop_unused() || self.drop_oldest()) {
                return None;
            }
        };
        self.blocks += 1;
        Some(Block { rows: Arc::new(rows), page: None })
    }

    /// A copy of the first `rows` rows of `whole`, which is released; `None` where there is no room for it.
    fn part(&mut self, whole: Block, rows: usize) -> Result<Option<Block>, RegionError> {
        let mut part = self.allocate();
        let copied = match part.as_mut().and_then(|part| Arc::get_mut(&mut part.rows)) {
            Some(filling) => {
                self.memory.rows(&whole.rows, 0..rows).and_then(|rows| self.memory.extend(filling, rows))
            }
            None => Ok(()),
        };
        self.release(whole);
        match (copied, part) {
            (Err(error), part) => {
                part.into_iter().for_each(|part| self.release(part));
                Err(error)
            }
            (Ok(()), part) => Ok(part),
        }
    }

    /// Has `page` keep the rows of `own`, unless it keeps equal ones; returns a reference to those that it keeps.
    fn enter(&mut self, page: u32, generation: u64, mut own: Block) -> Block {
        // A page that is found no more may be known for a while beside the one that took its place.
        if let Some(former) = self.page_of(&own).filter(|&former| former != page) {
            self.drop_page(former);
        }
        match self.hold(page) {
            Some(kept) => {
                self.release(own);
                kept
            }
            None => {
                self.pages.insert(page, PageRows { generation, unused: None, rows: Arc::clone(&own.rows) });
                own.page = Some(page);
                own
            }
        }
    }

    /// The page that keeps the rows of `block`.
    fn page_of(&self, block: &Block) -> Option<u32> {
        block
            .page
            .filter(|page| self.pages.get(page).is_some_and(|kept| Arc::ptr_eq(&kept.rows, &block.rows)))
    }

    /// A reference to the rows that are kept of `page`.
    fn hold(&mut self, page: u32) -> Option<Block> {
        let kept = self.pages.get_mut(&page)?;
        if let Some(since) = kept.unused.take() {
            self.unused.remove(&since);
        }
        Some(Block { rows: Arc::clone(&kept.rows), page: Some(page) })
    }

    /// Takes back a reference to a block, and its memory with the last one.
    fn release(&mut self, block: Block) {
        let page = self.page_of(&block);
        self.drop_reference(block.rows);
        page.into_iter().for_each(|page| self.note_unused(page));
    }

    /// Notes that the rows of `page` were of use until now, if they are kept and no sequence refers to them.
    fn note_unused(&mut self, page: u32) {
        let Some(kept) = self.pages.get_mut(&page).filter(|kept| Arc::strong_count(&kept.rows) == 1) else {
            return;
        };
        self.clock += 1;
        if let Some(before) = kept.unused.replace(self.clock) {
            self.unused.remove(&before);
        }
        self.unused.insert(self.clock, page);
    }

    /// Notes the use of the pages of `table` by a sequence that does not refer to their rows.
    fn touch(&mut self, table: &SeqTable) {
        table.pages().iter().rev().for_each(|&page| self.note_unused(page));
    }

    fn drop_page(&mut self, page: u32) {
        if let Some(rows) = self.pages.remove(&page) {
            self.drop_rows(rows);
        }
    }

    fn drop_rows(&mut self, rows: PageRows) {
        if let Some(since) = rows.unused {
            self.unused.remove(&since);
        }
        self.drop_reference(rows.rows);
    }

    fn drop_reference(&mut self, rows: Arc<RowBlock>) {
        let Some(mut rows) = Arc::into_inner(rows) else { return };
        self.blocks -= 1;
        rows.clear();
        self.spare.push(rows);
    }

    /// Drops the block that no sequence has referred to for longest.
    fn drop_unused(&mut self) -> bool {
        let Some((_, &page)) = self.unused.first_key_value() else { return false };
        tracing::debug!(page, "feature rows that no sequence has are let go: the feature cache is full");
        self.drop_page(page);
        true
    }

    /// Drops the oldest rows of the longest sequence, of those that share them with no other if there are any.
    fn drop_oldest(&mut self) -> bool {
        // A block that other sequences have too stays where it is.
        let is_alone =
            |block: &Block| Arc::strong_count(&block.rows) == 1 + usize::from(self.page_of(block).is_some());
        let frees = |rows: &Rows| rows.blocks.front().is_some_and(is_alone);
        let longest = self.sequences.iter().max_by_key(|(_, rows)| (frees(rows), rows.blocks.len()));
        let longest = longest.map(|(&key, _)| key).and_then(|key| self.sequences.get_mut(&key));
        let Some((rows, block)) = longest.and_then(|rows| rows.blocks.pop_front().map(|block| (rows, block)))
        else {
            return false;
        };
        let gone = block.rows.rows() as u32;
        rows.first += gone;
        self.release(block);
        if self.rows_let_go == 0 {
            tracing::warn!(
                limit_bytes = self.limit,
                "feature cache is full: oldest rows are let go, a restarted draft will start later in long sequences"
            );
        }
        self.rows_let_go += u64::from(gone);
        true
    }
}

#[cfg(test)]
#[path = "kept_tests.rs"]
mod tests;
