//! The state machine against an oracle of both peers that keeps no state but token lists.

use eyrie_speculation::{TreeShape, verify};
use eyrie_wire::v1::draft_out::Body;
use eyrie_wire::v1::{DraftOut, FeatureRef, Features, Need, Proposal as WireProposal};
use proptest::prelude::*;

use super::*;
use crate::draft_side::Heard;

const VOCAB: u32 = 50;

fn next(tokens: &[u32]) -> u32 {
    tokens.iter().rev().take(3).fold(7u32, |h, &t| h.wrapping_mul(31).wrapping_add(t)) % VOCAB
}

fn rows(first: u32, end: u32) -> Vec<FeatureRef> {
    let some = FeatureRef { first, rows: end.saturating_sub(first), at: None };
    if end > first { vec![some] } else { Vec::new() }
}

/// The target as plain decoding defines it.
struct Oracle {
    tokens: Vec<u32>,
}

impl Oracle {
    fn answer(&mut self, verify_msg: &Verify) -> Vec<Committed> {
        assert_eq!(verify_msg.root, *self.tokens.last().unwrap());
        assert_eq!(verify_msg.base_len as usize + 1, self.tokens.len());
        let parents = verify_msg.parents.iter().map(|&p| p as u16).collect::<Vec<_>>();
        let proposal = match parents.is_empty() {
            true => Proposal::chain(verify_msg.tokens.clone()).unwrap(),
            false => Proposal::try_new(verify_msg.tokens.clone(), parents).unwrap(),
        };
        let steps = verify_msg.steps.max(1);
        let step = |i| {
            let base = self.tokens.len() as u32 - 1;
            let verdict = verify(&proposal, base, |node, _| {
                let drafted = proposal.ancestors(node).into_iter().filter_map(|n| proposal.token(n));
                Ok::<_, ()>(next(&self.tokens.iter().copied().chain(drafted).collect::<Vec<_>>()))
            })
            .unwrap();
            self.tokens.extend_from_slice(&verdict.emitted);
            let kv_len = self.tokens.len() as u32 - 1;
            Committed {
                round: verify_msg.round + i,
                kv_len,
                tokens: verdict.emitted,
                path: verdict.path.iter().map(|&n| n as u32).collect(),
                features: rows(base, kv_len),
                last: i + 1 == steps,
                ..Default::default()
            }
        };
        (0..steps).map(step).collect()
    }
}

/// The draft as the contract defines it; `wrong` spoils its tokens.
#[derive(Default)]
struct Head {
    tokens: Vec<u32>,
    have: u32,
}

impl Head {
    fn answer(&mut self, propose: &Propose, wrong: u32) -> Body {
        assert_eq!(propose.token_from as usize + propose.tokens.len(), propose.base_len as usize + 1);
        if propose.token_from as usize > self.tokens.len() {
            return Body::Need(Need { from: self.tokens.len() as u32 });
        }
        self.tokens.truncate(propose.token_from as usize);
        self.tokens.extend_from_slice(&propose.tokens);
        self.have = self.have.min(propose.base_len);
        for part in &propose.features {
            assert!(part.first + part.rows <= propose.base_len, "no feature from beyond the base");
            if part.first <= self.have {
                self.have = self.have.max(part.first + part.rows);
            }
        }
        if self.have < propose.base_len {
            return Body::Need(Need { from: self.have });
        }
        let mut prefix = self.tokens.clone();
        let (mut tokens, mut parents) = (Vec::new(), Vec::new());
        let mut node = 0;
        for i in 0..propose.tree.map_or(propose.k, |shape| shape.levels) {
            let token = (next(&prefix) + u32::from(wrong == i)) % VOCAB;
            prefix.push(token);
            // In a tree the path has wrong siblings before it.
            for token in vec![(token + 7) % VOCAB, token].split_off(usize::from(propose.tree.is_none())) {
                tokens.push(token);
                parents.push(node);
            }
            node = tokens.len() as u32;
        }
        if propose.tree.is_none() {
            parents.clear();
        }
        Body::Proposal(WireProposal { base_len: propose.base_len, tokens, parents })
    }
}

#[derive(Debug, Clone)]
enum Turn {
    /// A chain of k, or a tree as deep, wrong at one place; `late`: the reply comes after the deadline.
    Draft {
        k: u32,
        tree: bool,
        wrong: u32,
        late: bool,
    },
    Plain {
        steps: u32,
    },
    /// The draft restarts, known to the gateway (a new stream) or not.
    Restart {
        known: bool,
    },
}

