//! Command-line arguments; `--help` is documentation.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use eyrie_checkpoint::{ModelSource, SynthSpec};
use eyrie_draft::SharedSource;
use eyrie_kernels::{Activations, Processor};
use eyrie_region::RegionKind;
use eyrie_wire::Address;

/// Serve DeepSeek and Kimi models with lossless EAGLE-3 speculative decoding.
#[derive(Debug, Parser)]
#[command(name = "eyrie", version, max_term_width = 100, after_help = AFTER_HELP)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

const AFTER_HELP: &str = "\
Start here:
  eyrie demo                              serve the bundled pair, watch one completion
  eyrie doctor --target DIR --draft DIR   can this pair be served? reads headers only
  eyrie up --target DIR --draft DIR       start the three services and keep serving
  eyrie generate --endpoint http://127.0.0.1:7700 --prompt 'def fib(n):'

Logs go to standard error; EYRIE_LOG=debug shows more. Exit codes: 0 fine, 1 the request or check failed, 2 usage.";

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Serve the bundled pair with three processes, stream one completion, compare it with plain decoding
    Demo(DemoArgs),
    /// Start targets, drafts and a gateway as processes and keep serving until Ctrl-C
    Up(UpArgs),
    /// Send one prompt to a gateway
    Generate(GenerateArgs),
    /// Measure tokens per second, plain and with drafts of 1, 3, 5 and 7 tokens
    Bench(Box<BenchArgs>),
    /// Check a checkpoint, or a pair, from its headers in under a second
    Doctor(DoctorArgs),
    /// Run the target service: holds the model, verifies and samples
    Target(TargetArgs),
    /// Run the draft service: maps the target's weights and proposes tokens
    Draft(DraftArgs),
    /// Run the gateway service: serves clients and runs the rounds
    Gateway(GatewayArgs),
}

/// Which models the three services serve, and with what means.
#[derive(Debug, Clone, Args)]
pub(crate) struct ModelArgs {
    /// Checkpoint folder of the target [default: the bundled demo model]
    #[arg(long, value_name = "DIR")]
    pub(crate) target: Option<PathBuf>,
    /// Checkpoint folder of the EAGLE-3 draft head [default: the bundled head with the bundled target,
    /// none with another]
    #[arg(long, value_name = "DIR", conflicts_with = "no_draft")]
    pub(crate) draft: Option<PathBuf>,
    /// Serve without a draft: plain decoding
    #[arg(long)]
    pub(crate) no_draft: bool,
    /// Make target and head up from a seed instead: see `eyrie target --help`. Prompts must be token ids
    #[arg(long, value_name = "SPEC", conflicts_with_all = ["target", "draft"])]
    pub(crate) synth: Option<SynthSpec>,
    /// What the draft's aux-layer ids mean, entering or after a layer, where its file does not tell
    #[arg(long, value_name = "MEANING", value_enum, hide_possible_values = true)]
    pub(crate) aux_convention: Option<AuxMeaning>,
    #[command(flatten)]
    pub(crate) compute: ComputeArgs,
    /// Tokens that the target's KV cache holds [default: 16384]
    #[arg(long, value_name = "N")]
    pub(crate) kv_tokens: Option<u32>,
    /// Bytes that target and draft each keep of ended sequences for prompts that begin alike; 0 keeps none
    /// [default: what is free of the KV cache]
    #[arg(long, value_name = "BYTES")]
    pub(crate) prefix_cache_bytes: Option<u64>,
    /// Prompt rows of one step at most [default: 256]
    #[arg(long, value_name = "N")]
    pub(crate) prefill_chunk: Option<u32>,
    /// Tokens that the draft's KV cache holds, where not as many as by itself.
    #[arg(skip)]
    pub(crate) draft_tokens: Option<u32>,
    /// Sequences at once, likewise of both.
    #[arg(skip)]
    pub(crate) max_sequences: Option<u32>,
    /// Bytes of aux rows that the target keeps, where not as many as by itself.
    #[arg(skip)]
    pub(crate) aux_cache_bytes: Option<u64>,
}

