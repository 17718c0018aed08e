//! The `eyrie` command: starts, supervises and talks to the three services.
#![forbid(unsafe_code)]

mod args;
mod bench;
mod client;
mod demo;
mod doctor;
mod fleet;
mod generate;
mod heap;
mod service;
mod signals;
mod steps;
mod style;
mod up;

use std::process::ExitCode;

use clap::Parser;

use args::{Cli, Command};

/// Exit code of a request or check that failed.
const FAILED: u8 = 1;
/// Exit code of an option that is out of its range; clap exits with the same on other wrong usage.
const USAGE: u8 = 2;

fn main() -> ExitCode {
    let cli = Cli::parse();
    raise_descriptor_limit();
    let code = run(cli).unwrap_or_else(|e| {
        style::error(&one_line(&e));
        ExitCode::from(if is_usage(&e) { USAGE } else { FAILED })
    });
    eyrie_service::flush_telemetry();
    code
}

/// Every connection is a descriptor: takes as many as the system allows without asking.
fn raise_descriptor_limit() {
    let resource = rustix::process::Resource::Nofile;
    let limit = rustix::process::getrlimit(resource);
    // Where it is refused, the limit that there is has to do.
    let _ = rustix::process::setrlimit(resource, rustix::process::Rlimit { current: limit.maximum, ..limit });
}

/// Whether an option was out of its range.
fn is_usage(error: &anyhow::Error) -> bool {
    use eyrie_draft::DraftError;
    use eyrie_gateway::GatewayError;
    use eyrie_target::TargetError;
    matches!(error.downcast_ref(), Some(TargetError::Option { .. }))
        || matches!(error.downcast_ref(), Some(DraftError::Option { .. }))
        || matches!(error.downcast_ref(), Some(GatewayError::Option(_)))
}

/// An error with its causes, each said once: some errors tell their cause in their own words already.
fn one_line(error: &anyhow::Error) -> String {
    let mut line = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !line.contains(&cause) {
            line += &format!(": {cause}");
        }
    }
    line
}

fn run(cli: Cli) -> anyhow::Result<ExitCode> {
    // Before the runtime's threads.
    eyrie_region::share_heap();
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.enable_all().max_blocking_threads(blocking_threads()).build()?;
    let code = runtime.block_on(async {
        match cli.command {
            Command::Demo(args) => demo::demo(args).await,
            Command::Up(args) => up::up(args).await,
            Command::Generate(args) => generate::generate(args).await,
            Command::Bench(args) => bench::bench(*args).await,
            Command::Target(args) => service::target(args).await,
            Command::Draft(args) => service::draft(args).await,
            Command::Gateway(args) => service::gateway(args).await,
            Command::Doctor(args) => doctor::doctor(&args),
        }
    });
    // A read of standard input cannot be cancelled, and dropping the runtime would wait for it.
    runtime.shutdown_background();
    code
}

/// Threads that tokenise prompts, import weights and wait for standard input. The default of 512 lets a burst of requests
/// start one each, which are no faster than the cores and leave their stacks and heaps behind.
fn blocking_threads() -> usize {
    std::thread::available_parallelism().map_or(8, |cores| cores.get().max(8))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn causes_are_said_once() {
        let told = anyhow::anyhow!("taken").context("cannot listen on x: taken").context("starting");
        assert_eq!(one_line(&told), "starting: cannot listen on x: taken");
        assert_eq!(one_line(&anyhow::anyhow!("why").context("what")), "what: why");
    }
}
