//! A row's logits are the same bits whatever runs beside it, however its prefix was cut, on any number of threads.

use crate::common::fixtures::{VARIANTS, WHOLE, expected, run};
use crate::common::{Pool, backend, cpu, deepseek, demo, fixture, values};
use eyrie_kernels::{Cpu, CpuOptions, Isa};
use eyrie_model::{CaptureSet, DeepSeek, ForwardOut, Keep, LogitRows, SeqRows, SeqTable, TargetModel};

const ROOM: usize = 2048;

fn mini(threads: usize) -> DeepSeek {
    let mut model = deepseek(&demo("mini"), &backend(threads));
    let layers = model.config().num_hidden_layers;
    model.set_capture(&CaptureSet::new(&[2, 4, 5], layers).unwrap()).unwrap();
    model
}

/// Distinct pseudo-text: sequence `n`'s tokens.
fn tokens(n: usize, len: usize) -> Vec<u32> {
    (0..len).map(|i| ((n * 7919 + i * 104_729 + i * i * 31) % 4000 + 8) as u32).collect()
}

/// Logits and aux of one sequence, by row.
fn rows(out: &ForwardOut, sequence: usize) -> (Vec<f32>, Vec<f32>) {
    let logits = out.logits.as_ref().unwrap();
    let width = logits.dim(1).unwrap();
    let range = out.logit_rows[sequence].clone();
    let logits = values(logits)[range.start * width..range.end * width].to_vec();
    (logits, out.aux.as_ref().unwrap().slice(out.rows[sequence].clone()).unwrap().to_vec().unwrap())
}

fn alone(threads: usize, tokens: &[u32]) -> (Vec<f32>, Vec<f32>) {
    let mut model = mini(threads);
    let mut pool = Pool::new(&model, ROOM);
    let mut table = SeqTable::default();
    rows(&pool.feed(&mut model, &mut table, tokens, LogitRows::All), 0)
}

#[test]
fn a_sequence_is_bit_equal_alone_and_beside_seven_others() {
    let lengths = [33, 1, 2, 70, 5, 16, 17, 48];
    let prompts: Vec<Vec<u32>> = lengths.iter().enumerate().map(|(n, &len)| tokens(n, len)).collect();
    let mut model = mini(2);
    let mut pool = Pool::new(&model, ROOM);
    let mut tables = vec![SeqTable::default(); prompts.len()];
    for (table, prompt) in tables.iter_mut().zip(&prompts) {
        pool.pages.reserve(table, prompt.len()).unwrap();
    }
    let batch: Vec<SeqRows<'_>> = std::iter::zip(&tables, &prompts)
        .map(|(table, tokens)| SeqRows { table, base_len: 0, tokens, parents: None, logits: LogitRows::All })
        .collect();
    let out = model.forward(&batch, &mut pool.cache).unwrap();
    for (sequence, prompt) in prompts.iter().enumerate() {
        assert_eq!(rows(&out, sequence), alone(1, prompt), "sequence {sequence}");
    }
}

#[test]
fn chunks_and_threads_do_not_change_a_bit() {
    let prompt = tokens(3, 130);
    let whole = alone(1, &prompt);
    for (threads, chunk) in [(2, 130), (1, 64), (2, 1), (2, 33), (3, 7)] {
        let mut model = mini(threads);
        let mut pool = Pool::new(&model, ROOM);
        let mut table = SeqTable::default();
        let (mut logits, mut aux) = (Vec::new(), Vec::new());
        for piece in prompt.chunks(chunk) {
            let out = pool.feed(&mut model, &mut table, piece, LogitRows::All);
            let (l, a) = rows(&out, 0);
            logits.extend(l);
            aux.extend(a);
        }
        assert!((logits, aux) == whole, "{threads} threads, chunks of {chunk}");
    }
}

#[test]
fn instruction_sets_do_not_change_a_bit() {
    for variant in VARIANTS {
        let expected = expected(variant);
        let scalar = Cpu::new(CpuOptions { threads: 2, isa: Isa::Scalar }).unwrap().into();
        let scalar = run(&mut deepseek(&fixture(variant), &scalar), &expected, WHOLE);
        let best = run(&mut deepseek(&fixture(variant), &cpu(2)), &expected, WHOLE);
        assert_eq!(scalar.logits, best.logits, "{variant}");
    }
}

