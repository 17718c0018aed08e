use std::collections::HashSet;
use std::ops::Range;

use proptest::prelude::*;

use super::*;

const TABLES: usize = 3;
/// What stands in a slot that was written as scratch.
const SCRATCH: &[u32] = &[u32::MAX];

#[derive(Debug, Clone)]
enum Op {
    /// Starts a table over with the pages known for these tokens.
    Open(usize, Vec<u32>),
    /// Computes rows for more tokens, and some scratch rows behind them.
    Grow(usize, Vec<u32>, usize),
    Cut(usize, u32),
    Publish(usize),
    Close(usize),
    Discard(usize),
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let table = 0..TABLES;
    let tokens = |len: Range<usize>| proptest::collection::vec(0..2_u32, len);
    let op = prop_oneof![
        (table.clone(), tokens(0..16)).prop_map(|(t, tokens)| Op::Open(t, tokens)),
        (table.clone(), tokens(0..9), 0..4_usize)
            .prop_map(|(t, tokens, scratch)| Op::Grow(t, tokens, scratch)),
        (table.clone(), 0..16_u32).prop_map(|(t, len)| Op::Cut(t, len)),
        table.clone().prop_map(Op::Publish),
        table.clone().prop_map(Op::Close),
        table.prop_map(Op::Discard),
    ];
    proptest::collection::vec(op, 1..60)
}

/// An allocator, a cache whose rows are the tokens that they depend on, and all that was ever published.
struct Bench {
    pages: PageAllocator,
    rows: Vec<Vec<u32>>,
    tables: Vec<(SeqTable, Vec<u32>)>,
    published: Vec<Vec<u32>>,
    lookahead: usize,
    evicts: bool,
}

impl Bench {
    fn new(pages: usize, page_rows: usize, lookahead: usize, most_idle: usize) -> Self {
        Self {
            pages: PageAllocator::new(pages, page_rows).with_prefixes(lookahead, most_idle),
            rows: vec![Vec::new(); pages * page_rows],
            tables: vec![Default::default(); TABLES],
            published: Vec::new(),
            lookahead,
            // All tables and every sequence that could be published fit the larger pools.
            evicts: pages < 1000,
        }
    }

    fn apply(&mut self, op: Op) {
        match op {
            Op::Open(t, tokens) => self.open(t, tokens),
            Op::Grow(t, tokens, scratch) => self.grow(t, &tokens, scratch),
            Op::Cut(t, len) => {
                let (table, tokens) = &mut self.tables[t];
                self.pages.cut(table, len);
                tokens.truncate(table.len() as usize + self.lookahead);
                assert!(
                    table.capacity(self.pages.page_rows()) < table.len() as usize + self.pages.page_rows()
                );
            }
            Op::Publish(t) => self.publish(t),
            Op::Close(t) => {
                self.publish(t);
                self.pages.free(std::mem::take(&mut self.tables[t]).0);
            }
            Op::Discard(t) => {
                self.pages.discard(std::mem::take(&mut self.tables[t]).0);
                self.evicts = true;
            }
        }
    }

    fn open(&mut self, t: usize, tokens: Vec<u32>) {
        self.pages.free(std::mem::take(&mut self.tables[t]).0);
        let table = self.pages.lookup(&tokens);
        let common = |known: &Vec<u32>| known.iter().zip(&tokens).take_while(|(a, b)| a == b).count();
        let naive = self.published.iter().map(common).max().unwrap_or(0);
        let naive = naive.saturating_sub(self.lookahead);
        assert!(table.len() as usize == naive || (self.evicts && (table.len() as usize) < naive));
        self.tables[t] = (table, tokens);
    }

    fn grow(&mut self, t: usize, more: &[u32], scratch: usize) {
        let (table, tokens) = &mut self.tables[t];
        let before = (table.clone(), self.pages.free_pages());
        let wanted = [tokens.as_slice(), more].concat();
        let end = wanted.len().saturating_sub(self.lookahead).max(table.len() as usize);
        match self.pages.reserve(table, end + scratch) {
            Ok(copy) => {
                let first = |page| page as usize * self.pages.page_rows();
                for row in copy.iter().flat_map(|copy| 0..copy.rows as usize) {
                    let copy = copy.unwrap();
                    self.rows[first(copy.to) + row] = self.rows[first(copy.from) + row].clone();
                }
            }
            Err(OutOfPages { needed, free }) => {
                assert!(needed > free);
                assert_eq!((&*table, self.pages.free_pages()), (&before.0, before.1));
                return;
            }
        }
        *tokens = wanted;
        for slot in table.len() as usize..end + scratch {
            let row = if slot < end { &tokens[..=slot + self.lookahead] } else { SCRATCH };
            self.rows[table.pool_slot(slot as u32, self.pages.page_rows()).unwrap() as usize] = row.to_vec();
        }
        table.commit(end as u32, self.pages.page_rows()).unwrap();
    }

