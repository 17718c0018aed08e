//! `eyrie bench`: rates through all three services, plain and with drafts, in one run.

use std::io::Write;
use std::process::ExitCode;

use eyrie_wire::Address;
use indicatif::ProgressBar;
use serde_json::json;

use crate::args::{BenchArgs, BenchWhat};
use crate::client::{self, Client, Drafting};
use crate::fleet::{Fleet, Shape};
use crate::signals::Signals;
use crate::steps;
use crate::style::{self, Style};

const PROMPTS: [&str; 4] = [
    "class Stack:\n    \"\"\"A last-in, first-out container.\"\"\"\n\n    def __init__(self):\n",
    "def parse_args(argv=None):\n    parser = argparse.ArgumentParser(description=__doc__)\n",
    "import json\nimport os\n\n\ndef load_settings(path, default=None):\n",
    "def test_empty_list_has_no_median():\n    with pytest.raises(ValueError):\n",
];

const CHAINS: [u32; 4] = [1, 3, 5, 7];

struct Setting {
    name: String,
    drafting: Drafting,
    rates: Vec<f64>,
    tokens: u64,
    rounds: u64,
}

/// Runs the command.
pub(crate) async fn bench(args: BenchArgs) -> anyhow::Result<ExitCode> {
    if let Some(BenchWhat::Steps(args)) = args.what {
        return steps::steps(&args).await;
    }
    anyhow::ensure!(
        args.models.synth.is_none(),
        "--synth makes no tokenizer up, and this bench sends text: use eyrie bench steps --synth"
    );
    let listen: Address = "127.0.0.1:0".parse()?;
    let mut fleet = Fleet::start(&args.models, None, &listen, Shape::PAIR).await?;
    let mut ending = Signals::listen()?;
    let outcome = tokio::select! {
        outcome = measure(&mut fleet, &args) => outcome,
        () = ending.next() => Err(anyhow::anyhow!("interrupted")),
    };
    fleet.stop(ending).await;
    let settings = outcome?;
    if args.json {
        print_json(&settings, &args)?
    } else {
        print_table(&settings)?
    }
    Ok(ExitCode::SUCCESS)
}

async fn measure(fleet: &mut Fleet, args: &BenchArgs) -> anyhow::Result<Vec<Setting>> {
    fleet.wait_ready().await?;
    let mut client = client::connect(&fleet.gateway).await?;
    let setting =
        |name: String, drafting| Setting { name, drafting, rates: Vec::new(), tokens: 0, rounds: 0 };
    let mut settings = vec![setting("plain".to_owned(), Drafting::Plain)];
    if fleet.is_drafted() {
        settings.extend(CHAINS.map(|k| setting(format!("K={k}"), Drafting::Chain(k))));
    }
    let bar = ProgressBar::new(u64::from(args.repeats) * settings.len() as u64);
    // Settings alternate within a pass, so that a slow spell of the machine hits all of them.
    for _ in 0..args.repeats {
        for setting in &mut settings {
            pass(&mut client, setting, args.max_tokens).await?;
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    Ok(settings)
}

/// All prompts once; the rate of the pass is tokens over decoding time.
async fn pass(client: &mut Client, setting: &mut Setting, max_tokens: u32) -> anyhow::Result<()> {
    let (mut tokens, mut seconds) = (0.0, 0.0);
    for prompt in PROMPTS {
        let done =
            client::run(client, client::greedy(prompt, max_tokens, setting.drafting), client::unseen).await?;
        tokens += done.token_ids.len().saturating_sub(1) as f64;
        seconds += done.decoding.as_secs_f64();
        // The first token comes from the prompt and belongs to no round.
        setting.tokens += done.token_ids.len().saturating_sub(1) as u64;
        setting.rounds += u64::from(done.usage.rounds);
    }
    setting.rates.push(tokens / seconds);
    Ok(())
}

impl Setting {
    fn median(&self) -> f64 {
        client::median(self.rates.clone())
    }

    fn tokens_a_round(&self) -> f64 {
        self.tokens as f64 / self.rounds.max(1) as f64
    }
}

fn print_table(settings: &[Setting]) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    let plain = settings.first().map_or(0.0, Setting::median);
    let head = format!("{:8} {:>10} {:>9} {:>14}", "drafts", "tokens/s", "x plain", "tokens/round");
    writeln!(out, "{}", Style::stdout().bold(&head))?;
    for s in settings {
        let (rate, round) = (s.median(), s.tokens_a_round());
        writeln!(out, "{:8} {rate:>10.0} {:>9.2} {round:>14.2}", s.name, rate / plain)?;
    }
    style::note("medians over passes, one client, whole path: client, gateway, draft, target");
    Ok(())
}

fn print_json(settings: &[Setting], args: &BenchArgs) -> anyhow::Result<()> {
    let rows: Vec<_> = settings
        .iter()
        .map(|s| json!({"drafts": s.name, "tokens_per_second": s.median(), "passes": s.rates, "tokens_per_round": s.tokens_a_round()}))
        .collect();
    let all = json!({"max_tokens": args.max_tokens, "prompts": PROMPTS.len(), "settings": rows});
    let mut out = std::io::stdout().lock();
    serde_json::to_writer_pretty(&mut out, &all)?;
    writeln!(out)?;
    Ok(())
}
