//! Whether a target and a draft fit together, told from configs, headers and the draft's vocabulary map alone.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::target::MOST_PROBLEMS;
use crate::{
    AuxConvention, CheckpointError, DraftCheckpoint, DraftConfig, EmbedSource, HeadSource, TargetCheckpoint,
    TargetConfig, TensorIndex, aux_ids,
};

const CONFIG: &str = "config.json";

/// Problems listed per folder; a folder of the wrong model would otherwise print thousands.
const MOST_LISTED: usize = 20;

/// Outcome of one check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// Fits.
    Ok,
    /// Can be served, but worse than it could be.
    Warn,
    /// Must be refused.
    Fail,
}

/// One check with the values it compared.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Check {
    /// Stable name of the check.
    pub id: &'static str,
    /// Outcome.
    pub status: Status,
    /// One line: file, field, value, limit.
    pub message: String,
}

/// Every check of a target and, when given, a draft.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Report {
    /// Target folder.
    pub target: PathBuf,
    /// Draft folder.
    pub draft: Option<PathBuf>,
    /// All checks, failed or not, in the order they were made.
    pub checks: Vec<Check>,
}

impl Report {
    /// True when nothing must be refused.
    pub fn passes(&self) -> bool {
        self.checks.iter().all(|c| c.status != Status::Fail)
    }

    fn push(&mut self, id: &'static str, status: Status, message: impl Into<String>) {
        self.checks.push(Check { id, status, message: message.into() });
    }

    /// What two configs say of each other; a misfit names both files.
    fn verdict(&mut self, id: &'static str, fits: bool, message: impl fmt::Display) {
        if fits {
            return self.push(id, Status::Ok, message.to_string());
        }
        let target = self.target.join(CONFIG);
        let draft = self.draft.iter().map(|dir| format!("{}: ", dir.join(CONFIG).display()));
        let message = format!("{}{message} ({})", draft.collect::<String>(), target.display());
        self.push(id, Status::Fail, message);
    }

    fn fail(&mut self, id: &'static str, error: &CheckpointError) {
        self.push(id, Status::Fail, error.to_string());
    }

    fn fail_all(&mut self, id: impl Fn(&CheckpointError) -> &'static str, problems: &[CheckpointError]) {
        for problem in problems.iter().take(MOST_LISTED) {
            self.fail(id(problem), problem);
        }
        if let (Some(last), true) = (problems.last(), problems.len() > MOST_LISTED) {
            let more = problems.len() - MOST_LISTED;
            let least = if problems.len() > MOST_PROBLEMS { "at least " } else { "" };
            self.push(id(last), Status::Fail, format!("and {least}{more} more problems"));
        }
    }
}

/// Checks a target and, when given, a draft; reads no weights and collects every problem.
pub fn preflight(target_dir: &Path, draft_dir: Option<&Path>) -> Report {
    preflight_with(target_dir, draft_dir, None)
}

/// [`preflight`] under an explicit meaning of the draft's aux layer ids.
pub fn preflight_with(
    target_dir: &Path,
    draft_dir: Option<&Path>,
    convention: Option<AuxConvention>,
) -> Report {
    let mut report =
        Report { target: target_dir.to_owned(), draft: draft_dir.map(Path::to_owned), checks: Vec::new() };
    let target = check_target(&mut report, target_dir);
    check_text_files(&mut report, target_dir, target.as_ref());
    if let Some(dir) = draft_dir
        && let Some(draft) = check_draft(&mut report, dir)
        && let Some(target) = target
    {
        check_pair(&mut report, &target, &draft, convention);
    }
    report
}

fn check_target(report: &mut Report, dir: &Path) -> Option<TargetConfig> {
    let config = TargetConfig::from_dir(dir).inspect_err(|e| report.fail("target-config", e)).ok();
    let index = TensorIndex::open(dir).inspect_err(|e| report.fail("target-tensors", e)).ok();
    let config = config?;
    let (layers, hidden, vocab) = (config.num_hidden_layers, config.hidden_size, config.vocab_size);
    let summary = format!(
        "{:?}, {layers} layers, hidden_size = {hidden}, vocab_size = {vocab}, weights {}",
        config.architecture, config.quantisation
    );
    report.push("target-config", Status::Ok, summary);
    if let Some(index) = index {
        let (checkpoint, problems) = TargetCheckpoint::survey(config.clone(), index);
        report.fail_all(|_| "target-tensors", &problems);
        if problems.is_empty() {
            report.push("target-tensors", Status::Ok, describe_account(&checkpoint));
        }
    }
    Some(config)
}

fn describe_account(checkpoint: &TargetCheckpoint) -> String {
    let account = checkpoint.account();
    let mut text = format!("{} tensors, {} bytes loaded", account.loaded.tensors, account.loaded.bytes);
    for (rule, total) in &account.skipped {
        text += &format!("; skipped {rule}: {} tensors, {} bytes", total.tensors, total.bytes);
    }
    text
}

fn check_text_files(report: &mut Report, dir: &Path, config: Option<&TargetConfig>) {
    let has = |file: &str| dir.join(file).is_file();
    match (has("tokenizer.json"), has("tiktoken.model")) {
        (true, _) => report.push("tokenizer", Status::Ok, "tokenizer.json"),
        (false, true) => {
            let message =
                "tiktoken.model is not read yet and tokenizer.json is missing: prompts must be token ids";
            report.push("tokenizer", Status::Warn, message);
        }
        (false, false) => {
            report.push("tokenizer", Status::Warn, "tokenizer.json is missing: prompts must be token ids");
        }
    }
    if has("generation_config.json") {
        report.push("generation-config", Status::Ok, "generation_config.json");
    } else {
        let message = "generation_config.json is missing: stop ids come from config.json alone";
        report.push("generation-config", Status::Warn, message);
    }
    match config.map(|c| c.eos_token_ids.as_slice()) {
        None => {}
        Some([]) => {
            report.push("eos", Status::Warn, "no file names an eos_token_id: only limits end a request")
        }
        Some(ids) => report.push("eos", Status::Ok, format!("eos_token_id = {ids:?}")),
    }
}

