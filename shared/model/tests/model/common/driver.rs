//! The round of speculative decoding in one process: extend, steps, verify.

use eyrie_kernels::{argmax, top_k_softmax};
use eyrie_model::{
    Aux, DraftCache, DraftRows, DraftState, Eagle3Head, Keep, LogitRows, PageAllocator, SeqRows, SeqTable,
    TargetModel,
};

use super::{PAGE_ROWS, Pool, argmax_rows, values};

/// A target and a draft with room for one sequence.
pub(crate) struct Pair<'a> {
    pub(crate) target: &'a mut dyn TargetModel,
    pub(crate) draft: &'a mut Eagle3Head,
    pool: Pool,
    table: SeqTable,
    draft_cache: DraftCache,
    draft_pages: PageAllocator,
    draft_table: SeqTable,
    /// Emitted tokens; the last has no target row yet.
    pub(crate) tokens: Vec<u32>,
    /// Rows captured at the positions behind the draft's committed slots.
    aux: Aux,
}

/// One tree as the target sees it: node 0 is the root.
pub(crate) struct Tree {
    pub(crate) tokens: Vec<u32>,
    pub(crate) parents: Vec<u16>,
}

impl<'a> Pair<'a> {
    /// Prefills `prompt` and emits the first token.
    pub(crate) fn start(
        target: &'a mut dyn TargetModel,
        draft: &'a mut Eagle3Head,
        prompt: &[u32],
        room: usize,
    ) -> Self {
        let mut pool = Pool::new(target, room);
        let mut table = SeqTable::default();
        let out = pool.feed(target, &mut table, prompt, LogitRows::Last);
        let mut tokens = prompt.to_vec();
        tokens.extend(argmax_rows(out.logits.as_ref().unwrap()));
        let draft_cache = draft.new_cache(room, PAGE_ROWS).unwrap();
        let draft_pages = draft_cache.allocator();
        let (draft_table, aux) = (SeqTable::default(), out.aux.unwrap());
        Self { target, draft, pool, table, draft_cache, draft_pages, draft_table, tokens, aux }
    }

    /// Rows the target holds.
    fn kv_len(&self) -> u32 {
        self.table.len()
    }

    /// Brings the draft up to the target; returns its last state and the logits after it.
    fn extend(&mut self) -> (DraftState, Vec<f32>) {
        let (base_slot, end) = (self.draft_table.len(), self.kv_len());
        self.draft_pages.reserve(&mut self.draft_table, end as usize).unwrap();
        let feature = self.draft.fuse(&self.aux).unwrap();
        let rows = DraftRows {
            table: &self.draft_table,
            base_slot,
            origin: 0,
            tokens: &self.tokens[base_slot as usize + 1..=end as usize],
            feature: &feature,
            parents: None,
        };
        let out = self.draft.extend(&mut self.draft_cache, &[rows]).unwrap();
        self.draft_cache.keep(&mut self.draft_table, Keep::Len(end)).unwrap();
        let last = out.states.rows() - 1;
        (out.states.slice(last..last + 1).unwrap(), values(&out.logits))
    }

    /// Drafts a chain of `k` tokens, verifies it; returns the proposed tokens and how many were accepted.
    pub(crate) fn chain_round(&mut self, k: usize) -> (Vec<u32>, usize) {
        let proposed = self.chain(k);
        let tree = Tree {
            tokens: std::iter::once(*self.tokens.last().unwrap()).chain(proposed.iter().copied()).collect(),
            parents: Vec::new(),
        };
        let y = self.verify(&tree, None);
        let accepted = std::iter::zip(&proposed, &y).take_while(|(d, y)| d == y).count();
        let nodes: Vec<usize> = (0..=accepted).collect();
        self.commit(&nodes, &y, Keep::Len(self.kv_len() + accepted as u32 + 1));
        (proposed, accepted)
    }

    fn chain(&mut self, k: usize) -> Vec<u32> {
        let (mut state, mut logits) = self.extend();
        let end = self.kv_len();
        self.draft_pages.reserve(&mut self.draft_table, end as usize + k).unwrap();
        let mut proposed = vec![self.pick(&logits)];
        while proposed.len() < k {
            let rows = DraftRows {
                table: &self.draft_table,
                base_slot: end + proposed.len() as u32 - 1,
                origin: 0,
                tokens: &proposed[proposed.len() - 1..],
                feature: &state,
                parents: None,
            };
            let out = self.draft.step(&mut self.draft_cache, &[rows]).unwrap();
            (state, logits) = (out.states, values(&out.logits));
            proposed.push(self.pick(&logits));
        }
        proposed
    }

    fn pick(&self, logits: &[f32]) -> u32 {
        self.draft.to_target_id(argmax(logits).unwrap()).unwrap()
    }

    /// The target's own choice after every node.
    fn verify(&mut self, tree: &Tree, parents: Option<&[u16]>) -> Vec<u32> {
        let base_len = self.kv_len();
        let end = base_len as usize + tree.tokens.len();
        self.pool.pages.reserve(&mut self.table, end).unwrap();
        let rows =
            SeqRows { table: &self.table, base_len, tokens: &tree.tokens, parents, logits: LogitRows::All };
        let out = self.target.forward(&[rows], &mut self.pool.cache).unwrap();
        self.aux = out.aux.unwrap();
        argmax_rows(&out.logits.unwrap())
    }

