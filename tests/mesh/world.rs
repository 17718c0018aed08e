//! One seed from beginning to end: real gateways and a real target engine on one thread and on virtual time, a network
//! and a draft that misbehave, clients, and what must hold during and after.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use eyrie_gateway::GatewayOptions;
use eyrie_gateway::sim::{Held, SimGateway};
use eyrie_region::Epoch;
use eyrie_target::sim::{self, Boot, Front};
use eyrie_wire::v1::generation_client::GenerationClient;
use eyrie_wire::v1::target_client::TargetClient;
use eyrie_wire::v1::{GetModelRequest, LoadReport, LoadRequest, Peer, peer};
use eyrie_wire::{Address, Dialer};
use tokio::task::{AbortHandle, JoinHandle};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tonic::Response;

use crate::client::{self, Ending};
use crate::draft::{Attached, Mood, OracleDraft};
use crate::lm::Fixture;
use crate::net::{Network, Port, Weather};
use crate::rng::{Rng, mix};
use crate::rude::Rude;
use crate::scenario::{Ask, Event, Kind, LATENESS, Node, Scenario};
use crate::trace::Trace;

const FINGERPRINT: &str = "mesh";
/// Everything has to end within this (virtual) time.
const PATIENCE: Duration = Duration::from_secs(900);
/// Tokens by which a draft has healed, with the longest prompt and the smallest ring: eight rows a round.
const HEALED: usize = 17;
/// Longest time until nothing is held any more: the grace of sequences of unary calls, and some.
const SETTLING: Duration = Duration::from_secs(100);

/// What came of a seed.
pub(crate) struct Outcome {
    pub(crate) result: Result<(), String>,
    pub(crate) counts: BTreeMap<&'static str, u64>,
    pub(crate) trace: String,
}

/// Runs `seed`.
pub(crate) fn run(seed: u64, fixture: &Arc<Fixture>, keeps_trace: bool) -> Outcome {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    runtime.block_on(async {
        let trace = Trace::new(keeps_trace);
        let world = World::new(seed, Arc::clone(fixture), trace.clone());
        trace.note(|| format!("{:?}", world.scenario));
        let result = match timeout(PATIENCE, world.live()).await {
            Ok(result) => result,
            Err(_) => Err(format!("still not over after {} virtual seconds", PATIENCE.as_secs())),
        };
        world.network.count("needs", world.draft.needs());
        let faults = world.faults.lock().unwrap().first().cloned();
        let draft_saw = world.draft.wrong().first().cloned();
        let result = faults.or(draft_saw).map_or(result, Err);
        Outcome { result, counts: world.network.counts(), trace: trace.text() }
    })
}

/// The boot of the target that runs, if one does.
#[derive(Default)]
struct TargetProcess {
    boots: u64,
    running: Option<(Front, AbortHandle)>,
    frozen: Arc<Mutex<Duration>>,
}

struct World {
    seed: u64,
    scenario: Scenario,
    fixture: Arc<Fixture>,
    network: Network,
    trace: Trace,
    rng: Mutex<Rng>,
    draft: OracleDraft,
    targets: Vec<Mutex<TargetProcess>>,
    gateways: Vec<SimGateway>,
    /// Cancelled when that gateway dies.
    deaths: Vec<CancellationToken>,
    faults: Arc<Mutex<Vec<String>>>,
}

fn boot_id(gateway: usize) -> u64 {
    1 + gateway as u64
}

fn named(name: &str) -> Address {
    Address::Tcp(name.to_owned())
}

fn target_name(target: usize) -> String {
    format!("target{target}")
}

