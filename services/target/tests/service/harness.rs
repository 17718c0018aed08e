//! A server in a folder of its own, and a gateway's half of a Rounds stream.

use std::collections::{BTreeMap, VecDeque};
use std::path::{Path, PathBuf};
use std::time::Duration;

use eyrie_service::Drain;
use eyrie_target::{Ready, TargetError, TargetOptions, run};
use eyrie_wire::v1::target_client::TargetClient;
use eyrie_wire::v1::{
    Close, Committed, FeatureRef, Features, FetchFeatures, Hello, ItemError, Limits, LoadReport, LoadRequest,
    Open, Revoke, Sampling, TargetFrame, TargetItem, TargetOut, TargetReply, Verify, target_item::Op,
    target_out::Body,
};
use eyrie_wire::{Address, PROTOCOL_VERSION, connect};
use serde_json::Value;
use tempfile::TempDir;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;
use tonic::{Status, Streaming};

/// Longer than anything takes; a test that waits this long has failed.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

pub(crate) fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The demo model with a small cache and one thread, listening in `dir`.
pub(crate) fn options(dir: &TempDir) -> TargetOptions {
    let listen = Address::Unix(dir.path().join("t.sock"));
    TargetOptions {
        threads: Some(2),
        kv_tokens: 4096,
        ..TargetOptions::new(repository().join("deploy/demo/mini"), listen)
    }
}

pub(crate) struct Server {
    pub(crate) drain: Drain,
    pub(crate) ready: Ready,
    pub(crate) client: TargetClient<Channel>,
    pub(crate) dir: TempDir,
    task: JoinHandle<Result<(), TargetError>>,
}

impl Server {
    pub(crate) async fn start() -> Self {
        Self::start_with(|_| {}).await
    }

    pub(crate) async fn start_with(change: impl FnOnce(&mut TargetOptions)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut options = options(&dir);
        change(&mut options);
        let drain = Drain::new();
        let (sender, ready) = oneshot::channel();
        // Spawned beside the drain's own tasks, which it waits for.
        let task = Drain::new().spawn(run(options, drain.clone(), move |ready| {
            let _ = sender.send(ready.clone());
        }));
        let ready = tokio::time::timeout(LIMIT, ready).await.unwrap().unwrap();
        let client = TargetClient::new(connect(&ready.address).await.unwrap());
        Self { drain, ready, client, dir, task }
    }

    /// Waits for the server to end by itself.
    pub(crate) async fn ended(self) -> Result<(), TargetError> {
        tokio::time::timeout(LIMIT, self.task).await.unwrap().unwrap()
    }

    /// As [`ended`](Self::ended), keeping the folder to look into.
    pub(crate) async fn ended_with_dir(self) -> TempDir {
        tokio::time::timeout(LIMIT, self.task).await.unwrap().unwrap().unwrap();
        self.dir
    }

    pub(crate) async fn stop(self) {
        self.drain.stop();
        self.ended().await.unwrap();
    }

    pub(crate) async fn load(&self) -> LoadReport {
        self.client.clone().load(LoadRequest {}).await.unwrap().into_inner()
    }

    /// Polls the load until `wanted` holds of it.
    pub(crate) async fn load_until(&self, wanted: impl Fn(&LoadReport) -> bool) -> LoadReport {
        let poll = async {
            loop {
                let load = self.load().await;
                if wanted(&load) {
                    return load;
                }
            }
        };
        tokio::time::timeout(LIMIT, poll).await.unwrap()
    }

    pub(crate) fn hello(&self, boot_id: u64) -> Hello {
        Hello { protocol_version: PROTOCOL_VERSION, boot_id, ..Default::default() }
    }

    /// One unary Round; the bodies of its answer with their sequences, in order of the sequences.
    pub(crate) async fn round(
        &self,
        boot_id: u64,
        items: Vec<(u64, Op)>,
    ) -> Result<Vec<(u64, Body)>, Status> {
        let frame = TargetFrame { hello: Some(self.hello(boot_id)), items: target_items(items) };
        let mut client = self.client.clone();
        let reply = tokio::time::timeout(LIMIT, client.round(frame)).await.unwrap()?.into_inner();
        let mut outs: Vec<_> = reply.outs.into_iter().map(|out| (out.seq, out.body.unwrap())).collect();
        outs.sort_by_key(|&(seq, _)| seq);
        Ok(outs)
    }

    pub(crate) async fn rounds(&self, boot_id: u64) -> Rounds {
        Rounds::connect(self, self.hello(boot_id)).await.unwrap()
    }
}

/// A gateway's half of a Rounds stream.
pub(crate) struct Rounds {
    frames: mpsc::Sender<TargetFrame>,
    replies: Streaming<TargetReply>,
    outs: VecDeque<TargetOut>,
    pub(crate) hello: Hello,
}