/// A draft's config, and the whole draft when its tensors could be opened.
struct Draft {
    config: DraftConfig,
    checkpoint: Option<DraftCheckpoint>,
}

fn check_draft(report: &mut Report, dir: &Path) -> Option<Draft> {
    let config = DraftConfig::from_dir(dir).inspect_err(|e| report.fail("draft-config", e)).ok();
    let index = TensorIndex::open(dir).inspect_err(|e| report.fail("draft-tensors", e)).ok();
    let config = config?;
    let (hidden, heads) = (config.hidden_size, config.num_attention_heads);
    report.push("draft-config", Status::Ok, format!("hidden_size = {hidden}, num_attention_heads = {heads}"));
    let checkpoint = index.and_then(|index| {
        let tensors = index.entries().len();
        let (checkpoint, problems) = DraftCheckpoint::survey(config.clone(), index);
        report.fail_all(draft_check_id, &problems);
        if problems.is_empty() {
            report.push("draft-tensors", Status::Ok, format!("{tensors} tensors"));
        }
        checkpoint
    });
    if let Some(checkpoint) = &checkpoint {
        describe_draft(report, checkpoint);
    }
    Some(Draft { config, checkpoint })
}

fn draft_check_id(problem: &CheckpointError) -> &'static str {
    let CheckpointError::Tensor { tensor, .. } = problem else { return "draft-tensors" };
    match tensor.strip_prefix("model.").unwrap_or(tensor) {
        "fc.weight" => "fc-width",
        "lm_head.weight" => "head-source",
        "embed_tokens.weight" => "embed-source",
        "d2t" | "draft_id_to_target_id" | "t2d" => "d2t",
        _ => "draft-tensors",
    }
}

fn describe_draft(report: &mut Report, draft: &DraftCheckpoint) {
    let config = draft.config();
    let (vocab, own) = (config.vocab_size, config.draft_vocab_size);
    report.push(
        "d2t",
        Status::Ok,
        match draft.target_ids() {
            Some(_) => format!("{own} draft ids map to strictly increasing target ids below {vocab}"),
            None => "draft ids are target ids".to_owned(),
        },
    );
    report.push(
        "embed-source",
        Status::Ok,
        match draft.embed_source() {
            EmbedSource::File => "the draft's own embed_tokens",
            EmbedSource::Target => "borrowed from the target",
        },
    );
    report.push(
        "head-source",
        Status::Ok,
        match draft.head_source() {
            HeadSource::File => "the draft's own lm_head",
            HeadSource::Target => "borrowed from the target",
        },
    );
}

fn check_pair(report: &mut Report, target: &TargetConfig, draft: &Draft, convention: Option<AuxConvention>) {
    let d = &draft.config;
    check_widths(report, target, draft);
    report.verdict(
        "vocab",
        d.vocab_size == target.vocab_size,
        format!("vocab_size = {}, target vocab_size = {}", d.vocab_size, target.vocab_size),
    );
    report.verdict(
        "draft-vocab",
        d.draft_vocab_size <= target.vocab_size,
        format!("draft_vocab_size = {}, target vocab_size = {}", d.draft_vocab_size, target.vocab_size),
    );
    match aux_ids(d, target.num_hidden_layers, convention) {
        Ok(ids) => {
            let message = format!(
                "streams entering layers {:?} of {} ({})",
                ids.canonical, target.num_hidden_layers, ids.rule
            );
            report.push("aux-ids", Status::Ok, message);
        }
        Err(e) => report.verdict("aux-ids", false, e),
    }
    let (trained, served) = (d.max_position_embeddings, target.max_position_embeddings);
    let message =
        format!("draft max_position_embeddings = {trained}, target max_position_embeddings = {served}");
    if trained < served {
        let why = "positions past the draft's are computed, but accepted less often";
        report.push("context", Status::Warn, format!("{message}: {why}"));
    } else {
        report.push("context", Status::Ok, message);
    }
}

fn check_widths(report: &mut Report, target: &TargetConfig, draft: &Draft) {
    let d = &draft.config;
    let ht = target.hidden_size;
    // A file without the field means its own width.
    let origin = if d.target_hidden_size == d.hidden_size { " (its hidden_size)" } else { "" };
    report.verdict(
        "hidden-size",
        d.target_hidden_size == ht,
        format!("target_hidden_size = {}{origin}, target hidden_size = {ht}", d.target_hidden_size),
    );
    if let Some(checkpoint) = &draft.checkpoint
        && let Some(input) = checkpoint.linear("fc").ok().map(|fc| fc.shape[1])
    {
        let wanted = d.num_aux_hidden_states * ht;
        let message = format!(
            "fc takes {input} inputs, {} aux hidden states of the target are {wanted} wide",
            d.num_aux_hidden_states
        );
        report.verdict("fc-width", input == wanted, message);
    }
    let borrows = draft
        .checkpoint
        .as_ref()
        .is_some_and(|c| c.embed_source() == EmbedSource::Target || c.head_source() == HeadSource::Target);
    if borrows {
        let message =
            format!("hidden_size = {}, borrows tensors of target hidden_size = {ht}", d.hidden_size);
        report.verdict("shared-width", d.hidden_size == ht, message);
    }
}
