use std::path::Path;

use eyrie_speculation::Proposal;
use proptest::prelude::*;

use super::*;

fn tokenizer() -> Tokenizer {
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/demo/mini");
    Tokenizer::from_dir(Path::new(dir)).unwrap()
}

fn commit(tokens: &[u32], path: usize, finish: FinishReason) -> Commit {
    let mut drafted = tokens.to_vec();
    drafted.resize(path.max(tokens.len()), 9);
    let proposal = if path == 0 { Proposal::empty() } else { Proposal::chain(drafted).unwrap() };
    let path = (1..=path as u32).collect();
    Commit { proposal, path, tokens: tokens.to_vec(), finish, last: true, cached: 0 }
}

fn run(stop: &[&str], tokenizer: &Tokenizer, rounds: &[Commit]) -> (Vec<GenerateChunk>, Output) {
    let stop = stop.iter().map(|s| (*s).to_owned()).collect();
    let mut output = Output::try_new(Some(tokenizer), stop, true, 4).unwrap();
    let mut chunks = Vec::new();
    for (i, round) in rounds.iter().enumerate() {
        chunks.extend(match i {
            0 => output.prefilled(round.clone()),
            _ => output.round(round.clone()),
        });
        if output.ended().is_some() {
            break;
        }
    }
    (chunks, output)
}

fn joined(chunks: &[GenerateChunk]) -> (String, Vec<u32>) {
    (
        chunks.iter().map(|c| c.text.as_str()).collect(),
        chunks.iter().flat_map(|c| c.token_ids.clone()).collect(),
    )
}

const ON: FinishReason = FinishReason::Unspecified;

#[test]
fn one_chunk_a_round_with_the_accepted_ids_first() {
    let t = tokenizer();
    let ids = t.encode("one two three four five", false).unwrap();
    let rounds =
        [commit(&ids[..1], 0, ON), commit(&ids[1..4], 2, ON), commit(&ids[4..], 1, FinishReason::Length)];
    let (chunks, output) = run(&[], &t, &rounds);
    assert_eq!(joined(&chunks), ("one two three four five".to_owned(), ids.clone()));
    assert_eq!(chunks.iter().map(|c| c.accepted).collect::<Vec<_>>(), [0, 2, 1]);
    assert_eq!(chunks.iter().map(|c| c.rounds.len()).collect::<Vec<_>>(), [0, 1, 1]);
    assert_eq!(output.ended(), Some(FinishReason::Length));
    assert_eq!(output.usage().completion_tokens as usize, ids.len());
}

#[test]
fn text_ends_tell_which_id_brought_which_text() {
    let t = tokenizer();
    let ids = t.encode("one two three four five", false).unwrap();
    let rounds = [commit(&ids[..1], 0, ON), commit(&ids[1..], 2, FinishReason::Length)];
    let (chunks, _) = run(&[], &t, &rounds);
    for chunk in &chunks {
        assert_eq!(chunk.text_ends.len(), chunk.token_ids.len(), "{chunk:?}");
        let mut start = 0;
        for (&id, &end) in chunk.token_ids.iter().zip(&chunk.text_ends) {
            assert_eq!(chunk.text[start..end as usize], t.decode(&[id], true).unwrap(), "{chunk:?}");
            start = end as usize;
        }
        assert_eq!(start, chunk.text.len());
    }
}

#[test]
fn held_back_ids_keep_their_round_until_they_are_released() {
    let t = tokenizer();
    let ids = t.encode("one two three", false).unwrap();
    assert!(ids.len() >= 3);
    let last = ids.len() - 1;
    let rounds = [
        commit(&ids[..1], 0, ON),
        commit(&ids[1..last], last - 2, ON),
        commit(&ids[last..], 0, FinishReason::Length),
    ];
    // The text so far may be the beginning of the stop string.
    let (chunks, _) = run(&[" two three four"], &t, &rounds);
    assert_eq!(joined(&chunks).1, ids);
    let released: Vec<_> = chunks.iter().filter(|c| !c.token_ids.is_empty()).collect();
    assert_eq!(released.len(), 3, "{released:?}");
    assert_eq!(released[1].accepted as usize, last - 2);
    assert_eq!(released[1].rounds.len(), 1);
}

