//! What a client gets: the same tokens whatever the draft does, cut where the request says.

use eyrie_text::{Tokenizer, TokenizerFiles};
use eyrie_wire::v1::round::Mode;
use eyrie_wire::v1::speculation::Mode as SpeculationMode;
use eyrie_wire::v1::{FinishReason, GenerateRequest, Speculation, TreeShape};

use crate::fake::*;

const PROMPT: [u32; 5] = [11, 12, 13, 14, 15];

async fn world(rule: Rule) -> (World, FakeTarget, FakeDraft) {
    world_with(rule, |_| {}).await
}

fn tokenizer() -> Tokenizer {
    let tokenizer_json = std::fs::read(demo_file("tokenizer.json")).unwrap();
    Tokenizer::from_files(&TokenizerFiles { tokenizer_json, tokenizer_config: None }).unwrap()
}

fn off(request: GenerateRequest) -> GenerateRequest {
    let mode = SpeculationMode::Off as i32;
    GenerateRequest { speculation: Some(Speculation { mode, trace: true, ..Default::default() }), ..request }
}

#[tokio::test]
async fn tokens_do_not_depend_on_the_draft() {
    for rule in [Rule::Right, Rule::First(0), Rule::First(2), Rule::Sometimes] {
        let (world, _target, _draft) = world(rule).await;
        let want = plain(&PROMPT, 5, 60);
        let plainly = world.generate(off(ids(&PROMPT, 60))).await.unwrap();
        assert_eq!(plainly.token_ids, want);
        assert_eq!(plainly.finish_reason(), FinishReason::Length);
        for request in [ids(&PROMPT, 60), traced(&PROMPT, 60, 1), traced(&PROMPT, 60, 7)] {
            let reply = world.generate(request).await.unwrap();
            assert_eq!(reply.token_ids, want, "{rule:?}");
            assert_eq!(reply.text, plainly.text);
        }
    }
}

#[tokio::test]
async fn a_right_draft_is_accepted_and_counted() {
    let (world, _target, _draft) = world(Rule::Right).await;
    let reply = world.generate(traced(&PROMPT, 13, 3)).await.unwrap();
    let usage = reply.usage.unwrap();
    assert_eq!((usage.prompt_tokens, usage.completion_tokens), (5, 13));
    assert_eq!((usage.rounds, usage.drafted_tokens, usage.accepted_tokens), (3, 9, 9));
    assert_eq!(usage.drafted_by_position, [3, 3, 3]);
    assert_eq!(usage.accepted_by_position, [3, 3, 3]);
    assert_eq!(usage.rounds_without_draft, 0);
    assert_eq!(reply.rounds.len(), 3);
}

#[tokio::test]
async fn an_exact_k_is_drafted_in_every_round_and_traced_untruncated() {
    let (world, _target, _draft) = world(Rule::First(2)).await;
    let reply = world.generate(traced(&PROMPT, 9, 5)).await.unwrap();
    // 1 from the prefill, then 3 a round: the last round keeps 2 of its 3.
    assert_eq!(reply.rounds.iter().map(|r| r.emitted.len()).collect::<Vec<_>>(), [3, 3, 2]);
    let emitted: Vec<u32> = reply.rounds.iter().flat_map(|r| r.emitted.clone()).collect();
    assert_eq!(emitted, reply.token_ids[1..]);
    for round in &reply.rounds {
        assert_eq!(round.mode(), Mode::Chain);
        assert_eq!(round.proposed.len(), 5);
        assert_eq!(round.parents, [0, 1, 2, 3, 4]);
        assert_eq!((round.accepted, &round.accepted_path[..]), (2, &[1, 2][..]));
    }
}

#[tokio::test]
async fn auto_drafts_no_more_than_the_budget_leaves() {
    let (world, target, _draft) = world(Rule::Right).await;
    let reply = world.generate(ids(&PROMPT, 4)).await.unwrap();
    assert_eq!(reply.token_ids.len(), 4);
    let drafted = |seen: &Seen| matches!(seen, Seen::Verify { drafted, .. } if *drafted == 2);
    target.events().wait(1, drafted).await;
    assert_eq!(target.events().count(|seen| matches!(seen, Seen::Verify { .. })), 1);
}

#[tokio::test]
async fn plain_requests_run_on_credits_and_leave_the_draft_alone() {
    let (world, target, draft) = world(Rule::Right).await;
    let reply = world.generate(off(ids(&PROMPT, 40))).await.unwrap();
    assert_eq!(reply.token_ids, plain(&PROMPT, 5, 40));
    assert!(reply.rounds.iter().all(|r| r.mode() == Mode::Plain && r.emitted.len() == 1));
    assert_eq!((reply.rounds.len(), reply.usage.unwrap().rounds), (39, 39));
    let steps: Vec<u32> = target.events().all().into_iter().filter_map(credit).collect();
    assert_eq!(steps, [16, 16, 7]);
    assert_eq!(draft.proposes().count(|_| true), 0);
    assert!(target.events().count(|s| matches!(s, Seen::Open { features: true, .. })) == 0);
}

fn credit(seen: Seen) -> Option<u32> {
    match seen {
        Seen::Verify { steps, .. } => Some(steps),
        _ => None,
    }
}

