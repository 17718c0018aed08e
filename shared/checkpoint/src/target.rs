use std::collections::HashMap;
use std::collections::HashSet;
use std::fmt;
use std::path::Path;

use crate::layout::{Layout, ScaleView, WeightView};
use crate::synth::target_entries;
use crate::tensors::{LinearSpec, Spec, VectorSpec, layer_tensors, model_tensors};
use crate::{
    CheckpointError, Dtype, ModelSource, QuantFormat, Result, TargetConfig, TensorEntry, TensorIndex,
};

/// Problems after which a survey stops: a config may promise millions of tensors that are not there.
pub(crate) const MOST_PROBLEMS: usize = 10_000;

/// Why a stored tensor is not loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SkipRule {
    /// Belongs to a multi-token prediction layer: at or past `num_hidden_layers`, with an `eh_proj`.
    MtpLayer,
    /// Rotary tables, which are recomputed.
    RotaryBuffer,
    /// Vision tower or its projector, which text does not use.
    Vision,
    /// Scales of a quantised key-value cache, which this server does not use.
    KvCacheScale,
}

impl SkipRule {
    const ALL: [Self; 4] = [Self::MtpLayer, Self::RotaryBuffer, Self::Vision, Self::KvCacheScale];

    /// The rule for a canonical tensor name, if any skips it; `mtp` tells the multi-token prediction layers.
    fn of(name: &str, mtp: &HashSet<usize>) -> Option<Self> {
        if name.starts_with("vision_tower.") || name.starts_with("mm_projector.") {
            return Some(Self::Vision);
        }
        let (layer, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
        if mtp.contains(&layer.parse().ok()?) {
            return Some(Self::MtpLayer);
        }
        let attention = rest.strip_prefix("self_attn.")?;
        if let Some(buffer) = attention.strip_prefix("rotary_emb.") {
            return matches!(buffer, "inv_freq" | "cos_cached" | "sin_cached").then_some(Self::RotaryBuffer);
        }
        let last = attention.rsplit('.').next()?;
        matches!(last, "k_scale" | "v_scale" | "kv_scale").then_some(Self::KvCacheScale)
    }
}

impl fmt::Display for SkipRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::MtpLayer => "multi-token-prediction layers",
            Self::RotaryBuffer => "rotary buffers",
            Self::Vision => "vision tower and projector",
            Self::KvCacheScale => "kv-cache scales",
        })
    }
}

/// Tensors and stored bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RuleTotal {
    /// Tensors.
    pub tensors: u64,
    /// Bytes.
    pub bytes: u64,
}

impl RuleTotal {
    fn add(&mut self, entry: &TensorEntry) {
        self.tensors += 1;
        self.bytes += entry.bytes();
    }
}

/// Where every tensor of the folder went.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Account {
    /// Tensors the model loads.
    pub loaded: RuleTotal,
    /// Tensors left alone, by rule; rules that met no tensor are absent.
    pub skipped: Vec<(SkipRule, RuleTotal)>,
}

/// A target checkpoint whose every tensor is accounted for; weights are mapped, not read.
#[derive(Debug)]
pub struct TargetCheckpoint {
    config: TargetConfig,
    index: TensorIndex,
    /// Index positions by canonical name.
    names: HashMap<String, usize>,
    account: Account,
}

impl TargetCheckpoint {
    /// Reads the config and the headers and accounts for every tensor; reads no weight.
    ///
    /// Fails with the first tensor that is missing, unexpected, or of the wrong shape or dtype;
    /// [`crate::pair::preflight`] lists all of them.
    pub fn open(dir: &Path) -> Result<Self> {
        Self::accounted(Self::survey(TargetConfig::from_dir(dir)?, TensorIndex::open(dir)?))
    }

    /// The target of `source`: a folder's, or one whose tensors are made up.
    ///
    /// # Errors
    /// As [`open`](Self::open), and a specification that stands for no target.
    pub fn from_source(source: &ModelSource) -> Result<Self> {
        let spec = match source {
            ModelSource::Folder(dir) => return Self::open(dir),
            ModelSource::Synth(spec) => spec,
        };
        let config = TargetConfig::from_source(source)?;
        let entries = target_entries(spec, &config);
        let index = TensorIndex::made(source.to_string().into(), spec.seed(), entries);
        Self::accounted(Self::survey(config, index))
    }

    fn accounted((checkpoint, problems): (Self, Vec<CheckpointError>)) -> Result<Self> {
        match problems.into_iter().next() {
            Some(problem) => Err(problem),
            None => Ok(checkpoint),
        }
    }