/// How the three processes are looked after.
#[derive(Debug, Clone, Args)]
pub(crate) struct WatchArgs {
    /// Supervise: start a service again when its process dies
    #[arg(long)]
    pub(crate) restart: bool,
    /// Write endpoints and process ids as JSON to this file once a request would succeed
    #[arg(long, value_name = "FILE")]
    pub(crate) ready_file: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct DemoArgs {
    #[command(flatten)]
    pub(crate) models: ModelArgs,
    #[command(flatten)]
    pub(crate) watch: WatchArgs,
    /// What to complete
    #[arg(long, value_name = "TEXT", default_value = DEMO_PROMPT, value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub(crate) prompt: String,
    /// Tokens to generate
    #[arg(long, value_name = "N", default_value_t = 160, value_parser = clap::value_parser!(u32).range(2..))]
    pub(crate) max_tokens: u32,
    /// Tokens drafted each round
    #[arg(long, default_value_t = 3, value_name = "K", value_parser = clap::value_parser!(u32).range(1..=16))]
    pub(crate) max_draft_tokens: u32,
}

const DEMO_PROMPT: &str =
    "def read_config(path):\n    \"\"\"Read the configuration file at `path` and return a dictionary.";

#[derive(Debug, Args)]
pub(crate) struct UpArgs {
    #[command(flatten)]
    pub(crate) models: ModelArgs,
    #[command(flatten)]
    pub(crate) watch: WatchArgs,
    /// Where the gateway serves clients [default: 127.0.0.1:7700, or a free port if that one is taken]
    #[arg(long, value_name = "HOST:PORT", value_parser = parse_address)]
    pub(crate) listen: Option<Address>,
    /// Targets to start; each holds the whole model
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=8))]
    pub(crate) targets: u8,
    /// Drafts to start, each for all of the targets
    #[arg(long, value_name = "N", default_value_t = 1, conflicts_with = "no_draft", value_parser = clap::value_parser!(u8).range(1..=8))]
    pub(crate) drafts: u8,
    /// Connect the services over TCP on loopback instead of unix sockets
    #[arg(long)]
    pub(crate) tcp: bool,
}

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    pub(crate) what: Option<BenchWhat>,
    #[command(flatten)]
    pub(crate) models: ModelArgs,
    /// Tokens to generate for each prompt
    #[arg(long, default_value_t = 96, value_parser = clap::value_parser!(u32).range(2..))]
    pub(crate) max_tokens: u32,
    /// Passes over all settings; the median of each is reported
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) repeats: u32,
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum BenchWhat {
    /// Measure milliseconds of a step and of a round by batch, straight at target and draft: needs no tokenizer
    Steps(Box<StepsArgs>),
}