    fn publish(&mut self, t: usize) {
        let (table, tokens) = &mut self.tables[t];
        self.pages.publish(table, tokens);
        let rows = (table.len() as usize).min(tokens.len().saturating_sub(self.lookahead));
        let whole = rows - rows % self.pages.page_rows();
        if whole > 0 {
            self.published.push(tokens[..whole + self.lookahead].to_vec());
        }
    }

    fn check(&self, most_idle: usize) {
        let page_rows = self.pages.page_rows();
        let mut holders = vec![0; self.pages.pages()];
        for (table, tokens) in &self.tables {
            table.pages().iter().for_each(|&page| holders[page as usize] += 1);
            for slot in 0..table.len() {
                let row = &self.rows[table.pool_slot(slot, page_rows).unwrap() as usize];
                assert_eq!(row, &tokens[..=slot as usize + self.lookahead], "slot {slot}");
            }
            let whole = &table.pages()[..table.len() as usize / page_rows];
            let tree = &self.pages.prefixes.as_ref().unwrap().tree;
            let known = whole.iter().take_while(|&&page| tree.contains(page)).count();
            assert!(tree.longest(tokens).0.starts_with(&whole[..known]), "known pages in use are not found");
        }
        assert_eq!(holders, self.pages.holders);
        let free: HashSet<u32> = self.pages.free.iter().copied().collect();
        assert_eq!(free.len(), self.pages.free.len(), "a page is free twice");
        let tree = &self.pages.prefixes.as_ref().unwrap().tree;
        let mut idle = 0;
        for (page, &holders) in holders.iter().enumerate() {
            let is_known = tree.contains(page as u32);
            assert_eq!(free.contains(&(page as u32)), holders == 0 && !is_known);
            assert!(holders <= 1 || is_known, "only known pages are shared");
            idle += usize::from(holders == 0 && is_known);
        }
        assert_eq!(idle, self.pages.idle_pages());
        assert!(idle <= most_idle);
    }
}

proptest! {
    #[test]
    fn tables_hold_the_rows_of_their_tokens_and_every_page_is_accounted_for(
        ops in ops(),
        pages in prop_oneof![1..12_usize, Just(1000)],
        page_rows in 1..6_usize,
        lookahead in 0..2_usize,
        most_idle in prop_oneof![0..6_usize, Just(1000)],
    ) {
        let mut bench = Bench::new(pages, page_rows, lookahead, most_idle);
        bench.evicts |= most_idle < 1000;
        for op in ops {
            bench.apply(op);
            bench.check(most_idle);
        }
    }
}

/// A table whose rows for `tokens` are computed.
fn computed(pages: &mut PageAllocator, tokens: &[u32]) -> SeqTable {
    let mut table = pages.lookup(tokens);
    pages.reserve(&mut table, tokens.len()).unwrap();
    table.commit(tokens.len() as u32, pages.page_rows()).unwrap();
    table
}

fn close(pages: &mut PageAllocator, mut table: SeqTable, tokens: &[u32]) {
    pages.publish(&mut table, tokens);
    pages.free(table);
}

#[test]
fn the_page_idle_longest_makes_room_and_ends_before_beginnings() {
    let mut pages = PageAllocator::new(4, 2).with_prefixes(0, 4);
    for tokens in [[1, 2, 3, 4], [5, 6, 7, 8]] {
        let table = computed(&mut pages, &tokens);
        close(&mut pages, table, &tokens);
    }
    let hit = |pages: &mut PageAllocator, tokens: &[u32]| {
        let table = pages.lookup(tokens);
        let len = table.len();
        pages.free(table);
        len
    };
    assert_eq!((pages.idle_pages(), hit(&mut pages, &[1, 2, 3, 4])), (4, 4));
    let third = computed(&mut pages, &[9]);
    assert_eq!(hit(&mut pages, &[5, 6, 7, 8]), 2, "used longest ago, it lost its end");
    assert_eq!(hit(&mut pages, &[1, 2, 3, 4]), 4);
    pages.free(third);
    assert_eq!(pages.free_pages(), 4);
}

