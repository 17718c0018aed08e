//! `eyrie demo`: the main job on the bundled pair, watched.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use eyrie_wire::v1::{Model, Usage};
use eyrie_wire::{Address, v1::GetModelRequest};

use crate::args::{DemoArgs, PairArgs};
use crate::client::{self, Completion, Drafting};
use crate::fleet::{Fleet, Links, Role};
use crate::generate::Printer;
use crate::style::{self, Style};

/// Where the bundled pair lies, from the repository's root.
const BUNDLED: &str = "deploy/demo";

/// Target and draft folders: as given, else the bundled ones.
pub(crate) fn pair_dirs(pair: &PairArgs) -> anyhow::Result<(PathBuf, Option<PathBuf>)> {
    let target = match &pair.target {
        Some(dir) => dir.clone(),
        None => bundled("mini")?,
    };
    let draft = match (&pair.draft, pair.no_draft) {
        (Some(dir), _) => Some(dir.clone()),
        (None, true) => None,
        (None, false) if pair.target.is_none() => Some(bundled("mini-eagle3")?),
        (None, false) => {
            style::warning(
                "no --draft with this --target: every request is decoded plainly (--no-draft says so on purpose)",
            );
            None
        }
    };
    Ok((target, draft))
}

/// The bundled folder `name`, looked for upwards from the working directory and from the binary.
fn bundled(name: &str) -> anyhow::Result<PathBuf> {
    let starts = [std::env::current_dir().ok(), std::env::current_exe().ok()];
    starts
        .iter()
        .flatten()
        .flat_map(|start| start.ancestors())
        .map(|dir| dir.join(BUNDLED).join(name))
        .find(|dir| dir.join("config.json").is_file())
        .with_context(|| format!("no {BUNDLED}/{name} above the working directory or the binary: give --target DIR and --draft DIR"))
}

/// Canonical capture set that the draft wants, after the pair checks.
pub(crate) fn aux_layers(target: &Path, draft: &Path) -> anyhow::Result<Vec<usize>> {
    crate::doctor::require_pair(target, draft)
}

/// Runs the command.
pub(crate) async fn demo(args: DemoArgs) -> anyhow::Result<ExitCode> {
    let style = Style::stderr();
    let listen: Address = "127.0.0.1:0".parse()?;
    let mut fleet = Fleet::start(&args.pair, &listen, Links::Unix).await?;
    let outcome = tokio::select! {
        outcome = show(&mut fleet, &args, style) => outcome,
        _ = tokio::signal::ctrl_c() => Err(anyhow::anyhow!("interrupted")),
    };
    fleet.stop().await;
    outcome.map(|()| ExitCode::SUCCESS)
}

async fn show(fleet: &mut Fleet, args: &DemoArgs, style: Style) -> anyhow::Result<()> {
    let model = fleet.wait_ready().await?;
    introduce(fleet, &model, style);
    let (gateway, drafted) = (fleet.gateway.clone(), fleet.draft.is_some());
    tokio::select! {
        compared = compare(&gateway, drafted, args, style) => compared,
        ended = fleet.supervise(args.pair.restart) => Err(ended),
    }
}

/// Streams one completion, then runs it plain and drafted back to back.
async fn compare(gateway: &Address, drafted: bool, args: &DemoArgs, style: Style) -> anyhow::Result<()> {
    let drafting = if drafted { Drafting::Chain(args.max_draft_tokens) } else { Drafting::Plain };
    let request = |drafting| client::greedy(&args.prompt, args.max_tokens, drafting);
    let mut client = client::connect(gateway).await?;

    style::note(&style.dim(&args.prompt));
    let mut printer = Printer::new(true);
    let shown = client::run(&mut client, request(drafting), |c| printer.chunk(c)).await?;
    printer.end()?;

    // The shown run has warmed both up.
    let plain = client::run(&mut client, request(Drafting::Plain), |_| {}).await?;
    let fast = client::run(&mut client, request(drafting), |_| {}).await?;
    let model = client.get_model(GetModelRequest {}).await.map_err(client::status_line)?.into_inner();
    summarise(&shown, &plain, &fast, &model, drafted, style);
    anyhow::ensure!(
        shown.token_ids == plain.token_ids && fast.token_ids == plain.token_ids,
        "speculative and plain tokens differ: this must never happen, please report it"
    );
    Ok(())
}

fn introduce(fleet: &Fleet, model: &Model, style: Style) {
    let pid = |role| fleet.pid(role).unwrap_or_default();
    let draft = match &fleet.draft {
        Some(_) => format!(", draft {} pid {}", model.draft_name, pid(Role::Draft)),
        None => ", no draft".to_owned(),
    };
    style::note(&format!(
        "{} target {} pid {}{draft}, gateway pid {}",
        style.good("ready"),
        style.bold(&model.name),
        pid(Role::Target),
        pid(Role::Gateway),
    ));
    if fleet.draft.is_some() {
        style::note(&format!(
            "tokens that the draft guessed and the target accepted are {}\n",
            style.good("green")
        ));
    }
}

fn summarise(
    shown: &Completion,
    plain: &Completion,
    fast: &Completion,
    model: &Model,
    drafted: bool,
    style: Style,
) {
    let usage = &shown.usage;
    style::note("");
    style::note(&format!(
        "{}  {} tokens in {} rounds, {:.2} tokens a round",
        style.bold("summary"),
        usage.completion_tokens,
        usage.rounds,
        shown.accept_length()
    ));
    if drafted {
        style::note(&format!("  accepted by position   {}", by_position(usage)));
    }
    style::note(&format!("  plain                  {:.0} tokens/s", plain.rate()));
    if drafted {
        style::note(&format!(
            "  speculative            {:.0} tokens/s, {:.2} x plain",
            fast.rate(),
            fast.rate() / plain.rate().max(f64::MIN_POSITIVE)
        ));
        style::note(&format!(
            "  shared without copy    {} of the target's memory mapped by the draft ({})",
            style::bytes(model.shared_bytes),
            model.shared_kind
        ));
    }
    let same = shown.token_ids == plain.token_ids && fast.token_ids == plain.token_ids;
    let verdict = if same { style.good("identical") } else { style.bad("DIFFERENT") };
    style::note(&format!("  speculative vs plain   {verdict} tokens"));
}

/// "1: 85 %  2: 70 %": of the rounds that drafted a position, how many accepted it.
pub(crate) fn by_position(usage: &Usage) -> String {
    let share = |(i, (&accepted, &drafted)): (usize, (&u32, &u32))| {
        format!("{}: {:.0} %", i + 1, 100.0 * f64::from(accepted) / f64::from(drafted.max(1)))
    };
    let pairs = usage.accepted_by_position.iter().zip(&usage.drafted_by_position);
    pairs.enumerate().map(share).collect::<Vec<_>>().join("  ")
}