#[derive(Debug, Args)]
pub(crate) struct StepsArgs {
    #[command(flatten)]
    pub(crate) models: ModelArgs,
    /// A target that runs already, instead of starting one
    #[arg(long, value_name = "ADDRESS", value_parser = parse_address, conflicts_with_all = ["target", "draft", "synth"])]
    pub(crate) target_at: Option<Address>,
    /// Its draft; without one steps are plain
    #[arg(long, value_name = "ADDRESS", value_parser = parse_address, requires = "target_at")]
    pub(crate) draft_at: Option<Address>,
    /// Sequences at once
    #[arg(long, value_name = "N,N,...", value_delimiter = ',', default_value = "1,2,4,8,16,32,64", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) batch: Vec<u32>,
    /// Tokens of each prompt
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) prompt_tokens: u32,
    /// Steps and rounds that are timed of each kind
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) rounds: u32,
    /// Tokens drafted a round
    #[arg(long, value_name = "K", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=63))]
    pub(crate) draft_tokens: u32,
    /// Bytes of aux rows that the target keeps for a draft that lacks them [default: 256 MiB]
    #[arg(long, value_name = "BYTES", conflicts_with = "target_at")]
    pub(crate) aux_cache_bytes: Option<u64>,
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(group(clap::ArgGroup::new("input").required(true).args(["prompt", "prompt_ids", "stdin"])))]
pub(crate) struct GenerateArgs {
    /// Gateway, as `eyrie up` prints it
    #[arg(long, value_name = "URL", env = "EYRIE_ENDPOINT", default_value = "http://127.0.0.1:7700", value_parser = parse_address)]
    pub(crate) endpoint: Address,
    /// The prompt as text
    #[arg(long, value_name = "TEXT")]
    pub(crate) prompt: Option<String>,
    /// The prompt as token ids: 1,2,3
    #[arg(long, value_name = "IDS", value_delimiter = ',')]
    pub(crate) prompt_ids: Option<Vec<u32>>,
    /// `-`: read the prompt as text from standard input
    #[arg(value_name = "-", value_parser = ["-"], hide_possible_values = true)]
    pub(crate) stdin: Option<String>,
    /// Tokens to generate [default: 256, or what the context leaves]
    #[arg(long, value_name = "N")]
    pub(crate) max_tokens: Option<u32>,
    /// 0 is greedy [default: the model's own, else 0]
    #[arg(long, value_name = "T", allow_negative_numbers = true)]
    pub(crate) temperature: Option<f32>,
    /// Nucleus sampling, in (0, 1]
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub(crate) top_p: Option<f32>,
    /// Keep the K most probable tokens; 0 is off
    #[arg(long, value_name = "K")]
    pub(crate) top_k: Option<u32>,
    /// Drop tokens below P times the largest probability, in [0, 1]
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub(crate) min_p: Option<f32>,
    /// Seed of the draws; the same seed gives the same tokens, with or without a draft
    #[arg(long, value_name = "S", allow_negative_numbers = true)]
    pub(crate) seed: Option<u64>,
    /// Stop before this text; may be given several times
    #[arg(long, value_name = "TEXT")]
    pub(crate) stop: Vec<String>,
    /// Stop after this token id; may be given several times
    #[arg(long, value_name = "ID")]
    pub(crate) stop_id: Vec<u32>,
    /// Go on after the model's end-of-sequence token
    #[arg(long)]
    pub(crate) ignore_eos: bool,
    /// Plain decoding: no draft
    #[arg(long, conflicts_with_all = ["max_draft_tokens", "tree"])]
    pub(crate) plain: bool,
    /// Draft exactly K tokens every round
    #[arg(long, value_name = "K")]
    pub(crate) max_draft_tokens: Option<u32>,
    /// Draft a dynamic tree: top-k x levels x nodes with the root, e.g. 4x5x16
    #[arg(long, value_name = "SHAPE", value_parser = parse_tree, conflicts_with = "max_draft_tokens")]
    pub(crate) tree: Option<eyrie_wire::v1::TreeShape>,
    /// Lower runs earlier and is preempted later
    #[arg(long, value_name = "N", default_value_t = 0, allow_negative_numbers = true)]
    pub(crate) priority: i32,
    /// Return every round: what was drafted and what was accepted
    #[arg(long)]
    pub(crate) trace: bool,
    /// Print one JSON object instead of streaming text
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// Checkpoint folder of the target
    #[arg(long, value_name = "DIR")]
    pub(crate) target: PathBuf,
    /// Checkpoint folder of the draft head
    #[arg(long, value_name = "DIR")]
    pub(crate) draft: Option<PathBuf>,
    /// What the written aux-layer ids mean, entering or after a layer, where the file does not tell
    #[arg(long, value_name = "MEANING", value_enum, hide_possible_values = true)]
    pub(crate) aux_convention: Option<AuxMeaning>,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// Meaning of the aux-layer ids written in a draft's config.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum AuxMeaning {
    /// The residual stream entering the layer.
    Entering,
    /// The residual stream after the layer.
    After,
}

/// What every service subcommand shares.
#[derive(Debug, Args)]
pub(crate) struct ServiceArgs {
    /// Log lines as JSON
    #[arg(long)]
    pub(crate) log_json: bool,
    /// Drain and stop when standard input closes (set by a supervisor)
    #[arg(long, hide = true)]
    pub(crate) with_parent: bool,
    /// Seconds that running requests may take to end after SIGTERM
    #[arg(long, value_name = "S", default_value_t = 30)]
    pub(crate) drain_grace: u64,
}

/// Where and how to compute.
#[derive(Debug, Clone, Args)]
pub(crate) struct ComputeArgs {
    /// Where to compute: cpu, cuda (the first GPU) or cuda:N
    #[arg(long, value_name = "DEVICE", env = "EYRIE_DEVICE", default_value_t = Processor::Cpu)]
    pub(crate) device: Processor,
    /// Numbers of activations and KV cache: f32, or bf16 on a GPU [default: f32 on the CPU, bf16 on a GPU]
    #[arg(long, value_name = "NUMBERS", env = "EYRIE_ACTIVATIONS")]
    pub(crate) activations: Option<Activations>,
    /// Compute threads of the CPU [default: the machine's cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) threads: Option<u32>,
}