impl World {
    fn new(seed: u64, fixture: Arc<Fixture>, trace: Trace) -> Arc<Self> {
        let mut rng = Rng::new(seed);
        let scenario = Scenario::draw(&mut rng);
        let network = Network::new(rng.fork(), scenario.weather, trace.clone());
        let whole = |ask: &Ask| ask.prompt.iter().chain(&ask.plain.tokens).copied().collect();
        let book = Arc::new(scenario.asks.iter().map(whole).collect());
        let draft = OracleDraft::new(rng.fork(), scenario.mood, book);
        let start = |gateway| {
            let port = Port { network: network.clone(), from: boot_id(gateway) };
            let targets = (0..scenario.targets).map(|target| named(&target_name(target)));
            let mut options = GatewayOptions::new(named("gateway"), targets, [named("draft")]);
            options.target_timeout = scenario.target_timeout;
            SimGateway::start(options, Dialer::instead(Arc::new(port)), boot_id(gateway)).unwrap()
        };
        let gateways: Vec<SimGateway> = (0..scenario.gateways).map(start).collect();
        Arc::new(Self {
            seed,
            deaths: gateways.iter().map(|_| CancellationToken::new()).collect(),
            targets: (0..scenario.targets).map(|_| Mutex::default()).collect(),
            scenario,
            fixture,
            network,
            trace,
            rng: Mutex::new(rng),
            draft,
            gateways,
            faults: Arc::default(),
        })
    }

    fn rng(&self) -> Rng {
        self.rng.lock().unwrap().fork()
    }

    async fn live(self: &Arc<Self>) -> Result<(), String> {
        let mut rng = self.rng();
        self.network.listen("draft", self.draft.channel());
        (0..self.targets.len()).for_each(|target| self.boot_target(target));
        let fate = tokio::spawn(Arc::clone(self).unfold());
        let rude: Vec<JoinHandle<_>> =
            (0..self.scenario.rude).map(|i| tokio::spawn(self.rude(i, rng.fork()).run())).collect();
        let asks = self.scenario.asks.iter().cloned().map(|ask| tokio::spawn(Arc::clone(self).client(ask)));
        for client in asks.collect::<Vec<_>>() {
            client.await.map_err(|e| e.to_string())??;
        }
        for peer in rude {
            peer.await.map_err(|e| e.to_string())??;
        }
        fate.await.map_err(|e| e.to_string())?;
        self.trace.note(|| "all requests have ended");
        self.network.set_weather(Weather::CALM);
        self.draft.set_mood(Mood::Fine);
        // Until every end has heard of what broke.
        sleep(Duration::from_millis(LATENESS.into())).await;
        self.settle().await?;
        self.probe().await?;
        self.settle().await?;
        self.count_loads().await
    }

    fn rude(&self, number: u32, rng: Rng) -> Rude {
        let boot = 1000 + u64::from(number);
        let port = Port { network: self.network.clone(), from: boot };
        let (dialer, network) = (Dialer::instead(Arc::new(port)), self.network.clone());
        let is_calm = self.scenario.kind == Kind::Calm;
        let target = named(&target_name(number as usize % self.targets.len()));
        Rude { rng, boot, target, dialer, network, asks: self.scenario.asks.clone(), is_calm }
    }

    async fn client(self: Arc<Self>, ask: Ask) -> Result<(), String> {
        sleep(ask.after).await;
        let death = &self.deaths[ask.gateway];
        let reply = tokio::select! {
            biased;
            () = death.cancelled() => return Ok(()),
            reply = client::ask(self.gateways[ask.gateway].channel(), &ask) => reply?,
        };
        self.trace.note(|| format!("a request ends: {:?}", reply.ending));
        self.network.count(
            match &reply.ending {
                Ending::Finished(_) => "finished",
                Ending::Failed(_) => "failed",
                Ending::Left => "left",
            },
            1,
        );
        if let Ending::Finished(finished) = &reply.ending {
            let usage = finished.usage.clone().unwrap_or_default();
            self.network.count("accepted", usage.accepted_tokens.into());
        }
        reply.check(&ask, |code| self.scenario.allows(&ask, code))
    }

    /// The events of the scenario, each on its own course.
    async fn unfold(self: Arc<Self>) {
        let mut courses = Vec::new();
        let mut now = Duration::ZERO;
        for &(at, event) in &self.scenario.events {
            sleep(at - now).await;
            now = at;
            self.trace.note(|| format!("{event:?}"));
            courses.push(tokio::spawn(Arc::clone(&self).happen(event)));
        }
        for course in courses {
            course.await.unwrap();
        }
    }