#[test]
fn a_hit_cuts_the_round_it_falls_into() {
    let t = tokenizer();
    let ids = t.encode("one two three four", false).unwrap();
    let rounds = [commit(&ids[..1], 0, ON), commit(&ids[1..], ids.len() - 2, ON)];
    let (chunks, output) = run(&[" three"], &t, &rounds);
    let (text, kept) = joined(&chunks);
    assert_eq!(text, "one two");
    assert_eq!(output.ended(), Some(FinishReason::Stop));
    let last = chunks.last().unwrap();
    assert_eq!(last.rounds[0].emitted, kept[1..]);
    assert_eq!(last.rounds[0].accepted as usize, ids.len() - 2, "not cut");
    let finished = last.finished.as_ref().unwrap();
    assert_eq!(finished.usage.as_ref().unwrap().completion_tokens as usize, kept.len());
}

#[test]
fn of_one_token_the_stop_id_comes_first_then_the_string_then_the_length() {
    let t = tokenizer();
    let ids = t.encode("one two", false).unwrap();
    let (head, tail) = ids.split_at(ids.len() - 1);
    let end = |finish| [commit(head, 0, ON), commit(tail, 0, finish)];
    let (chunks, output) = run(&["two"], &t, &end(FinishReason::Stop));
    assert_eq!(joined(&chunks), ("one two".to_owned(), ids.clone()), "the id ends the text, nothing is cut");
    assert_eq!(output.ended(), Some(FinishReason::Stop));
    let (chunks, output) = run(&["two"], &t, &end(FinishReason::Length));
    assert_eq!(joined(&chunks).0, "one ");
    assert_eq!(output.ended(), Some(FinishReason::Stop));
}

#[test]
fn ids_without_a_token_have_no_text() {
    let t = tokenizer();
    let beyond = t.vocab_size() as u32 + 3;
    let ids = t.encode("one", false).unwrap();
    let rounds = [commit(&[ids[0], beyond], 1, ON), commit(&[beyond], 0, FinishReason::Length)];
    let (chunks, _) = run(&["xyz"], &t, &rounds);
    assert_eq!(joined(&chunks).1, [ids[0], beyond, beyond]);
}

proptest! {
    /// Text and ids do not depend on how the tokens fell into rounds.
    #[test]
    fn rounds_do_not_change_the_reply(
        ids in prop::collection::vec(8u32..4096, 2..40),
        cuts in prop::collection::vec(1usize..6, 40),
        stops in prop::collection::vec("[a-e ]{1,3}", 0..3),
    ) {
        let t = tokenizer();
        let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
        let cut = |sizes: &[usize]| {
            let mut rounds = Vec::new();
            let mut rest = &ids[..];
            for &size in sizes {
                let (now, later) = rest.split_at(size.min(rest.len()));
                rest = later;
                let finish = if rest.is_empty() { FinishReason::Length } else { ON };
                rounds.push(commit(now, now.len() - 1, finish));
                if rest.is_empty() {
                    break;
                }
            }
            rounds
        };
        let (whole, _) = run(&stops, &t, &cut(&[1000]));
        let (pieces, output) = run(&stops, &t, &cut(&cuts));
        prop_assert_eq!(joined(&pieces), joined(&whole));
        let (_, tokens) = joined(&pieces);
        prop_assert_eq!(output.usage().completion_tokens as usize, tokens.len());
        let emitted: Vec<u32> = pieces.iter().flat_map(|c| &c.rounds).flat_map(|r| r.emitted.clone()).collect();
        prop_assert!(tokens.ends_with(&emitted), "{:?} {:?}", tokens, emitted);
        for chunk in &pieces {
            prop_assert!(chunk.accepted as usize <= chunk.token_ids.len());
        }
        prop_assert_eq!(pieces.iter().filter(|c| c.finished.is_some()).count(), 1);
    }
}