    /// Accounts for every tensor and returns all problems, or those of the first layers when there are more than
    /// [`MOST_PROBLEMS`]; the checkpoint may be used only if there are none.
    pub(crate) fn survey(config: TargetConfig, index: TensorIndex) -> (Self, Vec<CheckpointError>) {
        let mut survey = Survey::new(&config, &index);
        model_tensors(&config).visit(&mut |spec| survey.expect(spec));
        for layer in 0..config.num_hidden_layers {
            layer_tensors(&config, layer).visit(&mut |spec| survey.expect(spec));
            if survey.problems.len() > MOST_PROBLEMS {
                break;
            }
        }
        if survey.problems.len() <= MOST_PROBLEMS {
            survey.account_for_the_rest();
            survey.check_declared_format();
        }
        let Survey { names, account, problems, .. } = survey;
        (Self { config, index, names, account }, problems)
    }

    /// The typed config.
    pub fn config(&self) -> &TargetConfig {
        &self.config
    }

    /// The tensors as on disk.
    pub fn index(&self) -> &TensorIndex {
        &self.index
    }

    /// Counts and bytes of loaded and skipped tensors.
    pub fn account(&self) -> &Account {
        &self.account
    }

    fn entry(&self, name: &str) -> Option<&TensorEntry> {
        self.names.get(name).map(|&i| &self.index.entries()[i])
    }

    /// The weight matrix of a module such as `model.layers.0.self_attn.o_proj`, where it lies in its file.
    pub fn linear(&self, name: &str) -> Result<WeightView> {
        if let Some(packed) = self.entry(&format!("{name}.weight_packed")) {
            let view = int4_view(&self.index, packed, self.entry(&format!("{name}.weight_scale")))?;
            // Not part of opening: one page fault per expert would cost seconds on a cold disk.
            if let Some(stored) = self.entry(&format!("{name}.weight_shape")) {
                expect_stored_shape(&self.index, stored, view.shape)?;
            }
            return Ok(view);
        }
        match self.entry(&format!("{name}.weight")) {
            Some(entry) => float_view(&self.index, entry),
            None => Err(self.index.missing(&format!("{name}.weight"), "a weight matrix")),
        }
    }

    /// A vector tensor such as `model.norm.weight`, widened to float32.
    pub fn vector(&self, name: &str) -> Result<Vec<f32>> {
        match self.entry(name) {
            Some(entry) => self.index.read_vector(entry),
            None => Err(self.index.missing(name, "a vector")),
        }
    }
}

/// A stored float matrix as a view.
pub(crate) fn float_view(index: &TensorIndex, entry: &TensorEntry) -> Result<WeightView> {
    let layout = match entry.dtype {
        Dtype::F32 => Layout::F32,
        Dtype::F16 => Layout::F16,
        Dtype::Bf16 => Layout::Bf16,
        other => return Err(index.refuse(entry, format!("{other}, expected F32, F16 or BF16"))),
    };
    let &[out, input] = entry.shape.as_slice() else {
        return Err(index.refuse(entry, format!("shape {:?}, expected a matrix", entry.shape)));
    };
    Ok(WeightView { data: index.bytes(entry), layout, shape: [out, input], scales: None })
}

fn int4_view(index: &TensorIndex, packed: &TensorEntry, scale: Option<&TensorEntry>) -> Result<WeightView> {
    let (Some(scale), &[out, words]) = (scale, packed.shape.as_slice()) else {
        return Err(index.refuse(packed, "has no weight_scale beside it, or is not a matrix"));
    };
    let &[rows, groups] = scale.shape.as_slice() else {
        return Err(index.refuse(scale, format!("shape {:?}, expected a matrix", scale.shape)));
    };
    let scales = ScaleView { data: index.bytes(scale), dtype: scale.dtype, shape: [rows, groups] };
    Ok(WeightView {
        data: index.bytes(packed),
        layout: Layout::Int4G32,
        shape: [out, words * 8],
        scales: Some(scales),
    })
}

/// One walk over the expected tensors, ticking off what the folder holds.
struct Survey<'a> {
    config: &'a TargetConfig,
    index: &'a TensorIndex,
    names: HashMap<String, usize>,
    claimed: Vec<bool>,
    first_packed: Option<usize>,
    account: Account,
    problems: Vec<CheckpointError>,
}

impl<'a> Survey<'a> {
    fn new(config: &'a TargetConfig, index: &'a TensorIndex) -> Self {
        let mut survey = Self {
            config,
            index,
            names: HashMap::with_capacity(index.entries().len()),
            claimed: vec![false; index.entries().len()],
            first_packed: None,
            account: Account::default(),
            problems: Vec::new(),
        };
        let prefix = config.architecture.tensor_prefix();
        for (i, entry) in index.entries().iter().enumerate() {
            if let Some(earlier) = survey.names.insert(canonical(&entry.name, prefix), i) {
                let other = &index.entries()[earlier].name;
                survey.problems.push(index.refuse(entry, format!("is another spelling of {other}")));
            }
        }
        survey
    }

