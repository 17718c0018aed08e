//! P3: once the mailbox knows that a caller has left, no step begins that computes rows of its sequence: in the queue, at
//! each chunk of a prompt, at each step of a credit, at chains and trees.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;

use candle_core::{Device, Tensor};
use eyrie_checkpoint::{TargetCheckpoint, TargetConfig};
use eyrie_model::{
    CaptureSet, ForwardOut, Keep, LatentCache, LogitRows, ModelError, SeqRows, SeqTable, SharedWeights,
    TargetModel,
};
use eyrie_region::Epoch;
use eyrie_service::Drain;
use eyrie_wire::Address;
use eyrie_wire::v1::{self, TargetItem, target_item::Op, target_out::Body};
use parking_lot::Mutex;
use tokio::sync::mpsc;

use super::{
    Command, Ending, Engine, Gauges, Life, LoadRequest, Pass, Receiver, Replies, Sender, StreamId, load,
    mailbox,
};
use crate::TargetOptions;
use crate::plan::Plan;

const OTHER: u32 = 7;
const LEAVING: u32 = 9;

/// The caller that leaves reads its replies here.
type Reader = Arc<Mutex<Option<mpsc::Receiver<v1::TargetReply>>>>;

/// What is done in the middle of a step: the number of that step, and the deed.
type Deed = (usize, Box<dyn FnOnce() + Send>);

/// Steps so far.
#[derive(Default)]
struct Watch {
    /// Of each, the rows of the sequence that leaves.
    rows: Vec<usize>,
    deed: Option<Deed>,
}

/// Sequences say the token of their prompts for ever, so a row tells whose it is.
struct Echo {
    model: Box<dyn TargetModel>,
    watch: Arc<Mutex<Watch>>,
}

impl std::fmt::Debug for Echo {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Echo").finish_non_exhaustive()
    }
}

impl Echo {
    fn logits(&self, rows: &[u32]) -> Result<Tensor, ModelError> {
        let vocab = self.config().vocab_size;
        let mut logits = vec![0.0f32; rows.len() * vocab];
        rows.iter().enumerate().for_each(|(row, &token)| logits[row * vocab + token as usize] = 9.0);
        Ok(Tensor::from_vec(logits, (rows.len(), vocab), &Device::Cpu)?)
    }
}

impl TargetModel for Echo {
    fn config(&self) -> &TargetConfig {
        self.model.config()
    }
    fn embed_and_head(&self) -> &SharedWeights {
        self.model.embed_and_head()
    }
    fn set_capture(&mut self, capture: &CaptureSet) -> Result<(), ModelError> {
        self.model.set_capture(capture)
    }
    fn capture(&self) -> Option<&CaptureSet> {
        self.model.capture()
    }
    fn new_cache(&self, tokens: usize, page_rows: usize) -> Result<LatentCache, ModelError> {
        self.model.new_cache(tokens, page_rows)
    }
    fn forward(&mut self, batch: &[SeqRows<'_>], _: &mut LatentCache) -> Result<ForwardOut, ModelError> {
        let (mut out, mut row, mut drawn) = (ForwardOut::default(), 0, Vec::new());
        for seq in batch {
            out.rows.push(row..row + seq.tokens.len());
            row += seq.tokens.len();
            let first = drawn.len();
            match seq.logits {
                LogitRows::All => drawn.extend(seq.tokens),
                LogitRows::Last => drawn.extend(seq.tokens.last()),
                LogitRows::None => {}
            }
            out.logit_rows.push(first..drawn.len());
        }
        out.logits = Some(self.logits(&drawn)?);
        let leaving = batch.iter().filter(|seq| seq.tokens[0] == LEAVING);
        let mut watch = self.watch.lock();
        watch.rows.push(leaving.map(|seq| seq.tokens.len()).sum());
        let step = watch.rows.len();
        if let Some((_, deed)) = watch.deed.take_if(|(at, _)| *at == step) {
            deed();
        }
        Ok(out)
    }
    fn rollback(
        &self,
        cache: &mut LatentCache,
        table: &mut SeqTable,
        keep: Keep<'_>,
    ) -> Result<(), ModelError> {
        self.model.rollback(cache, table, keep)
    }
}

/// How a caller leaves.
#[derive(Debug, Clone, Copy)]
enum Way {
    Closes,
    StreamEnds,
    /// It is seen first by the half that is written to.
    ReadsNoMore,
}

/// A caller with one sequence.
struct Caller {
    token: u32,
    reader: Reader,
    /// Drafted tokens, parents and steps of its rounds.
    rounds: VecDeque<(Vec<u32>, Vec<u32>, u32)>,
}

impl Caller {
    fn stream(&self) -> StreamId {
        StreamId(self.token.into())
    }

    fn items(&self, op: Op) -> Command {
        Command::Items { stream: self.stream(), items: vec![TargetItem { seq: 1, op: Some(op) }] }
    }

    fn open(&self, engine: &Sender<Command>, prompt: usize, max_tokens: u32) {
        let (frames, reader) = mpsc::channel(8);
        *self.reader.lock() = Some(reader);
        let replies = Replies { frames, ending: Ending::default() };
        let (stream, boot) = (self.stream(), self.token.into());
        engine.post(Command::Attach { stream, boot, life: Life::Lasting, replies }).unwrap();
        let open = v1::Open {
            tokens: vec![self.token; prompt],
            sampling: Some(v1::Sampling { top_p: 1.0, ..Default::default() }),
            limits: Some(v1::Limits { max_tokens, ignore_eos: true, ..Default::default() }),
            ..Default::default()
        };
        engine.post(self.items(Op::Open(open))).unwrap();
    }

