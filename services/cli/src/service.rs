//! `eyrie target|draft|gateway`: one service in this process, drained by signals.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use eyrie_kernels::Isa;
use eyrie_service::{Drain, LogFormat, init_telemetry};
use tokio::io::AsyncReadExt;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::args::{DraftArgs, GatewayArgs, ServiceArgs, TargetArgs};
use crate::doctor;

/// Runs the target service until it is drained.
pub(crate) async fn target(args: TargetArgs) -> anyhow::Result<ExitCode> {
    doctor::require_target(&args.model)?;
    let drain = begin(&args.service)?;
    let defaults = eyrie_target::TargetOptions::new(args.model, args.listen);
    let options = eyrie_target::TargetOptions {
        context: args.context,
        kv_tokens: args.kv_tokens,
        max_sequences: args.max_sequences,
        prefill_chunk: args.prefill_chunk,
        threads: args.threads.map(|n| n as usize),
        aux_cache_bytes: args.aux_cache_bytes,
        capture: args.aux_layers,
        isa: Some(Isa::from_env().context("EYRIE_ISA")?),
        ..defaults
    };
    eyrie_target::run(options, drain, |_| {}).await?;
    Ok(ExitCode::SUCCESS)
}

/// Runs the draft service until it is drained.
pub(crate) async fn draft(args: DraftArgs) -> anyhow::Result<ExitCode> {
    let drain = begin(&args.service)?;
    let defaults = eyrie_draft::DraftOptions::new(args.model, args.listen, args.target);
    let options = eyrie_draft::DraftOptions {
        cache_tokens: args.cache_tokens,
        threads: args.threads.map_or(defaults.threads, |n| n as usize),
        aux_convention: args.aux_convention.map(Into::into),
        isa: Isa::from_env().context("EYRIE_ISA")?,
        ..defaults
    };
    eyrie_draft::run(options, drain, |_| {}).await?;
    Ok(ExitCode::SUCCESS)
}

/// Runs the gateway service until it is drained.
pub(crate) async fn gateway(args: GatewayArgs) -> anyhow::Result<ExitCode> {
    let drain = begin(&args.service)?;
    let defaults = eyrie_gateway::GatewayOptions::new(args.listen, args.target, args.draft);
    let options = eyrie_gateway::GatewayOptions { default_k: args.draft_tokens, ..defaults };
    eyrie_gateway::run(options, drain, |_| {}).await?;
    Ok(ExitCode::SUCCESS)
}

/// What asks a service to end.
struct Ends {
    interrupt: Signal,
    terminate: Signal,
    /// A supervisor holds our standard input open for as long as it lives.
    parent: Option<tokio::io::Stdin>,
}

impl Ends {
    async fn next(&mut self) {
        let parent = async {
            match &mut self.parent {
                Some(stdin) => {
                    let _ = stdin.read(&mut [0]).await;
                }
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
            () = parent => {}
        }
    }
}

/// Logs, and the two-stage end: the first call to end drains, the second or the end of the grace stops.
fn begin(args: &ServiceArgs) -> anyhow::Result<Drain> {
    init_telemetry(if args.log_json { LogFormat::Json } else { LogFormat::Text });
    let drain = Drain::new();
    let mut ends = Ends {
        interrupt: signal(SignalKind::interrupt())?,
        terminate: signal(SignalKind::terminate())?,
        parent: args.with_parent.then(tokio::io::stdin),
    };
    let grace = Duration::from_secs(args.drain_grace);
    let handle = drain.clone();
    #[expect(
        clippy::disallowed_methods,
        reason = "the drain's own watcher: tracked, it would wait for itself"
    )]
    tokio::spawn(async move {
        ends.next().await;
        tracing::info!("draining, at most {} s", grace.as_secs());
        handle.start();
        tokio::select! {
            () = ends.next() => {}
            () = tokio::time::sleep(grace) => {}
        }
        handle.stop();
    });
    Ok(drain)
}
