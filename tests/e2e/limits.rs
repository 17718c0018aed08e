//! P4: every limit of the API holds at its value and refuses one more, by name; frames of 5 MiB pass both ways and
//! those of more than 32 MiB are refused.

use crate::EYRIE;
use eyrie_tests::{Fleet, ask, call, framed, goldens};
use eyrie_wire::v1::draft_client::DraftClient;
use eyrie_wire::v1::generation_client::GenerationClient;
use eyrie_wire::v1::speculation::Mode;
use eyrie_wire::v1::target_client::TargetClient;
use eyrie_wire::v1::{
    Committed, DetokenizeRequest, DraftFrame, DraftItem, FeatureRef, GenerateRequest, Hello, LeaseFrame,
    Limits, Open, Propose, ReadFileRequest, Sampling, Speculation, TargetFrame, TargetItem, TokenIds,
    TokenizeRequest, TreeShape, Verify, draft_item, draft_out, feature_ref, generate_request, target_item,
    target_out,
};
use eyrie_wire::{MAX_MESSAGE, PROTOCOL_VERSION, reason_of};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Code, Status};

const MIB: usize = 1 << 20;
/// Values of a captured row of the bundled target.
const ROW: usize = 3 * 384;

/// A field, what a request holds at its limit, what one more, and what the refusal names besides the field.
type Limit = (&'static str, fn(&mut GenerateRequest), fn(&mut GenerateRequest), &'static [&'static str]);

const LIMITS: &[Limit] = &[
    ("prompt", |_| {}, |r| ids(r, vec![9; 4096]), &["4096"]),
    ("prompt", |r| ids(r, vec![4095]), |r| ids(r, vec![4096]), &["prompt[0]", "4096"]),
    ("prompt", |r| ids(r, vec![9]), |r| ids(r, vec![]), &["1", "0"]),
    ("max_tokens", |r| r.max_tokens = Some(1), |r| r.max_tokens = Some(0), &["1", "0"]),
    ("temperature", |r| r.temperature = Some(100.0), |r| r.temperature = Some(100.1), &["100", "100.1"]),
    ("top_p", |r| r.top_p = Some(1.0), |r| r.top_p = Some(1.1), &["1.1"]),
    ("min_p", |r| r.min_p = Some(1.0), |r| r.min_p = Some(1.1), &["1.1"]),
    ("top_p", |r| r.top_p = Some(f32::MIN_POSITIVE), |r| r.top_p = Some(0.0), &["0"]),
    ("stop", |r| r.stop = vec!["~".repeat(256); 16], |r| r.stop = vec!["~".to_owned(); 17], &["16", "17"]),
    ("stop[0]", |r| r.stop = vec!["~".to_owned()], |r| r.stop = vec!["~".repeat(257)], &["256", "257"]),
    ("stop_ids", |r| r.stop_ids = vec![9; 64], |r| r.stop_ids = vec![9; 65], &["64", "65"]),
    ("stop_ids[0]", |r| r.stop_ids = vec![4095], |r| r.stop_ids = vec![4096], &["4096"]),
    ("request_id", |r| r.request_id = "r".repeat(128), |r| r.request_id = "r".repeat(129), &["128", "129"]),
    ("request_id", |_| {}, |r| r.request_id = "é\n".repeat(2 * MIB), &["128", "6291456"]),
    ("stop[0]", |_| {}, |r| r.stop = vec!["x".repeat(5 * MIB)], &["256", "5242880"]),
    ("mode", |r| speculation(r).mode = Mode::Off as i32, |r| speculation(r).mode = 3, &["3"]),
    (
        "max_draft_tokens",
        |r| speculation(r).max_draft_tokens = Some(7),
        |r| speculation(r).max_draft_tokens = Some(u32::MAX),
        &["4294967295"],
    ),
    ("top-k", |r| tree(r, 2, 3, 8), |r| tree(r, 17, 3, 8), &["16", "17"]),
    ("levels", |r| tree(r, 2, 3, 8), |r| tree(r, 2, 0, 2), &["1", "0"]),
    ("nodes", |r| tree(r, 1, 7, 8), |r| tree(r, 1, 7, 9), &["8", "9"]),
];

fn ids(request: &mut GenerateRequest, ids: Vec<u32>) {
    request.prompt = Some(generate_request::Prompt::Ids(TokenIds { ids }));
}

fn speculation(request: &mut GenerateRequest) -> &mut Speculation {
    request.speculation.insert(Speculation::default())
}

fn tree(request: &mut GenerateRequest, top_k: u32, levels: u32, nodes: u32) {
    speculation(request).tree = Some(TreeShape { top_k, levels, nodes });
}

/// One line of at most 1 KiB that holds `parts`, with that reason.
fn refused(what: &str, status: &Status, reasons: &[&str], parts: &[&str]) {
    let reason = reason_of(status).unwrap_or_default();
    assert!(reasons.contains(&reason.as_str()), "{what}: {status:?}");
    let line = status.message();
    assert!(line.len() <= 1024 && !line.contains('\n'), "{what}: {line}");
    assert!(parts.iter().all(|part| line.contains(part)), "{what}: {line} names {parts:?}");
}

async fn channel(address: &str) -> Channel {
    eyrie_wire::connect(&address.parse().unwrap()).await.unwrap()
}

async fn generation(fleet: &Fleet) -> GenerationClient<Channel> {
    GenerationClient::new(channel(&fleet.ready().grpc).await).max_decoding_message_size(MAX_MESSAGE)
}

fn hello() -> Option<Hello> {
    Some(Hello { protocol_version: PROTOCOL_VERSION, boot_id: 5, ..Default::default() })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_field_passes_at_its_limit_and_one_more_is_refused() {
    let fleet = Fleet::start(EYRIE, &[]);
    let mut client = generation(&fleet).await;
    for (field, at_limit, beyond, parts) in LIMITS {
        let mut request = GenerateRequest { speculation: None, ..ask(&goldens()[0].prompt_ids, 1).0 };
        let mut bad = request.clone();
        at_limit(&mut request);
        let passed = client.generate(request).await;
        assert!(passed.is_ok(), "{field} at its limit: {passed:?}");
        beyond(&mut bad);
        let status = client.generate(bad).await.expect_err(field);
        assert_eq!(status.code(), Code::InvalidArgument, "{field}: {status:?}");
        refused(
            field,
            &status,
            &["INVALID_ARGUMENT", "TOKEN_RANGE", "CONTEXT"],
            &[&[*field], *parts].concat(),
        );
    }
    let detokenize = |ids| DetokenizeRequest { ids, keep_special: false };
    assert!(client.detokenize(detokenize(vec![97; MIB])).await.is_ok());
    let status = client.detokenize(detokenize(vec![97; MIB + 1])).await.unwrap_err();
    refused("detokenize", &status, &["INVALID_ARGUMENT"], &["ids", "1048576", "1048577"]);
    let text = "a".repeat(8 * MIB + 1);
    let status = client.tokenize(TokenizeRequest { text, add_special: false }).await.unwrap_err();
    refused("tokenize", &status, &["INVALID_ARGUMENT"], &["text", "8388608", "8388609"]);

    let mut target = TargetClient::new(channel(&fleet.ready().target).await);
    let status = target.read_file(ReadFileRequest { name: "n".repeat(5 * MIB) }).await.unwrap_err();
    refused("read_file", &status, &["INVALID_ARGUMENT"], &["name", "config.json"]);
    for (protocol_version, holder, reason, part) in [
        (2, "draft".to_owned(), "PROTOCOL_VERSION", "must be 1, given 2"),
        (PROTOCOL_VERSION, "h".repeat(65), "INVALID_ARGUMENT", "65 bytes"),
        (PROTOCOL_VERSION, "h".repeat(5 * MIB), "INVALID_ARGUMENT", "5242880 bytes"),
    ] {
        let frame = LeaseFrame { protocol_version, holder, pid: 1, ..Default::default() };
        let lease = target.attach(tokio_stream::once(frame)).await.unwrap().into_inner().message().await;
        refused("attach", &lease.unwrap_err(), &[reason], &[part]);
    }
}

/// One way a frame of items that are refused, the other the replies of the longest credit, asked for again as often as
/// may be at once.
async fn target_frames_of_5_mib(channel: Channel) {
    let mut target = TargetClient::new(channel).max_decoding_message_size(MAX_MESSAGE);
    let item = |seq, op| TargetItem { seq, op: Some(op) };
    let verify = Verify { round: 1, base_len: 1, root: 1, tokens: vec![4095; 700], ..Default::default() };
    let refused = (1..=4096).map(|n| item(u64::MAX - n, target_item::Op::Verify(verify.clone())));
    let frame = TargetFrame { hello: hello(), items: refused.collect() };
    assert!(eyrie_wire::Message::encoded_len(&frame) > 5 * MIB);
    let (frames, asked) = tokio::sync::mpsc::channel(1);
    frames.send(frame).await.unwrap();
    let mut replies = target.rounds(ReceiverStream::new(asked)).await.unwrap().into_inner();
    let mut next = async || replies.message().await.unwrap().unwrap();
    let mut refused = 0;
    while refused < 4096 {
        let outs = next().await.outs;
        refused += outs.iter().filter(|out| matches!(out.body, Some(target_out::Body::Error(_)))).count();
    }

    let seq = u64::MAX;
    let limits = Limits { max_tokens: 2000, ignore_eos: true, ..Default::default() };
    let sampling = Some(Sampling { top_p: 1.0, ..Default::default() });
    let open = Open { tokens: vec![9], limits: Some(limits), sampling, ..Default::default() };
    let send = async |items| frames.send(TargetFrame { hello: None, items }).await.unwrap();
    send(vec![item(seq, target_item::Op::Open(open))]).await;
    let opened = next().await.outs;
    let Some(target_out::Body::Committed(Committed { tokens, .. })) = &opened[0].body else {
        panic!("{opened:?}")
    };
    let verify = Verify { round: 1, base_len: 1, root: tokens[0], steps: 1024, ..Default::default() };
    let verify = item(seq, target_item::Op::Verify(verify));
    send(vec![verify.clone()]).await;
    let mut credit = Vec::new();
    while credit.len() < 1024 {
        credit.extend(next().await.outs);
    }
    send(vec![verify; 255]).await;
    let again = next().await;
    assert!(eyrie_wire::Message::encoded_len(&again) > 5 * MIB, "{} replies", again.outs.len());
    assert!(again.outs.len() == 255 * 1024 && again.outs.chunks(1024).all(|replies| replies == credit));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frames_of_5_mib_pass_at_every_service() {
    let fleet = Fleet::start(EYRIE, &[]);
    let text = "\u{e9}\u{20ac} ".repeat(MIB * 9 / 10);
    let request = TokenizeRequest { text, add_special: false };
    let ids = generation(&fleet).await.tokenize(request).await.unwrap().into_inner().ids;
    assert!(ids.iter().map(|&id| if id < 128 { 1 } else { 2 }).sum::<usize>() > 5 * MIB, "{}", ids.len());

    target_frames_of_5_mib(channel(&fleet.ready().target).await).await;

    // 1,200 rows of features inline, in a frame of as many items as there may be. Their answers are short; what the gateway
    // makes of long ones from a draft is shown in `faults`.
    let base_len = 1200;
    let rows = vec![0; ROW * 4 * base_len as usize];
    let features =
        vec![FeatureRef { first: 0, rows: base_len, at: Some(feature_ref::At::Inline(rows.into())) }];
    let tokens = vec![9; base_len as usize + 1];
    let propose = Propose { round: 1, base_len, tokens, features, k: 1, ..Default::default() };
    let seqs = u64::MAX - 4095..u64::MAX;
    let mut items: Vec<DraftItem> = seqs.map(|seq| DraftItem { seq, op: None }).collect();
    items.push(DraftItem { seq: 1, op: Some(draft_item::Op::Propose(propose)) });
    let draft = DraftClient::new(channel(&fleet.ready().draft.unwrap()).await);
    let reply =
        draft.max_decoding_message_size(MAX_MESSAGE).round(DraftFrame { hello: hello(), items }).await;
    let reply = reply.unwrap().into_inner();
    assert_eq!(reply.outs.len(), 4096);
    let is_proposal = |body: &_| matches!(body, Some(draft_out::Body::Proposal(p)) if p.tokens.len() == 1);
    assert!(reply.outs.iter().any(|out| out.seq == 1 && is_proposal(&out.body)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_over_32_mib_are_refused_at_every_method() {
    let fleet = Fleet::start(EYRIE, &[]);
    let ready = fleet.ready();
    // The head of a message tells how long it is; what follows need not come.
    let mut head = framed(b"");
    head[1..5].copy_from_slice(&(MAX_MESSAGE as u32 + 1).to_be_bytes());
    for (address, service, methods) in [
        (
            ready.target,
            "Target",
            &[
                "Describe",
                "Attach",
                "Rounds",
                "Round",
                "Load",
                "Drain",
                "ReadFile",
                "ReadShared",
                "ReadFeatures",
            ][..],
        ),
        (ready.draft.unwrap(), "Draft", &["Describe", "Rounds", "Round", "Drain"]),
        (ready.grpc, "Generation", &["Generate", "GenerateStream", "Tokenize", "Detokenize", "GetModel"]),
    ] {
        let channel = channel(&address).await;
        for method in methods {
            let path = format!("/eyrie.v1.{service}/{method}");
            let answer = call(&channel, &path, &[], head.clone()).await;
            assert_eq!(answer.status.code(), Code::InvalidArgument, "{path}: {:?}", answer.status);
            refused(&path, &answer.status, &["INVALID_ARGUMENT"], &["33554433", "33554432"]);
        }
    }
}
