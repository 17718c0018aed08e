//! Admission of one request: every limit of the client API, each refused in one line that names the
//! field, the limit and the value.

use std::fmt::Display;

use eyrie_speculation::{SamplingParams, TreeShape};
use eyrie_wire::v1::generate_request::Prompt;
use eyrie_wire::v1::speculation::Mode;
use eyrie_wire::v1::{GenerateRequest, Limits, ModelCard, Sampling, Speculation};
use eyrie_wire::{MAX_VERIFY_ROWS, Reason, refuse};
use tonic::Status;

use crate::catalog::Served;
use crate::policy::Plan;

const DEFAULT_MAX_TOKENS: u32 = 256;
const MAX_TEMPERATURE: f32 = 100.0;
const MAX_STOPS: usize = 16;
const MAX_STOP_BYTES: usize = 256;
const MAX_STOP_IDS: usize = 64;
const MAX_REQUEST_ID: usize = 128;

/// A request within every limit, with nothing left to default.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Admitted {
    pub(crate) request_id: String,
    pub(crate) prompt: Vec<u32>,
    pub(crate) sampling: Sampling,
    pub(crate) limits: Limits,
    pub(crate) stop: Vec<String>,
    pub(crate) plan: Plan,
    pub(crate) trace: bool,
    /// Lower runs earlier.
    pub(crate) priority: i32,
}

/// What admission fills in where the request is silent.
#[derive(Debug)]
pub(crate) struct Defaults {
    pub(crate) request_id: String,
    pub(crate) seed: u64,
    pub(crate) max_prompt_bytes: usize,
    /// Longest proposal of the draft, where one is connected.
    pub(crate) draft_limit: Option<u32>,
}

fn invalid(line: String) -> Status {
    refuse(Reason::InvalidArgument, line)
}

/// Checks `request` against the contract and the served model, and encodes a text prompt.
///
/// # Errors
/// INVALID_ARGUMENT in one line; reason TOKEN_RANGE or CONTEXT where a program may care.
pub(crate) fn admit(
    request: GenerateRequest,
    served: &Served,
    defaults: Defaults,
) -> Result<Admitted, Status> {
    let card = &served.card;
    let sampling = sampling(&request, card, defaults.seed)?;
    check_stops(&request, card)?;
    let plan = plan(request.speculation.as_ref(), card, defaults.draft_limit)?;
    if request.request_id.len() > MAX_REQUEST_ID {
        let given = request.request_id.len();
        return Err(invalid(format!("request_id must have at most {MAX_REQUEST_ID} bytes, given {given}")));
    }
    if !request.stop.is_empty() {
        served.tokenizer()?;
    }
    let request_id = match request.request_id.is_empty() {
        true => defaults.request_id,
        false => request.request_id,
    };
    let prompt = prompt(request.prompt, served, defaults.max_prompt_bytes)?;
    let limits = Limits {
        max_tokens: max_tokens(request.max_tokens, prompt.len(), card)?,
        stop_ids: request.stop_ids,
        ignore_eos: request.ignore_eos,
    };
    let trace = request.speculation.is_some_and(|s| s.trace);
    let priority = request.priority;
    Ok(Admitted { request_id, prompt, sampling, limits, stop: request.stop, plan, trace, priority })
}

fn sampling(request: &GenerateRequest, card: &ModelCard, seed: u64) -> Result<Sampling, Status> {
    let model = card.defaults.unwrap_or_default();
    let params = SamplingParams {
        temperature: request.temperature.or(model.temperature).unwrap_or(0.0),
        top_k: request.top_k.or(model.top_k).unwrap_or(0),
        top_p: request.top_p.or(model.top_p).unwrap_or(1.0),
        min_p: request.min_p.unwrap_or(0.0),
        seed: request.seed.unwrap_or(seed),
        choice: 0,
    };
    // Positive form: a NaN is in no range.
    if !(0.0..=MAX_TEMPERATURE).contains(&params.temperature) {
        let given = params.temperature;
        return Err(invalid(format!("temperature must be between 0 and {MAX_TEMPERATURE}, given {given}")));
    }
    params.validate().map_err(|e| invalid(e.to_string()))?;
    let SamplingParams { temperature, top_k, top_p, min_p, seed, choice } = params;
    Ok(Sampling { temperature, top_k, top_p, min_p, seed, choice })
}

