//! The pages of a cache, handed to sequences, shared by those with the same beginning, and kept for later ones.

use std::collections::HashMap;

use crate::error::{ModelError, Result};
use crate::prefix::PrefixTree;

/// The pages of one sequence in one cache, and how many of its slots are committed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SeqTable {
    pages: Vec<u32>,
    len: u32,
}

impl SeqTable {
    /// Page ids in slot order.
    pub fn pages(&self) -> &[u32] {
        &self.pages
    }

    /// Committed slots; rows beyond it are scratch until committed.
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Whether no slot is committed.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Slots its pages hold when a page has `page_rows`.
    pub fn capacity(&self, page_rows: usize) -> usize {
        self.pages.len() * page_rows
    }

    /// Pool slot of logical slot `slot`, if a page is reserved for it.
    pub fn pool_slot(&self, slot: u32, page_rows: usize) -> Option<u32> {
        let page = *self.pages.get(slot as usize / page_rows)?;
        Some(page * page_rows as u32 + slot % page_rows as u32)
    }

    /// Declares slots `0..len` committed; errors when they are not all reserved.
    pub fn commit(&mut self, len: u32, page_rows: usize) -> Result<()> {
        let capacity = self.capacity(page_rows);
        if len as usize > capacity {
            return Err(ModelError::Rollback(format!("length {len} is over the {capacity} reserved slots")));
        }
        self.len = len;
        Ok(())
    }
}

/// The pool has fewer free pages than a reservation needs; nothing was reserved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("out of cache pages: {needed} needed, {free} free")]
pub struct OutOfPages {
    /// Pages the reservation lacks.
    pub needed: usize,
    /// Pages free now.
    pub free: usize,
}

/// The leading rows of a page that others read, to be copied into the page that a table now has in its place. Copies are
/// made in the order in which they were asked for, and before any row is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageCopy {
    /// The shared page.
    pub from: u32,
    /// The table's own page.
    pub to: u32,
    /// Rows, from the first on.
    pub rows: u32,
}

/// Hands the pages of one cache to sequences.
///
/// With a prefix cache a whole page of committed rows can be *known* by its tokens ([`PageAllocator::publish`]). Tables
/// whose tokens begin alike share known pages ([`PageAllocator::lookup`]), and one that no table holds is *idle*: it
/// stays known until its room is needed, the one idle longest first.
///
/// Invariants: every page is free, or known, or in exactly one table. No table writes a known page: rows are only
/// written behind a table's length, and [`PageAllocator::reserve`] puts a copy where that lies inside a known page.
#[derive(Debug)]
pub struct PageAllocator {
    free: Vec<u32>,
    /// Tables that hold each page.
    holders: Vec<u32>,
    /// How often the rows of a page were given up, and for each page what that was at its last time.
    given_up: u64,
    generations: Vec<u64>,
    page_rows: usize,
    prefixes: Option<Prefixes>,
}

#[derive(Debug)]
struct Prefixes {
    tree: PrefixTree,
    most_idle: usize,
}

impl PageAllocator {
    /// An allocator over pages `0..pages` of `page_rows` slots that knows no prefixes.
    pub fn new(pages: usize, page_rows: usize) -> Self {
        Self {
            free: (0..pages as u32).rev().collect(),
            holders: vec![0; pages],
            given_up: 0,
            generations: vec![0; pages],
            page_rows: page_rows.max(1),
            prefixes: None,
        }
    }

    /// Adds a prefix cache of at most `most_idle` idle pages, for rows that depend on the tokens up to their own and
    /// `lookahead` more: none in a target, one in an EAGLE-3 draft.
    pub fn with_prefixes(self, lookahead: usize, most_idle: usize) -> Self {
        let tree = PrefixTree::new(self.page_rows, lookahead);
        Self { prefixes: Some(Prefixes { tree, most_idle }), ..self }
    }

    /// A table that shares the known pages of the longest known prefix of `tokens`, committed up to where that ends,
    /// which may be inside a page. O(pages).
    pub fn lookup(&mut self, tokens: &[u32]) -> SeqTable {
        let Some(Prefixes { tree, .. }) = &mut self.prefixes else { return SeqTable::default() };
        let (pages, rows) = tree.longest(tokens);
        for &page in &pages {
            tree.hold(page);
            self.holders[page as usize] += 1;
        }
        SeqTable { pages, len: rows as u32 }
    }

    /// Makes the whole pages among the committed slots of `table` known as those of `tokens`, the table's own from its
    /// first on. A page whose rows are known already is given back for the known one. O(pages not known yet).
    pub fn publish(&mut self, table: &mut SeqTable, tokens: &[u32]) {
        let Some(Prefixes { tree, .. }) = &mut self.prefixes else { return };
        let whole = (table.len as usize).min(tree.rows(tokens.len())) / self.page_rows;
        let known =
            (0..whole).rev().find(|&index| tree.contains(table.pages[index])).map_or(0, |last| last + 1);
        let mut parent = known.checked_sub(1).map(|last| table.pages[last]);
        let mut twins = Vec::new();
        for index in known..whole {
            let own = table.pages[index];
            if let Some(twin) = tree.insert(parent, tokens, index, own) {
                tree.hold(twin);
                self.holders[twin as usize] += 1;
                table.pages[index] = twin;
                twins.push(own);
            }
            parent = Some(table.pages[index]);
        }
        for own in twins {
            self.let_go(own);
        }
    }