/// What a service loads.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub(crate) struct SourceArgs {
    /// Checkpoint folder
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Make the weights up from a seed, in the memory that they are used in, as NAME[:key=value,...]: for measuring models
    /// that are not there. Names: deepseek-v2-lite, deepseek-v3, kimi-k2, mini. Keys: layers, dense-layers, experts,
    /// active-experts, shared-experts, expert-width, groups, hidden, heads, width, vocab, context, format (bf16, f32, or int4
    /// for the experts alone) and seed. A draft takes its target's SPEC, or eagle3:hidden=...,heads=...,kv-heads=...,
    /// head-dim=...,width=...,vocab=...,aux=...,context=...
    #[arg(long, value_name = "SPEC")]
    synth: Option<SynthSpec>,
}

impl SourceArgs {
    /// One of the two, which are required.
    pub(crate) fn source(self) -> ModelSource {
        match (self.model, self.synth) {
            (_, Some(spec)) => spec.into(),
            (dir, None) => dir.unwrap_or_default().into(),
        }
    }
}

#[derive(Debug, Args)]
pub(crate) struct TargetArgs {
    #[command(flatten)]
    pub(crate) model: SourceArgs,
    /// Where to serve: unix:/path.sock or host:port
    #[arg(long, value_name = "ADDRESS", value_parser = parse_address)]
    pub(crate) listen: Address,
    /// Canonical aux layers to capture (id i = residual stream entering layer i) [default: 2, n/2, n-3]
    #[arg(long, value_name = "IDS", value_delimiter = ',')]
    pub(crate) aux_layers: Option<Vec<u32>>,
    /// Serve at most this context instead of the model's
    #[arg(long, value_name = "N")]
    pub(crate) context: Option<u32>,
    /// Tokens that the KV cache holds; its memory is taken at the start
    #[arg(long, value_name = "N", default_value_t = 16_384)]
    pub(crate) kv_tokens: usize,
    /// Bytes of the KV cache that keep ended sequences for prompts that begin alike; 0 keeps none
    /// [default: what is free]
    #[arg(long, value_name = "BYTES")]
    pub(crate) prefix_cache_bytes: Option<u64>,
    /// Sequences at once
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub(crate) max_sequences: usize,
    /// Prompt rows of one step at most
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub(crate) prefill_chunk: usize,
    #[command(flatten)]
    pub(crate) compute: ComputeArgs,
    /// Bytes of aux rows kept for drafts that come back or lack what the prefix cache holds
    #[arg(long, value_name = "BYTES", default_value_t = 256 << 20)]
    pub(crate) aux_cache_bytes: u64,
    /// How GPU memory is shared with drafts: cuda_vmm (by descriptor, read-only there) or cuda_ipc (by handle, for hosts
    /// that cannot pass device memory by descriptor; writable there, so a draft needs --allow-writable-ipc)
    /// [default: cuda_vmm]
    #[arg(long, value_name = "KIND")]
    pub(crate) share: Option<RegionKind>,
    #[command(flatten)]
    pub(crate) service: ServiceArgs,
}