fn check_stops(request: &GenerateRequest, card: &ModelCard) -> Result<(), Status> {
    if request.stop.len() > MAX_STOPS {
        let given = request.stop.len();
        return Err(invalid(format!("stop must have at most {MAX_STOPS} strings, given {given}")));
    }
    for (i, stop) in request.stop.iter().enumerate() {
        if !(1..=MAX_STOP_BYTES).contains(&stop.len()) {
            let given = stop.len();
            return Err(invalid(format!("stop[{i}] must have 1 to {MAX_STOP_BYTES} bytes, given {given}")));
        }
    }
    if request.stop_ids.len() > MAX_STOP_IDS {
        let given = request.stop_ids.len();
        return Err(invalid(format!("stop_ids must have at most {MAX_STOP_IDS} ids, given {given}")));
    }
    check_ids("stop_ids", &request.stop_ids, card.vocab_size)
}

/// Every id below the vocabulary size.
///
/// # Errors
/// TOKEN_RANGE naming the first id that is not.
pub(crate) fn check_ids(field: &str, ids: &[u32], vocab: u32) -> Result<(), Status> {
    match ids.iter().enumerate().find(|&(_, &id)| id >= vocab) {
        Some((i, id)) => {
            let line = format!("{field}[{i}] must be below the vocabulary size {vocab}, given {id}");
            Err(refuse(Reason::TokenRange, line))
        }
        None => Ok(()),
    }
}

fn plan(speculation: Option<&Speculation>, card: &ModelCard, draft: Option<u32>) -> Result<Plan, Status> {
    let Some(wanted) = speculation else { return Ok(Plan::Auto) };
    let off = match Mode::try_from(wanted.mode) {
        Ok(Mode::Off) => true,
        Ok(Mode::Auto | Mode::Unspecified) => false,
        Err(_) => {
            let line = format!("speculation.mode must be AUTO (1) or OFF (2), given {}", wanted.mode);
            return Err(invalid(line));
        }
    };
    let rows = card.max_verify_rows.clamp(1, MAX_VERIFY_ROWS as u32);
    // Both the target's verify width and the draft bound what is drafted; the root is not drafted.
    let limit = draft.unwrap_or(u32::MAX).min(rows - 1);
    match (wanted.max_draft_tokens, wanted.tree) {
        (Some(_), Some(_)) => {
            Err(invalid("speculation.tree excludes speculation.max_draft_tokens, given both".to_owned()))
        }
        (Some(k), None) if off && k > 0 => {
            Err(invalid(format!("speculation.max_draft_tokens must be 0 with mode OFF, given {k}")))
        }
        (None, Some(_)) if off => Err(invalid("speculation.tree must be unset with mode OFF".to_owned())),
        (Some(0), None) => Ok(Plan::Off),
        (Some(k), None) => {
            if k > limit {
                let line = format!("speculation.max_draft_tokens must be at most {limit}, given {k}");
                return Err(invalid(line));
            }
            Ok(Plan::Chain(k))
        }
        (None, Some(tree)) => {
            if tree.nodes > limit + 1 {
                let line =
                    format!("speculation.tree.nodes must be at most {}, given {}", limit + 1, tree.nodes);
                return Err(invalid(line));
            }
            TreeShape::try_new(tree.top_k as usize, tree.levels as usize, tree.nodes as usize)
                .map(Plan::Tree)
                .map_err(|e| invalid(format!("speculation.{e}")))
        }
        (None, None) if off => Ok(Plan::Off),
        (None, None) => Ok(Plan::Auto),
    }
}

fn prompt(prompt: Option<Prompt>, served: &Served, max_bytes: usize) -> Result<Vec<u32>, Status> {
    let ids = match prompt {
        None => return Err(invalid("prompt must be text or ids, given neither".to_owned())),
        Some(Prompt::Ids(tokens)) => tokens.ids,
        Some(Prompt::Text(text)) => {
            if text.len() > max_bytes {
                let line = format!("text must have at most {max_bytes} bytes, given {}", text.len());
                return Err(invalid(line));
            }
            let tokenizer = served.tokenizer()?;
            let (least, context) = (tokenizer.least_tokens(text.len()), served.card.context_length);
            // Encoding takes long, and in vain.
            if least >= context as usize {
                let given = format!("{least} or more in {} bytes", text.len());
                return Err(no_room(context, given));
            }
            tokenizer.encode(&text, true).map_err(|e| invalid(format!("text: {e}")))?
        }
    };
    if ids.is_empty() {
        return Err(invalid("prompt must have at least 1 token, given 0".to_owned()));
    }
    check_ids("prompt", &ids, served.card.vocab_size)?;
    Ok(ids)
}

