//! A pair that is made from a seed is served like one from files.

use std::process::Command;

use serde_json::Value;

use crate::EYRIE;
use eyrie_tests::{Fleet, ask, client};

const TOKENS: u32 = 48;
/// So few tokens that a head which was never trained guesses right now and then.
const SMALL: &str = "mini:layers=4,vocab=8,context=256";
const PROMPT: [u32; 5] = [3, 1, 4, 1, 5];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_seed_gives_one_model_and_drafts_change_no_token_of_it() {
    let mut all = Vec::new();
    for seed in ["1", "1", "2"] {
        let fleet = Fleet::start(EYRIE, &["--synth", &format!("{SMALL},seed={seed}")]);
        let mut client = client(&fleet.ready().grpc).await;
        let plain = ask(&PROMPT, TOKENS).run(&mut client).await.unwrap().ids;
        assert_eq!(plain.len(), TOKENS as usize);
        for k in [1, 3] {
            let drafted = ask(&PROMPT, TOKENS).chain(k).run(&mut client).await.unwrap();
            assert_eq!(drafted.ids, plain, "K = {k}");
            assert!(drafted.usage.accepted_tokens > 0 && drafted.usage.rounds < TOKENS - 1, "K = {k}");
        }
        all.push(plain);
    }
    assert_eq!(all[0], all[1]);
    assert_ne!(all[0], all[2]);
}

#[test]
fn steps_and_rounds_are_timed_by_batch() {
    let args = [
        "bench",
        "steps",
        "--synth",
        SMALL,
        "--batch",
        "1,3",
        "--rounds",
        "4",
        "--prompt-tokens",
        "16",
        "--json",
    ];
    let output = Command::new(EYRIE).args(args).current_dir(eyrie_tests::root()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let told: Value = serde_json::from_slice(&output.stdout).unwrap();
    let lines = told["batches"].as_array().unwrap();
    assert_eq!(lines.iter().map(|line| line["batch"].as_u64().unwrap()).collect::<Vec<_>>(), [1, 3]);
    for line in lines {
        let drafted = &line["drafted"];
        let [plain, round, draft, verify] =
            [&line["plain_ms"], &drafted["round_ms"], &drafted["draft_ms"], &drafted["verify_ms"]]
                .map(|ms| ms.as_f64().unwrap());
        assert!(plain > 0.0 && draft > 0.0 && verify > 0.0 && round >= draft.max(verify), "{line}");
        assert!((1.0..=4.0).contains(&drafted["tokens_per_round"].as_f64().unwrap()), "{line}");
    }
}