impl Rounds {
    pub(crate) async fn connect(server: &Server, hello: Hello) -> Result<Self, Status> {
        let (frames, receiver) = mpsc::channel(64);
        let _ = frames.send(TargetFrame { hello: Some(hello), items: vec![] }).await;
        let mut replies = server.client.clone().rounds(ReceiverStream::new(receiver)).await?.into_inner();
        let first = replies.message().await?.unwrap();
        Ok(Self { frames, replies, outs: first.outs.into(), hello: first.hello.unwrap() })
    }

    pub(crate) async fn send_all(&self, items: Vec<(u64, Op)>) {
        self.frames.send(TargetFrame { hello: None, items: target_items(items) }).await.unwrap();
    }

    pub(crate) async fn send(&self, seq: u64, op: Op) {
        self.send_all(vec![(seq, op)]).await;
    }

    pub(crate) async fn send_frame(&self, frame: TargetFrame) {
        self.frames.send(frame).await.unwrap();
    }

    /// Ends the sending half; what comes of it is still to be read.
    pub(crate) fn half_close(&mut self) {
        self.frames = mpsc::channel(1).0;
    }

    /// The next reply of any sequence.
    pub(crate) async fn next(&mut self) -> Result<Option<(u64, Body)>, Status> {
        loop {
            if let Some(out) = self.outs.pop_front() {
                return Ok(Some((out.seq, out.body.unwrap())));
            }
            match tokio::time::timeout(LIMIT, self.replies.message()).await.unwrap()? {
                Some(reply) => self.outs.extend(reply.outs),
                None => return Ok(None),
            }
        }
    }

    pub(crate) async fn body(&mut self) -> Body {
        self.next().await.unwrap().unwrap().1
    }

    pub(crate) async fn committed(&mut self) -> Committed {
        match self.body().await {
            Body::Committed(committed) => committed,
            other => panic!("wanted a commit, got {other:?}"),
        }
    }

    pub(crate) async fn features(&mut self) -> Features {
        match self.body().await {
            Body::Features(features) => features,
            other => panic!("wanted features, got {other:?}"),
        }
    }

    pub(crate) async fn error(&mut self) -> ItemError {
        match self.body().await {
            Body::Error(error) => error,
            other => panic!("wanted an error, got {other:?}"),
        }
    }

    pub(crate) async fn closed(&mut self) {
        let body = self.body().await;
        assert!(matches!(body, Body::Closed(_)), "wanted closed, got {body:?}");
    }

    /// The status the stream ends with.
    pub(crate) async fn status(&mut self) -> Status {
        loop {
            if let Err(status) = self.next().await {
                return status;
            }
        }
    }

    /// Opens, then runs plain rounds until the sequence finishes; returns all tokens.
    pub(crate) async fn plain(&mut self, seq: u64, open: Open) -> Vec<u32> {
        self.drafted(seq, open, |_, _| vec![]).await
    }

    /// As [`plain`](Self::plain), verifying what `draft(tokens so far, root position)` proposes.
    pub(crate) async fn drafted(
        &mut self,
        seq: u64,
        open: Open,
        draft: impl Fn(&[u32], usize) -> Vec<u32>,
    ) -> Vec<u32> {
        self.send(seq, Op::Open(open)).await;
        let mut state = self.committed().await;
        let mut tokens = state.tokens.clone();
        while state.finish == 0 {
            let drafts = draft(&tokens, tokens.len());
            self.send(seq, next_verify(&state, drafts)).await;
            state = self.committed().await;
            tokens.extend(&state.tokens);
        }
        self.send(seq, Op::Close(Close {})).await;
        self.closed().await;
        tokens
    }
}

/// Opens half of `opens` on one stream as sequences 0, 1, …, and the others when the first one answers; says to each reply
/// what `next(seq, reply, tokens so far)` says, and closes the finished ones; returns each one's tokens. Every round comes
/// once, and so does every feature row behind those of a prefix cache.
pub(crate) async fn together(
    rounds: &mut Rounds,
    opens: Vec<Open>,
    next: impl Fn(u64, &Committed, &[u32]) -> Option<Op>,
) -> Vec<Vec<u32>> {
    #[derive(Default)]
    struct Heard {
        tokens: Vec<u32>,
        rounds: u32,
        /// First row that was published, and the one after the last.
        rows: Option<(u32, u32)>,
        closing: bool,
    }
    impl Heard {
        fn take_rows(&mut self, refs: &[FeatureRef]) {
            for at in refs {
                let (_, end) = self.rows.get_or_insert((at.first, at.first));
                assert_eq!(at.first, *end, "rows that do not follow the last ones");
                *end += at.rows;
            }
        }
    }
    let mut open = opens.len();
    let mut heard: BTreeMap<u64, Heard> = (0..open as u64).map(|seq| (seq, Heard::default())).collect();
    let features: Vec<bool> = opens.iter().map(|open| open.features).collect();
    let items = opens.into_iter().enumerate().map(|(seq, open)| (seq as u64, Op::Open(open)));
    let mut items: Vec<_> = items.collect();
    let mut late = items.split_off(open.div_ceil(2));
    rounds.send_all(items).await;
    while open > 0 {
        let (seq, body) = rounds.next().await.unwrap().unwrap();
        rounds.send_all(std::mem::take(&mut late)).await;
        let heard = heard.get_mut(&seq).unwrap();
        let state = match body {
            Body::Committed(state) => state,
            Body::Features(features) => {
                heard.take_rows(&features.refs);
                continue;
            }
            Body::Closed(_) => {
                open -= 1;
                continue;
            }
            Body::Error(error) => panic!("sequence {seq}: {error:?}"),
        };
        assert_eq!(state.round, heard.rounds, "sequence {seq}");
        heard.rounds += 1;
        heard.tokens.extend(&state.tokens);
        heard.take_rows(&state.features);
        if let Some((first, end)) = heard.rows {
            assert_eq!(end, state.kv_len, "sequence {seq} lacks rows");
            assert!(state.round > 0 || first == state.cached, "sequence {seq} lacks rows from {first} on");
        }
        assert_eq!(heard.rows.is_some(), features[seq as usize]);
        let op = if state.finish == 0 { next(seq, &state, &heard.tokens) } else { Some(close()) };
        if let Some(op) = op.filter(|_| !heard.closing) {
            heard.closing = matches!(op, Op::Close(_));
            rounds.send(seq, op).await;
        }
    }
    heard.into_values().map(|heard| heard.tokens).collect()
}

