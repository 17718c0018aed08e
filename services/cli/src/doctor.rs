//! `eyrie doctor`: what would be refused, told before anything is loaded.

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use eyrie_checkpoint::pair::{Check, Report, Status, preflight_with};
use eyrie_checkpoint::{AuxConvention, DraftConfig, ModelSource, TargetConfig, aux_ids};

use eyrie_text::Tokenizer;

use crate::args::{AuxMeaning, DoctorArgs};
use crate::style::Style;

/// The check that is about tokenizer files.
const TOKENIZER: &str = "tokenizer";

impl From<AuxMeaning> for AuxConvention {
    fn from(meaning: AuxMeaning) -> Self {
        match meaning {
            AuxMeaning::Entering => Self::Entering,
            AuxMeaning::After => Self::After,
        }
    }
}

/// Runs the command.
pub(crate) fn doctor(args: &DoctorArgs) -> anyhow::Result<ExitCode> {
    let started = Instant::now();
    let report = examine(&args.target, args.draft.as_deref(), args.aux_convention);
    let mut out = std::io::stdout().lock();
    if args.json {
        let mut value = serde_json::to_value(&report)?;
        value["passes"] = report.passes().into();
        serde_json::to_writer_pretty(&mut out, &value)?;
        writeln!(out)?;
    } else {
        print(&mut out, &report, started)?;
    }
    Ok(if report.passes() { ExitCode::SUCCESS } else { ExitCode::from(crate::FAILED) })
}

/// The header checks, and whether a tokenizer that is there can be read.
fn examine(target: &Path, draft: Option<&Path>, aux_convention: Option<AuxMeaning>) -> Report {
    let mut report = preflight_with(target, draft, aux_convention.map(Into::into));
    if target.join("tokenizer.json").exists()
        && let Err(e) = Tokenizer::from_dir(target)
    {
        let message = e.to_string();
        report.checks.retain(|check| check.id != TOKENIZER);
        report.checks.push(Check { id: TOKENIZER, status: Status::Fail, message });
    }
    report
}

fn print(out: &mut impl Write, report: &Report, started: Instant) -> std::io::Result<()> {
    let style = Style::stdout();
    for check in &report.checks {
        let mark = match check.status {
            Status::Ok => style.good("ok  "),
            Status::Warn => style.warn("warn"),
            Status::Fail => style.bad("FAIL"),
        };
        writeln!(out, "{mark} {:16} {}", check.id, check.message)?;
    }
    let count = |status| report.checks.iter().filter(|c| c.status == status).count();
    let (failed, warned) = (count(Status::Fail), count(Status::Warn));
    let verdict = match (failed, &report.draft) {
        (0, Some(_)) => style.good("this pair can be served"),
        (0, None) => style.good("this target can be served"),
        (1, _) => style.bad("refused: 1 problem"),
        (n, _) => style.bad(&format!("refused: {n} problems")),
    };
    let milliseconds = started.elapsed().as_secs_f64() * 1e3;
    let warnings = if warned == 1 { "1 warning".to_owned() } else { format!("{warned} warnings") };
    writeln!(out, "{verdict} ({warnings}, headers read in {milliseconds:.0} ms)")
}

/// Refuses a folder or pair that fails a check.
///
/// # Errors
/// The first failed check, as one line.
pub(crate) fn require(
    target: &Path,
    draft: Option<&Path>,
    aux_convention: Option<AuxMeaning>,
) -> anyhow::Result<()> {
    let report = examine(target, draft, aux_convention);
    let mut failed = report.checks.iter().filter(|c| c.status == Status::Fail);
    let Some(first) = failed.next() else { return Ok(()) };
    match failed.count() {
        0 => anyhow::bail!("{}", first.message),
        more => anyhow::bail!("{} (and {more} more: see eyrie doctor)", first.message),
    }
}

/// The canonical capture set that a draft wants of a target.
///
/// # Errors
/// A config that cannot be read, or ids whose meaning stays open.
pub(crate) fn capture_set(
    target: &ModelSource,
    draft: &ModelSource,
    aux_convention: Option<AuxMeaning>,
) -> anyhow::Result<Vec<usize>> {
    let layers = TargetConfig::from_source(target)?.num_hidden_layers;
    Ok(aux_ids(&DraftConfig::from_source(draft)?, layers, aux_convention.map(Into::into))?.canonical)
}