#[test]
fn a_table_that_needs_every_page_takes_the_one_it_would_copy() {
    let mut pages = PageAllocator::new(2, 4).with_prefixes(0, 2);
    let first = computed(&mut pages, &[1, 2, 3, 4]);
    close(&mut pages, first, &[1, 2, 3, 4]);
    let mut table = pages.lookup(&[1, 2, 9, 9]);
    assert_eq!((table.len(), pages.free_pages()), (2, 1));
    let page = table.pages()[0];
    let before = pages.generation(page);
    assert_eq!(pages.reserve(&mut table, 8), Ok(None));
    assert_eq!((table.pages()[0], pages.free_pages()), (page, 0));
    assert_ne!(pages.generation(page), before);
    assert_eq!(pages.lookup(&[1, 2, 3]), SeqTable::default(), "it is not known any more");
}

#[test]
fn a_page_that_outlived_its_parent_takes_none_with_it_that_stands_in_its_place() {
    let mut pages = PageAllocator::new(4, 2).with_prefixes(0, 4);
    let first = computed(&mut pages, &[1, 2, 3, 4]);
    close(&mut pages, first, &[1, 2, 3, 4]);
    let spoilt = pages.lookup(&[1, 2]);
    let parent = spoilt.pages()[0];
    pages.discard(spoilt);
    assert_eq!(pages.idle_pages(), 1, "what followed it");
    let mut second = computed(&mut pages, &[5, 6, 3, 4]);
    assert_eq!(second.pages()[0], parent);
    pages.publish(&mut second, &[5, 6, 3, 4]);
    let other = computed(&mut pages, &[7, 7, 7, 7]);
    assert_eq!((pages.free_pages(), pages.lookup(&[5, 6, 3, 4]).len()), (0, 4));
    pages.free(other);
}

#[test]
fn equal_pages_computed_side_by_side_become_one() {
    let mut pages = PageAllocator::new(8, 2).with_prefixes(0, 8);
    let tokens = [1, 2, 3, 4, 5];
    let (mut a, mut b) = (computed(&mut pages, &tokens), computed(&mut pages, &tokens));
    assert_eq!(pages.free_pages(), 2);
    pages.publish(&mut a, &tokens);
    let (own, known) = (b.pages()[0], a.pages()[0]);
    let before = [own, known].map(|page| pages.generation(page));
    pages.publish(&mut b, &tokens);
    assert_eq!((pages.free_pages(), pages.given_up()), (4, 2));
    assert_eq!(a.pages()[..2], b.pages()[..2]);
    assert_ne!(pages.generation(own), before[0]);
    assert_eq!((pages.generation(known), pages.is_known(known)), (before[1], true));
    assert_eq!((pages.held_only_by([&a]), pages.held_only_by([&a, &b])), (1, 4));
    pages.free(a);
    assert_eq!((pages.free_pages(), pages.idle_pages()), (5, 0), "the other still holds them");
    pages.free(b);
    assert_eq!((pages.free_pages(), pages.idle_pages()), (8, 2));
}

#[test]
fn the_pages_of_a_discarded_table_are_known_no_more_unless_others_hold_them() {
    let mut pages = PageAllocator::new(8, 2).with_prefixes(0, 8);
    let tokens: Vec<u32> = (0..6).collect();
    let mut spoilt = SeqTable::default();
    pages.reserve(&mut spoilt, 6).unwrap();
    spoilt.commit(6, 2).unwrap();
    pages.publish(&mut spoilt, &tokens);
    let shares = pages.lookup(&tokens[..2]);
    assert_eq!(shares.len(), 2);
    pages.discard(spoilt);
    let found = pages.lookup(&tokens);
    assert_eq!((found.len(), pages.idle_pages(), pages.free_pages()), (2, 0, 7));
    pages.free(found);
    pages.discard(shares);
    assert_eq!((pages.lookup(&tokens).len(), pages.idle_pages(), pages.free_pages()), (0, 0, 8));
}
