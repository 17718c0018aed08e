use eyrie_kernels::{Backend, Cpu, CpuOptions, Isa};

use super::*;

const WIDTH: usize = 3;
const PAGE: usize = 4;
const BLOCK: u64 = (PAGE * WIDTH * 4) as u64;

fn key(seq: u64) -> Key {
    Key { boot: 1, seq }
}

fn rows(positions: std::ops::Range<u32>) -> Vec<f32> {
    positions.flat_map(|p| [p as f32, 0.5, -(p as f32)]).collect()
}

fn backend() -> Backend {
    Cpu::new(CpuOptions { threads: 1, isa: Isa::best() }).unwrap().into()
}

fn kept(blocks: u64) -> Kept {
    let memory = RowMemory::beside(&backend(), WIDTH).unwrap();
    Kept::new(memory, KeptSizes { page_rows: PAGE, pages: 4, sequences: 2, limit: blocks * BLOCK }).unwrap()
}

fn append(kept: &mut Kept, key: Key, first: u32, values: &[f32]) {
    kept.append(key, first, RowSlice::Host { values, width: WIDTH }).unwrap();
}

fn read(kept: &Kept, key: Key, from: u32, to: u32, most: u32) -> (Option<u32>, u32, Vec<f32>) {
    let (first_held, start, parts) = kept.read(key, from, to, most).unwrap();
    (first_held, start, parts.iter().flat_map(|part| part.values()).copied().collect())
}

#[test]
fn rows_are_read_back_from_any_position() {
    let mut kept = kept(100);
    append(&mut kept, key(1), 0, &rows(0..50));
    append(&mut kept, key(1), 50, &rows(50..51));
    append(&mut kept, key(2), 0, &rows(0..1));
    assert_eq!(read(&kept, key(1), 0, 51, 1000), (Some(0), 0, rows(0..51)));
    assert_eq!(read(&kept, key(1), 31, 40, 1000), (Some(0), 31, rows(31..40)));
    assert_eq!(read(&kept, key(1), 40, 51, 3), (Some(0), 40, rows(40..43)));
    assert_eq!(read(&kept, key(3), 0, 9, 3), (None, 9, vec![]));
    kept.forget(key(1));
    kept.forget(key(2));
    assert_eq!(kept.bytes(), 0);
}

#[test]
fn over_the_limit_the_longest_sequence_loses_its_oldest_rows() {
    let mut kept = kept(4);
    append(&mut kept, key(1), 0, &rows(0..3));
    append(&mut kept, key(2), 0, &rows(0..12));
    assert_eq!(kept.rows_let_go, 0);
    append(&mut kept, key(2), 12, &rows(12..13));
    assert_eq!((kept.bytes(), kept.rows_let_go), (4 * BLOCK, PAGE as u64));
    assert_eq!(read(&kept, key(2), 0, 13, 1000), (Some(4), 4, rows(4..13)));
    assert_eq!(read(&kept, key(1), 0, 3, 1000), (Some(0), 0, rows(0..3)));
}

#[test]
fn a_sequence_that_lost_all_rows_starts_again_where_it_is() {
    let mut kept = kept(0);
    append(&mut kept, key(1), 0, &rows(0..10));
    assert_eq!(read(&kept, key(1), 0, 10, 9), (None, 10, vec![]));
    kept.limit = u64::MAX;
    append(&mut kept, key(1), 10, &rows(10..13));
    assert_eq!(read(&kept, key(1), 0, 13, 9), (Some(10), 10, rows(10..13)));
    assert_eq!(kept.bytes(), 2 * BLOCK, "blocks end where pages do");
}

/// Tokens of a sequence whose rows are those of [`rows`].
fn tokens(len: u32) -> Vec<u32> {
    (0..len).collect()
}

/// Computes and keeps `len` rows for `key`, and makes their pages known.
fn compute(kept: &mut Kept, pages: &mut PageAllocator, key: Key, len: u32) -> SeqTable {
    let mut table = SeqTable::default();
    pages.reserve(&mut table, len as usize).unwrap();
    table.commit(len, PAGE).unwrap();
    append(kept, key, 0, &rows(0..len));
    pages.publish(&mut table, &tokens(len));
    kept.share(key, &table, 0, true, pages);
    table
}

