//! The README's main job.

use crate::EYRIE;
use std::process::Command;

#[test]
fn demo_serves_the_bundled_pair_and_compares_with_plain() {
    let out = Command::new(EYRIE).arg("demo").current_dir(eyrie_tests::root()).output().unwrap();
    let (text, told) = (String::from_utf8(out.stdout).unwrap(), String::from_utf8(out.stderr).unwrap());
    assert!(out.status.success(), "{told}");
    assert!(text.len() > 100, "a completion is shown: {text}");
    for part in
        ["tokens a round", "accepted by position", "plain", "speculative", "shared without copy", "identical"]
    {
        assert!(told.contains(part), "the summary tells {part}: {told}");
    }
}

#[test]
fn bench_reports_every_setting() {
    let out = Command::new(EYRIE)
        .args(["bench", "--json", "--repeats", "1", "--max-tokens", "24"])
        .current_dir(eyrie_tests::root())
        .output()
        .unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let report: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    let rows = report["settings"].as_array().unwrap();
    let names: Vec<_> = rows.iter().map(|r| r["drafts"].as_str().unwrap()).collect();
    assert_eq!(names, ["plain", "K=1", "K=3", "K=5", "K=7"]);
    assert!(rows.iter().all(|r| r["tokens_per_second"].as_f64().unwrap() > 0.0));
}

#[test]
fn demo_into_a_pipe_that_closes_ends_quietly() {
    let mut demo = Command::new(EYRIE)
        .arg("demo")
        .current_dir(eyrie_tests::root())
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    drop(demo.stdout.take());
    let out = demo.wait_with_output().unwrap();
    let told = String::from_utf8(out.stderr).unwrap();
    assert!(out.status.success() && !told.contains("DIFFERENT"), "{told}");
}
