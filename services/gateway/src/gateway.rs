//! What all requests share, and the service's life: listen, follow the targets' state, drain.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use eyrie_service::{Drain, Health, ServeError, serve};
use eyrie_wire::v1::generation_server::GenerationServer;
use eyrie_wire::{Address, Dialer, Listener, MAX_MESSAGE};
use tokio::sync::Semaphore;
use tonic::service::Routes;
use tonic::service::interceptor::InterceptedService;

use crate::api::Api;
use crate::deadline;
use crate::options::{GatewayOptions, OptionError};
use crate::pool::Pool;
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
    pub(crate) pool: Arc<Pool>,
    pub(crate) streams: Arc<Semaphore>,
    /// Texts that are encoded or decoded off the reactor at once. A closure that was handed to the blocking threads runs
    /// even if its client has left, so whoever waits for a thread waits here.
    pub(crate) encoders: Arc<Semaphore>,
    pub(crate) stats: Stats,
    pub(crate) drain: Drain,
    requests: AtomicU64,
}

impl Gateway {
    pub(crate) fn start(options: GatewayOptions, dialer: Dialer, boot_id: u64, drain: Drain) -> Arc<Self> {
        let pool = Pool::start(&options, &dialer, boot_id, &drain);
        let streams = Arc::new(Semaphore::new(options.max_streams as usize));
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let encoders = Arc::new(Semaphore::new(encoders(cores)));
        let (stats, requests) = (Stats::default(), AtomicU64::new(0));
        Arc::new(Self { options, boot_id, pool, streams, encoders, stats, drain, requests })
    }

    /// A request id for a client that sent none.
    pub(crate) fn mint_id(&self) -> String {
        let n = self.requests.fetch_add(1, Ordering::Relaxed);
        format!("{:08x}-{n}", self.boot_id as u32)
    }

    /// Tokens drafted a round when the request does not say: no more than `limit`, which the draft takes.
    pub(crate) fn default_k(&self, limit: Option<u32>) -> u32 {
        self.options.default_k.min(limit.unwrap_or(u32::MAX))
    }

    /// SERVING exactly while a target takes sequences.
    async fn follow_health(&self, health: Health) {
        let view = self.pool.view();
        let mut up = false;
        loop {
            health.set(up && !self.drain.is_draining()).await;
            tokio::select! {
                now = view.wait_for(|view| Some(view.is_open()).filter(|&now| now != up)) => up = now,
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

/// One a core, with two of the process's blocking threads (the larger of 8 and the cores) left over: standard input and
/// name look-ups need them.
fn encoders(cores: usize) -> usize {
    cores.min(cores.max(8) - 2)
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
    let gateway = Gateway::start(options, Dialer::default(), boot_id, drain.clone());
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

#[cfg(test)]
mod tests {
    use super::encoders;

    #[test]
    fn encoding_leaves_two_blocking_threads() {
        for cores in 1..=64 {
            let all = encoders(cores);
            assert!(all >= 1 && all <= cores && all + 2 <= cores.max(8), "{all} of {cores}");
        }
    }
}
