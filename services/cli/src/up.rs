//! `eyrie up`: keeps the services running.

use std::process::ExitCode;

use eyrie_wire::Address;

use crate::args::UpArgs;
use crate::fleet::{Fleet, Links, Role, Shape};
use crate::signals::Signals;
use crate::style::{self, Style};

/// Where clients look first.
const DEFAULT_PORT: u16 = 7700;

/// Runs the command.
pub(crate) async fn up(args: UpArgs) -> anyhow::Result<ExitCode> {
    let links = if args.tcp { Links::Tcp } else { Links::Unix };
    let shape = Shape { targets: usize::from(args.targets), drafts: usize::from(args.drafts), links };
    let listen = args.listen.map_or_else(default_listen, Ok)?;
    let mut fleet = Fleet::start(&args.models, args.watch.ready_file, &listen, shape).await?;
    let mut ending = Signals::listen()?;
    let served = tokio::select! {
        served = serve(&mut fleet, args.watch.restart) => served,
        () = ending.next() => Ok(()),
    };
    if served.is_ok() {
        style::note("draining: running requests end, new ones are refused");
    }
    fleet.stop(ending).await;
    served.map(|()| ExitCode::SUCCESS)
}

/// The well-known port, or any free one beside another fleet.
fn default_listen() -> anyhow::Result<Address> {
    let free = std::net::TcpListener::bind(("127.0.0.1", DEFAULT_PORT)).is_ok();
    let port = if free { DEFAULT_PORT } else { 0 };
    Ok(format!("127.0.0.1:{port}").parse()?)
}

async fn serve(fleet: &mut Fleet, restart: bool) -> anyhow::Result<()> {
    let model = fleet.wait_ready().await?;
    let style = Style::stderr();
    style::note(&format!("{} {} is served", style.good("ready"), style.bold(&model.name)));
    style::note(&format!("  clients  {}", fleet.gateway));
    for service in fleet.all(Role::Target).chain(fleet.all(Role::Draft)) {
        style::note(&format!("  {:8} {} (pid {})", service.name, service.address, service.pid));
    }
    if fleet.is_drafted() {
        style::note(&format!(
            "  shared   {} mapped by the draft, not copied",
            style::bytes(model.shared_bytes)
        ));
    }
    style::note(&format!("  logs     {}", fleet.log_path("*").display()));
    // Made-up models have no tokenizer.
    let prompt =
        if model.name.starts_with("synth ") { "--prompt-ids 1,2,3" } else { "--prompt 'def main():'" };
    style::note(
        &style
            .dim(&format!("  try      eyrie generate --endpoint {} {prompt}   (Ctrl-C ends)", fleet.gateway)),
    );
    Err(fleet.supervise(restart).await)
}
