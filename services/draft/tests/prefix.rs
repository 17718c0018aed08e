//! New sequences that start with the slots of others whose tokens begin alike.
#![allow(clippy::unwrap_used, reason = "a helper that fails fails its test")]

mod common;

use common::exporter::Exporter;
use common::reference::{Text, texts, texts_of};
use common::{Draft, Rounds, item, proposal};
use eyrie_draft::DraftOptions;
use eyrie_wire::v1::{CloseDraft, DraftItem, FeatureRef, Proposal, Propose, TreeShape, draft_item};

/// Slots of a page of the draft's cache.
const PAGE: u32 = 32;
/// Bytes of that page: keys and values of 2 heads of 64 values a slot.
const PAGE_BYTES: u64 = PAGE as u64 * 2 * 2 * 64 * 4;
const TREE: TreeShape = TreeShape { top_k: 3, levels: 3, nodes: 10 };

/// A draft whose prefix cache may keep `bytes`, and the target it is attached to.
struct Pair {
    exporter: Exporter,
    draft: Draft,
    rounds: Rounds,
    seq: u64,
    _dir: tempfile::TempDir,
}

impl Pair {
    async fn start(bytes: Option<u64>) -> Self {
        Self::start_with(|options| options.prefix_cache_bytes = bytes).await
    }

    async fn start_with(edit: impl FnOnce(&mut DraftOptions)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let exporter = Exporter::start(dir.path());
        let draft = Draft::start_with(dir.path(), &exporter.address, edit).await;
        draft.until_attached(true).await;
        let rounds = draft.rounds(7).await;
        Self { exporter, draft, rounds, seq: 0, _dir: dir }
    }

    fn features(&mut self, text: &Text, from: u32, to: u32) -> Vec<FeatureRef> {
        self.exporter.publish(from, text.rows(from, to))
    }

    /// Takes in all of `text` below `base_len` as a new sequence; returns its number.
    async fn ingest(&mut self, text: &Text, base_len: u32) -> u64 {
        self.seq += 1;
        let features = self.features(text, 0, base_len);
        self.rounds.proposal(self.seq, propose(text, base_len, features, 0)).await;
        self.seq
    }

    async fn close(&mut self, seq: u64) {
        self.rounds.send(vec![DraftItem { seq, op: Some(draft_item::Op::Close(CloseDraft {})) }]).await;
    }

    /// What a new sequence lacks, without any features: the slots it has.
    async fn held(&mut self, text: &Text, base_len: u32) -> u32 {
        self.seq += 1;
        let held = self.rounds.need(self.seq, propose(text, base_len, Vec::new(), 3)).await;
        self.close(self.seq).await;
        held
    }

    /// A chain and a tree of a new sequence that is handed the features from `from` on.
    async fn proposals(&mut self, text: &Text, from: u32, base_len: u32) -> [Proposal; 2] {
        self.seq += 1;
        let features = self.features(text, from, base_len);
        let chain = self.rounds.proposal(self.seq, propose(text, base_len, features, 5)).await;
        let tree = Propose { tree: Some(TREE), ..propose(text, base_len, Vec::new(), 0) };
        [chain, self.rounds.proposal(self.seq, tree).await]
    }
}

fn propose(text: &Text, base_len: u32, features: Vec<FeatureRef>, k: u32) -> Propose {
    let tokens = text.tokens(0, base_len);
    Propose { round: base_len, base_len, tokens, features, k, ..Default::default() }
}

