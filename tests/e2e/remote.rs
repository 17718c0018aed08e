//! Drafts that share no memory with their target, drafts with two targets, and memory that outlives a killed target.

use std::collections::HashSet;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::EYRIE;
use eyrie_tests::{
    Outcome, Service, Signal, ask, client, collect, goldens, mini, mini_eagle3, signal, target_card, until,
};
use eyrie_wire::v1::draft_client::DraftClient;
use eyrie_wire::v1::{DescribeDraftRequest, GetModelRequest, TargetLease};

/// How soon an importer must have let go of memory whose lease it lost.
const UNMAP_LIMIT: Duration = Duration::from_secs(2);

/// Service processes with their sockets and logs in folders of their own.
struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn socket(&self, name: &str) -> String {
        format!("unix:{}/{name}.sock", self.0.path().display())
    }

    fn start(&self, name: &str, args: &[&str]) -> Service {
        let logs = self.0.path().join(name);
        std::fs::create_dir_all(&logs).unwrap();
        Service::start(EYRIE, args, &logs)
    }

    fn target(&self, name: &str, listen: &str) -> Service {
        let model = mini();
        let model = model.to_str().unwrap();
        let args =
            ["target", "--model", model, "--listen", listen, "--aux-layers", "2,4,5", "--threads", "1"];
        self.start(name, &args)
    }

    fn draft(&self, name: &str, targets: &[&str], shared: &str) -> Service {
        let (model, listen) = (mini_eagle3(), self.socket(name));
        let mut args = vec!["draft", "--model", model.to_str().unwrap(), "--listen", &listen];
        args.extend(["--shared-weights", shared, "--threads", "1"]);
        targets.iter().for_each(|target| args.extend(["--target", target]));
        self.start(name, &args)
    }

    /// A gateway that waits for proposals however busy the machine is: rounds are compared here.
    fn gateway(&self, name: &str, target: &str, draft: &str) -> Service {
        let (listen, draft) = (self.socket(name), self.socket(draft));
        let args = ["gateway", "--listen", &listen, "--target", target, "--draft", &draft];
        self.start(name, &[&args[..], &["--draft-deadline", "30000"]].concat())
    }

    /// Waits until the gateway speculates.
    async fn speculating(&self, gateway: &str) {
        let endpoint = self.socket(gateway);
        until("the gateway to speculate", async || {
            let channel = eyrie_wire::connect(&endpoint.parse().unwrap()).await.ok()?;
            let mut client = eyrie_wire::v1::generation_client::GenerationClient::new(channel);
            let model = client.get_model(GetModelRequest {}).await.ok()?.into_inner();
            model.speculating.then_some(())
        })
        .await;
    }

    async fn leases(&self, draft: &str) -> Option<Vec<TargetLease>> {
        let channel = eyrie_wire::connect(&self.socket(draft).parse().unwrap()).await.ok()?;
        Some(DraftClient::new(channel).describe(DescribeDraftRequest {}).await.ok()?.into_inner().targets)
    }
}

/// The memfds that a process maps, as device, inode and path.
fn memfds(pid: u32) -> HashSet<String> {
    let maps = std::fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("maps")).unwrap();
    let mapped = maps.lines().filter(|line| line.contains(" /memfd:eyrie-"));
    mapped.map(|line| line.split_whitespace().skip(3).collect::<Vec<_>>().join(" ")).collect()
}

/// Stops a process and waits until it is.
async fn freeze(pid: u32) {
    signal(pid, Signal::STOP);
    until("the process to stop", async || {
        let stat = std::fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("stat")).unwrap();
        let (_, state) = stat.rsplit_once(") ")?;
        state.starts_with('T').then_some(())
    })
    .await;
}

