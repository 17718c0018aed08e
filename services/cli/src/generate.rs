//! `eyrie generate`: one prompt, streamed or as JSON.

use std::io::{ErrorKind, Read, Write};
use std::ops::ControlFlow;
use std::process::ExitCode;

use anyhow::Context;
use eyrie_wire::v1::speculation::Mode;
use eyrie_wire::v1::{
    FinishReason, GenerateChunk, GenerateRequest, Round, Speculation, Usage, generate_request, round,
};
use serde_json::{Value, json};

use crate::args::GenerateArgs;
use crate::client::{self, Completion};
use crate::style::{self, Style};

/// Runs the command.
pub(crate) async fn generate(args: GenerateArgs) -> anyhow::Result<ExitCode> {
    let json = args.json;
    let mut client = client::connect(&args.endpoint).await?;
    let request = request(args)?;
    let mut printer = Printer::new(!json);
    let outcome = client::run(&mut client, request, |chunk| printer.chunk(chunk)).await;
    printer.end()?;
    let done = outcome?;
    if json {
        let mut out = std::io::stdout().lock();
        serde_json::to_writer(&mut out, &to_json(&done))?;
        writeln!(out)?;
    } else if done.finish != FinishReason::Unspecified {
        style::note(&Style::stderr().dim(&summary(&done)));
    }
    Ok(ExitCode::SUCCESS)
}

fn request(args: GenerateArgs) -> anyhow::Result<GenerateRequest> {
    let prompt = match (args.prompt, args.prompt_ids) {
        (Some(text), _) => generate_request::Prompt::Text(text),
        (None, Some(ids)) => client::id_prompt(ids),
        (None, None) => {
            let mut text = String::new();
            std::io::stdin().read_to_string(&mut text).context("reading the prompt from standard input")?;
            generate_request::Prompt::Text(text)
        }
    };
    let mode = if args.plain { Mode::Off } else { Mode::Auto };
    Ok(GenerateRequest {
        prompt: Some(prompt),
        max_tokens: args.max_tokens,
        temperature: args.temperature,
        top_p: args.top_p,
        top_k: args.top_k,
        min_p: args.min_p,
        seed: args.seed,
        stop: args.stop,
        stop_ids: args.stop_id,
        ignore_eos: args.ignore_eos,
        speculation: Some(Speculation {
            mode: mode as i32,
            max_draft_tokens: args.max_draft_tokens,
            tree: args.tree,
            trace: args.trace,
        }),
        request_id: String::new(),
        priority: args.priority,
    })
}

/// Streams text to standard output, accepted draft tokens in green.
#[derive(Debug)]
pub(crate) struct Printer {
    style: Style,
    on: bool,
    ends_with_newline: bool,
    failed: Option<std::io::Error>,
}

impl Printer {
    /// Prints only when `on`.
    pub(crate) fn new(on: bool) -> Self {
        Self { style: Style::stdout(), on, ends_with_newline: true, failed: None }
    }

    /// Shows one chunk; a break when standard output takes no more.
    pub(crate) fn chunk(&mut self, chunk: &GenerateChunk) -> ControlFlow<()> {
        if !self.on || chunk.text.is_empty() {
            return ControlFlow::Continue(());
        }
        self.ends_with_newline = chunk.text.ends_with('\n');
        let accepted_end = match chunk.accepted as usize {
            0 => 0,
            n => chunk.text_ends.get(n - 1).map_or(0, |&end| end as usize),
        };
        let (accepted, own) = chunk.text.split_at_checked(accepted_end).unwrap_or((&chunk.text, ""));
        let mut out = std::io::stdout().lock();
        let text = if accepted.is_empty() { own.to_owned() } else { self.style.good(accepted) + own };
        self.failed = out.write_all(text.as_bytes()).and_then(|()| out.flush()).err();
        if self.failed.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }

    /// Ends the last line; an error if standard output failed on the way.
    pub(crate) fn end(self) -> anyhow::Result<()> {
        match self.failed {
            // The reader has seen enough, as `head` has.
            Some(e) if e.kind() == ErrorKind::BrokenPipe => return Ok(()),
            Some(e) => return Err(e).context("writing to standard output"),
            None => {}
        }
        if !self.ends_with_newline {
            writeln!(std::io::stdout())?;
        }
        Ok(())
    }
}

fn summary(done: &Completion) -> String {
    let usage = &done.usage;
    let mut line = format!(
        "{} tokens ({}) in {} rounds, {:.2} a round, first token after {:.0} ms",
        usage.completion_tokens,
        finish_name(done.finish),
        usage.rounds,
        done.tokens_a_round(),
        done.first_token.as_secs_f64() * 1e3,
    );
    if let Some(rate) = done.rate() {
        line += &format!(", then {rate:.0} tokens/s");
    }
    if usage.rounds_without_draft > 0 {
        line += &format!(", {} rounds had no draft", usage.rounds_without_draft);
    }
    line
}

fn finish_name(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Unspecified => "unspecified",
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
    }
}

/// The stable machine form.
fn to_json(done: &Completion) -> Value {
    json!({
        "prompt_ids": done.prompt_ids,
        "token_ids": done.token_ids,
        "text": done.text,
        "finish_reason": finish_name(done.finish),
        "usage": usage_json(&done.usage),
        "seed": done.seed,
        "rounds": done.rounds.iter().map(round_json).collect::<Vec<_>>(),
    })
}

fn usage_json(usage: &Usage) -> Value {
    json!({
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
        "rounds": usage.rounds,
        "drafted_tokens": usage.drafted_tokens,
        "accepted_tokens": usage.accepted_tokens,
        "drafted_by_position": usage.drafted_by_position,
        "accepted_by_position": usage.accepted_by_position,
        "rounds_without_draft": usage.rounds_without_draft,
    })
}

fn round_json(round: &Round) -> Value {
    let mode = match round.mode() {
        round::Mode::Unspecified => "unspecified",
        round::Mode::Plain => "plain",
        round::Mode::Chain => "chain",
        round::Mode::Tree => "tree",
    };
    json!({
        "mode": mode,
        "proposed": round.proposed,
        "parents": round.parents,
        "accepted_path": round.accepted_path,
        "accepted": round.accepted,
        "emitted": round.emitted,
    })
}
