//! Starting, describing, draining and failing.

use eyrie_service::Drain;
use eyrie_target::{TargetOptions, run};
use eyrie_wire::v1::{
    DescribeRequest, DrainRequest, LoadState, ReadFileRequest, Verify, target_item::Op, target_out::Body,
};
use eyrie_wire::{Address, connect, reason_of};
use tonic::Code;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use crate::harness::{Golden, Server, goldens, greedy, options, repository, verify_after};

#[tokio::test(flavor = "multi_thread")]
async fn the_card_tells_what_is_served() {
    let server = Server::start().await;
    let card = server.client.clone().describe(DescribeRequest {}).await.unwrap().into_inner();
    assert_eq!(card.state, LoadState::Serving as i32);
    assert_eq!((card.name.as_str(), card.architecture.as_str()), ("mini", "DeepseekV3ForCausalLM"));
    assert_eq!((card.vocab_size, card.hidden_size, card.layers, card.context_length), (4096, 384, 8, 4096));
    assert_eq!((card.kv_capacity, card.max_verify_rows, card.aux_layers), (4096, 64, vec![2, 4, 5]));
    assert_eq!((card.epoch, card.fingerprint), (server.ready.epoch, server.ready.fingerprint.clone()));
    assert_eq!((card.eos_ids, card.pid), (vec![0], std::process::id()));
    assert!(card.loaded_bytes == card.total_bytes && card.total_bytes > 1_000_000, "{} B", card.total_bytes);
    assert!(card.weight_formats.contains("int4"), "{}", card.weight_formats);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn health_follows_readiness() {
    let server = Server::start().await;
    let mut rounds = server.rounds(1).await;
    rounds.send(1, Op::Open(greedy(&goldens(1)[0].prompt, 30))).await;
    assert!(matches!(rounds.body().await, Body::Committed(_)));
    let mut health = HealthClient::new(connect(&server.ready.address).await.unwrap());
    let request = HealthCheckRequest { service: "eyrie.v1.Target".to_owned() };
    let mut watch = health.watch(request).await.unwrap().into_inner();
    let first = watch.message().await.unwrap().unwrap();
    assert_eq!(first.status, ServingStatus::Serving as i32);
    server.drain.start();
    let second = watch.message().await.unwrap().unwrap();
    assert_eq!(second.status, ServingStatus::NotServing as i32);
    // Or the stopping server waits for its streams.
    drop((watch, rounds));
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn files_of_the_model_are_served_and_no_others() {
    let server = Server::start().await;
    let mut client = server.client.clone();
    let card = client.describe(DescribeRequest {}).await.unwrap().into_inner();
    assert!(card.files.iter().any(|file| file.name == "tokenizer.json"));
    for file in card.files {
        let mut chunks =
            client.read_file(ReadFileRequest { name: file.name.clone() }).await.unwrap().into_inner();
        let mut data = Vec::new();
        while let Some(chunk) = chunks.message().await.unwrap() {
            data.extend_from_slice(&chunk.data);
        }
        assert_eq!(data, std::fs::read(repository().join("deploy/demo/mini").join(&file.name)).unwrap());
        assert_eq!(file.bytes, data.len() as u64);
    }
    for name in ["model.safetensors", "../mini/config.json", ""] {
        let status = client.read_file(ReadFileRequest { name: name.to_owned() }).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{status}");
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_lets_running_sequences_end_and_refuses_new_ones() {
    let server = Server::start().await;
    let mut client = server.client.clone();
    let mut rounds = server.rounds(1).await;
    let Golden { prompt, tokens } = &goldens(1)[0];
    rounds.send(1, Op::Open(greedy(prompt, 30))).await;
    let state = rounds.committed().await;
    let reply = client.drain(DrainRequest { grace_ms: 0 }).await.unwrap().into_inner();
    assert_eq!(reply.sequences, 1);
    rounds.send(2, Op::Open(greedy(prompt, 30))).await;
    assert_eq!(rounds.error().await.reason, "DRAINING");
    rounds.send(1, Op::Verify(Verify { steps: 29, ..verify_after(&state, vec![]) })).await;
    for token in &tokens[1..30] {
        assert_eq!(rounds.committed().await.tokens, [*token]);
    }
    let status = rounds.status().await;
    assert_eq!(reason_of(&status).as_deref(), Some("DRAINING"), "{status}");
    server.ended().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_ends_what_still_runs_after_its_grace() {
    let server = Server::start().await;
    let mut rounds = server.rounds(1).await;
    rounds.send(1, Op::Open(greedy(&goldens(1)[0].prompt, 30))).await;
    assert!(matches!(rounds.body().await, Body::Committed(_)));
    let (socket, door) = (server.dir.path().join("t.sock"), server.dir.path().join("t.sock.door"));
    assert!(socket.exists() && door.exists());
    server.client.clone().drain(DrainRequest { grace_ms: 50 }).await.unwrap();
    assert_eq!(rounds.status().await.code(), Code::Unavailable);
    let _dir = server.ended_with_dir().await;
    assert!(!socket.exists() && !door.exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_served_ends_with_one_line() {
    let dir = tempfile::tempdir().unwrap();
    let good = options(&dir);
    let missing = dir.path().join("none");
    let taken = Address::Unix(dir.path().join("no/such/folder/t.sock"));
    for (options, part) in [
        (TargetOptions { model: missing.into(), ..good.clone() }, "none"),
        (TargetOptions { listen: taken, ..good.clone() }, "cannot listen on unix:"),
        (TargetOptions { context: Some(5000), ..good.clone() }, "option context"),
        (TargetOptions { capture: Some(vec![2, 99]), ..good.clone() }, "option aux-layers"),
    ] {
        let error = run(options, Drain::new(), |_| {}).await.unwrap_err().to_string();
        assert!(error.contains(part) && !error.contains('\n'), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_load_that_fails_ends_the_service() {
    let dir = tempfile::tempdir().unwrap();
    let huge = TargetOptions { ring_bytes: Some(u64::MAX / 2), ..options(&dir) };
    let error = run(huge, Drain::new(), |_| panic!("it must not become ready")).await.unwrap_err();
    assert!(
        error.to_string().contains("are needed at least") && error.to_string().contains("features"),
        "{error}"
    );
}
