//! `eyrie demo`: the main job on the bundled pair, watched.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use eyrie_checkpoint::ModelSource;
use eyrie_wire::v1::{FinishReason, Model, Usage};
use eyrie_wire::{Address, v1::GetModelRequest};

use crate::args::{DemoArgs, ModelArgs};
use crate::client::{self, Completion, Drafting};
use crate::fleet::{Fleet, Role, Shape};
use crate::generate::Printer;
use crate::signals::Signals;
use crate::style::{self, Style};

/// Timed runs of each kind.
const RUNS: usize = 3;
/// A gain below this is explained.
const WORTHWHILE: f64 = 1.2;

/// Where the bundled pair lies, from the repository's root.
const BUNDLED: &str = "deploy/demo";

/// Target and draft: as given, else the bundled ones.
pub(crate) fn pair(models: &ModelArgs) -> anyhow::Result<(ModelSource, Option<ModelSource>)> {
    if let Some(spec) = &models.synth {
        return Ok((spec.clone().into(), (!models.no_draft).then(|| spec.clone().into())));
    }
    let target = match &models.target {
        Some(dir) => dir.clone(),
        None => bundled("mini")?,
    };
    let draft = match (&models.draft, models.no_draft) {
        (Some(dir), _) => Some(dir.clone()),
        (None, true) => None,
        (None, false) if models.target.is_none() => Some(bundled("mini-eagle3")?),
        (None, false) => {
            style::warning(
                "no --draft with this --target: every request is decoded plainly (--no-draft says so on purpose)",
            );
            None
        }
    };
    Ok((target.into(), draft.map(Into::into)))
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

/// Runs the command.
pub(crate) async fn demo(args: DemoArgs) -> anyhow::Result<ExitCode> {
    let style = Style::stderr();
    let listen: Address = "127.0.0.1:0".parse()?;
    let mut fleet = Fleet::start(&args.models, args.watch.ready_file.clone(), &listen, Shape::PAIR).await?;
    let mut ending = Signals::listen()?;
    let outcome = tokio::select! {
        outcome = show(&mut fleet, &args, style) => outcome,
        () = ending.next() => Err(anyhow::anyhow!("interrupted")),
    };
    fleet.stop(ending).await;
    outcome.map(|()| ExitCode::SUCCESS)
}

async fn show(fleet: &mut Fleet, args: &DemoArgs, style: Style) -> anyhow::Result<()> {
    let model = fleet.wait_ready().await?;
    introduce(fleet, &model, style);
    let (gateway, drafted) = (fleet.gateway.clone(), fleet.is_drafted());
    tokio::select! {
        compared = compare(&gateway, drafted, args, style) => compared,
        ended = fleet.supervise(args.watch.restart) => Err(ended),
    }
}

/// What the demo saw.
struct Comparison {
    shown: Completion,
    plain: Vec<Completion>,
    drafted: Vec<Completion>,
    model: Model,
}

/// Streams one completion, then runs it plain and drafted in turn.
async fn compare(gateway: &Address, drafted: bool, args: &DemoArgs, style: Style) -> anyhow::Result<()> {
    let drafting = if drafted { Drafting::Chain(args.max_draft_tokens) } else { Drafting::Plain };
    let request = |drafting| client::greedy(&args.prompt, args.max_tokens, drafting);
    let mut client = client::connect(gateway).await?;

    style::note(&style.dim(&args.prompt));
    let mut printer = Printer::new(true);
    let shown = client::run(&mut client, request(drafting), |c| printer.chunk(c)).await?;
    printer.end()?;
    if shown.finish == FinishReason::Unspecified {
        // Standard output was closed in the middle: nobody watches any more.
        return Ok(());
    }

    // The shown run has warmed both up; taking turns lets a slow spell of the machine hit both.
    let mut seen = Comparison { shown, plain: Vec::new(), drafted: Vec::new(), model: Model::default() };
    for _ in 0..RUNS {
        seen.plain.push(client::run(&mut client, request(Drafting::Plain), client::unseen).await?);
        if drafted {
            seen.drafted.push(client::run(&mut client, request(drafting), client::unseen).await?);
        }
    }
    seen.model = client.get_model(GetModelRequest {}).await.map_err(client::status_line)?.into_inner();
    seen.summarise(style);
    anyhow::ensure!(
        seen.is_lossless(),
        "speculative and plain tokens differ: this must never happen, please report it"
    );
    Ok(())
}

fn introduce(fleet: &Fleet, model: &Model, style: Style) {
    let pid = |role| fleet.pid(role).unwrap_or_default();
    let draft = match fleet.pid(Role::Draft) {
        Some(pid) => format!(", draft {} pid {pid}", model.draft_name),
        None => ", no draft".to_owned(),
    };
    style::note(&format!(
        "{} target {} pid {}{draft}, gateway pid {}",
        style.good("ready"),
        style.bold(&model.name),
        pid(Role::Target),
        pid(Role::Gateway),
    ));
    if fleet.is_drafted() {
        style::note(&format!(
            "tokens that the draft guessed and the target accepted are {}\n",
            style.good("green")
        ));
    }
}

impl Comparison {
    fn is_lossless(&self) -> bool {
        self.plain.iter().chain(&self.drafted).all(|run| run.token_ids == self.shown.token_ids)
    }

    fn summarise(&self, style: Style) {
        let usage = &self.shown.usage;
        style::note(&format!(
            "\n{}  {} tokens in {} rounds, {:.2} tokens a round",
            style.bold("summary"),
            usage.completion_tokens,
            usage.rounds,
            self.shown.tokens_a_round()
        ));
        let plain = client::median(self.plain.iter().filter_map(Completion::rate).collect());
        if self.drafted.is_empty() {
            style::note(&format!("  plain                  {plain:.0} tokens/s"));
        } else {
            self.summarise_drafts(plain, style);
        }
        let verdict = if self.is_lossless() { style.good("identical") } else { style.bad("DIFFERENT") };
        style::note(&format!("  speculative vs plain   {verdict} tokens"));
    }

    fn summarise_drafts(&self, plain: f64, style: Style) {
        let usage = &self.shown.usage;
        style::note(&format!("  accepted by position   {}", by_position(usage)));
        let missed: u32 =
            self.drafted.iter().chain([&self.shown]).map(|run| run.usage.rounds_without_draft).sum();
        if missed > 0 {
            let line = format!("  without a draft        {missed} rounds: the draft was away");
            style::note(&style.warn(&line));
        }
        let fast = client::median(self.drafted.iter().filter_map(Completion::rate).collect());
        style::note(&format!("  plain                  {plain:.0} tokens/s"));
        style::note(&format!(
            "  speculative            {fast:.0} tokens/s, {:.2} x plain (medians of {RUNS} runs in turn)",
            fast / plain.max(f64::MIN_POSITIVE)
        ));
        if self.model.shared_bytes > 0 {
            style::note(&format!(
                "  shared without copy    {} of the target's memory mapped by the draft ({})",
                style::bytes(self.model.shared_bytes),
                self.model.shared_kind
            ));
        }
        if fast < WORTHWHILE * plain {
            let why = "  a model this fast gains little or nothing from drafts: eyrie bench shows each K";
            style::note(&style.dim(why));
        }
    }
}

/// "1: 85 %  2: 70 %": of the rounds that drafted a position, how many accepted it.
pub(crate) fn by_position(usage: &Usage) -> String {
    let share = |(i, (&accepted, &drafted)): (usize, (&u32, &u32))| {
        format!("{}: {:.0} %", i + 1, 100.0 * f64::from(accepted) / f64::from(drafted.max(1)))
    };
    let pairs = usage.accepted_by_position.iter().zip(&usage.drafted_by_position);
    pairs.enumerate().map(share).collect::<Vec<_>>().join("  ")
}
