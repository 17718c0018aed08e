//! Rounds an independent implementation decided for the demo pair (greedy; chains of 3, trees
//! 4x5x16): the same proposals must be accepted alike.
#![expect(clippy::unwrap_used, reason = "a failed test helper should panic")]

use std::convert::Infallible;

use eyrie_speculation::{Proposal, TreeShape, Verdict, verify};

const ROUNDS: &str = include_str!("fixtures/rounds.txt");

fn list<T: std::str::FromStr<Err: std::fmt::Debug>>(field: &str) -> Vec<T> {
    field.split(',').filter(|item| *item != "-").map(|item| item.parse().unwrap()).collect()
}

/// Fields of the lines of one kind.
fn lines(kind: &str) -> Vec<Vec<&'static str>> {
    let fields = ROUNDS.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    fields.filter(|fields| fields[0] == kind).map(|fields| fields[1..].to_vec()).collect()
}

/// Verifies the round whose root is the greedy continuation's token `root`.
fn round(greedy: &[u32], proposal: &Proposal, root: usize) -> Verdict {
    let choose = |_, position: u32| Ok::<_, Infallible>(greedy[position as usize]);
    verify(proposal, root as u32, choose).unwrap()
}

#[test]
fn chains_accept_what_the_reference_accepts() {
    let greedy: Vec<u32> = list(lines("greedy")[0][0]);
    let mut root = 0;
    let rounds = lines("chain");
    assert!(rounds.len() > 20);
    for fields in rounds {
        let proposal = Proposal::chain(list(fields[0])).unwrap();
        let verdict = round(&greedy, &proposal, root);
        assert_eq!(verdict.accepted().to_string(), fields[1]);
        assert_eq!(verdict.emitted, greedy[root + 1..][..verdict.accepted() + 1]);
        root += verdict.emitted.len();
    }
}

#[test]
fn trees_take_the_path_the_reference_takes() {
    let greedy: Vec<u32> = list(lines("greedy")[0][0]);
    let shape: TreeShape = "4x5x16".parse().unwrap();
    let mut root = 0;
    let rounds = lines("tree");
    assert!(rounds.len() > 20);
    for fields in rounds {
        let proposal = Proposal::try_new(list(fields[0]), list(fields[1])).unwrap();
        assert_eq!(proposal.nodes(), shape.nodes());
        assert!(proposal.max_depth() <= shape.levels());
        let verdict = round(&greedy, &proposal, root);
        assert_eq!(verdict.path, list::<usize>(fields[2]));
        assert_eq!(verdict.emitted.last().map(u32::to_string).as_deref(), Some(fields[3]));
        root += verdict.emitted.len();
    }
}
