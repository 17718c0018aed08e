//! Greedy tokens and chain rounds of the bundled pair, computed by an independent reference.

use std::collections::BTreeMap;

use serde::Deserialize;

/// One prompt with what the reference computed for it.
#[derive(Debug, Clone, Deserialize)]
pub struct Golden {
    /// Name.
    pub id: String,
    /// Text.
    pub prompt: String,
    /// Its encoding.
    pub prompt_ids: Vec<u32>,
    /// 96 greedy tokens; the end-of-sequence id is not a stop.
    pub greedy_ids: Vec<u32>,
    /// Smallest top-1 to top-2 gap of the target's logits.
    pub min_gap: f64,
    /// By K: the rounds.
    pub chain: BTreeMap<String, Chain>,
    /// By nodes with the root, top-k 4 and 5 levels: the rounds; of the first prompts only.
    #[serde(default)]
    pub tree: BTreeMap<String, Tree>,
}

/// The dynamic-tree rounds of one size.
#[derive(Debug, Clone, Deserialize)]
pub struct Tree {
    /// In order.
    pub rounds: Vec<TreeRound>,
}

/// One dynamic-tree round; node 0 is the root.
#[derive(Debug, Clone, Deserialize)]
pub struct TreeRound {
    /// Parent of each node, -1 for the root.
    pub parents: Vec<i64>,
    /// Token of each node.
    pub tokens: Vec<u32>,
    /// Accepted nodes, the root left out.
    pub accepted_path: Vec<u32>,
    /// Smallest relative score gap at a cut.
    pub min_rel_gap: f64,
}

/// The chain rounds of one K.
#[derive(Debug, Clone, Deserialize)]
pub struct Chain {
    /// Drafted ids and how many were accepted.
    pub rounds: Vec<(Vec<u32>, u32)>,
    /// Smallest top-1 to top-2 gap of the draft's logits.
    pub min_draft_gap: f64,
}

/// All goldens.
pub fn goldens() -> Vec<Golden> {
    let path = crate::root().join("tests/goldens/goldens_a.jsonl");
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    text.lines()
        .map(|l| serde_json::from_str(l).unwrap_or_else(|e| panic!("{}: {e}", path.display())))
        .collect()
}