/// Texts that begin as `text` and go on as `other` from position `fork` on.
fn forks(text: &Text, other: &Text, forks: &[usize]) -> Vec<Text> {
    let fork = |&at: &usize| [&text.tokens[..at], &other.tokens[..40]].concat();
    texts_of(forks.iter().map(fork), 0)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prefix_of_equal_tokens_gives_one_slot_less_and_the_same_proposals() {
    let (mut warm, mut cold) = (Pair::start(None).await, Pair::start(Some(0)).await);
    let texts = texts(2);
    let end = 2 * PAGE + 9;
    let first = warm.ingest(&texts[0], end).await;
    warm.close(first).await;
    let at = [1, 2, 31, 32, 33, 34, 64, 65, 66];
    for (text, at) in forks(&texts[0], &texts[1], &at).iter().zip(at) {
        let base_len = at as u32 + 20;
        let known = (at as u32 - 1).min(2 * PAGE);
        assert_eq!(warm.held(text, base_len).await, known, "fork at {at}");
        assert_eq!(cold.held(text, base_len).await, 0);
        let expected = cold.proposals(text, 0, base_len).await;
        assert_eq!(warm.proposals(text, known, base_len).await, expected, "fork at {at}");
        // Features for slots it has are skipped.
        assert_eq!(warm.proposals(text, 0, base_len).await, expected, "fork at {at}");
    }
    // What drafting and forks wrote behind shared slots has not changed them.
    let expected = cold.proposals(&texts[0], 0, end).await;
    assert_eq!(warm.proposals(&texts[0], 2 * PAGE, end).await, expected);
    warm.draft.stop().await;
    cold.draft.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sequence_that_is_known_to_its_end_runs_its_last_slot_again() {
    let (mut warm, mut cold) = (Pair::start(None).await, Pair::start(Some(0)).await);
    let text = &texts(1)[0];
    let first = warm.ingest(text, 2 * PAGE).await;
    warm.close(first).await;
    let expected = cold.proposals(text, 0, 2 * PAGE).await;
    assert_eq!(warm.held(text, 2 * PAGE).await, 2 * PAGE - 1, "drafting needs the last feature");
    assert_eq!(warm.proposals(text, 2 * PAGE - 1, 2 * PAGE).await, expected);
    warm.seq += 1;
    let nothing = warm.rounds.proposal(warm.seq, propose(text, 2 * PAGE, Vec::new(), 0)).await;
    assert_eq!(nothing.base_len, 2 * PAGE, "taking in tokens needs no feature");
    warm.draft.stop().await;
    cold.draft.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sequences_that_live_side_by_side_share_and_then_part() {
    let (mut warm, mut cold) = (Pair::start(None).await, Pair::start(Some(0)).await);
    let texts = texts(2);
    let base_len = 2 * PAGE + 5;
    let lives = warm.ingest(&texts[0], base_len).await;
    let fork = &forks(&texts[0], &texts[1], &[PAGE as usize + 7])[0];
    let (held, end) = (PAGE + 6, PAGE + 30);
    assert_eq!(warm.held(fork, end).await, held);
    let expected = cold.proposals(fork, 0, end).await;
    assert_eq!(warm.proposals(fork, held, end).await, expected);
    // The first one is cut into a page that it shares, takes the other turn as well, and then its own again.
    for (text, base_len) in [(fork, end), (&texts[0], base_len)] {
        let features = warm.features(text, 0, base_len);
        let round = item(lives, propose(text, base_len, features.clone(), 5));
        warm.rounds.send(vec![round]).await;
        let given = proposal(warm.rounds.receive(1).await.remove(0).body.unwrap());
        assert_eq!(given, cold.proposals(text, 0, base_len).await[0]);
    }
    assert_eq!(warm.proposals(fork, held, end).await, expected);
    warm.draft.stop().await;
    cold.draft.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slots_of_a_late_start_are_not_known_and_known_slots_reach_beyond_a_late_start() {
    let mut warm = Pair::start(None).await;
    let text = &texts(1)[0];
    let (start, end) = (10, 2 * PAGE + 20);
    warm.seq += 1;
    let features = warm.features(text, start, end);
    let late = Propose { start, ..propose(text, end, features, 3) };
    warm.rounds.proposal(warm.seq, late.clone()).await;
    warm.close(warm.seq).await;
    assert_eq!(warm.held(text, end).await, 0);

    let first = warm.ingest(text, end).await;
    warm.close(first).await;
    let expected = warm.proposals(text, 0, end).await;
    warm.seq += 1;
    let features = warm.features(text, start, end);
    let given = warm.rounds.proposal(warm.seq, Propose { features, k: 5, ..late }).await;
    assert_eq!(given, expected[0], "all positions are known, none is left out");
    warm.draft.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn targets_share_what_may_be_kept() {
    for (others, kept) in [(0, 2 * PAGE), (1, PAGE)] {
        let mut pair = Pair::start_with(|options| {
            options.prefix_cache_bytes = Some(2 * PAGE_BYTES);
            options.targets.extend((0..others).map(|i| format!("unix:/nowhere/{i}").parse().unwrap()));
        })
        .await;
        let text = &texts(1)[0];
        let first = pair.ingest(text, 3 * PAGE + 9).await;
        pair.close(first).await;
        assert_eq!(pair.held(text, 3 * PAGE + 9).await, kept);
        pair.draft.stop().await;
    }
}
