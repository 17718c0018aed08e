//! `eyrie target|draft|gateway`: one service in this process, drained by signals.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use eyrie_checkpoint::ModelSource;
use eyrie_kernels::Isa;
use eyrie_service::{Drain, LogFormat, init_telemetry};
use tokio::io::AsyncReadExt;

use crate::args::{DraftArgs, GatewayArgs, ServiceArgs, TargetArgs};
use crate::doctor;
use crate::heap;
use crate::signals::Signals;

/// Runs the target service until it is drained.
pub(crate) async fn target(args: TargetArgs) -> anyhow::Result<ExitCode> {
    let model = args.model.source();
    if let ModelSource::Folder(dir) = &model {
        doctor::require(dir, None, None)?;
    }
    let drain = begin(&args.service)?;
    let defaults = eyrie_target::TargetOptions::new(model, args.listen);
    let options = eyrie_target::TargetOptions {
        context: args.context,
        kv_tokens: args.kv_tokens,
        prefix_cache_bytes: args.prefix_cache_bytes,
        max_sequences: args.max_sequences,
        prefill_chunk: args.prefill_chunk,
        threads: args.compute.threads.map(|n| n as usize),
        processor: args.compute.device,
        activations: args.compute.activations,
        aux_cache_bytes: args.aux_cache_bytes,
        capture: args.aux_layers,
        sharing: args.share,
        drain_grace: drain_grace(&args.service),
        isa: Some(Isa::from_env().context("EYRIE_ISA")?),
        ..defaults
    };
    eyrie_target::run(options, drain, |_| {}).await?;
    Ok(ExitCode::SUCCESS)
}

/// Runs the draft service until it is drained.
pub(crate) async fn draft(args: DraftArgs) -> anyhow::Result<ExitCode> {
    let drain = begin(&args.service)?;
    let defaults = eyrie_draft::DraftOptions::new(args.model.source(), args.listen, args.target);
    let options = eyrie_draft::DraftOptions {
        shared: args.shared_weights,
        allow_writable_ipc: args.allow_writable_ipc,
        cache_tokens: args.cache_tokens,
        prefix_cache_bytes: args.prefix_cache_bytes,
        max_sequences: args.max_sequences,
        max_draft_tokens: args.max_draft_tokens,
        threads: args.compute.threads.map_or(defaults.threads, |n| n as usize),
        processor: args.compute.device,
        activations: args.compute.activations,
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
    let options = eyrie_gateway::GatewayOptions {
        default_k: args.draft_tokens,
        draft_deadline: Duration::from_millis(args.draft_deadline),
        target_timeout: Duration::from_secs(args.target_timeout),
        max_streams: args.max_streams,
        drain_grace: drain_grace(&args.service),
        ..defaults
    };
    eyrie_gateway::run(options, drain, |_| {}).await?;
    Ok(ExitCode::SUCCESS)
}

/// Resolves when the supervisor is gone, which holds our standard input open for as long as it lives.
async fn parent_gone(supervised: bool) {
    if !supervised {
        std::future::pending::<()>().await;
    }
    let _ = tokio::io::stdin().read(&mut [0]).await;
}

fn drain_grace(args: &ServiceArgs) -> Duration {
    Duration::from_secs(args.drain_grace)
}

/// Logs, and the two-stage end: the first signal or the end of the supervisor drains, the second signal or the
/// end of the grace stops.
fn begin(args: &ServiceArgs) -> anyhow::Result<Drain> {
    init_telemetry(if args.log_json { LogFormat::Json } else { LogFormat::Text })?;
    let drain = Drain::new();
    let mut signals = Signals::listen()?;
    let (supervised, grace) = (args.with_parent, drain_grace(args));
    let handle = drain.clone();
    #[expect(
        clippy::disallowed_methods,
        reason = "the drain's own watcher: tracked, it would wait for itself"
    )]
    tokio::spawn(async move {
        let told = tokio::select! {
            () = signals.next() => true,
            () = parent_gone(supervised) => false,
        };
        handle.start();
        tracing::info!("draining, at most {} s", grace.as_secs());
        // A supervisor that waits for us to end closes our standard input, and may be heard of before its signal.
        let told_again = async {
            if !told {
                signals.next().await;
            }
            signals.next().await;
        };
        tokio::select! {
            () = told_again => {}
            () = tokio::time::sleep(grace) => {}
        }
        handle.stop();
    });
    let stopping = drain.clone();
    drain.spawn(async move {
        tokio::select! {
            () = heap::trim_when_idle() => {}
            () = stopping.stopped() => {}
        }
    });
    Ok(drain)
}