    fn claim(&mut self, name: &str) -> Option<&'a TensorEntry> {
        let at = *self.names.get(name)?;
        let entry = &self.index.entries()[at];
        if !std::mem::replace(&mut self.claimed[at], true) {
            self.account.loaded.add(entry);
        }
        Some(entry)
    }

    fn expect(&mut self, spec: Spec<'_>) {
        let outcome = match spec {
            Spec::Linear(linear) => self.expect_linear(linear),
            Spec::Vector(vector) => self.expect_vector(vector),
        };
        if let Err(problem) = outcome {
            self.problems.push(problem);
        }
    }

    fn on_disk(&self, name: &str) -> String {
        format!("{}{name}", self.config.architecture.tensor_prefix())
    }

    fn expect_vector(&mut self, spec: &VectorSpec) -> Result<()> {
        let Some(entry) = self.claim(&spec.name) else {
            return Err(self.index.missing(&self.on_disk(&spec.name), &format!("float [{}]", spec.len)));
        };
        expect_float(self.index, entry, &[spec.len])
    }

    fn expect_linear(&mut self, spec: &LinearSpec) -> Result<()> {
        let LinearSpec { name, shape: [out, input], quantisable } = spec;
        let plain = format!("{name}.weight");
        let packed = format!("{name}.weight_packed");
        match (self.names.contains_key(&plain), self.names.contains_key(&packed)) {
            (true, true) => {
                let entry = &self.index.entries()[self.names[&packed]];
                Err(self.index.refuse(entry, "stands beside a plain weight: only one of them may be there"))
            }
            (false, true) if *quantisable => self.expect_int4(name, [*out, *input]),
            (false, true) => {
                let entry = &self.index.entries()[self.names[&packed]];
                Err(self.index.refuse(entry, "this module must be float"))
            }
            (true, false) => self.expect_plain(name, &plain, [*out, *input]),
            (false, false) => {
                let wanted = format!("float [{out}, {input}]");
                Err(self.index.missing(&self.on_disk(&plain), &wanted))
            }
        }
    }

    fn expect_plain(&mut self, name: &str, plain: &str, shape: [usize; 2]) -> Result<()> {
        let Some(entry) = self.claim(plain) else { return Ok(()) };
        let mut companions = Vec::new();
        for suffix in ["weight_scale_inv", "weight_scale", "weight_scale_2", "input_scale"] {
            companions.extend(self.claim(&format!("{name}.{suffix}")));
        }
        match entry.dtype {
            Dtype::F8E4m3 => Err(self.index.refuse(entry, "not supported yet: fp8 block")),
            Dtype::U8 => Err(self.index.refuse(entry, "not supported yet: nvfp4")),
            _ => match companions.first() {
                Some(scale) => Err(self
                    .index
                    .refuse(scale, format!("scales a {} weight, which needs none", entry.dtype))),
                None => expect_float(self.index, entry, &shape),
            },
        }
    }

    fn expect_int4(&mut self, name: &str, [out, input]: [usize; 2]) -> Result<()> {
        let Some(packed) = self.claim(&format!("{name}.weight_packed")) else { return Ok(()) };
        let index = self.index;
        if packed.dtype == Dtype::U8 {
            return Err(index.refuse(packed, "not supported yet: nvfp4"));
        }
        self.first_packed = self.first_packed.or(index.position(&packed.name));
        if !input.is_multiple_of(32) {
            return Err(index.refuse(packed, format!("{input} input features, int4 needs a multiple of 32")));
        }
        expect_exact(index, packed, &[Dtype::I32], &[out, input / 8])?;
        for (suffix, dtypes, shape) in [
            ("weight_scale", &[Dtype::Bf16][..], vec![out, input / 32]),
            ("weight_shape", &[Dtype::I32, Dtype::I64][..], vec![2]),
        ] {
            // Made from the shape itself, a tensor needs no record of it.
            if suffix == "weight_shape" && index.seed().is_some() {
                continue;
            }
            let full = format!("{name}.{suffix}");
            let Some(entry) = self.claim(&full) else {
                let wanted = format!("{} {shape:?} for {}", dtypes[0], packed.name);
                return Err(index.missing(&self.on_disk(&full), &wanted));
            };
            expect_exact(index, entry, dtypes, &shape)?;
        }
        Ok(())
    }

    fn account_for_the_rest(&mut self) {
        let prefix = self.config.architecture.tensor_prefix();
        let mtp = self.mtp_layers();
        let mut totals = SkipRule::ALL.map(|rule| (rule, RuleTotal::default()));
        for (entry, _) in self.index.entries().iter().zip(&self.claimed).filter(|(_, claimed)| !**claimed) {
            let name = canonical(&entry.name, prefix);
            match SkipRule::of(&name, &mtp) {
                Some(rule) => {
                    totals.iter_mut().filter(|(r, _)| *r == rule).for_each(|(_, total)| total.add(entry));
                }
                None => self.problems.push(self.index.refuse(entry, unexpected(&name))),
            }
        }
        self.account.skipped = totals.into_iter().filter(|(_, total)| total.tensors > 0).collect();
    }

    /// Layers past the model's own that predict further tokens. Configs do not always count them, but each joins
    /// two streams by `eh_proj`; a layer without one is a layer too many.
    fn mtp_layers(&self) -> HashSet<usize> {
        let prefix = self.config.architecture.tensor_prefix();
        let joins = |name: &str| {
            let layer = name.strip_prefix("model.layers.")?.strip_suffix(".eh_proj.weight")?.parse().ok()?;
            (layer >= self.config.num_hidden_layers).then_some(layer)
        };
        self.index.entries().iter().filter_map(|entry| joins(&canonical(&entry.name, prefix))).collect()
    }

    fn check_declared_format(&mut self) {
        let declared = self.config.quantisation;
        let problem = match (declared, self.first_packed) {
            (QuantFormat::Int4G32, None) => Some(self.disagreement(declared, "no tensor is packed")),
            (QuantFormat::Int4G32, Some(_)) | (QuantFormat::None, None) => None,
            (QuantFormat::None, Some(at)) => Some(self.index.refuse(
                &self.index.entries()[at],
                "is packed int4, but the config declares no quantization_config",
            )),
            // A folder with tensors of these formats has been refused by tensor already.
            (QuantFormat::Fp8Block { .. } | QuantFormat::Nvfp4 { .. }, _) if !self.problems.is_empty() => {
                None
            }
            (QuantFormat::Fp8Block { .. } | QuantFormat::Nvfp4 { .. }, _) => {
                Some(self.disagreement(declared, "no tensor has that format"))
            }
        };
        self.problems.extend(problem);
    }

    fn disagreement(&self, declared: QuantFormat, found: &str) -> CheckpointError {
        CheckpointError::File {
            path: self.index.dir().to_owned(),
            problem: format!("quantization_config declares {declared}, but {found}"),
        }
    }
}

