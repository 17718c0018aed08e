//! A11: what a service holds does not grow with the requests it has served.

use crate::EYRIE;
use eyrie_tests::{Asked, Fleet, ask, client, goldens, until};

/// Half of the requests speculate.
fn request(prompt: &[u32], n: u64) -> Asked {
    let asked = ask(prompt, 4);
    if n.is_multiple_of(2) { asked.chain(3) } else { asked.sampled(0.8, n) }
}

/// Resident memory of a process, in KiB.
fn resident(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thousands_of_requests_leave_no_memory_behind() {
    let fleet = Fleet::start(EYRIE, &[]);
    let ready = fleet.ready();
    let services = [
        ("gateway", ready.pids.gateway),
        ("target", ready.pids.target),
        ("draft", ready.pids.draft.unwrap()),
    ];
    let mut one = client(&ready.grpc).await;
    let prompts: Vec<Vec<u32>> =
        goldens().into_iter().map(|golden| golden.prompt_ids[..8].to_vec()).collect();
    let prompt = |n: u64| &prompts[n as usize % prompts.len()];
    for n in 0..200 {
        request(prompt(n), n).run(&mut one).await.unwrap();
    }
    let warm = services.map(|(_, pid)| resident(pid));
    for n in 0..2000 {
        request(prompt(n), n).run(&mut one).await.unwrap();
    }
    let mut all = tokio::task::JoinSet::new();
    for n in 0..200 {
        let (asked, mut client) = (request(prompt(n), n), one.clone());
        all.spawn(async move { asked.run(&mut client).await.unwrap() });
    }
    all.join_all().await;
    for ((name, pid), warm) in services.into_iter().zip(warm) {
        let limit = warm + 1024 + warm / 50;
        // A service gives back what a burst took once it rests.
        let what = format!("the {name} to hold at most {limit} KiB as after warm-up ({warm} KiB)");
        until(&what, async || (resident(pid) <= limit).then_some(())).await;
    }
}
