//! Greedy continuations and speculative rounds of the demo pair, computed by an independent implementation.

use crate::common::driver::Pair;
use crate::common::{Pool, argmax_rows, backend, deepseek, demo, draft, workspace};
use eyrie_checkpoint::{DraftCheckpoint, aux_ids};
use eyrie_model::{CaptureSet, DeepSeek, Eagle3Head, LogitRows, SeqTable, TargetModel};
use serde_json::Value;

/// Another implementation may choose differently where two candidates are this close.
const TIE: f64 = 2e-4;
const ROOM: usize = 256;

pub(crate) fn goldens() -> Vec<Value> {
    let text = std::fs::read_to_string(workspace().join("tests/goldens/goldens_a.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

pub(crate) fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn pair() -> (DeepSeek, Eagle3Head) {
    let backend = backend(2);
    let mut target = deepseek(&demo("mini"), &backend);
    let checkpoint = DraftCheckpoint::open(&demo("mini-eagle3")).unwrap();
    let layers = target.config().num_hidden_layers;
    let canonical = aux_ids(checkpoint.config(), layers, None).unwrap().canonical;
    assert_eq!(canonical, [2, 4, 5]);
    let capture = CaptureSet::new(&canonical, layers).unwrap();
    target.set_capture(&capture).unwrap();
    let head = draft(&demo("mini-eagle3"), &capture, target.embed_and_head(), &backend);
    (target, head)
}

#[test]
fn greedy_continuations_are_the_goldens() {
    let mut target = deepseek(&demo("mini"), &backend(2));
    let goldens = goldens();
    assert_eq!(goldens.len(), 24);
    // All prompts in one batch: what is checked is also that rows do not see each other.
    let mut pool = Pool::new(&target, 24 * ROOM);
    let mut tables = vec![SeqTable::default(); goldens.len()];
    let mut out: Vec<Vec<u32>> = Vec::new();
    for (golden, table) in goldens.iter().zip(&mut tables) {
        let first = pool.feed(&mut target, table, &ids(&golden["prompt_ids"]), LogitRows::Last);
        out.push(argmax_rows(&first.logits.unwrap()));
    }
    for _ in 1..96 {
        let next = pool.feed_each(
            &mut target,
            &mut tables,
            &out.iter().map(|o| *o.last().unwrap()).collect::<Vec<_>>(),
        );
        for (tokens, id) in out.iter_mut().zip(argmax_rows(&next.logits.unwrap())) {
            tokens.push(id);
        }
    }
    for (golden, tokens) in goldens.iter().zip(&out) {
        assert!(golden["min_gap"].as_f64().unwrap() > TIE);
        assert_eq!(*tokens, ids(&golden["greedy_ids"]), "{}", golden["id"]);
    }
}

fn check_chain(k: usize) {
    let (mut target, mut head) = pair();
    for golden in goldens() {
        let chain = &golden["chain"][k.to_string()];
        assert!(chain["min_draft_gap"].as_f64().unwrap() > TIE);
        let prompt = ids(&golden["prompt_ids"]);
        let mut pair = Pair::start(&mut target, &mut head, &prompt, ROOM);
        for (number, round) in chain["rounds"].as_array().unwrap().iter().enumerate() {
            let (proposed, accepted) = pair.chain_round(k);
            let want = (ids(&round[0]), round[1].as_u64().unwrap() as usize);
            assert_eq!((proposed, accepted), want, "{} K={k} round {number}", golden["id"]);
        }
        let emitted = &pair.tokens[prompt.len()..];
        assert_eq!(emitted[..96], ids(&golden["greedy_ids"]), "{} K={k}", golden["id"]);
    }
}

#[test]
fn chain_rounds_of_one_are_the_goldens() {
    check_chain(1);
}

#[test]
fn chain_rounds_of_three_are_the_goldens() {
    check_chain(3);
}

#[test]
fn chain_rounds_of_five_are_the_goldens() {
    check_chain(5);
}

#[test]
fn chain_rounds_of_seven_are_the_goldens() {
    check_chain(7);
}

#[test]
fn tree_rounds_are_the_goldens() {
    let (mut target, mut head) = pair();
    let mut rounds = 0;
    for golden in goldens() {
        let Some(trees) = golden["tree"].as_object() else { continue };
        let prompt = ids(&golden["prompt_ids"]);
        for (nodes, tree) in trees {
            let mut pair = Pair::start(&mut target, &mut head, &prompt, ROOM);
            for (number, round) in tree["rounds"].as_array().unwrap().iter().enumerate() {
                assert!(round["min_rel_gap"].as_f64().unwrap() > 1e-5);
                let (got, path, bonus) = pair.tree_round(4, 5, nodes.parse().unwrap());
                let at = format!("{} {nodes} nodes, round {number}", golden["id"]);
                assert_eq!(got.tokens, ids(&round["tokens"]), "{at}");
                let parents: Vec<u32> = got.parents.iter().map(|&p| u32::from(p)).collect();
                assert_eq!(parents, ids(&round["parents"].as_array().unwrap()[1..].to_vec().into()), "{at}");
                let path: Vec<u32> = path.iter().map(|&node| node as u32).collect();
                assert_eq!(path, ids(&round["accepted_path"]), "{at}");
                assert_eq!(bonus, round["bonus"].as_u64().unwrap() as u32, "{at}");
                rounds += 1;
            }
            assert_eq!(pair.tokens[prompt.len()..][..96], ids(&golden["greedy_ids"]));
        }
    }
    assert!(rounds > 100, "only {rounds} rounds");
}
