//! Streaming against whole-text references: detokenisation at every cut, stop strings anywhere.
#![expect(clippy::unwrap_used, reason = "a failed test helper should panic")]

use std::{path::Path, sync::LazyLock};

use eyrie_text::{Emit, Matched, StopMatcher, TextStream, Tokenizer};
use proptest::prelude::*;

static MINI: LazyLock<Tokenizer> = LazyLock::new(|| {
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/demo/mini");
    Tokenizer::from_dir(Path::new(dir)).unwrap()
});

/// The id of each single-byte token, by byte.
static BYTES: LazyLock<Vec<u32>> = LazyLock::new(|| {
    let id =
        |byte: u8| (0..MINI.vocab_size() as u32).find(|&id| MINI.token_bytes(id).unwrap() == [byte]).unwrap();
    (0..=255).map(id).collect()
});

/// Ids that mix the vocabulary, raw bytes and multi-byte characters spelled byte by byte.
fn ids() -> impl Strategy<Value = Vec<u32>> {
    let spelled = "[a\u{e9}\u{20ac}\u{1f600}\u{fffd}]{1,3}"
        .prop_map(|text| text.bytes().map(|byte| BYTES[usize::from(byte)]).collect());
    let piece = prop_oneof![
        (0u32..4096).prop_map(|id| vec![id]),
        (0u32..8).prop_map(|special| vec![special]),
        (0usize..256).prop_map(|byte| vec![BYTES[byte]]),
        spelled,
    ];
    prop::collection::vec(piece, 0..24).prop_map(|pieces| pieces.concat())
}

/// What a stop-string stream must come to: kept text, kept ids, index of the stop string.
type Outcome = (String, usize, Option<usize>);

fn reference(ids: &[u32], skip_special: bool, stops: &[String]) -> Outcome {
    let mut detokenizer = MINI.detokenizer(skip_special);
    let mut starts = Vec::new();
    let mut text = String::new();
    for &id in ids {
        starts.push(text.len());
        text += &detokenizer.push(id).unwrap();
    }
    text += &detokenizer.flush();
    let first = (1..=text.len()).filter(|&end| text.is_char_boundary(end)).find_map(|end| {
        let ended = stops.iter().enumerate().filter(|(_, s)| text[..end].ends_with(s.as_str()));
        ended.min_by_key(|(i, stop)| (end - stop.len(), *i)).map(|(i, stop)| (end - stop.len(), i))
    });
    match first {
        None => (text, ids.len(), None),
        Some((begin, stop)) => {
            let kept = starts.iter().filter(|&&start| start < begin).count();
            text.truncate(begin);
            (text, kept, Some(stop))
        }
    }
}

fn collect(matched: &[Matched]) -> Outcome {
    let mut outcome = (String::new(), 0, None);
    for matched in matched {
        let (emit, stop) = match matched {
            Matched::Emit(emit) => (emit, None),
            Matched::Hit { emit, stop } => (emit, Some(*stop)),
        };
        outcome.0 += &emit.text;
        outcome.1 += emit.ids;
        outcome.2 = outcome.2.or(stop);
    }
    outcome
}

/// How many bytes at the end begin a character that is not complete.
fn unfinished(bytes: &[u8]) -> usize {
    let begins = |n: &usize| {
        let tail = &bytes[bytes.len() - n.min(&bytes.len())..];
        std::str::from_utf8(tail).is_err_and(|e| e.valid_up_to() == 0 && e.error_len().is_none())
    };
    (1..=3).find(begins).unwrap_or(0)
}

