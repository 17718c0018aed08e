//! Which cached pages hold which tokens: a radix tree whose nodes are pages.
//!
//! A child is found by the tokens of its page themselves, not by a hash of them, so no collision can give rows of
//! other tokens; and since children are ordered by their tokens, the longest common prefix with any of them is that
//! with a neighbour of the place where the tokens would stand.

use std::collections::{BTreeMap, HashMap};
use std::ops::Bound;
use std::sync::Arc;

type Children = BTreeMap<Arc<[u32]>, u32>;

#[derive(Debug)]
struct Node {
    parent: Option<u32>,
    key: Arc<[u32]>,
    children: Children,
    /// Its place in `idle` while no table holds the page.
    idle: Option<u64>,
}

/// Pages by the tokens that their rows were computed from.
///
/// Invariant: a page that a table holds has only such ancestors as the table holds too, so an idle page has only idle
/// descendants; and a page becomes idle after its descendants, so the one that has been idle longest is a leaf.
#[derive(Debug)]
pub(crate) struct PrefixTree {
    page_rows: usize,
    /// Tokens beyond its own that a row depends on.
    lookahead: usize,
    roots: Children,
    nodes: HashMap<u32, Node>,
    /// Pages that no table holds, by when the last table let go.
    idle: BTreeMap<u64, u32>,
    clock: u64,
}

impl PrefixTree {
    pub(crate) fn new(page_rows: usize, lookahead: usize) -> Self {
        Self {
            page_rows,
            lookahead,
            roots: Children::new(),
            nodes: HashMap::new(),
            idle: BTreeMap::new(),
            clock: 0,
        }
    }

    /// Rows that are determined by `tokens` tokens.
    pub(crate) fn rows(&self, tokens: usize) -> usize {
        tokens.saturating_sub(self.lookahead)
    }

    pub(crate) fn contains(&self, page: u32) -> bool {
        self.nodes.contains_key(&page)
    }

    pub(crate) fn idle_pages(&self) -> usize {
        self.idle.len()
    }

    /// The pages of the longest known prefix of `tokens`, and how many rows of them belong to it.
    pub(crate) fn longest(&self, tokens: &[u32]) -> (Vec<u32>, usize) {
        let (mut pages, mut rows) = (Vec::new(), 0);
        let mut children = &self.roots;
        while let Some((page, common)) = nearest(children, self.key(tokens, pages.len())) {
            let found = if pages.is_empty() { self.rows(common) } else { common };
            if found == 0 {
                break;
            }
            pages.push(page);
            rows += found;
            match self.nodes.get(&page) {
                Some(node) if found == self.page_rows => children = &node.children,
                _ => break,
            }
        }
        (pages, rows)
    }

    /// Enters `page` as page number `index` of `tokens`, below `parent`; the page that stands there already, if any,
    /// holds equal rows and is returned instead.
    pub(crate) fn insert(
        &mut self,
        parent: Option<u32>,
        tokens: &[u32],
        index: usize,
        page: u32,
    ) -> Option<u32> {
        let key = self.key(tokens, index);
        if let Some(&twin) = self.children(parent)?.get(key) {
            return Some(twin);
        }
        let key: Arc<[u32]> = key.into();
        self.children(parent)?.insert(Arc::clone(&key), page);
        self.nodes.insert(page, Node { parent, key, children: Children::new(), idle: None });
        None
    }

    /// Notes that a table holds `page`.
    pub(crate) fn hold(&mut self, page: u32) {
        if let Some(since) = self.nodes.get_mut(&page).and_then(|node| node.idle.take()) {
            self.idle.remove(&since);
        }
    }

    /// Notes that no table holds `page` any more; whether it stays, since it is known.
    pub(crate) fn let_go(&mut self, page: u32) -> bool {
        let Some(node) = self.nodes.get_mut(&page) else { return false };
        self.clock += 1;
        node.idle = Some(self.clock);
        self.idle.insert(self.clock, page);
        true
    }

    /// Forgets the page that has been idle longest.
    pub(crate) fn evict(&mut self) -> Option<u32> {
        let (_, page) = self.idle.pop_first()?;
        self.forget(page);
        Some(page)
    }

    /// Forgets `page`; what follows it is not found any more.
    pub(crate) fn forget(&mut self, page: u32) {
        if let Some(node) = self.nodes.remove(&page)
            && let Some(siblings) = self.children(node.parent)
            // The parent may have been forgotten first, and its page stand elsewhere by now.
            && siblings.get(&node.key) == Some(&page)
        {
            siblings.remove(&node.key);
        }
    }

    fn children(&mut self, parent: Option<u32>) -> Option<&mut Children> {
        match parent {
            None => Some(&mut self.roots),
            Some(page) => self.nodes.get_mut(&page).map(|node| &mut node.children),
        }
    }

    /// The tokens that page number `index` adds: the first page carries the lookahead of all.
    fn key<'a>(&self, tokens: &'a [u32], index: usize) -> &'a [u32] {
        let end = (index + 1) * self.page_rows + self.lookahead;
        let start = if index == 0 { 0 } else { end - self.page_rows };
        &tokens[start.min(tokens.len())..end.min(tokens.len())]
    }
}

/// The child that shares the most leading tokens with `want`, and how many.
fn nearest(children: &Children, want: &[u32]) -> Option<(u32, usize)> {
    let from = children.range::<[u32], _>((Bound::Included(want), Bound::Unbounded)).next();
    let below = children.range::<[u32], _>((Bound::Unbounded, Bound::Excluded(want))).next_back();
    let common = |key: &[u32]| key.iter().zip(want).take_while(|(a, b)| a == b).count();
    [below, from].into_iter().flatten().map(|(key, &page)| (page, common(key))).max_by_key(|found| found.1)
}
