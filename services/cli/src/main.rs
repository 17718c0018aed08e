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
mod style;
mod up;

use std::process::ExitCode;

use clap::Parser;

use args::{Cli, Command};

/// Exit code of a request or check that failed; clap exits with 2 on wrong usage.
const FAILED: u8 = 1;

fn main() -> ExitCode {
    let cli = Cli::parse();
    match run(cli) {
        Ok(code) => code,
        Err(e) => {
            style::error(&one_line(&e));
            ExitCode::from(FAILED)
        }
    }
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
            Command::Bench(args) => bench::bench(args).await,
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
