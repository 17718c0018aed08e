//! How processes end when told to, whoever reads what they say.

use std::process::{Child, Command, Stdio};

use crate::EYRIE;
use eyrie_tests::{Fleet, Signal, ask, client, goldens, load, mini, root, signal, until};

async fn exit_code(child: &mut Child) -> Option<i32> {
    until("the process to end", async || child.try_wait().unwrap()).await.code()
}

#[tokio::test]
async fn a_service_whose_log_nobody_reads_still_serves_and_drains() {
    let dir = tempfile::tempdir().unwrap();
    let address = format!("unix:{}", dir.path().join("target.sock").display());
    let mut target = Command::new(EYRIE)
        .args(["target", "--listen", &address, "--model"])
        .arg(mini())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // As after `eyrie target … 2>&1 | head`: every line from now on is one that cannot be written.
    drop(target.stderr.take());
    until("the target to answer", async || load(&address).await.ok()).await;
    signal(target.id(), Signal::TERM);
    assert_eq!(exit_code(&mut target).await, Some(0));
}

#[tokio::test]
async fn up_goes_on_when_nobody_reads_what_it_says() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("ready.json");
    let mut up = Command::new(EYRIE)
        .args(["up", "--restart", "--listen", "127.0.0.1:0", "--ready-file"])
        .arg(&file)
        .current_dir(root())
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(up.stderr.take());
    let draft = async || {
        let ready: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).ok()?).ok()?;
        ready["pids"]["draft"].as_u64()
    };
    let first = until("a fleet", draft).await;
    signal(first as u32, Signal::KILL);
    until("another draft", async || draft().await.filter(|&pid| pid != first)).await;
    signal(up.id(), Signal::TERM);
    assert_eq!(exit_code(&mut up).await, Some(0));
    assert!(!file.exists());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_signal_does_not_wait_for_requests() {
    let fleet = Fleet::start(EYRIE, &[]);
    let mut client = client(&fleet.ready().grpc).await;
    let asked = ask(&goldens()[0].prompt_ids, 3000);
    let mut stream = client.generate_stream(asked.0).await.unwrap().into_inner();
    let mut tokens = 0;
    while tokens == 0 {
        tokens += stream.message().await.unwrap().unwrap().token_ids.len();
    }
    signal(fleet.pid(), Signal::TERM);
    until("the drain", async || fleet.log().contains("draining").then_some(())).await;
    signal(fleet.pid(), Signal::INT);
    let status = loop {
        match stream.message().await {
            Ok(Some(chunk)) => tokens += chunk.token_ids.len(),
            Ok(None) => panic!("the request was waited for"),
            Err(status) => break status,
        }
    };
    assert!(tokens < 3000 && status.message().contains("stopped"), "{status:?} after {tokens} tokens");
    assert_eq!(fleet.stop(), Some(0));
}
