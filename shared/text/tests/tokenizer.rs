//! The tokenizer of the bundled demo pair, against ids made by the reference implementation.
#![expect(clippy::unwrap_used, reason = "a failed test helper should panic")]

use std::{fs, path::Path, sync::LazyLock};

use eyrie_text::{TextError, Tokenizer, TokenizerFiles};
use proptest::prelude::*;
use serde_json::{Value, json};

const MINI_DIR: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/demo/mini");

static MINI: LazyLock<Tokenizer> = LazyLock::new(|| Tokenizer::from_dir(Path::new(MINI_DIR)).unwrap());

fn mini_json() -> Value {
    serde_json::from_slice(&fs::read(Path::new(MINI_DIR).join("tokenizer.json")).unwrap()).unwrap()
}

fn files(json: &Value, config: Option<Value>) -> TokenizerFiles {
    TokenizerFiles {
        tokenizer_json: json.to_string().into_bytes(),
        tokenizer_config: config.map(|config| config.to_string().into_bytes()),
    }
}

fn refusal(json: &Value, config: Option<Value>) -> String {
    Tokenizer::from_files(&files(json, config)).unwrap_err().to_string()
}

#[test]
fn prompts_and_continuations_equal_the_reference() {
    for line in include_str!("fixtures/mini.jsonl").lines() {
        let case: Value = serde_json::from_str(line).unwrap();
        let ids = |field: &str| -> Vec<u32> {
            case[field].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
        };
        let prompt = case["prompt"].as_str().unwrap();
        assert_eq!(MINI.encode(prompt, false).unwrap(), ids("prompt_ids"));
        assert_eq!(MINI.decode(&ids("prompt_ids"), true).unwrap(), prompt);
        let continuation = MINI.decode(&ids("continuation_ids"), true).unwrap();
        assert_eq!(continuation, case["continuation"].as_str().unwrap());
    }
}

#[test]
fn special_tokens_are_read_and_skipped() {
    assert_eq!(MINI.vocab_size(), 4096);
    let ids = MINI.encode("a<|end|>b", false).unwrap();
    assert!(MINI.is_special(ids[1]).unwrap() && !MINI.is_special(ids[0]).unwrap());
    assert_eq!(MINI.decode(&ids, true).unwrap(), "ab");
    assert_eq!(MINI.decode(&ids, false).unwrap(), "a<|end|>b");
    assert_eq!(MINI.token_bytes(ids[1]).unwrap(), b"<|end|>");
}

#[test]
fn an_added_token_that_is_not_special_has_text() {
    let mut json = mini_json();
    json["added_tokens"][4]["special"] = json!(false);
    let tokenizer = Tokenizer::from_files(&files(&json, None)).unwrap();
    assert_eq!(tokenizer.decode(&[3, 4], true).unwrap(), "<|end|>");
}

#[test]
fn the_config_s_edges_are_added_on_request_only() {
    let config = json!({
        "add_bos_token": true, "bos_token": {"content": "<|user|>"},
        "add_eos_token": true, "eos_token": "<|endoftext|>",
    });
    let tokenizer = Tokenizer::from_files(&files(&mini_json(), Some(config))).unwrap();
    let bare = tokenizer.encode("x", false).unwrap();
    assert_eq!(bare.len(), 1);
    assert_eq!(tokenizer.encode("x", true).unwrap(), [1, bare[0], 0]);
    assert_eq!(MINI.encode("x", true).unwrap(), bare);
}

#[test]
fn a_post_processor_that_adds_specials_is_not_doubled() {
    let mut json = mini_json();
    json["post_processor"] = json!({
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|user|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|user|>": {"id": "<|user|>", "ids": [1], "tokens": ["<|user|>"]}},
    });
    let config = json!({"add_bos_token": true, "bos_token": "<|user|>"});
    let tokenizer = Tokenizer::from_files(&files(&json, Some(config))).unwrap();
    let bare = MINI.encode("x", false).unwrap();
    assert_eq!(tokenizer.encode("x", true).unwrap(), [1, bare[0]]);
    assert_eq!(tokenizer.encode("x", false).unwrap(), bare);
}