    /// Emits the choices after `nodes` (root first), keeps their rows and features.
    fn commit(&mut self, nodes: &[usize], y: &[u32], keep: Keep<'_>) {
        self.tokens.extend(nodes.iter().map(|&node| y[node]));
        self.aux = self.aux.select(self.draft.backend(), nodes).unwrap();
        self.target.rollback(&mut self.pool.cache, &mut self.table, keep).unwrap();
        let len = self.table.len();
        self.pool.pages.cut(&mut self.table, len);
        let len = self.draft_table.len();
        self.draft_pages.cut(&mut self.draft_table, len);
    }

    /// Grows a dynamic tree of `nodes` nodes with the root, verifies it; returns tree, accepted path, bonus token.
    pub(crate) fn tree_round(&mut self, top_k: usize, depth: usize, nodes: usize) -> (Tree, Vec<usize>, u32) {
        let tree = self.grow(top_k, depth, nodes);
        let y = self.verify(&tree, Some(&tree.parents));
        let mut path = vec![0];
        loop {
            let last = path[path.len() - 1];
            let child = (1..tree.tokens.len())
                .find(|&node| usize::from(tree.parents[node - 1]) == last && tree.tokens[node] == y[last]);
            match child {
                Some(child) => path.push(child),
                None => break,
            }
        }
        self.commit(&path, &y, Keep::Path { base_len: self.kv_len(), nodes: &path });
        let bonus = y[path[path.len() - 1]];
        (tree, path[1..].to_vec(), bonus)
    }

    fn grow(&mut self, top_k: usize, depth: usize, nodes: usize) -> Tree {
        let (state, logits) = self.extend();
        let end = self.kv_len();
        self.draft_pages.reserve(&mut self.draft_table, end as usize + top_k * (depth - 1)).unwrap();
        let mut found = Candidates::default();
        let root: Vec<usize> = found.add(None, 1.0, &logits, top_k);
        let mut beam = root;
        let mut states = state.select(&super::backend(1), &vec![0; top_k]).unwrap();
        let (mut parents, mut previous): (Vec<u16>, Vec<usize>) = (vec![0; top_k], Vec::new());
        for level in 1..depth {
            let tokens: Vec<u32> =
                beam.iter().map(|&c| self.draft.to_target_id(found.token[c]).unwrap()).collect();
            if level > 1 {
                let rows: Vec<usize> = beam
                    .iter()
                    .map(|&c| previous.iter().position(|&p| Some(p) == found.parent[c]).unwrap())
                    .collect();
                states = states.select(&super::backend(1), &rows).unwrap();
                parents.extend(rows.iter().map(|&row| (1 + top_k * (level - 2) + row) as u16));
            }
            let rows = DraftRows {
                table: &self.draft_table,
                base_slot: end + (top_k * (level - 1)) as u32,
                origin: 0,
                tokens: &tokens,
                feature: &states,
                parents: Some(&parents),
            };
            let out = self.draft.step(&mut self.draft_cache, &[rows]).unwrap();
            states = out.states;
            let logits = values(&out.logits);
            let width = logits.len() / top_k;
            let mut children = Vec::new();
            for (row, &candidate) in logits.chunks(width).zip(&beam) {
                children.extend(found.add(Some(candidate), found.score[candidate], row, top_k));
            }
            previous = beam;
            beam = found.best(&children, top_k);
        }
        let all: Vec<usize> = (0..found.score.len()).collect();
        let mut chosen = found.best(&all, nodes - 1);
        chosen.sort_unstable();
        self.tree_of(&found, &chosen)
    }

    fn tree_of(&self, found: &Candidates, chosen: &[usize]) -> Tree {
        let mut tokens = vec![*self.tokens.last().unwrap()];
        let mut parents = Vec::new();
        for &candidate in chosen {
            tokens.push(self.draft.to_target_id(found.token[candidate]).unwrap());
            let parent = found.parent[candidate].map_or(0, |p| 1 + chosen.binary_search(&p).unwrap());
            parents.push(parent as u16);
        }
        Tree { tokens, parents }
    }
}

/// Every candidate of a growing tree, numbered in the order found.
#[derive(Default)]
struct Candidates {
    token: Vec<u32>,
    parent: Vec<Option<usize>>,
    score: Vec<f64>,
}

impl Candidates {
    fn add(&mut self, parent: Option<usize>, score: f64, logits: &[f32], top_k: usize) -> Vec<usize> {
        let first = self.token.len();
        for (token, probability) in top_k_softmax(logits, top_k).unwrap() {
            self.token.push(token);
            self.parent.push(parent);
            self.score.push(score * f64::from(probability));
        }
        (first..self.token.len()).collect()
    }

    fn best(&self, among: &[usize], n: usize) -> Vec<usize> {
        let mut order = among.to_vec();
        order.sort_by(|&a, &b| self.score[b].total_cmp(&self.score[a]).then(a.cmp(&b)));
        order.truncate(n);
        order
    }
}