    /// Reads what there is and goes on with the next round; whether it did.
    fn goes_on(&mut self, engine: &Sender<Command>) -> bool {
        let mut outs = Vec::new();
        if let Some(reader) = &mut *self.reader.lock() {
            outs.extend(std::iter::from_fn(|| reader.try_recv().ok()).flat_map(|reply| reply.outs));
        }
        let last = outs.into_iter().rev().find_map(|out| match out.body {
            Some(Body::Committed(committed)) => Some(committed),
            Some(Body::Closed(_)) => None,
            // A round that crossed the Close.
            Some(Body::Error(error)) if error.reason == "UNKNOWN_SEQ" => None,
            other => panic!("{other:?}"),
        });
        let Some(committed) = last.filter(|committed| committed.last) else { return false };
        let Some((tokens, parents, steps)) = self.rounds.pop_front() else { return false };
        let (round, base_len) = (committed.round + 1, committed.kv_len);
        let verify = v1::Verify { round, base_len, root: self.token, tokens, parents, steps };
        engine.post(self.items(Op::Verify(verify))).unwrap();
        true
    }

    fn leave(&self, way: Way, engine: Sender<Command>) -> Box<dyn FnOnce() + Send> {
        let (close, stream) = (self.items(Op::Close(v1::Close {})), self.stream());
        let reader = Arc::clone(&self.reader);
        Box::new(move || match way {
            Way::Closes => engine.post(close).unwrap(),
            Way::StreamEnds => engine.post(Command::Detach(stream)).unwrap(),
            Way::ReadsNoMore => drop(reader.lock().take()),
        })
    }
}

fn engine(max_sequences: usize, watch: &Arc<Mutex<Watch>>) -> Engine {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/v3");
    let options = TargetOptions {
        kv_tokens: 1024,
        threads: Some(1),
        prefill_chunk: 32,
        max_sequences,
        capture: Some(Vec::new()),
        ..TargetOptions::new(&dir, Address::Tcp("127.0.0.1:0".to_owned()))
    };
    let checkpoint = Arc::new(TargetCheckpoint::open(&dir).unwrap());
    let plan = Plan::new(&options, checkpoint.config()).unwrap();
    let request = LoadRequest {
        checkpoint,
        config_hash: String::new(),
        plan,
        epoch: Epoch::random().unwrap(),
        gauges: Arc::new(Gauges::new()),
        drain: Drain::new(),
    };
    let watch = Arc::clone(watch);
    load(request, &mut |_| {}).unwrap().engine.with_model(|model| Box::new(Echo { model, watch }))
}

/// Rows that each step computes of a sequence whose caller leaves in the middle of one of them, beside another sequence
/// of so many tokens.
fn rows(max_sequences: usize, others: u32, leaves: Option<(usize, Way)>) -> Vec<usize> {
    let watch = Arc::default();
    let mut engine = engine(max_sequences, &watch);
    let (sender, mailbox): (_, Receiver<Command>) = mailbox();
    let mut other = Caller { token: OTHER, reader: Reader::default(), rounds: [(vec![], vec![], 99)].into() };
    let rounds = [
        (vec![], vec![], 5),
        (vec![LEAVING; 3], vec![], 1),
        (vec![LEAVING, OTHER, LEAVING], vec![0, 0, 1], 1),
    ];
    let mut leaving = Caller { token: LEAVING, reader: Reader::default(), rounds: rounds.into() };
    watch.lock().deed = leaves.map(|(step, way)| (step, leaving.leave(way, sender.clone())));
    other.open(&sender, 3, others);
    leaving.open(&sender, 100, 1 + 5 + 4 + 3);
    loop {
        let pass = engine.pass(&mailbox).unwrap();
        let go_on = [&mut other, &mut leaving].map(|caller| caller.goes_on(&sender));
        if matches!(pass, Pass::Idle(_)) && go_on == [false, false] {
            return std::mem::take(&mut watch.lock().rows);
        }
    }
}

#[test]
fn no_step_begins_with_rows_of_a_caller_that_has_left() {
    let chunks_credit_chain_and_tree = [32 - 3, 31, 31, 9, 1, 1, 1, 1, 1, 4, 4];
    let behind_another = [0, 0, 0, 0, 0, 32, 32, 32, 4, 1, 1, 1, 1, 1, 4, 4];
    for (max_sequences, others, computed) in
        [(2, 20, &chunks_credit_chain_and_tree[..]), (1, 5, &behind_another)]
    {
        let undisturbed = rows(max_sequences, others, None);
        assert!(undisturbed.starts_with(computed), "{undisturbed:?}");
        assert_eq!(undisturbed.iter().sum::<usize>(), computed.iter().sum::<usize>());
        for step in 1..computed.len() {
            for way in [Way::Closes, Way::StreamEnds, Way::ReadsNoMore] {
                let rows = rows(max_sequences, others, Some((step, way)));
                let (before, after) = rows.split_at(step);
                assert_eq!(before, &computed[..step], "{way:?} in step {step}");
                assert!(after.iter().all(|&rows| rows == 0), "{way:?} in step {step}: {rows:?}");
                assert!(step >= others as usize || !after.is_empty(), "the other sequence goes on");
            }
        }
    }
}
