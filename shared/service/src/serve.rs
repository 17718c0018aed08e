//! Serving: health and reflection beside the service's own routes, until drained.

use std::time::Duration;

use eyrie_wire::{DESCRIPTORS, Listener};
use tonic::service::Routes;
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;
use tower::util::MapResponseLayer;

use crate::reasons::give_reason;
use crate::sent::mark_body;
use crate::{Drain, LogCalls};

/// Why serving ended early.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The transport failed.
    #[error("serving on {address} failed: {source}")]
    Transport {
        /// Where.
        address: String,
        /// Why.
        source: tonic::transport::Error,
    },
    /// The embedded descriptors are broken.
    #[error("reflection: {0}")]
    Reflection(#[from] tonic_reflection::server::Error),
}

/// Health as `grpc.health.v1` tells it, for the whole server (service name "").
#[derive(Debug, Clone)]
pub struct Health {
    reporter: HealthReporter,
    name: &'static str,
}

impl Health {
    /// SERVING when `ready`, else NOT_SERVING, for "" and for the service's own name.
    pub async fn set(&self, ready: bool) {
        let status = if ready { ServingStatus::Serving } else { ServingStatus::NotServing };
        self.reporter.set_service_status("", status).await;
        self.reporter.set_service_status(self.name, status).await;
    }
}

/// How long running streams may take to end after [`Drain::stop`].
const STOP_GRACE: Duration = Duration::from_secs(10);

/// Serves `routes` with health (NOT_SERVING at first) and reflection on `listener` until
/// [`Drain::stop`]; `name` is the full gRPC service name, `started` gets the health handle.
///
/// # Errors
/// [`ServeError`] when the transport fails.
pub async fn serve(
    name: &'static str,
    listener: Listener,
    routes: Routes,
    drain: Drain,
    started: impl FnOnce(Health),
) -> Result<(), ServeError> {
    let (reporter, health_service) = tonic_health::server::health_reporter();
    let health = Health { reporter, name };
    health.set(false).await;
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
            // The descriptors are the whole package's; only what is served here is told.
            .with_service_name(name)
            .with_service_name("grpc.health.v1.Health")
    };
    let routes = routes
        .add_service(health_service)
        .add_service(reflection().build_v1()?)
        .add_service(reflection().build_v1alpha()?);
    started(health);
    let address = listener.address().clone();
    tracing::info!(%address, service = name, "listening");
    let stop = drain.clone();
    let serving = eyrie_wire::server()
        .layer(LogCalls)
        .layer(MapResponseLayer::new(give_reason))
        .layer(MapResponseLayer::new(mark_body))
        .add_routes(routes)
        .serve_with_incoming_shutdown(listener.incoming(), async move { stop.stopped().await });
    // Hyper waits for open connections; peers that never close must not keep the process alive.
    let overdue = async {
        drain.stopped().await;
        tokio::time::sleep(STOP_GRACE).await;
    };
    let result = tokio::select! {
        served = serving => served,
        () = overdue => {
            tracing::warn!(%address, "connections still open {} s after stop: dropped", STOP_GRACE.as_secs());
            Ok(())
        }
    };
    result.map_err(|source| ServeError::Transport { address: address.to_string(), source })
}