/// The name without the wrapper's prefix; NVIDIA exports leave `model.` out behind it.
fn canonical(name: &str, prefix: &str) -> String {
    let inner = name.strip_prefix(prefix).unwrap_or(name);
    match inner.strip_prefix("layers.") {
        Some(rest) if !prefix.is_empty() => format!("model.layers.{rest}"),
        _ => inner.to_owned(),
    }
}

fn unexpected(name: &str) -> String {
    if name.contains(".mlp.experts.gate_up_proj") || name.ends_with(".mlp.experts.down_proj") {
        return "not supported yet: experts fused into one tensor".to_owned();
    }
    for (suffix, format) in [
        (".qweight", "GPTQ or AWQ"),
        (".qzeros", "GPTQ or AWQ"),
        (".g_idx", "GPTQ or AWQ"),
        (".weight_zero_point", "asymmetric int4"),
        (".weight_scale_inv", "fp8 block"),
        (".weight_global_scale", "nvfp4"),
    ] {
        if name.ends_with(suffix) {
            return format!("not supported yet: {format}");
        }
    }
    "is unexpected: no part of this architecture has it and no rule skips it".to_owned()
}

pub(crate) fn expect_float(index: &TensorIndex, entry: &TensorEntry, shape: &[usize]) -> Result<()> {
    if entry.dtype.is_float() && entry.shape == shape {
        return Ok(());
    }
    let TensorEntry { dtype, shape: found, .. } = entry;
    Err(index.refuse(entry, format!("{dtype} {found:?}, expected F32, F16 or BF16 {shape:?}")))
}

fn expect_exact(index: &TensorIndex, entry: &TensorEntry, dtypes: &[Dtype], shape: &[usize]) -> Result<()> {
    if dtypes.contains(&entry.dtype) && entry.shape == shape {
        return Ok(());
    }
    let wanted = dtypes.iter().map(ToString::to_string).collect::<Vec<_>>().join(" or ");
    let TensorEntry { dtype, shape: found, .. } = entry;
    Err(index.refuse(entry, format!("{dtype} {found:?}, expected {wanted} {shape:?}")))
}

fn expect_stored_shape(index: &TensorIndex, entry: &TensorEntry, shape: [usize; 2]) -> Result<()> {
    let stored = index.read_integers(entry)?;
    let wanted = shape.map(|n| i64::try_from(n).unwrap_or(i64::MAX));
    if stored == wanted {
        return Ok(());
    }
    Err(index.refuse(entry, format!("holds {stored:?}, the packed tensor is {wanted:?}")))
}
