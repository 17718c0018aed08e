//! P1 and P3 with several of each: two gateways, two targets and two drafts under traffic, while one service after
//! the other is killed or ended and started again.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use eyrie_tests::{
    Fleet, Golden, Service, Signal, ask, client, draft_card, goldens, mini, mini_eagle3, signal, until,
};
use eyrie_wire::reason_of;
use eyrie_wire::v1::peer::{Role, State};
use eyrie_wire::v1::{GetModelRequest, LoadReport, Model};
use tokio::task::JoinSet;

use crate::EYRIE;

/// Requests that run at any time, and how many of them pass between one fault and the next.
const STREAMS: usize = 4;
const BETWEEN: usize = 4;

/// One process, with what it takes to start it again.
struct Member {
    args: Vec<String>,
    service: Service,
}

impl Member {
    fn start(args: Vec<String>, folder: &std::path::Path) -> Self {
        let service = Service::start(EYRIE, &args.iter().map(String::as_str).collect::<Vec<_>>(), folder);
        Self { args, service }
    }

    /// Ends it and starts it again.
    fn hit(&mut self, with: Signal, folder: &std::path::Path) {
        signal(self.service.pid(), with);
        let code = self.service.wait();
        assert_eq!(code, (with == Signal::TERM).then_some(0), "{:?}: {}", self.args, self.service.log());
        *self = Self::start(self.args.clone(), folder);
    }
}

/// Two of each; every draft is attached to one target, every gateway knows all.
struct Pools {
    folder: tempfile::TempDir,
    members: Vec<Member>,
}

impl Pools {
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| format!("unix:{}/{name}.sock", folder.path().display());
        let (mini, eagle) = (mini(), mini_eagle3());
        let (mini, eagle) = (mini.to_str().unwrap(), eagle.to_str().unwrap());
        let peers =
            ["--target", &at("t1"), "--target", &at("t2"), "--draft", &[at("d1"), at("d2")].join(",")];
        let mut members = Vec::new();
        let mut start = |args: &[&str]| {
            let args = args.iter().map(|&arg| arg.to_owned()).collect();
            members.push(Member::start(args, folder.path()));
        };
        for n in ["1", "2"] {
            let (target, draft) = (at(&format!("t{n}")), at(&format!("d{n}")));
            let threads = ["--threads", "1"];
            let weights = ["target", "--model", mini, "--aux-layers", "2,4,5", "--listen", &target];
            start(&[&weights[..], &threads].concat());
            let head = ["draft", "--model", eagle, "--target", &target, "--listen", &draft];
            start(&[&head[..], &threads].concat());
            start(&[&["gateway", "--listen", &at(&format!("g{n}"))], &peers[..]].concat());
        }
        Self { folder, members }
    }

    fn at(&self, name: &str) -> String {
        format!("unix:{}/{name}.sock", self.folder.path().display())
    }

    /// Waits until a gateway has sequences at this target or draft.
    async fn in_use(&self, member: usize) {
        let args = &self.members[member].args;
        let listen = args.iter().skip_while(|arg| *arg != "--listen").nth(1).unwrap();
        until("sequences at it", async || {
            let models = [model(&self.at("g1")).await?, model(&self.at("g2")).await?];
            let mut peers = models.iter().flat_map(|model| &model.peers);
            peers.any(|peer| peer.address == *listen && peer.sequences > 0).then_some(())
        })
        .await;
    }

    /// How often a running request was opened at another target, or another boot of its own.
    fn reopened(&self) -> usize {
        let logs = std::fs::read_dir(self.folder.path()).unwrap().map(|entry| entry.unwrap().path());
        let gateways = logs.filter(|path| path.to_string_lossy().contains("gateway-"));
        gateways.map(|log| std::fs::read_to_string(log).unwrap().matches("is opened again").count()).sum()
    }

    /// Waits until both gateways work with both targets and a draft of each.
    async fn complete(&self) {
        for gateway in ["g1", "g2"] {
            until("every peer", async || {
                let model = model(&self.at(gateway)).await?;
                let up = |role| {
                    let is_up =
                        |peer: &&eyrie_wire::v1::Peer| (peer.role(), peer.state()) == (role, State::Up);
                    model.peers.iter().filter(is_up).count()
                };
                (up(Role::Target) == 2 && up(Role::Draft) == 2).then_some(())
            })
            .await;
        }
    }
}

async fn model(gateway: &str) -> Option<Model> {
    let channel = eyrie_wire::connect(&gateway.parse().ok()?).await.ok()?;
    let mut client = eyrie_wire::v1::generation_client::GenerationClient::new(channel);
    Some(client.get_model(GetModelRequest {}).await.ok()?.into_inner())
}

async fn load(target: &str) -> LoadReport {
    eyrie_tests::load(target).await.unwrap()
}

async fn draft_sequences(draft: &str) -> u32 {
    draft_card(draft).await.unwrap().targets.iter().map(|lease| lease.sequences).sum()
}

