//! What peers see when the model fails: that sequence's error, or the end of the service, never silence.

use std::path::Path;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use candle_core::Tensor;
use eyrie_checkpoint::{TargetCheckpoint, TargetConfig};
use eyrie_kernels::KernelError;
use eyrie_model::{
    CaptureSet, ForwardOut, Keep, LatentCache, ModelError, SeqRows, SeqTable, SharedWeights, TargetModel,
};
use eyrie_region::Epoch;
use eyrie_service::Drain;
use eyrie_wire::v1::target_server::Target;
use eyrie_wire::v1::{
    Hello, Limits, LoadState, Open, Sampling, TargetFrame, TargetItem, TargetReply, Verify, target_item::Op,
    target_out::Body,
};
use eyrie_wire::{Address, PROTOCOL_VERSION, reason_of};
use tonic::{Code, Request, Status};

use crate::engine::{Command, LoadRequest, Receiver, load, mailbox};
use crate::files::Files;
use crate::importers::Importers;
use crate::plan::Plan;
use crate::rpc::{Copies, Service};
use crate::run::step_until_stopped;
use crate::state::State;
use crate::{TargetError, TargetOptions};

/// A prompt that holds this token meets the fault.
const MARK: u32 = 4000;

#[derive(Debug, Clone, Copy)]
enum Fault {
    Panic,
    Error,
    NotANumber,
    /// Of more rows than this at once, whatever they hold.
    TooMany(usize),
}

/// A model that fails on marked rows.
#[derive(Debug)]
struct Faulty {
    model: Box<dyn TargetModel>,
    fault: Fault,
}