fn no_room(context: u32, given: impl Display) -> Status {
    refuse(
        Reason::Context,
        format!("prompt and one more token must fit the context of {context}, given {given}"),
    )
}

fn max_tokens(wanted: Option<u32>, prompt: usize, card: &ModelCard) -> Result<u32, Status> {
    let context = card.context_length;
    let room = u32::try_from(prompt).ok().and_then(|p| context.checked_sub(p)).unwrap_or(0);
    if room == 0 {
        return Err(no_room(context, prompt));
    }
    match wanted {
        Some(0) => Err(invalid("max_tokens must be at least 1, given 0".to_owned())),
        Some(n) => Ok(n.min(room)),
        None => Ok(DEFAULT_MAX_TOKENS.min(room)),
    }
}

#[cfg(test)]
mod tests {
    use eyrie_wire::reason_of;
    use eyrie_wire::v1::{GenerationDefaults, TokenIds, TreeShape as WireTree};

    use super::*;

    fn served() -> Served {
        let defaults = GenerationDefaults { temperature: Some(0.6), top_p: Some(0.95), top_k: Some(20) };
        Served::without_text(ModelCard {
            vocab_size: 100,
            context_length: 10,
            max_verify_rows: 8,
            defaults: Some(defaults),
            ..Default::default()
        })
    }

    fn request() -> GenerateRequest {
        let prompt = Some(Prompt::Ids(TokenIds { ids: vec![1, 2, 3] }));
        GenerateRequest { prompt, ..Default::default() }
    }

    fn defaults() -> Defaults {
        Defaults { request_id: "r-1".into(), seed: 7, max_prompt_bytes: 64, draft_limit: Some(5) }
    }

    fn speculate(speculation: Speculation) -> GenerateRequest {
        GenerateRequest { speculation: Some(speculation), ..request() }
    }

    #[test]
    fn silence_is_filled_in() {
        let admitted = admit(request(), &served(), defaults()).unwrap();
        assert_eq!(admitted.request_id, "r-1");
        assert_eq!(admitted.limits.max_tokens, 7, "256 cut to what the context leaves");
        assert_eq!(admitted.plan, Plan::Auto);
        let s = admitted.sampling;
        assert_eq!((s.temperature, s.top_k, s.top_p, s.min_p, s.seed), (0.6, 20, 0.95, 0.0, 7));
        let bare = Served::without_text(ModelCard { defaults: None, ..served().card });
        let s = admit(request(), &bare, defaults()).unwrap().sampling;
        assert_eq!((s.temperature, s.top_k, s.top_p, s.min_p), (0.0, 0, 1.0, 0.0));
    }

    #[test]
    fn what_the_request_says_goes_before_the_model_s_defaults() {
        let said = GenerateRequest { temperature: Some(0.0), top_k: Some(0), top_p: Some(1.0), ..request() };
        let s = admit(said, &served(), defaults()).unwrap().sampling;
        assert_eq!((s.temperature, s.top_k, s.top_p), (0.0, 0, 1.0));
    }