#[test]
fn rows_of_known_pages_are_shared_and_outlive_the_sequence() {
    let (mut kept, mut pages) = (kept(100), PageAllocator::new(10, PAGE).with_prefixes(0, 10));
    let table = compute(&mut kept, &mut pages, key(1), 10);
    assert_eq!((kept.bytes(), kept.unused_bytes()), (3 * BLOCK, 0));
    let live = pages.lookup(&tokens(7));
    kept.adopt(key(2), &live, true, &pages);
    assert_eq!(read(&kept, key(2), 0, 7, 99), (Some(0), 0, rows(0..7)));
    assert_eq!(kept.bytes(), 4 * BLOCK, "the page that it ends in has a copy");
    append(&mut kept, key(2), 7, &[9.0; 2 * WIDTH]);
    assert_eq!(read(&kept, key(1), 0, 10, 99).2, rows(0..10));

    kept.forget(key(1));
    pages.free(table);
    assert_eq!(kept.bytes(), 4 * BLOCK);
    let later = pages.lookup(&tokens(8));
    kept.adopt(key(3), &later, true, &pages);
    assert_eq!(read(&kept, key(3), 0, 8, 99), (Some(0), 0, rows(0..8)));
    for (key, table) in [(key(2), live), (key(3), later)] {
        kept.forget(key);
        pages.free(table);
    }
    assert_eq!((kept.bytes(), kept.unused_bytes()), (2 * BLOCK, 2 * BLOCK));
}

#[test]
fn equal_rows_kept_twice_become_one_block() {
    let (mut kept, mut pages) = (kept(100), PageAllocator::new(10, PAGE).with_prefixes(0, 10));
    compute(&mut kept, &mut pages, key(1), 8);
    compute(&mut kept, &mut pages, key(2), 8);
    assert_eq!(kept.bytes(), 2 * BLOCK);
    assert_eq!(read(&kept, key(2), 0, 8, 99), (Some(0), 0, rows(0..8)));
}

#[test]
fn rows_go_with_their_page_and_a_page_of_other_rows_has_none() {
    let (mut kept, mut pages) = (kept(100), PageAllocator::new(3, PAGE).with_prefixes(0, 3));
    let table = compute(&mut kept, &mut pages, key(1), 8);
    kept.forget(key(1));
    pages.free(table);
    let other = [90, 91, 92, 93, 94, 95, 96, 97];
    let mut table = SeqTable::default();
    pages.reserve(&mut table, 8).unwrap();
    table.commit(8, PAGE).unwrap();
    pages.publish(&mut table, &other);
    kept.adopt(key(2), &table, true, &pages);
    assert_eq!(read(&kept, key(2), 0, 8, 99), (None, 8, vec![]), "computed without features");
    assert_eq!(kept.bytes(), BLOCK, "the first page's rows: it was not needed");
    pages.free(table);
}

/// Makes room for one block more than the three of `kept` that no sequence has; which are left.
fn beginning_left(kept: &mut Kept, pages: &mut PageAllocator) {
    assert_eq!((kept.bytes(), kept.unused_bytes()), (3 * BLOCK, 3 * BLOCK));
    append(kept, key(9), 0, &rows(0..1));
    assert_eq!((kept.bytes(), kept.unused_bytes(), kept.rows_let_go), (3 * BLOCK, 2 * BLOCK, 0));
    let mut table = pages.lookup(&tokens(12));
    assert_eq!(kept.reach(&table, 12, pages), 8);
    kept.adopt(key(3), &table, true, pages);
    assert_eq!(read(kept, key(3), 0, 12, 99), (None, 12, vec![]), "a gap ends what is adopted");
    pages.cut(&mut table, 8);
    kept.adopt(key(3), &table, true, pages);
    assert_eq!((read(kept, key(3), 0, 8, 99), kept.unused_bytes()), ((Some(0), 0, rows(0..8)), 0));
    assert_eq!(kept.reach(&table, 13, pages), 8, "no more of its rows could be kept");
}