impl TargetModel for Faulty {
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
    fn forward(&mut self, batch: &[SeqRows<'_>], cache: &mut LatentCache) -> Result<ForwardOut, ModelError> {
        let rows: usize = batch.iter().map(|rows| rows.tokens.len()).sum();
        if let Fault::TooMany(most) = self.fault
            && rows > most
        {
            let memory = KernelError::GpuMemory { what: "linear", wanted: rows, free: most, total: most };
            return Err(memory.into());
        }
        let marked = batch.iter().position(|rows| rows.tokens.contains(&MARK));
        let mut out = self.model.forward(batch, cache)?;
        match (marked, self.fault) {
            (None, _) | (_, Fault::TooMany(_)) => Ok(out),
            (Some(_), Fault::Panic) => panic!("a kernel panicked"),
            (Some(_), Fault::Error) => Err(ModelError::Rollback("broken on purpose".to_owned())),
            (Some(at), Fault::NotANumber) => {
                let logits = out.logits.take().unwrap();
                let mut rows = logits.to_vec2::<f32>().unwrap();
                rows[out.logit_rows[at].start][5] = f32::NAN;
                out.logits = Some(Tensor::new(rows, logits.device()).unwrap());
                Ok(out)
            }
        }
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

struct Setup {
    state: Arc<State>,
    service: Service,
    request: LoadRequest,
    mailbox: Receiver<Command>,
}

fn set_up() -> Setup {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/demo/mini");
    let options = TargetOptions {
        kv_tokens: 1024,
        threads: Some(1),
        ..TargetOptions::new(&dir, Address::Tcp("127.0.0.1:0".to_owned()))
    };
    let checkpoint = Arc::new(TargetCheckpoint::open(&dir).unwrap());
    let plan = Plan::new(&options, checkpoint.config()).unwrap();
    let epoch = Epoch::random().unwrap();
    let files = Files::scan(&dir).unwrap();
    let importers = Importers::open(dir.join("none/importers"));
    let state = Arc::new(State::new(
        "mini".to_owned(),
        &checkpoint,
        plan.clone(),
        files,
        epoch,
        importers,
        Weak::new(),
    ));
    let (sender, mailbox) = mailbox();
    let drain = Drain::new();
    let service = Service::new(Arc::clone(&state), sender, drain.clone(), Duration::ZERO);
    let (config_hash, gauges) = (state.files.config_hash(), Arc::clone(&state.gauges));
    let request = LoadRequest { checkpoint, config_hash, plan, epoch, gauges, drain };
    Setup { request, state, service, mailbox }
}

type Ended = JoinHandle<Result<(), TargetError>>;

fn start(fault: Fault) -> (Service, Ended) {
    let Setup { state, service, request, mailbox } = set_up();
    let loaded = load(request, &mut |_| {}).unwrap();
    let engine = loaded.engine.with_model(|model| Box::new(Faulty { model, fault }));
    let copies = Copies::of(&loaded.exports);
    state.loaded(loaded.exports, copies, loaded.formats, loaded.fingerprint);
    let thread = std::thread::spawn(move || step_until_stopped(&state, engine, &mailbox));
    (service, thread)
}

fn item(seq: u64, tokens: Vec<u32>) -> TargetItem {
    let open = Open {
        tokens,
        sampling: Some(Sampling { top_p: 1.0, ..Default::default() }),
        limits: Some(Limits { max_tokens: 9, ignore_eos: true, ..Default::default() }),
        ..Default::default()
    };
    TargetItem { seq, op: Some(Op::Open(open)) }
}

async fn round(service: &Service, items: Vec<TargetItem>) -> Result<TargetReply, Status> {
    let hello = Hello { protocol_version: PROTOCOL_VERSION, boot_id: 1, ..Default::default() };
    let frame = TargetFrame { hello: Some(hello), items };
    let round = Target::round(service, Request::new(frame));
    tokio::time::timeout(Duration::from_secs(60), round).await.unwrap().map(tonic::Response::into_inner)
}

#[tokio::test]
async fn before_it_is_loaded_a_target_says_so() {
    let setup = set_up();
    let status = round(&setup.service, vec![item(1, vec![1])]).await.unwrap_err();
    assert_eq!(reason_of(&status).as_deref(), Some("LOADING"), "{status}");
    let card = setup.state.card(false);
    assert_eq!((card.state, card.loaded_bytes), (LoadState::Loading as i32, 0));
    assert!(card.total_bytes > 1_000_000 && card.fingerprint.is_empty());
}

#[tokio::test]
async fn a_failed_step_ends_the_engine_and_tells_everybody() {
    for (fault, why) in [(Fault::Panic, "a kernel panicked"), (Fault::Error, "broken on purpose")] {
        let (service, thread) = start(fault);
        assert_eq!(round(&service, vec![item(1, vec![1, 2])]).await.unwrap().outs.len(), 1);
        let status = round(&service, vec![item(2, vec![1, 2]), item(3, vec![MARK])]).await.unwrap_err();
        assert!(status.code() == Code::Internal && status.message().contains(why), "{status}");
        let error = thread.join().unwrap().unwrap_err();
        assert!(error.to_string().contains(why), "{error}");
        let status = round(&service, vec![item(4, vec![1, 2])]).await.unwrap_err();
        assert!(status.code() == Code::Internal && status.message().contains(why), "{status}");
    }
}

#[tokio::test]
async fn a_row_that_is_not_a_number_is_its_own_sequence_s_error() {
    let (service, thread) = start(Fault::NotANumber);
    let reply = round(&service, vec![item(1, vec![MARK]), item(2, vec![1, 2])]).await.unwrap();
    let mut outs = reply.outs;
    outs.sort_by_key(|out| out.seq);
    match [&outs[0].body, &outs[1].body] {
        [Some(Body::Error(error)), Some(Body::Committed(committed))] => {
            assert!(error.reason == "INTERNAL" && error.message.contains("sampling"), "{error:?}");
            assert_eq!(committed.tokens.len(), 1);
        }
        other => panic!("{other:?}"),
    }
    service.stop_engine();
    thread.join().unwrap().unwrap();
}

#[tokio::test]
async fn rows_that_are_too_many_for_the_memory_are_computed_apart() {
    let (service, thread) = start(Fault::TooMany(3));
    let opened = |reply: TargetReply| -> Vec<(u64, Result<Vec<u32>, String>)> {
        let mut outs: Vec<_> = reply
            .outs
            .into_iter()
            .map(|out| match out.body {
                Some(Body::Committed(committed)) => (out.seq, Ok(committed.tokens)),
                Some(Body::Error(error)) => (out.seq, Err(error.message)),
                other => panic!("{other:?}"),
            })
            .collect();
        outs.sort_by_key(|(seq, _)| *seq);
        outs
    };
    let items = || vec![item(1, vec![5, 6]), item(2, vec![7, 8]), item(3, vec![1, 2, 3, 4])];
    let apart = opened(round(&service, items()).await.unwrap());
    assert!(apart[2].1.as_ref().is_err_and(|why| why.contains("GPU memory")), "{apart:?}");

    let (roomy, _) = start(Fault::TooMany(usize::MAX));
    let together = opened(round(&roomy, items()).await.unwrap());
    assert_eq!(apart[..2], together[..2]);

    // A round that is too wide goes on without its drafts.
    let verify = |seq, tokens: Vec<u32>| TargetItem {
        seq,
        op: Some(Op::Verify(Verify {
            round: 1,
            base_len: 2,
            root: apart[0].1.clone().unwrap()[0],
            tokens,
            ..Default::default()
        })),
    };
    let plain = opened(round(&roomy, vec![verify(1, vec![9; 5])]).await.unwrap());
    let narrow = opened(round(&service, vec![verify(1, vec![9; 5])]).await.unwrap());
    assert_eq!(narrow[0].1.as_ref().unwrap()[..1], plain[0].1.as_ref().unwrap()[..1]);
    service.stop_engine();
    thread.join().unwrap().unwrap();
}
