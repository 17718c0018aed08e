//! A1 and A2: turns and commits of a sequence against an oracle that knows the plain tokens and counts.

use eyrie_speculation::{Proposal, SamplingParams, StopRules, verify};
use eyrie_wire::v1::{Committed, FinishReason};
use proptest::prelude::*;

use super::StreamId;
use super::sequence::{Request, Sequence, Turn};

const STOP: u32 = 0;

/// The token that plain decoding draws after `tokens`.
fn next(tokens: &[u32]) -> u32 {
    tokens.iter().rev().take(3).fold(11, |hash: u32, &t| hash.wrapping_mul(31).wrapping_add(t)) % 23
}

/// What a sequence is: so many of the plain tokens.
struct Oracle {
    prompt: u32,
    /// All tokens that plain decoding emits, the one that ends it included.
    plain: Vec<u32>,
    emitted: usize,
    round: u32,
    /// Steps that run or are still to run.
    steps: u32,
    answered: ((u32, u32), Vec<Committed>),
}

impl Oracle {
    fn new(prompt: &[u32], max_tokens: usize) -> Self {
        let mut tokens = prompt.to_vec();
        while tokens.len() < prompt.len() + max_tokens
            && (tokens.len() == prompt.len() || tokens.last() != Some(&STOP))
        {
            tokens.push(next(&tokens));
        }
        let (prompt, plain) = (prompt.len() as u32, tokens.split_off(prompt.len()));
        Self { prompt, plain, emitted: 1, round: 0, steps: 0, answered: Default::default() }
    }

    fn kv_len(&self) -> u32 {
        self.prompt + self.emitted as u32 - 1
    }

    fn goes_on(&self) -> bool {
        self.emitted < self.plain.len()
    }

    fn turn(&self, round: u32, base_len: u32) -> Turn {
        let (first, replies) = &self.answered;
        let (expected_round, expected_len) = (self.round + 1, self.kv_len());
        match (round, base_len) {
            given if round > 0 && given == *first => Turn::Repeated(replies.clone()),
            given if given == (expected_round, expected_len) && self.steps == 0 && self.goes_on() => {
                Turn::Next
            }
            _ => Turn::Wrong { expected_len, expected_round },
        }
    }

    /// The reply of a step that verified `proposal`.
    fn commit(&mut self, proposal: &Proposal) -> Committed {
        let (mut node, mut path) = (0, Vec::new());
        let wanted = |i: usize| self.plain.get(self.emitted + i).copied();
        while let Some(child) = proposal.children(node).find(|&c| proposal.token(c) == wanted(path.len())) {
            node = child;
            path.push(child as u32);
        }
        let tokens: Vec<u32> = self.plain[self.emitted..].iter().copied().take(path.len() + 1).collect();
        self.emitted += tokens.len();
        self.round += 1;
        self.steps = if self.goes_on() { self.steps - 1 } else { 0 };
        let finish = match (self.goes_on(), self.plain.last()) {
            (true, _) => FinishReason::Unspecified,
            (false, Some(&STOP)) => FinishReason::Stop,
            (false, _) => FinishReason::Length,
        };
        let (round, kv_len, last) = (self.round, self.kv_len(), self.steps == 0);
        let reply =
            Committed { round, kv_len, tokens, path, finish: finish as i32, last, ..Default::default() };
        self.answered.1.push(reply.clone());
        reply
    }
}

#[derive(Debug, Clone)]
enum Act {
    /// A Verify: its turn off by so much, and what it drafts.
    Verify {
        round: i32,
        base_len: i32,
        draft: Draft,
    },
    /// The first Verify of the latest answer, once more.
    Repeat,
    /// One step of what runs.
    Step,
    Revoke,
}

#[derive(Debug, Clone)]
enum Draft {
    Credit(u32),
    /// A tree: parents, and whether each token is the plain one at its depth.
    Tree(Vec<(u16, bool)>),
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let off = || prop_oneof![8 => Just(0), 1 => -2..=2];
    let tree = prop::collection::vec((0u16..9, prop::bool::weighted(0.8)), 1..9).prop_map(Draft::Tree);
    let draft = prop_oneof![1 => (0u32..6).prop_map(Draft::Credit), 2 => tree];
    let verify =
        (off(), off(), draft).prop_map(|(round, base_len, draft)| Act::Verify { round, base_len, draft });
    prop::collection::vec(
        prop_oneof![6 => verify, 6 => Just(Act::Step), 1 => Just(Act::Revoke), 2 => Just(Act::Repeat)],
        1..80,
    )
}

