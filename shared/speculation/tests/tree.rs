//! The grower against the published numbering scheme: candidates, parent table and rerank written
//! out over flat arrays, as the reference implementations have them.
#![expect(clippy::unwrap_used, clippy::expect_used, reason = "a failed test helper should panic")]

use eyrie_speculation::{GrowError, Proposal, TreeGrower, TreeShape};
use proptest::prelude::*;

type Row = Vec<(u32, f32)>;

/// What the draft answers at (level, row).
fn grow(shape: TreeShape, rows: impl Fn(usize, usize) -> Row) -> (TreeGrower, Vec<Vec<usize>>) {
    let mut grower = TreeGrower::new(shape);
    grower.level0(&rows(0, 0)).unwrap();
    let mut beams = Vec::new();
    while !grower.is_complete() {
        beams.push(grower.beam().iter().map(|node| node.candidate).collect());
        let children: Vec<Row> = (0..grower.beam().len()).map(|row| rows(grower.grown(), row)).collect();
        grower.expand(&children).unwrap();
    }
    (grower, beams)
}

fn best(scores: &[f64], range: std::ops::Range<usize>, count: usize) -> Vec<usize> {
    let mut ids: Vec<usize> = range.collect();
    ids.sort_by(|&a, &b| scores[b].partial_cmp(&scores[a]).unwrap().then(a.cmp(&b)));
    ids.truncate(count);
    ids
}

/// parent(f) = root if f div k == 0 else PL[f div k], PL = [−1, 0..k−1] ++ beam_1 ++ beam_2 …
fn reference(shape: TreeShape, rows: impl Fn(usize, usize) -> Row) -> (Proposal, Vec<Vec<usize>>) {
    let k = shape.top_k();
    let (mut tokens, mut scores): (Vec<u32>, Vec<f64>) =
        rows(0, 0).into_iter().map(|(token, prob)| (token, f64::from(prob))).unzip();
    let mut table = vec![usize::MAX];
    let mut beam = best(&scores, 0..k, k);
    // Level 0 enters the table in candidate order, which is its beam order for sorted rows.
    let mut beams = Vec::new();
    for level in 1..shape.levels() {
        let first = tokens.len();
        for (row, &parent) in beam.iter().enumerate() {
            for (token, prob) in rows(level, row) {
                tokens.push(token);
                scores.push(scores[parent] * f64::from(prob));
            }
        }
        table.extend(&beam);
        beams.push(beam);
        beam = best(&scores, first..tokens.len(), k);
    }
    let mut chosen = best(&scores, 0..tokens.len(), shape.nodes() - 1);
    chosen.sort_unstable();
    let parent = |&f: &usize| match f / k {
        0 => 0,
        entry => 1 + chosen.iter().position(|&c| c == table[entry]).expect("parent selected") as u16,
    };
    let proposal =
        Proposal::try_new(chosen.iter().map(|&f| tokens[f]).collect(), chosen.iter().map(parent).collect());
    (proposal.unwrap(), beams)
}

/// Sorted rows drawn from few values, so that ties (p = 1 and p = 0 too) are the rule.
fn tied_row(k: usize, picks: &[u8]) -> Row {
    const VALUES: [f32; 6] = [1.0, 1.0, 0.5, 0.25, 0.0, 1e-30];
    let mut probs: Vec<f32> = picks[..k].iter().map(|&p| VALUES[usize::from(p) % 6]).collect();
    probs.sort_by(|a, b| b.total_cmp(a));
    probs.into_iter().enumerate().map(|(i, prob)| (i as u32 * 7, prob)).collect()
}

/// Sorted rows of distinct probabilities that sum to less than 1.
fn smooth_row(k: usize, picks: &[u8]) -> Row {
    let mut probs: Vec<f32> = picks[..k].iter().map(|&p| (f32::from(p) + 1.0) / (k as f32 * 300.0)).collect();
    probs.sort_by(|a, b| b.total_cmp(a));
    probs.into_iter().enumerate().map(|(i, prob)| (i as u32, prob)).collect()
}

fn shapes() -> impl Strategy<Value = TreeShape> {
    (1usize..=5, 1usize..=6).prop_flat_map(|(k, levels)| {
        let most = (1 + k + (levels - 1) * k * k).min(64);
        (2..=most).prop_map(move |nodes| TreeShape::try_new(k, levels, nodes).unwrap())
    })
}