    async fn happen(self: Arc<Self>, event: Event) {
        match event {
            Event::TargetDies { target, down } => {
                self.kill_target(target);
                sleep(down).await;
                self.boot_target(target);
            }
            Event::TargetFreezes(target, time) => {
                *self.targets[target].lock().unwrap().frozen.lock().unwrap() = time;
            }
            Event::DraftDies { down } => {
                self.network.vanish("draft");
                for target in 0..self.targets.len() {
                    self.draft.attach(&target_name(target), None);
                }
                sleep(down).await;
                self.network.listen("draft", self.draft.channel());
                for target in 0..self.targets.len() {
                    self.attach_draft(target).await;
                }
            }
            Event::DraftTurns(mood) => self.draft.set_mood(mood),
            Event::StreamsBreak(Node::Target(target)) => self.network.shake(&target_name(target)),
            Event::StreamsBreak(Node::Draft) => self.network.shake("draft"),
            Event::OrderReturns => {
                self.network.set_weather(Weather::CALM);
                (0..self.targets.len()).for_each(|target| self.network.shake(&target_name(target)));
                self.network.shake("draft");
            }
            Event::TargetDrains { target, down } => {
                self.front(target).iter().for_each(Front::drain);
                sleep(down).await;
                self.kill_target(target);
                sleep(down).await;
                self.boot_target(target);
            }
            Event::GatewayDies(gateway) => {
                self.deaths[gateway].cancel();
                self.network.leave(boot_id(gateway));
                self.gateways[gateway].stop();
            }
        }
    }

    /// The service of a target, while it runs.
    fn front(&self, target: usize) -> Option<Front> {
        self.targets[target].lock().unwrap().running.as_ref().map(|(front, _)| front.clone())
    }

    fn kill_target(&self, target: usize) {
        let Some((front, engine)) = self.targets[target].lock().unwrap().running.take() else { return };
        self.network.count("target deaths", 1);
        self.network.vanish(&target_name(target));
        self.draft.attach(&target_name(target), None);
        engine.abort();
        front.stop();
    }

    /// Boots a target unless it runs.
    fn boot_target(self: &Arc<Self>, number: usize) {
        let mut process = self.targets[number].lock().unwrap();
        if process.running.is_some() {
            return;
        }
        process.boots += 1;
        let which = self.seed ^ (process.boots << 32) ^ ((number as u64) << 48);
        let epoch = Epoch::try_from(mix(which) | 1).unwrap();
        let boot = Boot {
            checkpoint: &self.fixture.checkpoint,
            options: &self.scenario.target,
            model: self.fixture.model(epoch),
            epoch,
            fingerprint: FINGERPRINT,
        };
        let (target, front) = sim::boot(boot).unwrap();
        let (mut rng, step, frozen) = (self.rng(), self.scenario.step, Arc::clone(&process.frozen));
        let step_time = move || rng.millis(0..=step) + std::mem::take(&mut *frozen.lock().unwrap());
        let engine = tokio::spawn(target.run(step_time));
        process.running = Some((front.clone(), engine.abort_handle()));
        drop(process);
        tokio::spawn(watch(engine, Arc::clone(&self.faults)));
        self.network.listen(&target_name(number), front.channel());
        let world = Arc::clone(self);
        tokio::spawn(async move { world.attach_draft(number).await });
    }

    /// The draft finds a target that runs.
    async fn attach_draft(&self, target: usize) {
        let time = self.rng().millis(0..=2000);
        sleep(time).await;
        let Some(front) = self.front(target) else { return };
        self.trace.note(|| "the draft is attached");
        // As a real one, which needs a ring.
        let Some(ring) = front.ring().map(Result::unwrap) else { return };
        let (epoch, fingerprint, lost) =
            (front.epoch().get(), FINGERPRINT.to_owned(), CancellationToken::new());
        self.draft.attach(&target_name(target), Some(Attached { epoch, fingerprint, ring, lost }));
    }

    /// Whoever still lives.
    fn living(&self) -> impl Iterator<Item = usize> {
        (0..self.gateways.len()).filter(|&gateway| !self.deaths[gateway].is_cancelled())
    }