struct Play {
    sequence: Sequence,
    oracle: Oracle,
    /// What the running step verifies.
    proposal: Proposal,
}

impl Play {
    fn opened(prompt: &[u32], max_tokens: u32) -> Self {
        let oracle = Oracle::new(prompt, max_tokens as usize);
        let request = Request {
            tokens: prompt.to_vec(),
            generated: 0,
            sampling: SamplingParams::default(),
            rules: StopRules::max_tokens(max_tokens).stop_ids([STOP]),
            features: false,
            priority: 0,
        };
        let mut sequence = Sequence::new(request, StreamId(1), 0);
        sequence.advance(prompt.len() as u32);
        let opened = sequence.first_token(oracle.plain[0]);
        assert_eq!((opened.kv_len, opened.finish == 0), (oracle.kv_len(), oracle.goes_on()));
        Self { sequence, oracle, proposal: Proposal::empty() }
    }

    /// A proper tree from arbitrary parents: siblings with one token are left out.
    fn proposal(&self, draft: &[(u16, bool)]) -> Proposal {
        let mut built = Proposal::empty();
        for &(parent, right) in draft {
            let parent = parent.min(built.len() as u16);
            let at = self.oracle.emitted + built.depth(parent.into());
            let token = self.oracle.plain.get(at).map_or(5, |&token| if right { token } else { token + 1 });
            let tokens = [built.tokens(), &[token]].concat();
            let parents = [built.parents(), &[parent]].concat();
            built = Proposal::try_new(tokens, parents).unwrap_or(built);
        }
        built
    }

    fn verify(&mut self, round: u32, base_len: u32, draft: &Draft) {
        let turn = self.sequence.turn(round, base_len);
        assert_eq!(turn, self.oracle.turn(round, base_len));
        if turn != Turn::Next {
            return;
        }
        let (proposal, steps) = match draft {
            Draft::Credit(steps) => (Proposal::empty(), *steps),
            Draft::Tree(nodes) => (self.proposal(nodes), 1),
        };
        let root = self.oracle.plain[self.oracle.emitted - 1];
        self.sequence.begin_round(root, proposal.clone(), steps);
        self.oracle.steps = steps.max(1);
        self.oracle.answered = ((round, base_len), Vec::new());
        self.proposal = proposal;
    }

    fn step(&mut self) {
        assert_eq!(self.sequence.has_work(), self.oracle.steps > 0);
        if self.oracle.steps == 0 {
            return;
        }
        let proposal = std::mem::replace(&mut self.proposal, Proposal::empty());
        let tokens = self.sequence.tokens.clone();
        let verdict = verify(&proposal, self.sequence.kv_len, |node, _| {
            let drafted = proposal.ancestors(node).into_iter().filter_map(|n| proposal.token(n));
            Ok::<_, ()>(next(&tokens.iter().copied().chain(drafted).collect::<Vec<_>>()))
        });
        let reply = self.sequence.commit(&verdict.unwrap(), Vec::new());
        let path = reply.path.clone();
        let expected = self.oracle.commit(&proposal);
        // Beyond the end nothing is plain: there the path is whatever the draft had right.
        assert!(path.starts_with(&expected.path));
        assert_eq!(Committed { path: expected.path.clone(), ..reply }, expected);
        self.oracle.answered.1.last_mut().unwrap().path = path;
    }
}

proptest! {
    #[test]
    fn turns_and_commits_are_those_of_plain_counting(
        prompt in prop::collection::vec(1u32..23, 1..6),
        max_tokens in 1u32..60,
        acts in acts(),
    ) {
        let mut play = Play::opened(&prompt, max_tokens);
        for act in acts {
            match act {
                Act::Verify { round, base_len, draft } => {
                    let round = (play.oracle.round + 1).saturating_add_signed(round);
                    let base_len = play.oracle.kv_len().saturating_add_signed(base_len);
                    play.verify(round, base_len, &draft);
                }
                Act::Repeat => {
                    let (round, base_len) = play.oracle.answered.0;
                    play.verify(round, base_len, &Draft::Credit(1));
                }
                Act::Step => play.step(),
                Act::Revoke => {
                    play.sequence.revoke();
                    play.oracle.steps = play.oracle.steps.min(1);
                }
            }
            let Play { sequence, oracle, .. } = &play;
            prop_assert_eq!(sequence.kv_len, oracle.kv_len());
            prop_assert_eq!(&sequence.tokens[prompt.len()..], &oracle.plain[..oracle.emitted]);
            prop_assert_eq!(sequence.is_finished(), !oracle.goes_on());
        }
    }
}
