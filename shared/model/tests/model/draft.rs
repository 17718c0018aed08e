//! The EAGLE-3 head on the demo pair: chains, trees, batches and late joins.

use crate::common::{PAGE_ROWS, Pool, backend, deepseek, demo, draft, values};
use eyrie_model::{
    Aux, CaptureSet, DraftCache, DraftRows, DraftState, Eagle3Head, Feature, Keep, LogitRows, PageAllocator,
    SeqTable, TargetModel,
};

struct Bench {
    head: Eagle3Head,
    cache: DraftCache,
    pages: PageAllocator,
}

/// A head, and features of `len` positions with the tokens one further on.
fn bench(len: usize) -> (Bench, Aux, Vec<u32>) {
    let backend = backend(2);
    let mut target = deepseek(&demo("mini"), &backend);
    let capture = CaptureSet::new(&[2, 4, 5], 8).unwrap();
    target.set_capture(&capture).unwrap();
    let head = draft(&demo("mini-eagle3"), &capture, target.embed_and_head(), &backend);
    let tokens: Vec<u32> = (0..=len as u32).map(|i| (i * i * 37 + 11) % 4000 + 8).collect();
    let mut pool = Pool::new(&target, 512);
    let out = pool.feed(&mut target, &mut SeqTable::default(), &tokens[..len], LogitRows::None);
    assert!(out.logits.is_none());
    let cache = head.new_cache(1024, PAGE_ROWS).unwrap();
    let pages = cache.allocator();
    (Bench { head, cache, pages }, out.aux.unwrap(), tokens[1..].to_vec())
}

impl Bench {
    fn extend(&mut self, table: &mut SeqTable, tokens: &[u32], feature: &Feature) -> (Vec<f32>, DraftState) {
        let base_slot = table.len();
        let end = base_slot + tokens.len() as u32;
        self.pages.reserve(table, end as usize).unwrap();
        let rows = DraftRows { table, base_slot, origin: 0, tokens, feature, parents: None };
        let out = self.head.extend(&mut self.cache, &[rows]).unwrap();
        self.cache.keep(table, Keep::Len(end)).unwrap();
        (values(&out.logits), out.states)
    }
}

fn last(states: &DraftState) -> DraftState {
    states.slice(states.rows() - 1..states.rows()).unwrap()
}

#[test]
fn an_extend_in_pieces_is_bit_equal_to_a_whole_one() {
    let (mut bench, aux, tokens) = bench(61);
    let feature = bench.head.fuse(&aux).unwrap();
    let (logits, states) = bench.extend(&mut SeqTable::default(), &tokens, &feature);
    for piece in [1, 7, 32] {
        let mut table = SeqTable::default();
        let mut seen = (Vec::new(), Vec::new());
        for start in (0..61).step_by(piece) {
            let range = start..(start + piece).min(61);
            let feature = bench.head.fuse(&aux.slice(range.clone()).unwrap()).unwrap();
            let (l, s) = bench.extend(&mut table, &tokens[range], &feature);
            seen.0 = l;
            seen.1.extend(s.to_vec().unwrap());
        }
        assert!(seen == (logits.clone(), states.to_vec().unwrap()), "pieces of {piece}");
    }
}