proptest! {
    #[test]
    fn any_numbers_are_a_shape_or_refused(
        top_k in prop_oneof![0..20_usize, any::<usize>()],
        levels in prop_oneof![0..70_usize, any::<usize>()],
        nodes in prop_oneof![0..70_usize, any::<usize>()],
    ) {
        let in_range = (1..=16).contains(&top_k) && (1..64).contains(&levels) && (2..=64).contains(&nodes);
        let fits = in_range && nodes <= 1 + top_k + (levels - 1) * top_k * top_k;
        prop_assert_eq!(TreeShape::try_new(top_k, levels, nodes).is_ok(), fits);
    }

    #[test]
    fn any_arrays_are_a_tree_or_refused(
        tokens in prop::collection::vec(0..40_u32, 0..70),
        mut parents in prop::collection::vec(0..9_u16, 0..70),
        is_near: bool,
    ) {
        if is_near {
            parents = (0..tokens.len() as u16).map(|i| parents.get(i as usize).map_or(i, |&p| p.min(i))).collect();
        }
        let nodes: std::collections::HashSet<_> = parents.iter().zip(&tokens).collect();
        let is_tree = tokens.len() == parents.len()
            && tokens.len() < 64
            && parents.iter().enumerate().all(|(i, &parent)| usize::from(parent) <= i)
            && nodes.len() == tokens.len();
        match Proposal::try_new(tokens.clone(), parents.clone()) {
            Ok(proposal) => prop_assert!(
                is_tree && proposal.tokens() == tokens && proposal.parents() == parents
            ),
            Err(error) => prop_assert!(!is_tree, "{error}"),
        }
    }

    #[test]
    fn equals_the_flat_array_scheme(
        shape in shapes(),
        picks in prop::collection::vec(any::<[u8; 5]>(), 32),
        tied: bool,
    ) {
        let rows = |level: usize, row: usize| {
            let pick = &picks[level * 5 + row];
            if tied { tied_row(shape.top_k(), pick) } else { smooth_row(shape.top_k(), pick) }
        };
        let (grower, beams) = grow(shape, rows);
        prop_assert!(grower.beam().is_empty());
        let proposal = grower.finish();
        let (want, want_beams) = reference(shape, rows);
        prop_assert_eq!(&proposal, &want);
        prop_assert_eq!(beams, want_beams);
        prop_assert_eq!(proposal.nodes(), shape.nodes());
        prop_assert!(proposal.max_depth() <= shape.levels());
    }
}

#[test]
fn parent_rows_point_into_the_previous_step() {
    let shape: TreeShape = "2x3x6".parse().unwrap();
    let mut grower = TreeGrower::new(shape);
    assert!(grower.beam().is_empty());
    grower.level0(&[(1, 0.6), (2, 0.3)]).unwrap();
    // Row 1's best child (0.27) beats row 0's second (0.06) and follows its first (0.42).
    grower.expand(&[[(10, 0.7), (11, 0.1)], [(20, 0.9), (21, 0.05)]]).unwrap();
    let beam: Vec<_> = grower.beam().iter().map(|n| (n.token, n.parent_row, n.candidate)).collect();
    assert_eq!(beam, [(10, 0, 2), (20, 1, 4)]);
    grower.expand(&[[(30, 0.5), (31, 0.4)], [(40, 0.5), (41, 0.5)]]).unwrap();
    let proposal = grower.finish();
    assert_eq!(proposal.tokens(), [1, 2, 10, 20, 30]);
    assert_eq!(proposal.parents(), [0, 0, 1, 2, 3]);
}

#[test]
fn a_certain_chain_of_ties_stays_closed_under_ancestors() {
    let shape: TreeShape = "2x5x4".parse().unwrap();
    let (grower, _) = grow(shape, |_, _| vec![(8, 1.0), (9, 1.0)]);
    let proposal = grower.finish();
    assert_eq!((proposal.tokens(), proposal.parents()), (&[8, 9, 8][..], &[0, 0, 1][..]));
}

#[test]
fn a_tree_cut_short_holds_the_levels_it_has() {
    let mut grower = TreeGrower::new("3x4x16".parse().unwrap());
    grower.level0(&[(1, 0.5), (2, 0.3), (3, 0.1)]).unwrap();
    assert_eq!(grower.finish(), Proposal::try_new(vec![1, 2, 3], vec![0, 0, 0]).unwrap());
}

#[test]
fn refusals_name_level_row_and_value() {
    let shape: TreeShape = "2x2x4".parse().unwrap();
    let text = |r: Result<(), GrowError>| r.unwrap_err().to_string();
    let mut grower = TreeGrower::new(shape);
    assert_eq!(text(grower.expand(&[[(1, 0.5), (2, 0.5)]])), "level 0 of the tree takes 0 rows, given 1");
    assert_eq!(
        text(grower.level0(&[(1, f32::NAN), (2, 0.5)])),
        "draft probabilities must be between 0 and 1, given NaN for token 1 at level 0 row 0"
    );
    assert_eq!(
        text(grower.level0(&[(1, 0.5)])),
        "each row of the tree takes top-k = 2 children, given 1 at level 0 row 0"
    );
    grower.level0(&[(1, 0.5), (2, 0.4)]).unwrap();
    assert_eq!(text(grower.level0(&[(1, 0.5), (2, 0.4)])), "level 1 of the tree takes 2 rows, given 1");
    let row = [(1, 0.5), (2, 0.4)];
    assert_eq!(
        text(grower.expand(&[row, [(5, 0.5), (5, 0.4)]])),
        "siblings must have distinct tokens, given 5 twice at level 1 row 1"
    );
    grower.expand(&[row, row]).unwrap();
    assert_eq!(text(grower.expand(&[row, row])), "the tree has 2 levels, all grown already");
}