#[derive(Debug, Args)]
pub(crate) struct DraftArgs {
    #[command(flatten)]
    pub(crate) model: SourceArgs,
    /// Where to serve
    #[arg(long, value_name = "ADDRESS", value_parser = parse_address)]
    pub(crate) listen: Address,
    /// Target to draft for; may be given several times, and each gets an equal share of the KV cache
    #[arg(long, value_name = "ADDRESS", value_parser = parse_address, required = true)]
    pub(crate) target: Vec<Address>,
    /// Where the target's embedding and head come from: `map` shares the target's memory and works on its host alone;
    /// `target` copies them from the target; a folder with the same model is read instead. With the last two, features
    /// are read over the network. Never one in place of another
    #[arg(long, value_name = "map|target|DIR", default_value = "map", value_parser = parse_shared)]
    pub(crate) shared_weights: SharedSource,
    /// Map a target's GPU memory also where it is shared by handle (cuda_ipc): the driver maps that writable, so a fault of
    /// the draft could change the target's weights
    #[arg(long)]
    pub(crate) allow_writable_ipc: bool,
    /// Tokens that the draft's KV cache holds, over all targets; its memory is taken when it attaches
    #[arg(long, value_name = "N", default_value_t = 16_384)]
    pub(crate) cache_tokens: usize,
    /// Bytes of that cache, over all targets, that keep ended sequences for prompts that begin alike; 0 keeps none
    /// [default: what is free]
    #[arg(long, value_name = "BYTES")]
    pub(crate) prefix_cache_bytes: Option<u64>,
    /// Sequences at once, for each target; the least recently used makes room
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub(crate) max_sequences: usize,
    /// Tokens proposed in one round at most
    #[arg(long, value_name = "K", default_value_t = 63)]
    pub(crate) max_draft_tokens: usize,
    #[command(flatten)]
    pub(crate) compute: ComputeArgs,
    /// What the written aux-layer ids mean, entering or after a layer, where the file does not tell
    #[arg(long, value_name = "MEANING", value_enum, hide_possible_values = true)]
    pub(crate) aux_convention: Option<AuxMeaning>,
    #[command(flatten)]
    pub(crate) service: ServiceArgs,
}

#[derive(Debug, Args)]
pub(crate) struct GatewayArgs {
    /// Where to serve clients
    #[arg(long, value_name = "ADDRESS", value_parser = parse_address)]
    pub(crate) listen: Address,
    /// A target; may be given several times or as a list with commas. New sequences go to the one with the fewest, and
    /// to another one when theirs goes away
    #[arg(long, value_name = "ADDRESS", env = "EYRIE_GATEWAY_TARGETS", required = true, value_delimiter = ',', value_parser = parse_address)]
    pub(crate) target: Vec<Address>,
    /// A draft, likewise; it serves the targets that it is attached to. Without one every round is plain
    #[arg(long, value_name = "ADDRESS", env = "EYRIE_GATEWAY_DRAFTS", value_delimiter = ',', value_parser = parse_address)]
    pub(crate) draft: Vec<Address>,
    /// Tokens drafted a round when the request does not say
    #[arg(long, value_name = "K", default_value_t = 3)]
    pub(crate) draft_tokens: u32,
    /// Milliseconds to wait for a proposal before a round goes on without one
    #[arg(long, value_name = "MS", default_value_t = 250, value_parser = clap::value_parser!(u64).range(1..=60_000))]
    pub(crate) draft_deadline: u64,
    /// Seconds that a request waits while no target is there
    #[arg(long, value_name = "S", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub(crate) target_timeout: u64,
    /// Requests that run at once; more are refused
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) max_streams: u32,
    #[command(flatten)]
    pub(crate) service: ServiceArgs,
}

fn parse_address(s: &str) -> Result<Address, String> {
    s.parse::<Address>().map_err(|e| e.to_string())
}

fn parse_shared(s: &str) -> Result<SharedSource, String> {
    if s.is_empty() { Err("want map, target or a folder".to_owned()) } else { Ok(s.into()) }
}

fn parse_tree(s: &str) -> Result<eyrie_wire::v1::TreeShape, String> {
    let parts: Vec<u32> = s
        .split('x')
        .map(str::parse)
        .collect::<Result<_, std::num::ParseIntError>>()
        .map_err(|e| e.to_string())?;
    match parts[..] {
        [top_k, levels, nodes] if top_k > 0 && levels > 0 && nodes > 1 => {
            Ok(eyrie_wire::v1::TreeShape { top_k, levels, nodes })
        }
        _ => Err("want TOPKxLEVELSxNODES with at least two nodes, e.g. 4x5x16".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn arguments_are_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn trees_parse() {
        let tree = parse_tree("4x5x16").unwrap();
        assert_eq!((tree.top_k, tree.levels, tree.nodes), (4, 5, 16));
        for bad in ["4x5", "4x5x16x1", "ax5x16", "0x5x16", "4x5x1", ""] {
            assert!(parse_tree(bad).is_err(), "{bad}");
        }
    }
}