    /// Makes room for slots `0..tokens` of `table` in all, none of those behind its length in a known page; all or
    /// nothing. Idle pages make room where no page is free.
    pub fn reserve(&mut self, table: &mut SeqTable, tokens: usize) -> Result<Option<PageCopy>, OutOfPages> {
        let grow = tokens.div_ceil(self.page_rows).saturating_sub(table.pages.len());
        let tail = self.known_tail(table).filter(|_| tokens > table.len as usize);
        let mut needed = grow + usize::from(tail.is_some());
        let free = self.free_pages();
        let is_only_holder = |index: &usize| self.holders[table.pages[*index] as usize] == 1;
        let taken = tail.filter(|_| needed > free).filter(is_only_holder);
        needed -= usize::from(taken.is_some());
        if needed > free {
            return Err(OutOfPages { needed, free });
        }
        while self.free.len() < needed && self.evict() {}
        // The page that a copy is made of is let go last, so that it is not handed out here.
        let new_tail = tail.filter(|_| taken.is_none()).and_then(|index| Some((index, self.take()?)));
        for _ in 0..grow {
            table.pages.extend(self.take());
        }
        if let Some(index) = taken {
            self.forget(table.pages[index]);
        }
        Ok(new_tail.map(|(index, to)| {
            let from = std::mem::replace(&mut table.pages[index], to);
            self.let_go(from);
            self.trim();
            PageCopy { from, to, rows: table.len % self.page_rows as u32 }
        }))
    }

    /// Cuts `table` to at most `len` committed slots and takes back the pages beyond them.
    pub fn cut(&mut self, table: &mut SeqTable, len: u32) {
        table.len = table.len.min(len);
        let keep = (table.len as usize).div_ceil(self.page_rows).min(table.pages.len());
        for page in table.pages.drain(keep..).rev() {
            self.let_go(page);
        }
        self.trim();
    }

    /// Takes back every page of `table`.
    pub fn free(&mut self, mut table: SeqTable) {
        self.cut(&mut table, 0);
    }

    /// Takes back every page of `table`, and forgets those that it alone holds: its rows are not to be trusted.
    pub fn discard(&mut self, table: SeqTable) {
        for &page in table.pages.iter().rev() {
            if self.holders[page as usize] == 1 && self.is_known(page) {
                self.forget(page);
            }
        }
        self.free(table);
    }

    /// Pages that no table holds: free ones, and idle ones that make room.
    pub fn free_pages(&self) -> usize {
        self.free.len() + self.idle_pages()
    }

    /// Known pages that no table holds.
    pub fn idle_pages(&self) -> usize {
        self.prefixes.as_ref().map_or(0, |prefixes| prefixes.tree.idle_pages())
    }

    /// Pages that no table would hold if `tables` did not.
    pub fn held_only_by<'a>(&self, tables: impl IntoIterator<Item = &'a SeqTable>) -> usize {
        let mut holders: HashMap<u32, u32> = HashMap::new();
        for &page in tables.into_iter().flat_map(SeqTable::pages) {
            *holders.entry(page).or_default() += 1;
        }
        holders.iter().filter(|&(&page, &holders)| self.holders[page as usize] == holders).count()
    }

    /// Whether it has a prefix cache.
    pub fn knows_prefixes(&self) -> bool {
        self.prefixes.is_some()
    }

    /// Whether the rows of `page` are known by their tokens.
    pub fn is_known(&self, page: u32) -> bool {
        self.prefixes.as_ref().is_some_and(|prefixes| prefixes.tree.contains(page))
    }

    /// How often the rows of a page were given up so far.
    pub fn given_up(&self) -> u64 {
        self.given_up
    }

    /// Changes whenever the rows of `page` are given up.
    pub fn generation(&self, page: u32) -> u64 {
        self.generations[page as usize]
    }

    /// Pages in all.
    pub fn pages(&self) -> usize {
        self.holders.len()
    }

    /// Slots a page.
    pub fn page_rows(&self) -> usize {
        self.page_rows
    }

    /// Index of the page that the slot behind the last committed one lies in, if that page is known.
    fn known_tail(&self, table: &SeqTable) -> Option<usize> {
        let index = table.len as usize / self.page_rows;
        let page = *table.pages.get(index)?;
        let inside = !(table.len as usize).is_multiple_of(self.page_rows);
        (inside && self.is_known(page)).then_some(index)
    }

    fn take(&mut self) -> Option<u32> {
        let page = self.free.pop()?;
        self.holders[page as usize] = 1;
        Some(page)
    }

    /// Notes that one table less holds `page`.
    fn let_go(&mut self, page: u32) {
        let holders = &mut self.holders[page as usize];
        *holders -= 1;
        if *holders > 0 {
            return;
        }
        let stays = self.prefixes.as_mut().is_some_and(|prefixes| prefixes.tree.let_go(page));
        if !stays {
            self.give_back(page);
        }
    }

    fn give_back(&mut self, page: u32) {
        self.give_up(page);
        self.free.push(page);
    }

    fn give_up(&mut self, page: u32) {
        self.given_up += 1;
        self.generations[page as usize] = self.given_up;
    }

    /// Leaves a known page to the table that holds it.
    fn forget(&mut self, page: u32) {
        if let Some(prefixes) = &mut self.prefixes {
            prefixes.tree.forget(page);
        }
        self.give_up(page);
    }

    /// Frees the page that has been idle longest.
    fn evict(&mut self) -> bool {
        let page = self.prefixes.as_mut().and_then(|prefixes| prefixes.tree.evict());
        page.inspect(|&page| self.give_back(page)).is_some()
    }

    /// Keeps the idle pages within their limit.
    fn trim(&mut self) {
        while self.prefixes.as_ref().is_some_and(|p| p.tree.idle_pages() > p.most_idle) && self.evict() {}
    }
}

#[cfg(test)]
#[path = "pages_tests.rs"]
mod tests;
