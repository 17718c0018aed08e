//! What all requests share, and the service's life: listen, follow the target's state, drain.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use eyrie_service::{Drain, Health, ServeError, serve};
use eyrie_wire::v1::LoadReport;
use eyrie_wire::v1::generation_server::GenerationServer;
use eyrie_wire::{Address, Listener, MAX_MESSAGE, Reason, refuse};
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout_at};
use tonic::Status;
use tonic::service::Routes;
use tonic::service::interceptor::InterceptedService;

use crate::api::Api;
use crate::deadline;
use crate::link::{DraftPeer, Link, State, TargetPeer, TargetReady, target_load};
use crate::options::{GatewayOptions, OptionError};
use crate::stats::Stats;

const SERVICE: &str = "eyrie.v1.Generation";

/// Why the gateway ended.
#[derive(Debug, thiserror::Error)]
pub enum GatewayError {
    /// An option is out of its range.
    #[error(transparent)]
    Option(#[from] OptionError),
    /// The socket cannot be had.
    #[error(transparent)]
    Listen(#[from] std::io::Error),
    /// Serving failed.
    #[error(transparent)]
    Serve(#[from] ServeError),
    /// The system has no random numbers.
    #[error("no random numbers: {0}")]
    Random(getrandom::Error),
}

/// The gateway listens; whether a request would succeed is told by health.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ready {
    /// Where it listens, with the port that the system chose for port 0.
    pub address: Address,
}

/// What all requests share.
#[derive(Debug)]
pub(crate) struct Gateway {
    pub(crate) options: GatewayOptions,
    pub(crate) boot_id: u64,
    pub(crate) target: Link<TargetPeer>,
    pub(crate) draft: Option<Link<DraftPeer>>,
    pub(crate) streams: Arc<Semaphore>,
    pub(crate) stats: Stats,
    pub(crate) drain: Drain,
    requests: AtomicU64,
}

impl Gateway {
    fn start(options: GatewayOptions, boot_id: u64, drain: Drain) -> Arc<Self> {
        let target = Link::spawn(TargetPeer::new(options.target.clone(), boot_id), &drain);
        let draft = options.draft.clone().map(|address| {
            let peer = DraftPeer::new(address, boot_id, target.subscribe());
            Link::spawn(peer, &drain)
        });
        let streams = Arc::new(Semaphore::new(options.max_streams as usize));
        let (stats, requests) = (Stats::default(), AtomicU64::new(0));
        Arc::new(Self { options, boot_id, target, draft, streams, stats, drain, requests })
    }

    /// A request id for a client that sent none.
    pub(crate) fn mint_id(&self) -> String {
        let n = self.requests.fetch_add(1, Ordering::Relaxed);
        format!("{:08x}-{n}", self.boot_id as u32)
    }

    /// Longest proposal of the connected draft.
    pub(crate) fn draft_limit(&self) -> Option<u32> {
        let state = self.draft.as_ref()?.state();
        state.up().map(|draft| draft.card.max_draft_tokens).filter(|&limit| limit > 0)
    }

    /// Tokens drafted a round when the request does not say: no more than the draft takes.
    pub(crate) fn default_k(&self) -> u32 {
        self.options.default_k.min(self.draft_limit().unwrap_or(u32::MAX))
    }

    /// How busy the target is, asked beside the round stream.
    pub(crate) async fn target_load(&self) -> Result<LoadReport, Status> {
        target_load(&self.options.target).await
    }

    /// The target once it is up, waiting until `until`.
    ///
    /// # Errors
    /// UNAVAILABLE with the reason why it is not.
    pub(crate) async fn target_up(&self, until: Instant) -> Result<TargetReady, Status> {
        let mut state = self.target.subscribe();
        if let Ok(Ok(state)) = timeout_at(until, state.wait_for(|state| state.up().is_some())).await
            && let Some(ready) = state.up()
        {
            return Ok(ready.clone());
        }
        let why = match self.target.state() {
            State::Down(why) => why,
            State::Suspect(_) | State::Up(_) => "it is connected but computes nothing".into(),
        };
        let line = format!("the target at {} is not available: {why}", self.options.target);
        Err(refuse(Reason::Unreachable, line))
    }

    /// SERVING exactly while the target is up.
    async fn follow_health(&self, health: Health) {
        let mut state = self.target.subscribe();
        loop {
            let up = state.borrow_and_update().up().is_some();
            health.set(up && !self.drain.is_draining()).await;
            tokio::select! {
                changed = state.changed() => if changed.is_err() { return },
                () = self.drain.draining() => return health.set(false).await,
            }
        }
    }

    /// After a drain began: stop once the running requests are done, or late.
    async fn follow_drain(&self) {
        self.drain.draining().await;
        let all = self.streams.acquire_many(self.options.max_streams);
        if tokio::time::timeout(self.options.drain_grace, all).await.is_err() {
            let running = self.options.max_streams as usize - self.streams.available_permits();
            tracing::warn!(running, "requests still run after the drain's grace: ended");
        }
        self.stats.log();
        self.drain.stop();
    }
}

/// Random bits for ids and seeds.
pub(crate) fn random() -> Result<u64, getrandom::Error> {
    getrandom::u64()
}

/// Serves the client API until `drain` stops it; `on_ready` is called once it listens.
///
/// # Errors
/// [`GatewayError`] for options out of range and a socket that cannot be had or fails.
pub async fn run(
    options: GatewayOptions,
    drain: Drain,
    on_ready: impl FnOnce(&Ready),
) -> Result<(), GatewayError> {
    options.validate()?;
    // Peers take 0 for a missing id.
    let boot_id = random().map_err(GatewayError::Random)?.max(1);
    let listener = Listener::bind(&options.listen).await?;
    let ready = Ready { address: listener.address().clone() };
    let grace = options.drain_grace;
    let gateway = Gateway::start(options, boot_id, drain.clone());
    let service = GenerationServer::new(Api::new(Arc::clone(&gateway)))
        .max_decoding_message_size(MAX_MESSAGE)
        .max_encoding_message_size(MAX_MESSAGE);
    let service = InterceptedService::new(service, deadline::stamp);
    let draining = Arc::clone(&gateway);
    drain.spawn(async move { draining.follow_drain().await });
    let tasks = drain.clone();
    let served = serve(SERVICE, listener, Routes::new(service), drain.clone(), move |health| {
        tasks.spawn(async move { gateway.follow_health(health).await });
        on_ready(&ready);
    })
    .await;
    drain.stop();
    drain.join(grace).await;
    Ok(served?)
}
