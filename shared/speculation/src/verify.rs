//! Sample, then match: each visited node draws its token exactly as plain decoding would and the
//! walk goes on only into the child that carries it, so the draft can change speed but no token.

use crate::Proposal;

/// Outcome of one verification round.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verdict {
    /// Accepted node indices from the root down, the root itself left out.
    pub path: Vec<usize>,
    /// Accepted tokens, then the bonus token: never empty.
    pub emitted: Vec<u32>,
}

impl Verdict {
    /// Number of accepted draft tokens (the bonus is not one).
    #[must_use]
    pub fn accepted(&self) -> usize {
        self.path.len()
    }
}

/// Walks `proposal` from the root, which stands at absolute position `base_len`.
///
/// `choose(node, position)` returns the token plain decoding would place at `position` given the
/// prefix that ends in `node`; a node at depth δ is asked for position `base_len + δ + 1`. It is
/// called once per visited node, in path order, and for no other node.
///
/// # Errors
/// The first error of `choose`; nothing of the round is then committed.
pub fn verify<E>(
    proposal: &Proposal,
    base_len: u32,
    mut choose: impl FnMut(usize, u32) -> Result<u32, E>,
) -> Result<Verdict, E> {
    let mut path = Vec::new();
    let mut emitted = Vec::new();
    let mut node = 0;
    loop {
        let token = choose(node, base_len + path.len() as u32 + 1)?;
        emitted.push(token);
        match proposal.children(node).find(|&child| proposal.token(child) == Some(token)) {
            Some(child) => {
                path.push(child);
                node = child;
            }
            None => return Ok(Verdict { path, emitted }),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;

    #[test]
    fn walks_into_the_matching_child_and_samples_visited_nodes_only() {
        let tree = Proposal::try_new(vec![10, 11, 20, 21, 30], vec![0, 0, 2, 2, 4]).unwrap();
        let mut asked = Vec::new();
        let verdict = verify(&tree, 100, |node, position| {
            asked.push((node, position));
            Ok::<_, Infallible>([11, 0, 21, 0, 99, 0][node])
        })
        .unwrap();
        assert_eq!(verdict.path, [2, 4]);
        assert_eq!(verdict.emitted, [11, 21, 99]);
        assert_eq!(verdict.accepted(), 2);
        assert_eq!(asked, [(0, 101), (2, 102), (4, 103)]);
    }

    #[test]
    fn an_empty_proposal_is_a_plain_step() {
        let verdict = verify(&Proposal::empty(), 7, |_, p| Ok::<_, Infallible>(p)).unwrap();
        assert_eq!((verdict.path.len(), verdict.emitted), (0, vec![8]));
    }

    #[test]
    fn an_error_of_the_sampler_is_the_round_s_error() {
        let chain = Proposal::chain(vec![1, 2]).unwrap();
        let out = verify(&chain, 0, |node, _| if node == 1 { Err("row 1") } else { Ok(1) });
        assert_eq!(out, Err("row 1"));
    }
}
