//! What the service knows of itself, shared by its handlers and the engine's thread.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock, Weak};

use eyrie_checkpoint::{Architecture, TargetCheckpoint, TargetConfig};
use eyrie_model::Progress;
use eyrie_region::{Epoch, FdDoor, Grant, Importer, Lease, LeaseTable};
use eyrie_wire::v1::{LeaseHolder, LoadReport, LoadState, ModelCard};
use eyrie_wire::{MAX_VERIFY_ROWS, PROTOCOL_VERSION};

use crate::engine::{Exports, Gauges};
use crate::files::Files;
use crate::importers::Importers;
use crate::plan::Plan;
use crate::rpc::Copies;

/// State of one boot of the service.
pub(crate) struct State {
    pub(crate) epoch: Epoch,
    pub(crate) plan: Plan,
    pub(crate) files: Files,
    pub(crate) leases: LeaseTable,
    pub(crate) importers: Importers,
    pub(crate) gauges: Arc<Gauges>,
    // Weak: handlers of dying connections may outlive the service, its socket file must not.
    door: Weak<FdDoor>,
    config: TargetConfig,
    name: String,
    loaded_bytes: AtomicU64,
    total_bytes: AtomicU64,
    formats: OnceLock<String>,
    fingerprint: OnceLock<String>,
    exports: OnceLock<Exports>,
    copies: OnceLock<Copies>,
    failure: OnceLock<String>,
}

impl State {
    pub(crate) fn new(
        name: String,
        checkpoint: &TargetCheckpoint,
        plan: Plan,
        files: Files,
        epoch: Epoch,
        importers: Importers,
        door: Weak<FdDoor>,
    ) -> Self {
        Self {
            epoch,
            plan,
            files,
            leases: LeaseTable::new(),
            importers,
            gauges: Arc::new(Gauges::new()),
            door,
            config: checkpoint.config().clone(),
            name,
            loaded_bytes: AtomicU64::new(0),
            total_bytes: AtomicU64::new(checkpoint.account().loaded.bytes),
            formats: OnceLock::new(),
            fingerprint: OnceLock::new(),
            exports: OnceLock::new(),
            copies: OnceLock::new(),
            failure: OnceLock::new(),
        }
    }

    /// Notes how far loading is.
    pub(crate) fn progress(&self, progress: Progress) {
        self.loaded_bytes.store(progress.bytes_done, Relaxed);
        self.total_bytes.store(progress.bytes_total, Relaxed);
    }

    /// Notes that the model is loaded, what it exports and what it is.
    pub(crate) fn loaded(&self, exports: Exports, copies: Copies, formats: String, fingerprint: String) {
        let _ = self.formats.set(formats);
        let _ = self.fingerprint.set(fingerprint);
        let _ = self.copies.set(copies);
        let _ = self.exports.set(exports);
    }

    /// Identity of the model; empty until it is loaded.
    pub(crate) fn fingerprint(&self) -> &str {
        self.fingerprint.get().map_or("", String::as_str)
    }

    /// What is exported, once loaded.
    pub(crate) fn exports(&self) -> Option<&Exports> {
        self.exports.get()
    }

    /// What is exported, for those who cannot map it, once loaded.
    pub(crate) fn copies(&self) -> Option<&Copies> {
        self.copies.get()
    }

    /// The door that hands out what is exported, while the service stands.
    pub(crate) fn door(&self) -> Option<Arc<FdDoor>> {
        self.door.upgrade()
    }

    /// Notes why the engine failed.
    pub(crate) fn failed(&self, why: String) {
        let _ = self.failure.set(why);
    }

    /// Why the engine failed, if it did.
    pub(crate) fn failure(&self) -> Option<&str> {
        self.failure.get().map(String::as_str)
    }

    pub(crate) fn card(&self, draining: bool) -> ModelCard {
        let grant = self.exports().map(|exports| &exports.grant);
        let state = match (grant, draining) {
            (_, true) => LoadState::Draining,
            (Some(_), false) => LoadState::Serving,
            (None, false) => LoadState::Loading,
        };
        let leases = self.leases.holders().into_iter();
        ModelCard {
            protocol_version: PROTOCOL_VERSION,
            state: state as i32,
            loaded_bytes: self.loaded_bytes.load(Relaxed),
            total_bytes: self.total_bytes.load(Relaxed),
            epoch: self.epoch.get(),
            name: self.name.clone(),
            architecture: architecture_name(self.config.architecture).to_owned(),
            fingerprint: self.fingerprint().to_owned(),
            vocab_size: self.plan.vocab,
            hidden_size: self.hidden_size(),
            layers: self.layers(),
            context_length: self.plan.context,
            max_verify_rows: MAX_VERIFY_ROWS as u32,
            max_sequences: self.plan.max_sequences as u32,
            kv_capacity: self.plan.kv_tokens as u64,
            eos_ids: self.config.eos_token_ids.clone(),
            aux_layers: self.plan.capture.clone(),
            files: self.files.infos().to_vec(),
            shared_bytes: grant.map_or(0, |grant: &Grant| grant.bytes),
            shared_kind: grant.map_or_else(String::new, |grant| grant.kind.to_string()),
            leases: leases
                .map(|Lease { holder, pid, remote, .. }| LeaseHolder { holder, pid, remote })
                .collect(),
            defaults: Some(self.files.generation_defaults()),
            pid: std::process::id(),
            weight_formats: self.formats.get().cloned().unwrap_or_default(),
            left_behind: self.importers.left_behind().iter().map(left_behind).collect(),
        }
    }

    pub(crate) fn load_report(&self) -> LoadReport {
        LoadReport {
            kv_capacity: self.plan.kv_tokens as u64,
            leases: self.leases.holders().len() as u32,
            ..self.gauges.report()
        }
    }

    pub(crate) fn hidden_size(&self) -> u32 {
        self.config.hidden_size as u32
    }

    pub(crate) fn layers(&self) -> u32 {
        self.config.num_hidden_layers as u32
    }
}

fn left_behind(importer: &Importer) -> LeaseHolder {
    LeaseHolder { holder: importer.holder.clone(), pid: importer.pid, remote: false }
}

fn architecture_name(architecture: Architecture) -> &'static str {
    match architecture {
        Architecture::DeepseekV2 => "DeepseekV2ForCausalLM",
        Architecture::DeepseekV3 => "DeepseekV3ForCausalLM",
        Architecture::KimiK25 => "KimiK25ForConditionalGeneration",
    }
}