#[tokio::test]
async fn a_stream_joined_is_the_unary_reply() {
    let (world, _target, _draft) = world(Rule::Sometimes).await;
    for (k, stop) in [(3, vec![]), (5, vec![]), (3, vec!["e".to_owned(), " t".to_owned()])] {
        let request = GenerateRequest { stop, ..traced(&PROMPT, 80, k) };
        let whole = world.generate(request.clone()).await.unwrap();
        let chunks = drained(world.stream(request).await).await;
        let text: String = chunks.iter().map(|c| c.text.as_str()).collect();
        let tokens: Vec<u32> = chunks.iter().flat_map(|c| c.token_ids.clone()).collect();
        let rounds: Vec<_> = chunks.iter().flat_map(|c| c.rounds.clone()).collect();
        assert_eq!((text, tokens, rounds), (whole.text, whole.token_ids, whole.rounds));
        assert_eq!(chunks.iter().filter(|c| c.started.is_some()).count(), 1);
        assert_eq!(chunks[0].started.as_ref().unwrap().seed, 5);
        let finished: Vec<_> = chunks.iter().filter_map(|c| c.finished.clone()).collect();
        assert_eq!(finished.len(), 1);
        assert_eq!((finished[0].reason, finished[0].usage.clone()), (whole.finish_reason, whole.usage));
        let usage = finished[0].usage.as_ref().unwrap();
        let accepted: u32 = chunks.iter().map(|c| c.accepted).sum();
        assert!(accepted <= usage.accepted_tokens && (accepted > 0 || usage.rounds < 3), "{accepted}");
    }
}

#[tokio::test]
async fn a_stop_string_cuts_text_ids_and_rounds_together() {
    let (world, target, _draft) = world(Rule::Sometimes).await;
    let all = plain(&PROMPT, 5, 60);
    let text = tokenizer().decode(&all, true).unwrap();
    let at = (text.len() / 2..).find(|&i| text.is_char_boundary(i)).unwrap();
    let end = (at + 5..).find(|&i| text.is_char_boundary(i)).unwrap();
    let stop = &text[at..end];
    let begin = text.find(stop).unwrap();
    let reply = world
        .generate(GenerateRequest { stop: vec![stop.to_owned()], ..traced(&PROMPT, 60, 3) })
        .await
        .unwrap();
    assert_eq!(reply.text, text[..begin]);
    assert_eq!(reply.finish_reason(), FinishReason::Stop);
    let mut detokenizer = tokenizer().detokenizer(true);
    let mut start = 0;
    let begins_before = |&&id: &&u32| {
        let before = start;
        start += detokenizer.push(id).unwrap().len();
        before < begin
    };
    let kept = all.iter().take_while(begins_before).count();
    assert_eq!(reply.token_ids, all[..kept]);
    assert_eq!(reply.usage.unwrap().completion_tokens as usize, kept);
    let emitted: Vec<u32> = reply.rounds.iter().flat_map(|r| r.emitted.clone()).collect();
    assert!(kept > 10 && emitted == all[1..kept]);
    target.events().wait(1, |seen| matches!(seen, Seen::Close { .. })).await;
}

#[tokio::test]
async fn a_stop_id_is_the_last_token() {
    let (world, _target, _draft) = world(Rule::Right).await;
    let all = plain(&PROMPT, 5, 30);
    let stop = all[20];
    let at = all.iter().position(|&t| t == stop).unwrap();
    let request = GenerateRequest { stop_ids: vec![stop], ..traced(&PROMPT, 60, 7) };
    let reply = world.generate(request).await.unwrap();
    assert_eq!(reply.token_ids, all[..=at]);
    assert_eq!(reply.finish_reason(), FinishReason::Stop);
}

#[tokio::test]
async fn tokens_end_at_the_context() {
    let (world, _target, _draft) = world(Rule::Right).await;
    let prompt: Vec<u32> = (0..CONTEXT - 6).map(|i| 10 + i % 900).collect();
    for request in [ids(&prompt, 999), traced(&prompt, 999, 4)] {
        let reply = world.generate(request).await.unwrap();
        assert_eq!(reply.token_ids, plain(&prompt, 5, 6));
        assert_eq!(reply.finish_reason(), FinishReason::Length);
    }
}

#[tokio::test]
async fn a_long_prompt_reaches_the_draft_chunk_by_chunk() {
    let (world, target, draft) = world(Rule::Right).await;
    let prompt: Vec<u32> = (0..100).map(|i| 10 + i).collect();
    let reply = world.generate(traced(&prompt, 9, 3)).await.unwrap();
    assert_eq!(reply.usage.unwrap().rounds_without_draft, 0);
    let proposes = draft.proposes().all();
    assert!(proposes.len() > 2, "{} proposes", proposes.len());
    assert!(proposes.iter().take_while(|p| p.round == 0).all(|p| p.k == 0 && p.base_len < 100));
    // Every row was handed over once, in order.
    let firsts: Vec<u32> = proposes.iter().flat_map(|p| p.features.iter().map(|f| f.first)).collect();
    assert!(firsts.is_sorted());
    assert_eq!(firsts.len(), firsts.iter().collect::<std::collections::BTreeSet<_>>().len());
    assert_eq!(target.events().count(|s| matches!(s, Seen::Fetch { .. })), 0);
}

#[tokio::test]
async fn a_tree_is_passed_through() {
    let (world, _target, draft) = world(Rule::Right).await;
    let tree = TreeShape { top_k: 4, levels: 5, nodes: 16 };
    let speculation = Speculation { tree: Some(tree), trace: true, ..Default::default() };
    let request = GenerateRequest { speculation: Some(speculation), ..ids(&PROMPT, 20) };
    let reply = world.generate(request).await.unwrap();
    assert_eq!(reply.token_ids, plain(&PROMPT, 5, 20));
    let asked = draft.proposes().all();
    assert!(asked.iter().filter(|p| p.round > 0).all(|p| p.tree == Some(tree) && p.k == 0));
    // This draft grows no trees: it proposes nothing, and the rounds say so.
    assert_eq!(reply.usage.unwrap().rounds_without_draft, 19);
}
