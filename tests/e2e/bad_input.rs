//! P4: bad input is one clear line with the right status or exit code, and the service goes on.

use crate::EYRIE;
use std::path::Path;
use std::process::{Command, Output};

use eyrie_tests::{Fleet, ask, client, goldens, mini, mini_eagle3, root};
use eyrie_wire::reason_of;
use eyrie_wire::v1::{GenerateRequest, TreeShape, generate_request};
use tonic::Code;

fn run(args: &[&str]) -> Output {
    Command::new(EYRIE).args(args).current_dir(root()).output().unwrap()
}

/// A change that makes a request bad, and what the answer must name.
type Case = (&'static str, fn(&mut GenerateRequest), Code, &'static [&'static str]);

const CASES: &[Case] = &[
    ("no prompt", |r| r.prompt = None, Code::InvalidArgument, &["prompt"]),
    (
        "empty text",
        |r| r.prompt = Some(generate_request::Prompt::Text(String::new())),
        Code::InvalidArgument,
        &["prompt"],
    ),
    ("id too large", |r| set_ids(r, vec![1, 4096]), Code::InvalidArgument, &["4096"]),
    ("prompt too long", |r| set_ids(r, vec![9; 5000]), Code::InvalidArgument, &["5000", "4096"]),
    ("max_tokens 0", |r| r.max_tokens = Some(0), Code::InvalidArgument, &["max_tokens", "0"]),
    ("temperature NaN", |r| r.temperature = Some(f32::NAN), Code::InvalidArgument, &["temperature", "NaN"]),
    (
        "temperature inf",
        |r| r.temperature = Some(f32::INFINITY),
        Code::InvalidArgument,
        &["temperature", "inf"],
    ),
    ("temperature -1", |r| r.temperature = Some(-1.0), Code::InvalidArgument, &["temperature", "-1"]),
    ("top_p 0", |r| r.top_p = Some(0.0), Code::InvalidArgument, &["top_p", "0"]),
    ("top_p 2", |r| r.top_p = Some(2.0), Code::InvalidArgument, &["top_p", "2"]),
    ("min_p 1.5", |r| r.min_p = Some(1.5), Code::InvalidArgument, &["min_p", "1.5"]),
    ("min_p NaN", |r| r.min_p = Some(f32::NAN), Code::InvalidArgument, &["min_p", "NaN"]),
    ("17 stops", |r| r.stop = vec!["x".to_owned(); 17], Code::InvalidArgument, &["stop", "17", "16"]),
    ("empty stop", |r| r.stop = vec![String::new()], Code::InvalidArgument, &["stop"]),
    ("long stop", |r| r.stop = vec!["x".repeat(257)], Code::InvalidArgument, &["stop", "257", "256"]),
    ("stop id", |r| r.stop_ids = vec![70_000], Code::InvalidArgument, &["70000", "4096"]),
    ("K 1000", |r| set_k(r, 1000), Code::InvalidArgument, &["max_draft_tokens", "1000"]),
    (
        "K and tree",
        |r| {
            set_k(r, 2);
            set_tree(r, 4, 5, 16)
        },
        Code::InvalidArgument,
        &["tree", "max_draft_tokens"],
    ),
    ("tree too small", |r| set_tree(r, 2, 2, 60), Code::InvalidArgument, &["tree"]),
    ("long request id", |r| r.request_id = "x".repeat(129), Code::InvalidArgument, &["request_id", "128"]),
];

fn set_ids(request: &mut GenerateRequest, ids: Vec<u32>) {
    request.prompt = Some(generate_request::Prompt::Ids(eyrie_wire::v1::TokenIds { ids }));
}

fn set_k(request: &mut GenerateRequest, k: u32) {
    request.speculation.get_or_insert_default().max_draft_tokens = Some(k);
}

fn set_tree(request: &mut GenerateRequest, top_k: u32, levels: u32, nodes: u32) {
    request.speculation.get_or_insert_default().tree = Some(TreeShape { top_k, levels, nodes });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_out_of_range_are_refused_by_name_and_the_service_goes_on() {
    let fleet = Fleet::start(EYRIE, &[]);
    let mut client = client(&fleet.ready().grpc).await;
    let golden = &goldens()[0];
    for (name, spoil, code, parts) in CASES {
        let mut request = ask(&golden.prompt_ids, 8).chain(2).0;
        request.speculation.as_mut().unwrap().max_draft_tokens = None;
        spoil(&mut request);
        let unary = client.generate(request.clone()).await.expect_err(name);
        let streamed = match client.generate_stream(request).await {
            Err(status) => status,
            Ok(stream) => eyrie_tests::collect(stream.into_inner(), |_| {}).await.expect_err(name),
        };
        for status in [unary, streamed] {
            assert_eq!(status.code(), *code, "{name}: {status:?}");
            assert!(reason_of(&status).is_some(), "{name} carries a stable reason: {status:?}");
            assert!(!status.message().contains('\n') && status.message().len() <= 1024, "{name}: one line");
            for part in *parts {
                assert!(status.message().contains(part), "{name}: \"{}\" names {part}", status.message());
            }
        }
    }
    let fine = ask(&golden.prompt_ids, 96).chain(3).run(&mut client).await.unwrap();
    assert_eq!(fine.ids, golden.greedy_ids);
}

#[test]
fn wrong_usage_exits_with_2_and_failed_requests_with_1() {
    for usage in [
        &["generate"][..],
        &["generate", "--prompt", "x", "--prompt-ids", "1"],
        &["nonsense"],
        &["generate", "--prompt", "x", "--tree", "4x5"],
    ] {
        assert_eq!(run(usage).status.code(), Some(2), "{usage:?}");
    }
    let nobody = run(&["generate", "--endpoint", "http://127.0.0.1:9", "--prompt", "x"]);
    assert_eq!(nobody.status.code(), Some(1));
    let line = String::from_utf8(nobody.stderr).unwrap();
    assert!(line.contains("127.0.0.1:9") && line.trim().lines().count() == 1, "{line}");
}

/// A copy of a folder in which one file is changed.
fn spoiled(source: &Path, file: &str, change: impl FnOnce(Vec<u8>) -> Option<Vec<u8>>) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(source).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
    }
    let path = folder.path().join(file);
    match change(std::fs::read(&path).unwrap()) {
        Some(bytes) => std::fs::write(&path, bytes).unwrap(),
        None => std::fs::remove_file(&path).unwrap(),
    }
    folder
}

/// A copy of a folder in which one file is there twice.
fn with_copy(source: &Path, file: &str, again: &str) -> tempfile::TempDir {
    let folder = spoiled(source, file, Some);
    std::fs::copy(folder.path().join(file), folder.path().join(again)).unwrap();
    folder
}

fn replace(from: &'static str, to: &'static str) -> impl FnOnce(Vec<u8>) -> Option<Vec<u8>> {
    move |bytes| {
        let text = String::from_utf8(bytes).unwrap();
        assert!(text.contains(from), "{from}");
        Some(text.replace(from, to).into_bytes())
    }
}

#[test]
fn broken_folders_are_refused_by_doctor_and_by_every_start() {
    let v3 = root().join("tests/fixtures/v3");
    let truncated = |mut b: Vec<u8>| {
        b.truncate(b.len() - 100);
        Some(b)
    };
    let targets: Vec<(tempfile::TempDir, &[&str])> = vec![
        (spoiled(&mini(), "model.safetensors", truncated), &["model.safetensors"]),
        (spoiled(&v3, "model-00002-of-00003.safetensors", |_| None), &["model-00002-of-00003.safetensors"]),
        (
            spoiled(&mini(), "config.json", replace("\"vocab_size\": 4096", "\"vocab_size\": 4097")),
            &["embed_tokens", "4097", "4096"],
        ),
        (
            spoiled(&mini(), "config.json", replace("DeepseekV3ForCausalLM", "LlamaForCausalLM")),
            &["config.json", "LlamaForCausalLM"],
        ),
        (spoiled(&mini(), "config.json", replace("{", "{{")), &["config.json"]),
        (
            spoiled(&mini(), "config.json", replace("\"num_hidden_layers\": 8", "\"num_hidden_layers\": 7")),
            &["model.safetensors", "model.layers.7."],
        ),
        (
            spoiled(&mini(), "generation_config.json", replace("{", "{\"temperature\": 500,")),
            &["generation_config.json", "temperature = 500", "100"],
        ),
        (
            with_copy(&v3, "model-00001-of-00003.safetensors", "model-00004-of-00003.safetensors"),
            &["model-00004"],
        ),
        (spoiled(&mini(), "tokenizer.json", |_| Some(b"{".to_vec())), &["tokenizer.json"]),
    ];
    for (folder, parts) in &targets {
        let path = folder.path().to_str().unwrap();
        refused(&["doctor", "--target", path], parts);
        refused(&["up", "--target", path, "--no-draft", "--listen", "127.0.0.1:0"], parts);
        let socket = format!("unix:{path}/t.sock");
        refused(&["target", "--model", path, "--listen", &socket], parts);
    }
    let mini = mini();
    let target = mini.to_str().unwrap();
    let drafts: Vec<(tempfile::TempDir, &[&str])> = vec![
        (
            spoiled(&mini_eagle3(), "config.json", replace("\"vocab_size\": 4096", "\"vocab_size\": 5000")),
            &["t2d", "5000", "4096"],
        ),
        (
            spoiled(
                &mini_eagle3(),
                "config.json",
                replace("\"draft_vocab_size\": 2048", "\"draft_vocab_size\": 2000"),
            ),
            &["2000", "2048"],
        ),
        (spoiled(&mini_eagle3(), "model.safetensors", truncated), &["model.safetensors"]),
    ];
    for (folder, parts) in &drafts {
        let path = folder.path().to_str().unwrap();
        refused(&["doctor", "--target", target, "--draft", path], parts);
        refused(&["up", "--target", target, "--draft", path, "--listen", "127.0.0.1:0"], parts);
    }
}

#[test]
fn a_pair_that_does_not_fit_names_both_files() {
    let (target, draft) = (mini(), root().join("tests/fixtures/v3_eagle3"));
    let args = ["doctor", "--target", target.to_str().unwrap(), "--draft", draft.to_str().unwrap()];
    for field in ["hidden_size = 96", "vocab_size = 259"] {
        refused(&args, &["v3_eagle3/config.json", field, "mini/config.json"]);
    }
}

fn refused(args: &[&str], parts: &[&str]) {
    let out = run(args);
    let told = String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{args:?}: {told}");
    let named = told.lines().any(|line| parts.iter().all(|part| line.contains(part)));
    assert!(named, "{args:?}: one line names {parts:?}: {told}");
    assert!(!told.contains("panicked"), "{told}");
}

#[test]
fn doctor_passes_the_bundled_pair_as_text_and_as_json() {
    let (target, draft) = (mini(), mini_eagle3());
    let args = ["doctor", "--target", target.to_str().unwrap(), "--draft", draft.to_str().unwrap()];
    let text = run(&args);
    assert!(text.status.success(), "{}", String::from_utf8_lossy(&text.stdout));
    let json = run(&[&args[..], &["--json"]].concat());
    let report: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!(report["passes"], true);
    assert!(report["checks"].as_array().unwrap().len() > 5);
}