#[test]
fn fragmented_pages_and_reused_slots_do_not_change_a_bit() {
    let prompt = tokens(5, 60);
    let whole = alone(2, &prompt);
    let mut model = mini(2);
    let mut pool = Pool::new(&model, ROOM);
    let mut others = vec![SeqTable::default(); 6];
    for (n, table) in others.iter_mut().enumerate() {
        pool.feed(&mut model, table, &tokens(n + 20, 40), LogitRows::None);
    }
    for table in others.into_iter().step_by(2) {
        pool.pages.free(table);
    }
    let mut table = SeqTable::default();
    assert!(rows(&pool.feed(&mut model, &mut table, &prompt, LogitRows::All), 0) == whole);
    assert!(!table.pages().is_sorted_by(|a, b| a + 1 == *b), "pages {:?} are not scattered", table.pages());
}

/// A tree over a shared prefix: each node's logits are those of the chain of its ancestors.
#[test]
fn tree_nodes_are_bit_equal_to_the_chains_of_their_ancestors() {
    let prompt = tokens(9, 37);
    //        0
    //      1   2
    //     3 4  5
    //       6  7
    let parents: [u16; 7] = [0, 0, 1, 1, 2, 4, 5];
    let nodes = tokens(11, 8);
    let mut model = mini(2);
    let mut pool = Pool::new(&model, ROOM);
    let mut table = SeqTable::default();
    pool.feed(&mut model, &mut table, &prompt, LogitRows::None);
    let base_len = table.len();
    pool.pages.reserve(&mut table, prompt.len() + nodes.len()).unwrap();
    let tree =
        SeqRows { table: &table, base_len, tokens: &nodes, parents: Some(&parents), logits: LogitRows::All };
    let out = model.forward(&[tree], &mut pool.cache).unwrap();
    let (logits, aux) = rows(&out, 0);
    let (width, aux_width) = (logits.len() / 8, aux.len() / 8);
    for node in 0..8 {
        let mut path = vec![node];
        while path[0] > 0 {
            path.insert(0, usize::from(parents[path[0] - 1]));
        }
        let chain: Vec<u32> = prompt.iter().copied().chain(path.iter().map(|&n| nodes[n])).collect();
        let (want_logits, want_aux) = alone(1, &chain);
        assert!(logits[node * width..][..width] == want_logits[(chain.len() - 1) * width..], "node {node}");
        assert!(
            aux[node * aux_width..][..aux_width] == want_aux[(chain.len() - 1) * aux_width..],
            "node {node}"
        );
    }

    // The accepted path 0, 2, 5, 7 goes on as if it had been a chain.
    let path = [0, 2, 5, 7];
    model.rollback(&mut pool.cache, &mut table, Keep::Path { base_len, nodes: &path }).unwrap();
    assert_eq!(table.len(), base_len + 4);
    let next = tokens(12, 3);
    let got = rows(&pool.feed(&mut model, &mut table, &next, LogitRows::All), 0).0;
    let chain: Vec<u32> = prompt.iter().copied().chain(path.map(|n| nodes[n])).chain(next).collect();
    assert!(got == alone(1, &chain).0[(chain.len() - 3) * width..]);
}

#[test]
fn a_cut_chain_goes_on_as_if_the_cut_rows_had_never_been() {
    let prompt = tokens(13, 29);
    let mut model = mini(2);
    let mut pool = Pool::new(&model, ROOM);
    let mut table = SeqTable::default();
    pool.feed(&mut model, &mut table, &prompt, LogitRows::None);
    pool.feed(&mut model, &mut table, &tokens(14, 9), LogitRows::None);
    model.rollback(&mut pool.cache, &mut table, Keep::Len(20)).unwrap();
    let next = tokens(15, 12);
    let got = rows(&pool.feed(&mut model, &mut table, &next, LogitRows::All), 0);
    let chain: Vec<u32> = prompt[..20].iter().copied().chain(next).collect();
    let want = alone(1, &chain);
    let (width, aux_width) = (want.0.len() / 32, want.1.len() / 32);
    assert!(got == (want.0[20 * width..].to_vec(), want.1[20 * aux_width..].to_vec()));
}
