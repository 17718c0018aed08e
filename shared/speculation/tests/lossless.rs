//! Losslessness: whatever is proposed, the emitted tokens are those of plain decoding.
#![expect(clippy::unwrap_used, reason = "a failed test helper should panic")]

use std::hash::{DefaultHasher, Hash, Hasher};

use eyrie_speculation::{Proposal, SampleError, Sampler, SamplingParams, verify};
use proptest::prelude::*;

const VOCAB: u32 = 5;
const LENGTH: usize = 48;

/// A model whose logits depend on the whole prefix.
fn logits(model: u64, prefix: &[u32]) -> Vec<f32> {
    let logit = |token: u32| {
        let mut hasher = DefaultHasher::new();
        (model, prefix, token).hash(&mut hasher);
        (hasher.finish() % 1000) as f32 / 250.0
    };
    (0..VOCAB).map(logit).collect()
}

fn plain(model: u64, prompt: &[u32], params: &SamplingParams) -> Result<Vec<u32>, SampleError> {
    let mut tokens = prompt.to_vec();
    let mut sampler = Sampler::new();
    while tokens.len() < prompt.len() + LENGTH {
        tokens.push(sampler.sample(&logits(model, &tokens), params, tokens.len() as u32)?);
    }
    Ok(tokens)
}

/// Decodes in rounds with one proposal each; returns the tokens and how many were accepted.
fn speculative(
    model: u64,
    prompt: &[u32],
    params: &SamplingParams,
    mut propose: impl FnMut(&[u32]) -> Proposal,
) -> Result<(Vec<u32>, usize), SampleError> {
    let mut tokens = prompt.to_vec();
    let mut sampler = Sampler::new();
    let mut accepted = 0;
    while tokens.len() < prompt.len() + LENGTH {
        let proposal = propose(&tokens);
        let base_len = tokens.len() as u32 - 1;
        let verdict = verify(&proposal, base_len, |node, position| {
            let mut prefix = tokens.clone();
            prefix.extend(proposal.ancestors(node).into_iter().filter_map(|n| proposal.token(n)));
            assert_eq!(prefix.len() as u32, position);
            sampler.sample(&logits(model, &prefix), params, position)
        })?;
        accepted += verdict.accepted();
        assert_eq!(verdict.emitted.len(), verdict.accepted() + 1);
        tokens.extend(verdict.emitted);
    }
    tokens.truncate(prompt.len() + LENGTH);
    Ok((tokens, accepted))
}

fn params() -> impl Strategy<Value = SamplingParams> {
    let temperature = prop_oneof![Just(0.0f32), 0.2f32..2.0];
    (temperature, 0u32..6, 0.3f32..=1.0, 0.0f32..0.4, any::<u64>(), 0u32..4).prop_map(
        |(temperature, top_k, top_p, min_p, seed, choice)| SamplingParams {
            temperature,
            top_k,
            top_p,
            min_p,
            seed,
            choice,
        },
    )
}

/// Any tree: arbitrary earlier parents, sibling twins dropped.
fn trees() -> impl Strategy<Value = Proposal> {
    prop::collection::vec((0..VOCAB, any::<u16>()), 0..24).prop_map(|nodes| {
        let (mut tokens, mut parents) = (Vec::new(), Vec::new());
        for (token, raw) in nodes {
            let parent = raw % (tokens.len() as u16 + 1);
            let twin = parents.iter().zip(&tokens).any(|(&p, &t)| p == parent && t == token);
            if !twin {
                tokens.push(token);
                parents.push(parent);
            }
        }
        Proposal::try_new(tokens, parents).unwrap()
    })
}

fn chains() -> impl Strategy<Value = Proposal> {
    prop::collection::vec(0..VOCAB, 0..8).prop_map(|tokens| Proposal::chain(tokens).unwrap())
}

proptest! {
    #[test]
    fn any_proposals_leave_the_output_unchanged(
        model: u64,
        prompt in prop::collection::vec(0..VOCAB, 1..6),
        params in params(),
        proposals in prop::collection::vec(prop_oneof![trees(), chains()], 1..12),
    ) {
        let mut next = proposals.iter().cycle().cloned();
        let (tokens, _) =
            speculative(model, &prompt, &params, |_| next.next().unwrap_or_default()).unwrap();
        prop_assert_eq!(tokens, plain(model, &prompt, &params).unwrap());
    }

    #[test]
    fn a_draft_that_knows_the_answer_is_accepted_whole(
        model: u64, params in params(), k in 1usize..8,
    ) {
        let prompt = [1, 2, 3];
        let answer = plain(model, &prompt, &params).unwrap();
        let mut proposed = 0;
        let (tokens, accepted) = speculative(model, &prompt, &params, |prefix| {
            let ahead: Vec<u32> = answer.iter().copied().skip(prefix.len()).take(k).collect();
            proposed += ahead.len();
            Proposal::chain(ahead).unwrap()
        }).unwrap();
        prop_assert_eq!(tokens, answer);
        prop_assert_eq!(accepted, proposed);
    }
}

#[test]
fn the_seed_decides_and_a_bad_row_is_an_error() {
    let at = |seed| SamplingParams { temperature: 1.0, seed, ..SamplingParams::default() };
    assert_ne!(plain(1, &[1], &at(1)).unwrap(), plain(1, &[1], &at(2)).unwrap());
    let mut sampler = Sampler::new();
    let chain = Proposal::chain(vec![0]).unwrap();
    let rows = [[1.0, 0.0], [f32::NAN, 0.0]];
    let error = verify(&chain, 9, |node, p| sampler.sample(&rows[node], &at(1), p)).unwrap_err();
    assert!(matches!(error, SampleError::NotFinite { token: 0, position: 11, .. }), "{error}");
}
