//! `eyrie bench steps`: how long a step of the target and a round of the pair take, by batch, without gateway and text.

mod lane;
mod rounds;

use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use eyrie_wire::Address;
use indicatif::ProgressBar;
use serde::Serialize;

use crate::args::{ModelArgs, StepsArgs};
use crate::client::median;
use crate::fleet::{Fleet, Role, Shape};
use crate::signals::Signals;
use crate::style::{self, Style};
use rounds::{Bench, Sizes};

/// Steps and rounds that are run first and not counted.
const WARM_UP: u32 = 2;
/// Rows that a verify needs beside what it commits, and whole pages for each sequence.
const SPARE: u32 = 128;

/// What was measured at one batch.
#[derive(Debug, Serialize)]
struct Line {
    batch: usize,
    /// Median milliseconds of a plain step of all sequences.
    plain_ms: f64,
    plain_tokens_per_second: f64,
    drafted: Option<Drafted>,
}

/// The same of rounds with drafted tokens.
#[derive(Debug, Serialize)]
struct Drafted {
    /// Median milliseconds until all proposals, from there until all are verified, and of both.
    draft_ms: f64,
    verify_ms: f64,
    round_ms: f64,
    tokens_per_round: f64,
    tokens_per_second: f64,
}

/// Runs the command.
pub(crate) async fn steps(args: &StepsArgs) -> anyhow::Result<ExitCode> {
    let lines = match &args.target_at {
        Some(target) => measure(target, args.draft_at.as_ref(), args).await?,
        None => with_own_fleet(args).await?,
    };
    if args.json {
        print_json(&lines, args)?
    } else {
        print_table(&lines, args.draft_tokens)?
    }
    Ok(ExitCode::SUCCESS)
}

async fn with_own_fleet(args: &StepsArgs) -> anyhow::Result<Vec<Line>> {
    let listen: Address = "127.0.0.1:0".parse()?;
    let mut fleet = Fleet::start(&sized(args), None, &listen, Shape::PAIR).await?;
    let mut ending = Signals::listen()?;
    let measured = async {
        fleet.wait_ready().await?;
        let first = |role| fleet.all(role).next().map(|service| service.address.clone());
        let target = first(Role::Target).ok_or_else(|| anyhow::anyhow!("no target was started"))?;
        measure(&target, first(Role::Draft).as_ref(), args).await
    };
    let outcome = tokio::select! {
        outcome = measured => outcome,
        () = ending.next() => Err(anyhow::anyhow!("interrupted")),
    };
    fleet.stop(ending).await;
    outcome
}

/// The models with caches that hold the largest batch, and without prefixes, which random prompts do not share.
fn sized(args: &StepsArgs) -> ModelArgs {
    let most = args.batch.iter().copied().max().unwrap_or(1);
    let rounds = (args.rounds + WARM_UP) * (args.draft_tokens + 1);
    let tokens = (args.prompt_tokens + rounds + SPARE).saturating_mul(most);
    ModelArgs {
        kv_tokens: args.models.kv_tokens.or(Some(tokens)),
        draft_tokens: Some(tokens),
        max_sequences: Some(most.max(2)),
        aux_cache_bytes: args.aux_cache_bytes,
        prefix_cache_bytes: args.models.prefix_cache_bytes.or(Some(0)),
        ..args.models.clone()
    }
}

async fn measure(target: &Address, draft: Option<&Address>, args: &StepsArgs) -> anyhow::Result<Vec<Line>> {
    let sizes = Sizes { prompt: args.prompt_tokens, rounds: args.rounds + WARM_UP, k: args.draft_tokens };
    let mut bench = Bench::connect(target, draft, sizes).await?;
    let bar = ProgressBar::new(args.batch.len() as u64);
    let mut lines = Vec::new();
    for &batch in &args.batch {
        lines.push(line(&mut bench, batch as usize).await?);
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(lines)
}

async fn line(bench: &mut Bench, batch: usize) -> anyhow::Result<Line> {
    let skip = WARM_UP as usize;
    let plain_ms = middle(bench.plain(batch).await?.into_iter().skip(skip));
    let plain_tokens_per_second = batch as f64 * 1e3 / plain_ms;
    let drafted = match bench.drafted(batch).await? {
        None => None,
        Some(rounds) => {
            let counted = || rounds.iter().skip(skip);
            let tokens: u32 = counted().map(|round| round.tokens).sum();
            let time: Duration = counted().map(|round| round.draft + round.verify).sum();
            Some(Drafted {
                draft_ms: middle(counted().map(|round| round.draft)),
                verify_ms: middle(counted().map(|round| round.verify)),
                round_ms: middle(counted().map(|round| round.draft + round.verify)),
                tokens_per_round: f64::from(tokens) / (counted().count() * batch) as f64,
                tokens_per_second: f64::from(tokens) / time.as_secs_f64(),
            })
        }
    };
    Ok(Line { batch, plain_ms, plain_tokens_per_second, drafted })
}

/// The median in milliseconds.
fn middle(times: impl Iterator<Item = Duration>) -> f64 {
    median(times.map(|time| time.as_secs_f64() * 1e3).collect())
}

fn print_table(lines: &[Line], k: u32) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    let k = format!("K={k}");
    let head = format!(
        "{:>5} {:>10} {:>10} | {k:>4} {:>9} {:>9} {:>9} {:>12} {:>10}",
        "batch", "plain ms", "tokens/s", "draft ms", "verify ms", "round ms", "tokens/round", "tokens/s"
    );
    writeln!(out, "{}", Style::stdout().bold(&head))?;
    for Line { batch, plain_ms, plain_tokens_per_second: rate, drafted } in lines {
        write!(out, "{batch:>5} {plain_ms:>10.3} {rate:>10.0} |")?;
        match drafted {
            Some(d) => writeln!(
                out,
                " {:>4} {:>9.3} {:>9.3} {:>9.3} {:>12.2} {:>10.0}",
                "", d.draft_ms, d.verify_ms, d.round_ms, d.tokens_per_round, d.tokens_per_second
            )?,
            None => writeln!(out, " no draft")?,
        }
    }
    style::note("medians; random prompts, all sequences in step, straight to target and draft");
    Ok(())
}

fn print_json(lines: &[Line], args: &StepsArgs) -> anyhow::Result<()> {
    let all = serde_json::json!({
        "prompt_tokens": args.prompt_tokens,
        "rounds": args.rounds,
        "draft_tokens": args.draft_tokens,
        "batches": lines,
    });
    let mut out = std::io::stdout().lock();
    serde_json::to_writer_pretty(&mut out, &all)?;
    writeln!(out)?;
    Ok(())
}