#[test]
fn sequences_in_one_extend_and_step_do_not_see_each_other() {
    let (mut bench, aux, tokens) = bench(40);
    let lengths = [40, 1, 17, 8];
    let mut want = Vec::new();
    for &len in &lengths {
        let feature = bench.head.fuse(&aux.slice(0..len).unwrap()).unwrap();
        let mut table = SeqTable::default();
        let (logits, states) = bench.extend(&mut table, &tokens[..len], &feature);
        let state = last(&states);
        bench.pages.reserve(&mut table, len + 1).unwrap();
        let rows = DraftRows {
            table: &table,
            base_slot: len as u32,
            origin: 0,
            tokens: &tokens[..1],
            feature: &state,
            parents: None,
        };
        let step = bench.head.step(&mut bench.cache, &[rows]).unwrap();
        want.push((logits, values(&step.logits)));
    }
    let features: Vec<Feature> =
        lengths.iter().map(|&len| bench.head.fuse(&aux.slice(0..len).unwrap()).unwrap()).collect();
    let mut tables = vec![SeqTable::default(); lengths.len()];
    for (table, &len) in tables.iter_mut().zip(&lengths) {
        bench.pages.reserve(table, len + 1).unwrap();
    }
    let batch: Vec<DraftRows<'_, Feature>> = (0..lengths.len())
        .map(|n| DraftRows {
            table: &tables[n],
            base_slot: 0,
            origin: 0,
            tokens: &tokens[..lengths[n]],
            feature: &features[n],
            parents: None,
        })
        .collect();
    let out = bench.head.extend(&mut bench.cache, &batch).unwrap();
    for (table, &len) in tables.iter_mut().zip(&lengths) {
        bench.cache.keep(table, Keep::Len(len as u32)).unwrap();
    }
    let states: Vec<DraftState> =
        out.rows.iter().map(|rows| out.states.slice(rows.end - 1..rows.end).unwrap()).collect();
    let batch: Vec<DraftRows<'_, DraftState>> = (0..lengths.len())
        .map(|n| DraftRows {
            table: &tables[n],
            base_slot: lengths[n] as u32,
            origin: 0,
            tokens: &tokens[..1],
            feature: &states[n],
            parents: None,
        })
        .collect();
    let step = bench.head.step(&mut bench.cache, &batch).unwrap();
    let vocab = bench.head.draft_vocab();
    let (extended, stepped) = (values(&out.logits), values(&step.logits));
    for (n, (logits, after)) in want.iter().enumerate() {
        assert_eq!((out.logit_rows[n].clone(), step.logit_rows[n].clone()), (n..n + 1, n..n + 1));
        assert!(extended[n * vocab..(n + 1) * vocab] == *logits, "sequence {n}");
        assert!(stepped[n * vocab..(n + 1) * vocab] == *after, "sequence {n}");
    }
}

#[test]
fn a_tree_of_steps_is_bit_equal_to_the_chains_it_holds() {
    let (mut bench, aux, tokens) = bench(23);
    let feature = bench.head.fuse(&aux).unwrap();
    let mut table = SeqTable::default();
    let (_, states) = bench.extend(&mut table, &tokens, &feature);
    let root = last(&states);
    bench.pages.reserve(&mut table, 23 + 4).unwrap();

    // Nodes 1 and 2 hang on the root, 3 on 2 and 4 on 1.
    let parents = [0, 0, 2, 1];
    let level =
        |bench: &mut Bench, base_slot, tokens: &[u32], feature: &DraftState, parents: Option<&[u16]>| {
            let rows = DraftRows { table: &table, base_slot, origin: 17, tokens, feature, parents };
            let out = bench.head.step(&mut bench.cache, &[rows]).unwrap();
            (out.states, values(&out.logits))
        };
    let both = root.select(&backend(1), &[0, 0]).unwrap();
    let (first, logits_1) = level(&mut bench, 23, &[100, 200], &both, Some(&parents[..2]));
    let crossed = first.select(&backend(1), &[1, 0]).unwrap();
    let (_, logits_2) = level(&mut bench, 25, &[300, 400], &crossed, Some(&parents));
    let vocab = bench.head.draft_vocab();
    for (node, chain) in [(0, [100, 400]), (1, [200, 300])] {
        let (state, logits) = level(&mut bench, 23, &chain[..1], &root, None);
        assert!(logits == logits_1[node * vocab..(node + 1) * vocab], "node {}", node + 1);
        let (_, logits) = level(&mut bench, 24, &chain[1..], &state, None);
        let row = 1 - node;
        assert!(logits == logits_2[row * vocab..(row + 1) * vocab], "child of node {}", node + 1);
    }
}

#[test]
fn a_late_join_drafts_at_absolute_positions() {
    let (mut bench, aux, tokens) = bench(50);
    let from = 20;
    let feature = bench.head.fuse(&aux.slice(from..50).unwrap()).unwrap();
    let mut logits = Vec::new();
    for origin in [from as u32, 0] {
        let mut table = SeqTable::default();
        bench.pages.reserve(&mut table, 30).unwrap();
        let rows = DraftRows {
            table: &table,
            base_slot: 0,
            origin,
            tokens: &tokens[from..],
            feature: &feature,
            parents: None,
        };
        logits.push(values(&bench.head.extend(&mut bench.cache, &[rows]).unwrap().logits));
    }
    // Rotation is relative, so another origin may only move the result by rounding.
    let diff = logits[0].iter().zip(&logits[1]).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(diff > 0.0 && diff < 1e-3, "{diff}");
}

