//! The gateway without a network of its own, for simulations of the protocol.

use std::sync::Arc;

use eyrie_service::Drain;
use eyrie_wire::v1::generation_server::GenerationServer;
use eyrie_wire::{Dialer, PeerChannel, in_process};
use tonic::service::interceptor::InterceptedService;

use crate::api::Api;
use crate::deadline;
use crate::gateway::Gateway;
use crate::{GatewayError, GatewayOptions};

/// A gateway whose peers are what `dialer` connects it to.
#[derive(Debug, Clone)]
pub struct SimGateway {
    gateway: Arc<Gateway>,
}

/// What a gateway holds; all zero at rest.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Held {
    /// Places taken by requests.
    pub requests: usize,
    /// Sequences registered at targets, and at drafts.
    pub routes: [usize; 2],
}

impl SimGateway {
    /// Starts it on the current runtime.
    ///
    /// # Errors
    /// Options out of range.
    pub fn start(options: GatewayOptions, dialer: Dialer, boot_id: u64) -> Result<Self, GatewayError> {
        options.validate()?;
        Ok(Self { gateway: Gateway::start(options, dialer, boot_id, Drain::new()) })
    }

    /// A client's connection.
    pub fn channel(&self) -> PeerChannel {
        let service = GenerationServer::new(Api::new(Arc::clone(&self.gateway)));
        let service = InterceptedService::new(service, deadline::stamp);
        in_process(service)
    }

    /// What it holds now.
    pub fn held(&self) -> Held {
        let gateway = &self.gateway;
        let requests = gateway.options.max_streams as usize - gateway.streams.available_permits();
        Held { requests, routes: gateway.pool.sequences() }
    }

    /// Ends it at once.
    pub fn stop(&self) {
        self.gateway.drain.stop();
    }
}