    #[test]
    fn every_refusal_names_field_limit_and_value() {
        let ids = |ids: Vec<u32>| Some(Prompt::Ids(TokenIds { ids }));
        let tree = |top_k, levels, nodes| Some(WireTree { top_k, levels, nodes });
        let base = Speculation::default;
        let off = Mode::Off as i32;
        let cases = [
            (GenerateRequest { prompt: None, ..request() }, "prompt must be text or ids, given neither"),
            (
                GenerateRequest { prompt: ids(vec![]), ..request() },
                "prompt must have at least 1 token, given 0",
            ),
            (
                GenerateRequest { prompt: Some(Prompt::Text("a".repeat(65))), ..request() },
                "text must have at most 64 bytes, given 65",
            ),
            (GenerateRequest { max_tokens: Some(0), ..request() }, "max_tokens must be at least 1, given 0"),
            (
                GenerateRequest { temperature: Some(f32::NAN), ..request() },
                "temperature must be between 0 and 100, given NaN",
            ),
            (
                GenerateRequest { temperature: Some(f32::INFINITY), ..request() },
                "temperature must be between 0 and 100, given inf",
            ),
            (
                GenerateRequest { temperature: Some(-0.1), ..request() },
                "temperature must be between 0 and 100, given -0.1",
            ),
            (
                GenerateRequest { top_p: Some(0.0), ..request() },
                "top_p must be above 0 and at most 1, given 0",
            ),
            (GenerateRequest { min_p: Some(1.5), ..request() }, "min_p must be between 0 and 1, given 1.5"),
            (
                GenerateRequest { stop: vec!["x".into(); 17], ..request() },
                "stop must have at most 16 strings",
            ),
            (GenerateRequest { stop: vec![String::new()], ..request() }, "stop[0] must have 1 to 256 bytes"),
            (GenerateRequest { stop: vec!["y".repeat(257)], ..request() }, "given 257"),
            (
                GenerateRequest { stop_ids: vec![1; 65], ..request() },
                "stop_ids must have at most 64 ids, given 65",
            ),
            (GenerateRequest { request_id: "r".repeat(129), ..request() }, "at most 128 bytes, given 129"),
            (
                speculate(Speculation { mode: 9, ..base() }),
                "speculation.mode must be AUTO (1) or OFF (2), given 9",
            ),
            (
                speculate(Speculation { max_draft_tokens: Some(6), ..base() }),
                "speculation.max_draft_tokens must be at most 5, given 6",
            ),
            (
                speculate(Speculation { max_draft_tokens: Some(2), tree: tree(2, 2, 4), ..base() }),
                "speculation.tree excludes speculation.max_draft_tokens",
            ),
            (
                speculate(Speculation { tree: tree(4, 5, 16), ..base() }),
                "speculation.tree.nodes must be at most 6, given 16",
            ),
            (
                speculate(Speculation { tree: tree(0, 5, 6), ..base() }),
                "speculation.tree top-k must be between 1",
            ),
            (
                speculate(Speculation { mode: off, max_draft_tokens: Some(1), ..base() }),
                "speculation.max_draft_tokens must be 0 with mode OFF, given 1",
            ),
        ];
        for (request, line) in cases {
            let status = admit(request, &served(), defaults()).unwrap_err();
            assert_eq!(status.code(), tonic::Code::InvalidArgument, "{line}");
            assert!(status.message().contains(line), "{} lacks {line:?}", status.message());
        }
    }

    #[test]
    fn token_range_and_context_have_their_own_reason() {
        let ids =
            |ids: Vec<u32>| GenerateRequest { prompt: Some(Prompt::Ids(TokenIds { ids })), ..request() };
        for (request, reason, line) in [
            (ids(vec![5, 100]), "TOKEN_RANGE", "prompt[1] must be below the vocabulary size 100, given 100"),
            (
                GenerateRequest { stop_ids: vec![200], ..request() },
                "TOKEN_RANGE",
                "stop_ids[0] must be below the vocabulary size 100, given 200",
            ),
            (ids(vec![1; 10]), "CONTEXT", "must fit the context of 10, given 10"),
        ] {
            let status = admit(request, &served(), defaults()).unwrap_err();
            assert_eq!(status.code(), tonic::Code::InvalidArgument);
            assert_eq!(reason_of(&status).as_deref(), Some(reason));
            assert!(status.message().contains(line), "{}", status.message());
        }
        assert_eq!(admit(ids(vec![1; 9]), &served(), defaults()).unwrap().limits.max_tokens, 1);
    }

    #[test]
    fn plans_follow_the_request() {
        let plan = |s: Speculation| admit(speculate(s), &served(), defaults()).unwrap().plan;
        let base = Speculation::default;
        assert_eq!(plan(Speculation { mode: Mode::Off as i32, ..base() }), Plan::Off);
        assert_eq!(plan(Speculation { max_draft_tokens: Some(0), ..base() }), Plan::Off);
        assert_eq!(plan(Speculation { max_draft_tokens: Some(5), ..base() }), Plan::Chain(5));
        let tree = WireTree { top_k: 2, levels: 2, nodes: 6 };
        let shape = TreeShape::try_new(2, 2, 6).unwrap();
        assert_eq!(plan(Speculation { tree: Some(tree), ..base() }), Plan::Tree(shape));
        let status = admit(GenerateRequest { stop: vec!["\n".into()], ..request() }, &served(), defaults())
            .unwrap_err();
        assert_eq!(status.code(), tonic::Code::Unimplemented, "stop strings need a tokenizer");
    }
}