fn turns() -> impl Strategy<Value = Vec<Turn>> {
    let turn = prop_oneof![
        6 => (1u32..6, any::<bool>(), 0u32..8, prop::bool::weighted(0.1))
            .prop_map(|(k, tree, wrong, late)| Turn::Draft { k, tree, wrong, late }),
        2 => (1u32..5).prop_map(|steps| Turn::Plain { steps }),
        1 => any::<bool>().prop_map(|known| Turn::Restart { known }),
    ];
    prop::collection::vec(turn, 1..40)
}

fn opened(prompt: &[u32]) -> (Rounds, Oracle) {
    let mut rounds = Rounds::opening(prompt.to_vec(), VOCAB);
    let first = next(prompt);
    let kv_len = prompt.len() as u32;
    rounds.draft.features(Features { refs: rows(0, kv_len), first_held: 0, fetched: false });
    let committed = Committed { kv_len, tokens: vec![first], last: true, ..Default::default() };
    assert_eq!(rounds.committed(committed).unwrap().unwrap().tokens, [first]);
    let mut tokens = prompt.to_vec();
    tokens.push(first);
    (rounds, Oracle { tokens })
}

fn ask(k: u32, tree: bool) -> Ask {
    let depth = k as usize;
    if tree { Ask::Tree(TreeShape::try_new(2, depth, 1 + 2 * depth).unwrap()) } else { Ask::Chain(k) }
}

struct Play {
    rounds: Rounds,
    oracle: Oracle,
    head: Head,
    late: Vec<DraftOut>,
}

impl Play {
    fn propose(&mut self, ask: Ask, wrong: u32, late: bool) -> Proposal {
        let next = self.rounds.next();
        for out in self.late.drain(..) {
            self.rounds.draft.overhear(out, next);
        }
        if !self.rounds.draft.ready() {
            return Proposal::empty();
        }
        let propose = self.rounds.propose(ask);
        let body = Some(self.head.answer(&propose, wrong));
        let out = DraftOut { seq: 1, round: propose.round, body };
        if late {
            self.late.push(out);
            return Proposal::empty();
        }
        match self.rounds.draft.hear(out, next, ask, VOCAB) {
            Heard::Proposal(proposal) => proposal,
            Heard::Need => Proposal::empty(),
            other => panic!("{other:?}"),
        }
    }

    /// One round; how many drafts were accepted.
    fn round(&mut self, proposal: Proposal, steps: u32) -> usize {
        if let Some(from) = self.rounds.draft.fetch() {
            // At most a few rows at once, so that healing takes several turns.
            let end = (from + 9).min(self.oracle.tokens.len() as u32 - 1);
            let refs = rows(from, end);
            self.rounds.draft.features(Features { refs, first_held: from, fetched: true });
        }
        let asked = self.rounds.verify(proposal, steps);
        let mut accepted = 0;
        for committed in self.oracle.answer(&asked) {
            let last = committed.last;
            let commit = self.rounds.committed(committed).unwrap().unwrap();
            assert_eq!(commit.last, last);
            accepted += commit.path.len();
        }
        assert_eq!(self.rounds.tokens, self.oracle.tokens);
        assert_eq!(self.rounds.kv_len as usize + 1, self.oracle.tokens.len());
        accepted
    }
}

proptest! {
    /// Whatever the draft does the tokens are the plain ones, and in the end it is healed.
    #[test]
    fn tokens_are_plain_and_the_draft_heals(
        prompt in prop::collection::vec(0..VOCAB, 1..40),
        turns in turns(),
    ) {
        let (rounds, oracle) = opened(&prompt);
        let mut play = Play { rounds, oracle, head: Head::default(), late: Vec::new() };
        for turn in turns {
            match turn {
                Turn::Draft { k, tree, wrong, late } => {
                    let proposal = play.propose(ask(k, tree), wrong, late);
                    let right = proposal.max_depth().min(wrong as usize);
                    prop_assert_eq!(play.round(proposal, 1), right);
                }
                Turn::Plain { steps } => {
                    play.round(Proposal::empty(), steps);
                }
                Turn::Restart { known } => {
                    play.head = Head::default();
                    if known {
                        play.rounds.draft.joined();
                        play.late.clear();
                    }
                }
            }
        }
        let mut plain = prompt.clone();
        while plain.len() < play.oracle.tokens.len() {
            plain.push(next(&plain));
        }
        prop_assert_eq!(&play.rounds.tokens, &plain);
        let healed = (0..play.oracle.tokens.len()).any(|_| {
            let proposal = play.propose(Ask::Chain(3), 9, false);
            play.round(proposal, 1) == 3
        });
        prop_assert!(healed, "no proposal was accepted although the draft is fine");
    }
}