#[test]
fn positions_beyond_the_trained_length_are_computed() {
    let (mut bench, aux, tokens) = bench(8);
    let feature = bench.head.fuse(&aux).unwrap();
    assert_eq!(bench.head.trained_len(), 2048);
    let mut table = SeqTable::default();
    bench.pages.reserve(&mut table, 8).unwrap();
    let rows = DraftRows {
        table: &table,
        base_slot: 0,
        origin: 100_000,
        tokens: &tokens,
        feature: &feature,
        parents: None,
    };
    let logits = values(&bench.head.extend(&mut bench.cache, &[rows]).unwrap().logits);
    assert!(logits.iter().all(|x| x.is_finite()));
}

#[test]
fn bad_rows_are_refused_by_name() {
    let (mut bench, aux, tokens) = bench(8);
    let feature = bench.head.fuse(&aux).unwrap();
    let mut table = SeqTable::default();
    bench.pages.reserve(&mut table, 12).unwrap();
    let extend = |bench: &mut Bench, base_slot, tokens: &[u32]| {
        let rows =
            DraftRows { table: &table, base_slot, origin: 0, tokens, feature: &feature, parents: None };
        bench.head.extend(&mut bench.cache, &[rows]).unwrap_err().to_string()
    };
    for (error, part) in [
        (extend(&mut bench, 1, &tokens), "within the 0 committed slots, got slot 1"),
        (extend(&mut bench, 0, &tokens[..7]), "features must be [7, 384], got [8, 384]"),
        (extend(&mut bench, 0, &[1, 2, 3, 4, 5, 6, 7, 4096]), "vocabulary of 4096, got 4096"),
        (
            bench.head.to_target_id(2048).unwrap_err().to_string(),
            "below the draft vocabulary of 2048, got 2048",
        ),
        (
            Aux::from_rows(&backend(1), vec![0.0; 100], 1152).unwrap_err().to_string(),
            "expected 1152, got 100",
        ),
    ] {
        assert!(error.contains(part), "{error:?} lacks {part:?}");
    }
    let far = DraftRows {
        table: &table,
        base_slot: 0,
        origin: u32::MAX - 4,
        tokens: &tokens,
        feature: &feature,
        parents: None,
    };
    let error = bench.head.extend(&mut bench.cache, &[far]).unwrap_err().to_string();
    assert!(error.contains("got origin 4294967291 and 8 slots"), "{error}");
    let tree = DraftRows {
        table: &table,
        base_slot: 0,
        origin: 0,
        tokens: &tokens,
        feature: &feature,
        parents: Some(&[0; 8]),
    };
    let error = bench.head.extend(&mut bench.cache, &[tree]).unwrap_err().to_string();
    assert!(error.contains("takes a chain"), "{error}");
    let error = bench.head.extend(&mut bench.cache, &[]).unwrap_err().to_string();
    assert!(error.contains("at least one sequence, got 0"), "{error}");
    let state = DraftState::from_rows(&backend(1), vec![0.0; 384], 384).unwrap();
    let rows = DraftRows {
        table: &table,
        base_slot: 0,
        origin: 0,
        tokens: &tokens[..1],
        feature: &state,
        parents: None,
    };
    let error = bench.head.step(&mut bench.cache, &[rows]).unwrap_err().to_string();
    assert!(error.contains("at least 1, got slot 0"), "{error}");
}

#[test]
fn a_head_for_another_target_is_refused() {
    let backend = backend(1);
    let target = deepseek(&demo("mini"), &backend);
    let checkpoint = eyrie_checkpoint::DraftCheckpoint::open(&demo("mini-eagle3")).unwrap();
    let two = CaptureSet::new(&[2, 4], 8).unwrap();
    let error =
        Eagle3Head::load(&checkpoint, &two, target.embed_and_head(), &backend).unwrap_err().to_string();
    assert!(error.contains("fc input width") && error.contains("768") && error.contains("1152"), "{error}");
    let three = CaptureSet::new(&[1, 2, 3], 4).unwrap();
    let other = deepseek(&crate::common::fixture("v3"), &backend);
    let error =
        Eagle3Head::load(&checkpoint, &three, other.embed_and_head(), &backend).unwrap_err().to_string();
    assert!(error.contains("384"), "{error}");
}