#[test]
fn a_prompt_is_never_cut_or_padded() {
    let mut json = mini_json();
    json["truncation"] =
        json!({"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0});
    json["padding"] = json!({
        "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": null,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>",
    });
    let tokenizer = Tokenizer::from_files(&files(&json, None)).unwrap();
    let text = "def moving_average(values, window):";
    assert_eq!(tokenizer.encode(text, false), MINI.encode(text, false));
}

#[test]
fn ids_without_a_token_are_errors() {
    let text = |tokenizer: &Tokenizer, id| tokenizer.decode(&[9, id], true).unwrap_err().to_string();
    let limit = "token id must be below the tokenizer's size 4096, given ";
    assert_eq!(text(&MINI, 4096), format!("{limit}4096"));
    assert_eq!(text(&MINI, u32::MAX), format!("{limit}{}", u32::MAX));
    let with_id = |id: u64| {
        let mut json = mini_json();
        let vocab = json["model"]["vocab"].as_object_mut().unwrap();
        vocab.insert("unheard-of".to_owned(), json!(id));
        files(&json, None)
    };
    let holed = Tokenizer::from_files(&with_id(5000)).unwrap();
    assert_eq!(holed.vocab_size(), 5001);
    assert_eq!(holed.decode(&[5000], true).unwrap(), "unheard-of");
    assert_eq!(text(&holed, 4999), "token id 4999 has no token in tokenizer.json");
    assert_eq!(
        Tokenizer::from_files(&with_id(4_000_000_000)).unwrap_err().to_string(),
        "tokenizer.json: greatest token id must be below 4194304, given 4000000000"
    );
}

#[test]
fn an_added_token_is_never_renumbered_silently() {
    let mut json = mini_json();
    let mut far = json["added_tokens"][4].clone();
    far["content"] = json!("<|far|>");
    for (id, refused) in [(4096, false), (4200, true)] {
        far["id"] = json!(id);
        json["added_tokens"][7] = far.clone();
        match Tokenizer::from_files(&files(&json, None)) {
            Ok(tokenizer) => {
                assert!(!refused);
                assert_eq!(tokenizer.encode("<|far|>", false).unwrap(), [id]);
            }
            Err(error) => {
                assert!(refused, "{error}");
                assert_eq!(
                    error.to_string(),
                    "tokenizer.json: added_tokens id must be the next free id 4096 for \"<|far|>\", \
                     without a gap, given 4200"
                );
            }
        }
    }
}

#[test]
fn files_that_are_not_served_are_refused_by_name() {
    let mut json = mini_json();
    json["decoder"] = json!({"type": "ByteFallback"});
    assert_eq!(refusal(&json, None), "tokenizer.json: decoder.type must be ByteLevel, given ByteFallback");
    json["decoder"] = Value::Null;
    assert_eq!(refusal(&json, None), "tokenizer.json: decoder.type must be ByteLevel, given null");
    assert_eq!(
        refusal(&mini_json(), Some(json!({"add_bos_token": true, "bos_token": "<s>"}))),
        "tokenizer_config.json: bos_token must be a token of tokenizer.json, since it is added, \
         given \"<s>\""
    );
    assert_eq!(
        refusal(&mini_json(), Some(json!({"add_bos_token": 1}))),
        "tokenizer_config.json: add_bos_token must be true or false, given 1"
    );
    let cut = TokenizerFiles { tokenizer_json: b"{\"version\"".to_vec(), tokenizer_config: None };
    let line = Tokenizer::from_files(&cut).unwrap_err().to_string();
    assert!(line.starts_with("tokenizer.json: EOF while parsing"), "{line}");
    let config = TokenizerFiles { tokenizer_config: Some(b"[".to_vec()), ..files(&mini_json(), None) };
    let line = Tokenizer::from_files(&config).unwrap_err().to_string();
    assert!(line.starts_with("tokenizer_config.json: EOF while parsing"), "{line}");
}

#[test]
fn a_folder_without_tokenizer_json_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let line = || Tokenizer::from_dir(dir.path()).unwrap_err().to_string();
    let folder = dir.path().display();
    assert_eq!(line(), format!("{folder}: no tokenizer.json"));
    fs::write(dir.path().join("tiktoken.model"), "").unwrap();
    assert_eq!(
        line(),
        format!("{folder}: no tokenizer.json; its tiktoken.model is a format that is not served yet")
    );
    fs::create_dir(dir.path().join("tokenizer.json")).unwrap();
    assert!(matches!(Tokenizer::from_dir(dir.path()), Err(TextError::Read { .. })));
}

#[test]
fn only_regular_files_of_bounded_size_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let line = || Tokenizer::from_dir(dir.path()).unwrap_err().to_string();
    let path = dir.path().join("tokenizer.json");
    // Sparse: it takes no room, and reading it whole would take 256 MiB of memory.
    let huge = fs::File::create(&path).unwrap();
    huge.set_len((256 << 20) + 1).unwrap();
    assert_eq!(line(), format!("{}: 268435457 bytes, limit 268435456", path.display()));
    fs::remove_file(&path).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(&path).unwrap();
    assert_eq!(line(), format!("{}: not a regular file", path.display()));
}

proptest! {
    #[test]
    fn decoding_equals_the_tokenizers_crate(
        ids in prop::collection::vec(0u32..4096, 0..60), skip_special: bool,
    ) {
        static REFERENCE: LazyLock<tokenizers::Tokenizer> = LazyLock::new(|| {
            tokenizers::Tokenizer::from_file(Path::new(MINI_DIR).join("tokenizer.json")).unwrap()
        });
        let want = REFERENCE.decode(&ids, skip_special).unwrap();
        prop_assert_eq!(MINI.decode(&ids, skip_special).unwrap(), want);
    }

    #[test]
    fn any_text_comes_back(text in "\\PC{0,40}") {
        let ids = MINI.encode(&text, false).unwrap();
        prop_assert_eq!(MINI.decode(&ids, false).unwrap(), text);
    }
}