fn verifying(tokens: &[u32]) -> Rounds {
    let (mut rounds, _) = opened(&[1, 2, 3]);
    rounds.verify(Proposal::chain(tokens.to_vec()).unwrap(), 1);
    rounds
}

#[test]
fn a_target_that_contradicts_the_question_is_caught() {
    let ok = Committed { round: 1, kv_len: 6, tokens: vec![7, 8, 9], path: vec![1, 2], ..Default::default() };
    assert!(verifying(&[7, 8, 5]).committed(ok.clone()).is_ok());
    for (answer, line) in [
        (Committed { round: 2, ..ok.clone() }, "answered round 2, expected 1"),
        (Committed { kv_len: 7, ..ok.clone() }, "kv_len 7 after round 1, expected 6"),
        (Committed { tokens: vec![7, 8], ..ok.clone() }, "emitted 2 tokens in round 1, expected 3"),
        (Committed { tokens: vec![7, 8, 9, 9], ..ok.clone() }, "emitted 4 tokens in round 1, expected 3"),
        (Committed { tokens: vec![7, 9, 9], ..ok.clone() }, "emitted 9 in round 1 where it accepted draft 8"),
        (Committed { tokens: vec![7, 8, 50], ..ok.clone() }, "token 50, the vocabulary size is 50"),
        (Committed { path: vec![1, 3], ..ok.clone() }, "node 3 in round 1, which does not follow node 1"),
        (Committed { path: vec![0, 1], ..ok.clone() }, "node 0 in round 1"),
        (Committed { path: vec![1, 9], ..ok.clone() }, "node 9 in round 1"),
    ] {
        let violation = verifying(&[7, 8, 5]).committed(answer).unwrap_err().to_string();
        assert!(violation.contains(line), "{violation} lacks {line}");
    }
    let mut rounds = verifying(&[]);
    let plain = Committed { round: 1, kv_len: 4, tokens: vec![7], last: true, ..Default::default() };
    assert!(rounds.committed(plain.clone()).unwrap().is_some());
    assert_eq!(rounds.committed(plain.clone()), Ok(None), "a repeat says nothing new");
    let unasked = Committed { round: 2, ..plain };
    assert_eq!(rounds.committed(unasked).unwrap_err(), Violation::Unasked { given: 2 });
}

#[test]
fn a_finish_may_cut_the_emitted_run() {
    let finish = FinishReason::Length as i32;
    let cut =
        Committed { round: 1, kv_len: 6, tokens: vec![7], path: vec![1, 2], finish, ..Default::default() };
    let commit = verifying(&[7, 8, 5]).committed(cut).unwrap().unwrap();
    assert_eq!((commit.tokens, commit.path, commit.finish), (vec![7], vec![1, 2], FinishReason::Length));
    assert!(commit.last);
}

#[test]
fn prompt_chunks_are_handed_over_with_the_token_after_them() {
    let mut rounds = Rounds::opening((0..20).collect(), VOCAB);
    assert!(rounds.ingest().is_none());
    rounds.draft.published(rows(0, 8));
    let chunk = rounds.ingest().unwrap();
    assert_eq!((chunk.round, chunk.k, chunk.base_len, chunk.token_from), (0, 0, 8, 0));
    assert_eq!(chunk.tokens, (0..=8).collect::<Vec<_>>());
    rounds.draft.published(rows(8, 16));
    let chunk = rounds.ingest().unwrap();
    assert_eq!((chunk.base_len, chunk.token_from), (16, 9));
    // The last chunk needs the first generated token.
    rounds.draft.published(rows(16, 20));
    assert!(rounds.ingest().is_none());
    let first = Committed { kv_len: 20, tokens: vec![3], last: true, ..Default::default() };
    rounds.committed(first).unwrap();
    let propose = rounds.propose(Ask::Chain(2));
    assert_eq!((propose.base_len, propose.token_from, propose.features.len()), (20, 17, 1));
}
