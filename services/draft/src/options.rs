use std::path::PathBuf;
use std::time::Duration;

use eyrie_checkpoint::{AuxConvention, ModelSource};
use eyrie_kernels::{Activations, Isa, Processor};
use eyrie_wire::{Address, MAX_VERIFY_ROWS};

use crate::DraftError;

/// Targets of one draft at most.
const MAX_TARGETS: usize = 16;

/// Where a draft takes the embedding and the head of its target from. What is asked for is what is done: where it is not
/// possible the draft is not attached and says why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SharedSource {
    /// Mapped from the target's memory, without a copy. Features come through the target's ring. On the same host.
    Map,
    /// One copy, read from the target. Features are read from the target as they are needed.
    Target,
    /// One copy, built from this folder, which must hold the target's model. Features as with [`Target`](Self::Target).
    Folder(PathBuf),
}

impl From<&str> for SharedSource {
    /// `map`, `target`, or else a path.
    fn from(given: &str) -> Self {
        match given {
            "map" => Self::Map,
            "target" => Self::Target,
            folder => Self::Folder(PathBuf::from(folder)),
        }
    }
}

/// How a draft service is run.
#[derive(Debug, Clone)]
pub struct DraftOptions {
    /// The EAGLE-3 head.
    pub model: ModelSource,
    /// Where to listen.
    pub listen: Address,
    /// The targets to attach to, 1 to 16, all different.
    pub targets: Vec<Address>,
    /// Where their embedding and head come from.
    pub shared: SharedSource,
    /// Whether a target's GPU memory may be mapped by handle (`cuda_ipc`), which the driver makes writable: a fault of this
    /// process could then change the target's weights.
    pub allow_writable_ipc: bool,
    /// Positions that the draft's cache holds, over all sequences: 1 to 2³¹. Targets get equal shares of it.
    pub cache_tokens: usize,
    /// Bytes of that cache which may keep slots of ended sequences, for others whose tokens begin alike; 0 keeps none.
    /// Targets get equal shares of it. Default: as much as is free.
    pub prefix_cache_bytes: Option<u64>,
    /// Threads that compute, 1 to 1,024.
    pub threads: usize,
    /// Instruction set of the kernels.
    pub isa: Isa,
    /// Where to compute.
    pub processor: Processor,
    /// Numbers of activations and cache; default: the processor's usual ones.
    pub activations: Option<Activations>,
    /// Sequences held at once for each target, 1 to 2²⁰; the least recently used one is dropped for another.
    pub max_sequences: usize,
    /// Tokens proposed in one round at most, 1 to 63.
    pub max_draft_tokens: usize,
    /// How long a sequence that only unary calls speak of is kept unused, between 1 ms and 1 h. Those of a stream are
    /// kept until the stream ends.
    pub unary_idle: Duration,
    /// What the layer ids in the head's config mean, where its file does not tell.
    pub aux_convention: Option<AuxConvention>,
}

impl DraftOptions {
    /// Defaults for the head in `model`: mapped weights, all threads, 16,384 cached positions, 64 sequences,
    /// 63 draft tokens, 60 s for unary calls.
    pub fn new(model: impl Into<ModelSource>, listen: Address, targets: Vec<Address>) -> Self {
        Self {
            model: model.into(),
            listen,
            targets,
            shared: SharedSource::Map,
            allow_writable_ipc: false,
            cache_tokens: 16_384,
            prefix_cache_bytes: None,
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            isa: Isa::best(),
            processor: Processor::Cpu,
            activations: None,
            max_sequences: 64,
            max_draft_tokens: MAX_VERIFY_ROWS - 1,
            unary_idle: Duration::from_secs(60),
            aux_convention: None,
        }
    }

    pub(crate) fn validate(&self) -> Result<(), DraftError> {
        let check = |option, given: usize, max: usize| {
            if (1..=max).contains(&given) {
                return Ok(());
            }
            Err(DraftError::Option { option, limit: format!("1..={max}"), given: given.to_string() })
        };
        check("max-draft-tokens", self.max_draft_tokens, MAX_VERIFY_ROWS - 1)?;
        check("max-sequences", self.max_sequences, 1 << 20)?;
        check("number of targets", self.targets.len(), MAX_TARGETS)?;
        check("cache-tokens", self.cache_tokens, 1 << 31)?;
        check("cache-tokens of a target", self.cache_tokens / self.targets.len(), 1 << 31)?;
        let twice = self.targets.iter().enumerate().find(|(i, target)| self.targets[..*i].contains(target));
        if let Some((_, target)) = twice {
            let (limit, given) = ("all different".to_owned(), format!("{target} twice"));
            return Err(DraftError::Option { option: "targets", limit, given });
        }
        if !(Duration::from_millis(1)..=Duration::from_secs(3600)).contains(&self.unary_idle) {
            let given = format!("{:?}", self.unary_idle);
            return Err(DraftError::Option { option: "unary-idle", limit: "1ms..=3600s".to_owned(), given });
        }
        Ok(())
    }
}

/// What is known once the service listens.
#[derive(Debug, Clone)]
pub struct Ready {
    /// Where it listens, with the port that the system chose for port 0.
    pub address: Address,
}