    /// Waits until nothing is held.
    async fn settle(&self) -> Result<(), String> {
        let mut held = Vec::new();
        for _ in 0..SETTLING.as_secs() {
            sleep(Duration::from_secs(1)).await;
            held = self.held().await;
            if held.is_empty() {
                return Ok(());
            }
        }
        Err(format!("not given back after {} s: {}", SETTLING.as_secs(), held.join(", ")))
    }

    /// What is held that should not be.
    async fn held(&self) -> Vec<String> {
        let mut held = Vec::new();
        for gateway in self.living() {
            let rest = self.gateways[gateway].held();
            if rest != Held::default() {
                held.push(format!("gateway {gateway}: {rest:?}"));
            }
        }
        if self.draft.sequences() > 0 {
            held.push(format!("draft: {} sequences", self.draft.sequences()));
        }
        for target in 0..self.targets.len() {
            match self.load(target).await {
                Ok(load) => held.extend(self.busy(&load)),
                Err(why) => held.push(why),
            }
        }
        held
    }

    async fn load(&self, target: usize) -> Result<LoadReport, String> {
        let front = self.front(target).ok_or("the target is away")?;
        let load = TargetClient::new(front.channel()).load(LoadRequest {}).await;
        load.map(Response::into_inner).map_err(|status| status.to_string())
    }

    /// What the targets that live at the end have been through.
    async fn count_loads(&self) -> Result<(), String> {
        for target in 0..self.targets.len() {
            let load = self.load(target).await?;
            self.network.count("preempted", load.preemptions);
            self.network.count("prefix hits", load.prefix_hits);
        }
        Ok(())
    }

    fn busy(&self, load: &LoadReport) -> Option<String> {
        let LoadReport { running, waiting, kv_used, aux_bytes, streams, .. } = *load;
        let streams_wanted = self.living().count() as u32;
        let rest = (running, waiting, kv_used, aux_bytes, streams) == (0, 0, 0, 0, streams_wanted);
        (!rest).then(|| format!("target: {load:?}"))
    }

    /// All is well again: every gateway serves, with its draft.
    async fn probe(&self) -> Result<(), String> {
        let captures = self.scenario.target.capture.as_ref().is_some_and(|ids| !ids.is_empty());
        for gateway in self.living() {
            let channel = self.gateways[gateway].channel();
            let mut client = GenerationClient::new(channel.clone());
            for _ in 0..90 {
                let model = client.get_model(GetModelRequest {}).await.map_err(|e| format!("probe: {e}"))?;
                let is_up = |peer: &Peer| peer.state() == peer::State::Up;
                if model.into_inner().peers.iter().all(is_up) || !captures {
                    break;
                }
                sleep(Duration::from_secs(1)).await;
            }
            let Some(ask) = self.scenario.asks.iter().max_by_key(|ask| ask.plain.tokens.len()) else {
                continue;
            };
            let mut calm =
                Ask { deadline: None, leaves_after: None, reads_in: Duration::ZERO, ..ask.clone() };
            calm.request.speculation = None;
            let reply = client::ask(channel, &calm).await?;
            reply.check(&calm, |_| false).map_err(|why| format!("probe at gateway {gateway}: {why}"))?;
            let Ending::Finished(finished) = reply.ending else { continue };
            let accepted = finished.usage.unwrap_or_default().accepted_tokens;
            if captures && accepted == 0 && calm.plain.tokens.len() >= HEALED {
                return Err(format!("probe at gateway {gateway}: the draft has not healed"));
            }
        }
        Ok(())
    }
}

/// Notes an engine that fails or panics.
async fn watch(engine: JoinHandle<Result<(), eyrie_target::TargetError>>, faults: Arc<Mutex<Vec<String>>>) {
    let fault = match engine.await {
        Ok(Ok(())) => return,
        Ok(Err(error)) => format!("the engine failed: {error}"),
        Err(error) if error.is_cancelled() => return,
        Err(error) => format!("the engine panicked: {error}"),
    };
    faults.lock().unwrap().push(fault);
}