#[test]
fn of_rows_that_no_sequence_has_the_ends_go_first() {
    let (mut kept, mut pages) = (kept(3), PageAllocator::new(10, PAGE).with_prefixes(0, 10));
    compute(&mut kept, &mut pages, key(1), 12);
    kept.forget(key(1));
    beginning_left(&mut kept, &mut pages);
}

#[test]
fn of_rows_that_were_never_asked_for_the_ends_go_first_too() {
    let (mut kept, mut pages) = (kept(3), PageAllocator::new(10, PAGE).with_prefixes(0, 10));
    let mut table = SeqTable::default();
    pages.reserve(&mut table, 12).unwrap();
    for to in [4, 8, 12] {
        table.commit(to, PAGE).unwrap();
        append(&mut kept, key(1), to - 4, &rows(to - 4..to));
        pages.publish(&mut table, &tokens(to));
        kept.share(key(1), &table, to as usize / PAGE - 1, false, &pages);
    }
    kept.adopt(key(2), &table, false, &pages);
    beginning_left(&mut kept, &mut pages);
}

#[test]
fn rows_that_only_one_sequence_has_go_before_shared_ones() {
    let (mut kept, mut pages) = (kept(4), PageAllocator::new(10, PAGE).with_prefixes(0, 10));
    let table = compute(&mut kept, &mut pages, key(1), 12);
    kept.adopt(key(2), &table, true, &pages);
    append(&mut kept, key(3), 0, &rows(0..5));
    assert_eq!((kept.bytes(), kept.rows_let_go), (4 * BLOCK, PAGE as u64));
    assert_eq!(read(&kept, key(3), 0, 5, 99), (Some(4), 4, rows(4..5)));
    for shared in [key(1), key(2)] {
        assert_eq!(read(&kept, shared, 0, 12, 99), (Some(0), 0, rows(0..12)));
    }
}

#[test]
fn a_sequence_without_features_leaves_rows_to_its_pages_only() {
    let (mut kept, mut pages) = (kept(100), PageAllocator::new(10, PAGE).with_prefixes(0, 10));
    let mut table = SeqTable::default();
    pages.reserve(&mut table, 10).unwrap();
    for (from, to) in [(0, 3), (3, 9), (9, 10)] {
        table.commit(to, PAGE).unwrap();
        append(&mut kept, key(1), from, &rows(from..to));
        pages.publish(&mut table, &tokens(to));
        kept.share(key(1), &table, from as usize / PAGE, false, &pages);
    }
    assert_eq!(read(&kept, key(1), 0, 10, 99), (Some(8), 8, rows(8..10)));
    assert_eq!((kept.bytes(), kept.unused_bytes()), (3 * BLOCK, 2 * BLOCK));
    let hit = pages.lookup(&tokens(7));
    kept.adopt(key(2), &hit, false, &pages);
    assert_eq!(read(&kept, key(2), 0, 7, 99), (Some(4), 4, rows(4..7)));
    kept.adopt(key(3), &hit, true, &pages);
    assert_eq!(read(&kept, key(3), 0, 7, 99), (Some(0), 0, rows(0..7)));
}

#[test]
fn memory_is_taken_at_the_start_and_used_again() {
    for (limit, taken) in [(100, 6), (3, 3), (0, 0)] {
        assert_eq!((kept(limit).blocks, kept(limit).spare.len()), (0, taken));
    }
    let sizes = KeptSizes { page_rows: 64, pages: 1 << 30, sequences: 2, limit: u64::MAX };
    let memory = RowMemory::beside(&backend(), 1 << 20).unwrap();
    let error = Kept::new(memory, sizes).unwrap_err().to_string();
    assert!(error.starts_with("feature cache: ") && error.contains("memory available"), "{error}");
    let mut kept = kept(100);
    for _ in 0..3 {
        append(&mut kept, key(1), 0, &rows(0..30));
        assert_eq!((kept.blocks, kept.spare.len()), (8, 0));
        kept.forget(key(1));
        assert_eq!((kept.blocks, kept.spare.len()), (0, 8));
    }
}