/// Clients that ask one gateway after the other, again and again.
struct Traffic {
    gateways: [String; 2],
    goldens: Vec<Golden>,
    finished: AtomicUsize,
    /// A gateway is about to be hit: its clients may lose their streams, and ask the other one.
    gateway_hit: AtomicBool,
    over: AtomicBool,
}

impl Traffic {
    async fn run(&self, mut turn: usize) {
        while !self.over.load(Ordering::SeqCst) {
            let golden = &self.goldens[turn % self.goldens.len()];
            let asked = match turn % 3 {
                0 => ask(&golden.prompt_ids, 96),
                1 => ask(&golden.prompt_ids, 96).auto(),
                _ => ask(&golden.prompt_ids, 96).chain(5),
            };
            let outcome = loop {
                turn += 1;
                let gateway = &self.gateways[turn % 2];
                let Ok(channel) = eyrie_wire::connect(&gateway.parse().unwrap()).await else {
                    assert!(self.gateway_hit.load(Ordering::SeqCst), "{gateway} is away");
                    continue;
                };
                let mut client = eyrie_wire::v1::generation_client::GenerationClient::new(channel);
                match asked.run(&mut client).await {
                    Ok(outcome) => break outcome,
                    // No word of the gateway's own, or that it drains.
                    Err(status) if self.gateway_hit.load(Ordering::SeqCst) => {
                        let reason = reason_of(&status);
                        assert!(reason.is_none_or(|reason| reason == "DRAINING"), "{status:?}");
                    }
                    Err(status) => panic!("a request was lost: {status:?}"),
                }
            };
            assert_eq!(outcome.ids, golden.greedy_ids, "{}", golden.id);
            self.finished.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Waits until some more requests have ended.
    async fn passes(&self) {
        let enough = self.finished.load(Ordering::SeqCst) + BETWEEN;
        until("traffic", async || (self.finished.load(Ordering::SeqCst) >= enough).then_some(())).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn any_service_may_come_and_go_under_traffic() {
    let mut pools = Pools::start();
    pools.complete().await;
    let traffic = Arc::new(Traffic {
        gateways: [pools.at("g1"), pools.at("g2")],
        goldens: goldens(),
        finished: AtomicUsize::new(0),
        gateway_hit: AtomicBool::new(false),
        over: AtomicBool::new(false),
    });
    let mut clients = JoinSet::new();
    for i in 0..STREAMS {
        let traffic = Arc::clone(&traffic);
        clients.spawn(async move { traffic.run(7 * i).await });
    }
    for with in [Signal::KILL, Signal::TERM] {
        for i in 0..pools.members.len() {
            traffic.passes().await;
            let is_gateway = pools.members[i].args[0] == "gateway";
            traffic.gateway_hit.store(is_gateway, Ordering::SeqCst);
            if !is_gateway {
                pools.in_use(i).await;
            }
            pools.members[i].hit(with, pools.folder.path());
            pools.complete().await;
        }
    }
    traffic.passes().await;
    traffic.over.store(true, Ordering::SeqCst);
    while let Some(client) = clients.join_next().await {
        client.unwrap();
    }
    assert!(pools.reopened() > 0, "requests went on elsewhere");
    for n in ["1", "2"] {
        let (target, draft) = (pools.at(&format!("t{n}")), pools.at(&format!("d{n}")));
        until("everything to be given back", async || {
            let load = load(&target).await;
            assert!(load.steps > 0, "it served");
            let held = (load.running, load.waiting, load.kv_used, load.aux_bytes);
            let held_by = (load.streams, load.leases, draft_sequences(&draft).await);
            (held == (0, 0, 0, 0) && held_by == (2, 1, 0)).then_some(())
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn up_starts_and_keeps_several_of_each() {
    let fleet = Fleet::start(EYRIE, &["--targets", "2", "--drafts", "2", "--restart"]);
    let before = fleet.ready();
    assert_eq!((before.targets.len(), before.drafts.len()), (2, 2), "{before:?}");
    assert_eq!((&before.targets[0], before.pids.targets[0]), (&before.target, before.pids.target));
    let golden = &goldens()[9];
    let asked = ask(&golden.prompt_ids, 96).chain(3);
    let mut client = client(&before.grpc).await;
    signal(before.pids.targets[1], Signal::KILL);
    signal(before.pids.drafts[0], Signal::KILL);
    let outcome = asked.run(&mut client).await.unwrap();
    assert_eq!(outcome.ids, golden.greedy_ids);
    let after = until("both to be started again", async || {
        let after = fleet.ready();
        let anew =
            after.pids.targets[1] != before.pids.targets[1] && after.pids.drafts[0] != before.pids.drafts[0];
        anew.then_some(after)
    });
    let after = after.await;
    assert_eq!((after.pids.targets[0], after.pids.gateway), (before.pids.targets[0], before.pids.gateway));
    for _ in 0..2 {
        let outcome = asked.run(&mut client).await.unwrap();
        assert_eq!(outcome.ids, golden.greedy_ids);
        assert!(outcome.usage.accepted_tokens > 0, "each target has its draft again");
    }
    assert_eq!(fleet.stop(), Some(0));
}
