//! Target, draft and gateway on the GPU.

use std::path::Path;

use eyrie_tests::{
    Asked, Outcome, Trio, ask, client, draft_card, goldens, mini, mini_eagle3, target_card, until,
};
use eyrie_wire::v1::{LoadState, ModelCard, TargetLease};

/// Whatever the environment says: a service that falls back to the CPU is no result here.
const ON_GPU: &[&str] = &["--device", "cuda:0", "--activations", "bf16"];
/// Option of the target that chooses how it shares its memory.
const SHARE: &str = "--share";

/// The bundled pair, or one made from a seed.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Pair {
    Bundled,
    /// What `--synth` takes, of both.
    Synth(&'static str),
}

impl Pair {
    fn target(self) -> [String; 2] {
        self.source(&mini())
    }

    fn draft(self) -> [String; 2] {
        self.source(&mini_eagle3())
    }

    fn source(self, bundled: &Path) -> [String; 2] {
        match self {
            Self::Bundled => ["--model".to_owned(), bundled.display().to_string()],
            Self::Synth(spec) => ["--synth".to_owned(), spec.to_owned()],
        }
    }
}

/// Starts a target on socket `target` that shares its memory by `kind`; waits until it serves.
pub(crate) async fn start_target(trio: &mut Trio, pair: Pair, kind: &str, flags: &[&str]) -> ModelCard {
    let model = pair.target();
    let model = model.each_ref().map(String::as_str);
    trio.launch("target", &[], "target", &[&model[..], ON_GPU, &[SHARE, kind], flags].concat());
    let card = until("the target to serve", async || {
        let card = target_card(&trio.at("target")).await.ok();
        assert!(trio.is_running("target"), "the target ended: {}", reason(&trio.log("target")));
        card.filter(|card| card.state() == LoadState::Serving)
    })
    .await;
    assert_eq!(card.shared_kind, kind);
    card
}

/// Starts a draft on socket `name`, as the last arguments of the command `through`, and waits for its lease, or for the
/// reason that it has none.
pub(crate) async fn start_draft(
    trio: &mut Trio,
    pair: Pair,
    name: &'static str,
    through: &[&str],
    flags: &[&str],
) -> Result<TargetLease, String> {
    let (model, target) = (pair.draft(), trio.at("target"));
    let model = model.each_ref().map(String::as_str);
    trio.launch(name, through, "draft", &[&model[..], ON_GPU, &["--target", &target], flags].concat());
    let lease = until("the draft's lease, or why there is none", async || {
        if !trio.is_running(name) {
            return Some(Err(format!("the draft ended: {}", reason(&trio.log(name)))));
        }
        let lease = lease(trio, name).await?;
        (lease.attached || lease.because != "starting").then_some(Ok(lease))
    })
    .await?;
    if !lease.attached {
        return Err(lease.because);
    }
    let kind = target_card(&target).await.unwrap().shared_kind;
    assert_eq!((&lease.kind, lease.copied_bytes), (&kind, 0), "no silent fall-back");
    Ok(lease)
}

/// The draft's view of its only target.
pub(crate) async fn lease(trio: &Trio, draft: &str) -> Option<TargetLease> {
    draft_card(&trio.at(draft)).await.ok()?.targets.into_iter().next()
}

/// Waits until the draft is attached.
pub(crate) async fn attached(trio: &Trio, draft: &str) -> TargetLease {
    until("the draft to attach", async || lease(trio, draft).await.filter(|lease| lease.attached)).await
}

/// Milliseconds from the grant to the lease's use: descriptors, mapping, checksums, the head over it. Of the last lease.
pub(crate) fn attach_ms(log: &str) -> u64 {
    let value = log.rsplit_once("after_ms=").unwrap().1;
    value.split(|c: char| !c.is_ascii_digit()).next().unwrap().parse().unwrap()
}

/// Why a process ended.
fn reason(log: &str) -> &str {
    let error = log.lines().find(|line| line.starts_with("error"));
    error.or(log.lines().last()).unwrap_or("it said nothing")
}

/// `tokens` greedy tokens after golden `number`.
pub(crate) fn asked(number: usize, tokens: u32) -> Asked {
    ask(&goldens()[number].prompt_ids, tokens)
}

/// Runs a request by the gateway on socket `gateway`.
pub(crate) async fn run(trio: &Trio, gateway: &str, asked: &Asked) -> Outcome {
    asked.run(&mut client(&trio.at(gateway)).await).await.unwrap()
}

/// Proposals of the draft are accepted, and the tokens are those without it. Ends the gateway that it starts.
pub(crate) async fn proposes(trio: &mut Trio, draft: &str) -> String {
    trio.start_gateway("target", draft, &["--draft-deadline", "10000"]);
    trio.speculating().await;
    let plain = run(trio, "gateway", &asked(0, 48)).await;
    let drafted = run(trio, "gateway", &asked(0, 48).chain(3)).await;
    trio.kill("gateway");
    assert_eq!(drafted.ids, plain.ids, "{draft}");
    let usage = drafted.usage;
    assert!(usage.accepted_tokens > 0 && usage.rounds_without_draft == 0, "{usage:?}");
    format!("{} of {} accepted", usage.accepted_tokens, usage.drafted_tokens)
}