/// Drafts that are right for `golden` except every `wrong`-th of them.
pub(crate) fn drafts(golden: &[u32], at: usize, k: usize, wrong: usize) -> Vec<u32> {
    let right = golden.iter().chain(std::iter::repeat(&7)).copied().skip(at).take(k);
    right
        .enumerate()
        .map(|(i, id)| if (at + i).is_multiple_of(wrong) { (id + 1) % 4096 } else { id })
        .collect()
}

/// A tree of three levels below `last`: nodes 2, 4 and 6 are those of `golden` from `at` on, and their siblings 1, 3 and
/// 5 are not.
pub(crate) fn tree_after(last: &Committed, golden: &[u32], at: usize) -> Op {
    let right = |i: usize| golden[(at + i).min(golden.len() - 1)];
    let tokens = (0..3).flat_map(|i| [(right(i) + 1) % 4096, right(i)]).collect();
    Op::Verify(Verify { parents: vec![0, 0, 2, 2, 4, 4], ..verify_after(last, tokens) })
}

fn target_items(items: Vec<(u64, Op)>) -> Vec<TargetItem> {
    items.into_iter().map(|(seq, op)| TargetItem { seq, op: Some(op) }).collect()
}

/// The Verify that follows `last`.
pub(crate) fn next_verify(last: &Committed, tokens: Vec<u32>) -> Op {
    Op::Verify(verify_after(last, tokens))
}

pub(crate) fn verify_after(last: &Committed, tokens: Vec<u32>) -> Verify {
    Verify {
        round: last.round + 1,
        base_len: last.kv_len,
        root: *last.tokens.last().unwrap(),
        tokens,
        ..Default::default()
    }
}

pub(crate) fn close() -> Op {
    Op::Close(Close {})
}

pub(crate) fn revoke() -> Op {
    Op::Revoke(Revoke {})
}

pub(crate) fn fetch(from: u32) -> Op {
    Op::FetchFeatures(FetchFeatures { from })
}

/// A greedy request that ignores the end of the text.
pub(crate) fn greedy(prompt: &[u32], max_tokens: u32) -> Open {
    Open {
        tokens: prompt.to_vec(),
        generated: 0,
        sampling: Some(Sampling { top_p: 1.0, ..Default::default() }),
        limits: Some(Limits { max_tokens, ignore_eos: true, ..Default::default() }),
        features: false,
        priority: 0,
    }
}

/// The same, drawn at temperature 0.9 with top-p from `seed`.
pub(crate) fn seeded(prompt: &[u32], max_tokens: u32, seed: u64) -> Open {
    let sampling = Sampling { temperature: 0.9, top_p: 0.95, seed, ..Default::default() };
    Open { sampling: Some(sampling), ..greedy(prompt, max_tokens) }
}

/// A prompt and its greedy continuation, computed by an independent implementation.
pub(crate) struct Golden {
    pub(crate) prompt: Vec<u32>,
    pub(crate) tokens: Vec<u32>,
}

pub(crate) fn goldens(count: usize) -> Vec<Golden> {
    let text = std::fs::read_to_string(repository().join("tests/goldens/goldens_a.jsonl")).unwrap();
    let ids = |line: &Value, key: &str| {
        let ids = line[key].as_array().unwrap().iter();
        ids.map(|id| u32::try_from(id.as_u64().unwrap()).unwrap()).collect()
    };
    let golden = |line: &str| {
        let line: Value = serde_json::from_str(line).unwrap();
        Golden { prompt: ids(&line, "prompt_ids"), tokens: ids(&line, "greedy_ids") }
    };
    text.lines().take(count).map(golden).collect()
}