/// A loopback address whose port was free a moment ago.
fn loopback() -> String {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_draft_elsewhere_speculates_as_one_beside_the_target() {
    let (place, address) = (Place::new(), loopback());
    let target = place.target("target", &address);
    let drafts = [("mapped", "map"), ("copied", "target"), ("built", mini().to_str().unwrap())]
        .map(|(name, shared)| (name, place.draft(name, &[&address], shared)));
    let gateways = drafts.each_ref().map(|(name, _)| format!("{name}-gateway"));
    let _running: Vec<Service> = std::iter::zip(&gateways, &drafts)
        .map(|(gateway, (draft, _))| place.gateway(gateway, &address, draft))
        .collect();
    let mut clients = Vec::new();
    for gateway in &gateways {
        place.speculating(gateway).await;
        clients.push(client(&place.socket(gateway)).await);
    }
    for (name, process) in &drafts {
        // Weights and ring.
        let shared = memfds(process.pid()).intersection(&memfds(target.pid())).count();
        assert_eq!(shared, if *name == "mapped" { 2 } else { 0 }, "{name}");
    }
    let remote = target_card(&address).await.unwrap().leases.iter().filter(|lease| lease.remote).count();
    assert_eq!(remote, 2);

    for golden in goldens().iter().take(3) {
        let asked = [
            ask(&golden.prompt_ids, 96).chain(3),
            ask(&golden.prompt_ids, 96).chain(7).sampled(0.7, 3),
            ask(&golden.prompt_ids, 96).tree(4, 5, 16),
        ];
        for (asked, exact) in asked.iter().zip([true, false, true]) {
            let mut outcomes: Vec<Outcome> = Vec::new();
            for client in &mut clients {
                outcomes.push(asked.run(client).await.unwrap());
            }
            assert!(!exact || outcomes[0].ids == golden.greedy_ids, "{}", golden.id);
            assert!(outcomes[0].usage.accepted_tokens > 0);
            for outcome in &outcomes[1..] {
                assert_eq!(outcome.ids, outcomes[0].ids, "{}", golden.id);
                assert_eq!(outcome.rounds, outcomes[0].rounds, "{}: the same rounds", golden.id);
                assert_eq!(outcome.usage.rounds_without_draft, 0);
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_draft_speculates_for_two_targets_and_goes_on_for_one() {
    const TOKENS: u32 = 900;
    let place = Place::new();
    let targets = ["first", "second"].map(|name| place.socket(name));
    let first = place.target("first", &targets[0]);
    let _second = place.target("second", &targets[1]);
    let _draft = place.draft("draft", &[&targets[0], &targets[1]], "map");
    let _gateways = ["gateway-first", "gateway-second"]
        .iter()
        .zip(&targets)
        .map(|(name, target)| place.gateway(name, target, "draft"))
        .collect::<Vec<_>>();
    place.speculating("gateway-first").await;
    place.speculating("gateway-second").await;
    let golden = &goldens()[0];
    let drafted =
        ask(&golden.prompt_ids, 96).chain(3).run(&mut client(&place.socket("gateway-first")).await).await;
    let drafted = drafted.unwrap();
    assert_eq!(drafted.ids, golden.greedy_ids);
    assert!(drafted.usage.accepted_tokens > 0);

    let mut client = client(&place.socket("gateway-second")).await;
    let asked = ask(&golden.prompt_ids, TOKENS).chain(3).sampled(0.7, 5);
    let whole = asked.run(&mut client).await.unwrap();
    let stream = client.generate_stream(asked.0).await.unwrap().into_inner();
    let mut pending = true;
    let outcome = collect(stream, |so_far| {
        if pending && so_far.ids.len() > 100 {
            pending = false;
            signal(first.pid(), Signal::KILL);
        }
    });
    let outcome = outcome.await.unwrap();
    assert!(!pending, "the other target was killed on the way");
    assert_eq!((outcome.ids, outcome.rounds), (whole.ids, whole.rounds), "not a round was missed");
    assert_eq!(outcome.usage.rounds_without_draft, 0);
    let leases = until("the first lease to go", async || {
        place.leases("draft").await.filter(|leases| !leases[0].attached)
    });
    assert!(leases.await[1].attached);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_importer_lets_go_of_a_killed_target_in_time() {
    let place = Place::new();
    let address = place.socket("target");
    let target = place.target("target", &address);
    let draft = place.draft("draft", &[&address], "map");
    attached(&place).await;
    assert_eq!(memfds(draft.pid()).len(), 2, "weights and ring");
    signal(target.pid(), Signal::KILL);
    let killed = Instant::now();
    until("the draft to unmap", async || memfds(draft.pid()).is_empty().then_some(())).await;
    assert!(killed.elapsed() < UNMAP_LIMIT, "{:?}", killed.elapsed());
}

async fn attached(place: &Place) {
    until("the draft to attach", async || {
        place.leases("draft").await.filter(|leases| leases.iter().all(|lease| lease.attached))
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restarted_target_names_who_holds_the_former_one_s_memory_and_serves() {
    let place = Place::new();
    let address = place.socket("target");
    let target = place.target("target", &address);
    let draft = place.draft("draft", &[&address], "map");
    attached(&place).await;
    freeze(draft.pid()).await;
    signal(target.pid(), Signal::KILL);
    drop(target);

    let again = place.target("target", &address);
    let loaded = until("the restarted target to load", async || {
        target_card(&address).await.ok().filter(|card| !card.fingerprint.is_empty())
    });
    let left: Vec<u32> = loaded.await.left_behind.iter().map(|holder| holder.pid).collect();
    assert_eq!(left, [draft.pid()]);
    let line = format!("draft (pid {})", draft.pid());
    assert!(
        again.log().lines().any(|told| told.contains("previous boot") && told.contains(&line)),
        "{}",
        again.log()
    );

    signal(draft.pid(), Signal::CONT);
    until("the draft to have the new memory", async || {
        (!memfds(draft.pid()).is_disjoint(&memfds(again.pid()))).then_some(())
    })
    .await;
    // The dead hold nothing.
    signal(draft.pid(), Signal::KILL);
    drop(draft);
    drop(again);
    let _third = place.target("target", &address);
    let loaded = until("the third target to load", async || {
        target_card(&address).await.ok().filter(|card| !card.fingerprint.is_empty())
    });
    assert!(loaded.await.left_behind.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopping_target_names_who_does_not_let_go() {
    let place = Place::new();
    let address = place.socket("target");
    let mut target = place.target("target", &address);
    let draft = place.draft("draft", &[&address], "map");
    attached(&place).await;
    freeze(draft.pid()).await;
    signal(target.pid(), Signal::TERM);
    assert_eq!(target.wait(), Some(0), "{}", target.log());
    let line = format!("draft (pid {}", draft.pid());
    assert!(
        target.log().lines().any(|told| told.contains("still holds") && told.contains(&line)),
        "{}",
        target.log()
    );
}
