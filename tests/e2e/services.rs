//! Services one by one: any order of start, TCP or unix sockets, orderly end, health.

use crate::EYRIE;
use eyrie_tests::{
    Fleet, Service, Signal, ask, client, goldens, mini, mini_eagle3, signal, speculating, until,
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn any_order_of_start_ends_in_speculation() {
    let golden = &goldens()[3];
    for order in [["gateway", "draft", "target"], ["draft", "target", "gateway"]] {
        let folder = tempfile::tempdir().unwrap();
        let socket = |name: &str| format!("unix:{}/{name}.sock", folder.path().display());
        let (target, draft, gateway) = (socket("target"), socket("draft"), socket("gateway"));
        let (mini, eagle) = (mini(), mini_eagle3());
        let (mini, eagle) = (mini.to_str().unwrap(), eagle.to_str().unwrap());
        let mut running = Vec::new();
        for name in order {
            let args: Vec<&str> = match name {
                "target" => vec!["target", "--model", mini, "--listen", &target, "--aux-layers", "2,4,5"],
                "draft" => vec!["draft", "--model", eagle, "--listen", &draft, "--target", &target],
                _ => vec!["gateway", "--listen", &gateway, "--target", &target, "--draft", &draft],
            };
            running.push(Service::start(EYRIE, &args, folder.path()));
        }
        speculating(&gateway).await;
        let outcome = ask(&golden.prompt_ids, 96).chain(3).run(&mut client(&gateway).await).await.unwrap();
        assert_eq!(outcome.ids, golden.greedy_ids, "{order:?}");
        assert!(outcome.usage.accepted_tokens > 0, "{order:?}");
        for service in &mut running {
            signal(service.pid(), Signal::TERM);
            assert_eq!(service.wait(), Some(0), "{order:?}: {}", service.log());
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tcp_between_the_services_serves_the_same() {
    let fleet = Fleet::start(EYRIE, &["--tcp"]);
    let ready = fleet.ready();
    assert!(ready.target.starts_with("http://127.0.0.1:"), "{ready:?}");
    let golden = &goldens()[4];
    let outcome = ask(&golden.prompt_ids, 96).chain(5).run(&mut client(&ready.grpc).await).await.unwrap();
    assert_eq!(outcome.ids, golden.greedy_ids);
    assert!(outcome.usage.accepted_tokens > 0);
    assert_eq!(fleet.stop(), Some(0), "SIGTERM drains and ends with 0");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restarted_target_serves_again_with_a_new_epoch() {
    let fleet = Fleet::start(EYRIE, &["--restart"]);
    let before = fleet.ready();
    let golden = &goldens()[5];
    signal(before.pids.target, Signal::KILL);
    let after = until("the new target's pid", async || {
        Some(fleet.ready()).filter(|r| r.pids.target != before.pids.target)
    });
    let after = after.await;
    speculating(&after.grpc).await;
    let outcome = ask(&golden.prompt_ids, 96).chain(3).run(&mut client(&after.grpc).await).await.unwrap();
    assert_eq!(outcome.ids, golden.greedy_ids);
    assert!(outcome.usage.accepted_tokens > 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fleet_that_ends_lets_running_requests_end() {
    let fleet = Fleet::start(EYRIE, &[]);
    let mut client = client(&fleet.ready().grpc).await;
    let asked = ask(&goldens()[7].prompt_ids, 800).chain(3);
    let whole = asked.run(&mut client).await.unwrap();
    let stream = client.generate_stream(asked.0).await.unwrap().into_inner();
    let mut pending = true;
    let outcome = eyrie_tests::collect(stream, |so_far| {
        if pending && so_far.ids.len() > 50 {
            pending = false;
            signal(fleet.pid(), Signal::TERM);
        }
    });
    assert_eq!(outcome.await.unwrap().ids, whole.ids);
    assert!(!pending, "it was ended on the way");
    assert_eq!(fleet.stop(), Some(0));
}

#[test]
fn a_supervised_service_ends_when_it_is_told_to() {
    let folder = tempfile::tempdir().unwrap();
    let socket = format!("unix:{}/gateway.sock", folder.path().display());
    let args = ["gateway", "--listen", &socket, "--target", "unix:/none.sock", "--with-parent"];
    let mut service = Service::start_supervised(EYRIE, &args, folder.path());
    while !folder.path().join("gateway.sock").exists() {
        std::thread::yield_now();
    }
    // Its supervisor is still there and holds its standard input.
    signal(service.pid(), Signal::TERM);
    assert_eq!(service.wait(), Some(0), "{}", service.log());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_service_is_started_again_however_it_ended() {
    let fleet = Fleet::start(EYRIE, &["--restart"]);
    let golden = &goldens()[8];
    type Pid = fn(&eyrie_tests::Pids) -> u32;
    let services: [(&str, Pid); 3] =
        [("target", |p| p.target), ("draft", |p| p.draft.unwrap_or(0)), ("gateway", |p| p.gateway)];
    for (name, pid) in services {
        for with in [Signal::TERM, Signal::KILL] {
            let before = pid(&fleet.ready().pids);
            signal(before, with);
            until(name, async || (pid(&fleet.ready().pids) != before).then_some(())).await;
            let ready = fleet.ready();
            let outcome =
                ask(&golden.prompt_ids, 96).chain(3).run(&mut client(&ready.grpc).await).await.unwrap();
            assert_eq!(outcome.ids, golden.greedy_ids, "{name} after {with:?}");
            assert!(outcome.usage.accepted_tokens > 0, "{name} after {with:?}");
        }
    }
}

#[test]
fn a_start_that_cannot_succeed_says_why_and_ends() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let listen = taken.local_addr().unwrap().to_string();
    for (args, part) in [(&["--listen", listen.as_str()][..], "in use"), (&["--kv-tokens", "0"], "kv-tokens")]
    {
        let out = std::process::Command::new(EYRIE)
            .arg("up")
            .args(args)
            .current_dir(eyrie_tests::root())
            .output()
            .unwrap();
        let told = String::from_utf8(out.stderr).unwrap();
        assert_eq!(out.status.code(), Some(1), "{args:?}: {told}");
        assert!(
            told.lines().any(|line| line.starts_with("error:") && line.contains(part)),
            "{args:?}: {told}"
        );
    }
}