proptest! {
    #[test]
    fn deltas_and_flush_are_the_whole_text(ids in ids(), skip_special: bool) {
        let shown = |&&id: &&u32| !(skip_special && MINI.is_special(id).unwrap());
        for cut in 0..=ids.len() {
            let ids = &ids[..cut];
            let mut detokenizer = MINI.detokenizer(skip_special);
            let mut text = String::new();
            for &id in ids {
                text += &detokenizer.push(id).unwrap();
            }
            let bytes: Vec<u8> =
                ids.iter().filter(shown).flat_map(|&id| MINI.token_bytes(id).unwrap().to_vec()).collect();
            // Nothing waits but the beginning of the last character.
            prop_assert_eq!(&text, &String::from_utf8_lossy(&bytes[..bytes.len() - unfinished(&bytes)]));
            text += &detokenizer.flush();
            prop_assert_eq!(text, String::from_utf8_lossy(&bytes));
        }
    }

    #[test]
    fn streams_with_stop_strings_equal_the_whole_text_cut(
        ids in ids(),
        skip_special: bool,
        picks in prop::collection::vec((any::<u16>(), 1usize..6), 0..4),
    ) {
        // Stop strings taken from the text itself, or they would hardly ever occur.
        let text: Vec<char> = MINI.decode(&ids, skip_special).unwrap().chars().collect();
        let stops: Vec<String> = picks
            .iter()
            .map(|&(at, len)| text.iter().skip(at as usize % (text.len() + 1)).take(len).collect())
            .filter(|stop: &String| !stop.is_empty())
            .collect();
        let mut stream = TextStream::try_new(&MINI, skip_special, stops.clone()).unwrap();
        let mut matched: Vec<_> = ids.iter().map(|&id| stream.push(id).unwrap()).collect();
        matched.push(stream.finish());
        prop_assert_eq!(collect(&matched), reference(&ids, skip_special, &stops));
    }

    #[test]
    fn overlapping_stops_are_found_and_little_is_held_back(
        deltas in prop::collection::vec("[ab\u{e9}]{0,3}", 0..16),
        stops in prop::collection::vec("[ab\u{e9}]{1,4}", 1..4),
    ) {
        let text = deltas.concat();
        let begin = (0..=text.len()).filter(|&end| text.is_char_boundary(end)).find_map(|end| {
            let ended = stops.iter().filter(|stop| text[..end].ends_with(stop.as_str()));
            ended.map(|stop| end - stop.len()).min()
        });
        let longest = stops.iter().map(String::len).max().unwrap_or(0);
        let mut matcher = StopMatcher::try_new(stops).unwrap();
        let mut seen = 0;
        let mut matched = Vec::new();
        for delta in &deltas {
            seen += delta.len();
            matched.push(matcher.push(delta));
            let (sofar, _, hit) = collect(&matched);
            prop_assert!(hit.is_some() || seen - sofar.len() < longest);
        }
        matched.push(matcher.finish(""));
        let (kept, ids, hit) = collect(&matched);
        prop_assert_eq!(&kept, &text[..begin.unwrap_or(text.len())]);
        let starts = (0..deltas.len()).map(|i| deltas[..i].concat().len());
        prop_assert_eq!(ids, starts.filter(|&start| begin.is_none_or(|b| start < b)).count());
        prop_assert_eq!(hit.is_some(), begin.is_some());
    }
}

fn emit(text: &str, ids: usize) -> Matched {
    Matched::Emit(Emit { text: text.to_owned(), ids })
}

fn hit(text: &str, ids: usize, stop: usize) -> Matched {
    Matched::Hit { emit: Emit { text: text.to_owned(), ids }, stop }
}

fn matcher(stops: &[&str]) -> StopMatcher {
    StopMatcher::try_new(stops.iter().map(|&stop| stop.to_owned()).collect()).unwrap()
}

#[test]
fn a_straddling_token_keeps_its_id_and_loses_its_tail() {
    let mut m = matcher(&["END"]);
    assert_eq!(m.push("one "), emit("one ", 1));
    assert_eq!(m.push("two E"), emit("two ", 1));
    assert_eq!(m.push("N"), emit("", 0));
    assert_eq!(m.push("D three"), hit("", 0, 0));
    assert_eq!(m.push("four"), hit("", 0, 0));
    assert_eq!(m.finish("five"), hit("", 0, 0));
}

#[test]
fn a_false_start_is_released_when_it_is_refuted_or_the_text_ends() {
    let mut m = matcher(&["\n\n"]);
    assert_eq!(m.push("a\n"), emit("a", 1));
    assert_eq!(m.push(""), emit("", 0));
    assert_eq!(m.push("b"), emit("\nb", 2));
    assert_eq!(m.push("\n"), emit("", 0));
    assert_eq!(m.finish(""), emit("\n", 1));
}

#[test]
fn the_first_completion_wins_and_then_the_longest() {
    assert_eq!(matcher(&["cd", "bcde"]).push("abcde"), hit("ab", 1, 0));
    assert_eq!(matcher(&["c", "bc"]).push("abc"), hit("a", 1, 1));
    assert_eq!(matcher(&["abc"]).push("abc"), hit("", 0, 0));
}

#[test]
fn without_stop_strings_nothing_waits() {
    let mut m = matcher(&[]);
    assert_eq!(m.push(""), emit("", 1));
    assert_eq!(m.push("x"), emit("x", 1));
}

#[test]
fn the_flushed_tail_can_complete_a_stop_string() {
    let mut m = matcher(&["x\u{fffd}"]);
    assert_eq!(m.push("wx"), emit("w", 1));
    assert_eq!(m.finish("\u{fffd}"), hit("", 0, 0));
}

#[test]
fn a_flush_leaves_nothing_behind() {
    let mut detokenizer = MINI.detokenizer(true);
    assert_eq!(detokenizer.push(BYTES[0xe2]).unwrap(), "");
    assert_eq!(detokenizer.flush(), "\u{fffd}");
    assert_eq!(detokenizer.flush(), "");
    assert!(detokenizer.push(4096).is_err());
    assert_eq!(detokenizer.push(BYTES[usize::from(b'x')]).unwrap(), "x");
}

#[test]
fn streams_move_between_threads() {
    let stream = TextStream::try_new(&MINI, true, Vec::new()).unwrap();
    let pushed = std::thread::spawn(move || stream.clone().push(BYTES[usize::from(b'x')]));
    assert_eq!(pushed.join().unwrap().unwrap(), emit("x", 1));
}

#[test]
fn an_empty_stop_string_is_refused() {
    let refused = StopMatcher::try_new(vec!["a".to_owned(), String::new()]).unwrap_err();
    assert_eq!(refused.to_string(), "stop[1] must not be empty");
}
