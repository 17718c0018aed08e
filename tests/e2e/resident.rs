//! A11: what a service holds does not grow with the requests it has served.

use std::time::{Duration, Instant};

use crate::EYRIE;
use eyrie_tests::{Asked, Fleet, ask, client, goldens, until};
use eyrie_wire::v1::generation_client::GenerationClient;
use tonic::transport::Channel;

/// Half of the requests speculate.
fn request(prompts: &[Vec<u32>], n: u64) -> Asked {
    let asked = ask(&prompts[n as usize % prompts.len()], 4);
    if n.is_multiple_of(2) { asked.chain(3) } else { asked.sampled(0.8, n) }
}

/// Resident memory of a process, in KiB.
fn resident(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse().unwrap()
}

/// Several times as long as a service that rests waits before it trims its heap.
const CALM: Duration = Duration::from_secs(3);

/// Resident memory of each process once that has stayed as it is, give or take a few pages.
async fn settled(pids: [u32; 3]) -> [u64; 3] {
    let (mut held, mut since) = (pids.map(resident), Instant::now());
    until("the services to rest", async || {
        let now = pids.map(resident);
        if now.iter().zip(held).any(|(now, held)| now.abs_diff(held) > 32) {
            (held, since) = (now, Instant::now());
        }
        (since.elapsed() > CALM).then_some(now)
    })
    .await
}

/// One by one.
async fn in_turn(client: &GenerationClient<Channel>, prompts: &[Vec<u32>], requests: u64) {
    let mut client = client.clone();
    for n in 0..requests {
        request(prompts, n).run(&mut client).await.unwrap();
    }
}

/// All at once.
async fn at_once(client: &GenerationClient<Channel>, prompts: &[Vec<u32>], requests: u64) {
    let mut all = tokio::task::JoinSet::new();
    for n in 0..requests {
        let (asked, mut client) = (request(prompts, n), client.clone());
        all.spawn(async move { asked.run(&mut client).await.unwrap() });
    }
    all.join_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thousands_of_requests_leave_no_memory_behind() {
    let fleet = Fleet::start(EYRIE, &[]);
    let ready = fleet.ready();
    let pids = [ready.pids.gateway, ready.pids.target, ready.pids.draft.unwrap()];
    let one = client(&ready.grpc).await;
    let prompts: Vec<Vec<u32>> =
        goldens().into_iter().map(|golden| golden.prompt_ids[..8].to_vec()).collect();
    in_turn(&one, &prompts, 200).await;
    // Read at rest each time: work in flight holds memory, and what it has freed is given back only after it.
    let warm = settled(pids).await;
    in_turn(&one, &prompts, 2000).await;
    at_once(&one, &prompts, 200).await;
    let busy = pids.map(resident);
    let end = settled(pids).await;
    println!("gateway, target, draft in KiB: {warm:?} warm, {busy:?} at the end, {end:?} at rest");
    for ((name, warm), end) in ["gateway", "target", "draft"].into_iter().zip(warm).zip(end) {
        let limit = warm + 1024 + warm / 50;
        assert!(end <= limit, "the {name} holds {end} KiB, after warm-up {warm} KiB");
    }
}
