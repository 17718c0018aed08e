//! The command lines of the services.

use anyhow::Context;
use clap::ValueEnum;
use eyrie_checkpoint::ModelSource;
use eyrie_wire::Address;

use crate::args::{ComputeArgs, ModelArgs};
use crate::doctor;

/// A target, which captures what `draft` needs.
pub(super) fn target(
    models: &ModelArgs,
    target: &ModelSource,
    draft: Option<&ModelSource>,
    listen: &Address,
) -> anyhow::Result<Vec<String>> {
    let mut args = vec!["target".to_owned()];
    args.extend(model(target));
    args.extend(["--listen".to_owned(), listen.to_string()]);
    if let Some(draft) = draft {
        let ids = doctor::capture_set(target, draft, models.aux_convention)?;
        args.extend([
            "--aux-layers".to_owned(),
            ids.iter().map(ToString::to_string).collect::<Vec<_>>().join(","),
        ]);
    }
    let numbers = [
        ("--kv-tokens", models.kv_tokens.map(u64::from)),
        ("--prefill-chunk", models.prefill_chunk.map(u64::from)),
        ("--prefix-cache-bytes", models.prefix_cache_bytes),
        ("--max-sequences", models.max_sequences.map(u64::from)),
        ("--aux-cache-bytes", models.aux_cache_bytes),
    ];
    args.extend(given(&numbers));
    args.extend(compute(&models.compute));
    Ok(args)
}

/// A draft for all `targets`.
pub(super) fn draft(
    models: &ModelArgs,
    draft: &ModelSource,
    listen: &Address,
    targets: &[Address],
) -> Vec<String> {
    let mut args = vec!["draft".to_owned()];
    args.extend(model(draft));
    args.extend(["--listen".to_owned(), listen.to_string()]);
    for target in targets {
        args.extend(["--target".to_owned(), target.to_string()]);
    }
    args.extend(compute(&models.compute));
    args.extend(given(&[
        ("--prefix-cache-bytes", models.prefix_cache_bytes),
        ("--cache-tokens", models.draft_tokens.map(u64::from)),
        ("--max-sequences", models.max_sequences.map(u64::from)),
    ]));
    if let Some(meaning) = models.aux_convention.and_then(|m| m.to_possible_value()) {
        args.extend(["--aux-convention".to_owned(), meaning.get_name().to_owned()]);
    }
    args
}

/// The options that have a value.
fn given(numbers: &[(&str, Option<u64>)]) -> Vec<String> {
    let given = numbers.iter().filter_map(|&(name, value)| Some([name.to_owned(), value?.to_string()]));
    given.flatten().collect()
}

/// Where and how target and draft compute.
fn compute(args: &ComputeArgs) -> Vec<String> {
    let mut flags = vec!["--device".to_owned(), args.device.to_string()];
    if let Some(numbers) = args.activations {
        flags.extend(["--activations".to_owned(), numbers.name().to_owned()]);
    }
    if let Some(threads) = args.threads {
        flags.extend(["--threads".to_owned(), threads.to_string()]);
    }
    flags
}

/// A gateway over all of them.
pub(super) fn gateway(listen: &Address, targets: &[Address], drafts: &[Address]) -> Vec<String> {
    let mut args = vec!["gateway".to_owned(), "--listen".to_owned(), listen.to_string()];
    let named = [("--target", targets), ("--draft", drafts)];
    for (name, address) in named.iter().flat_map(|(name, all)| all.iter().map(move |a| (name, a))) {
        args.extend([(*name).to_owned(), address.to_string()]);
    }
    args
}

/// An address to listen on: as given if nobody is there, with a port that was free a moment ago for port 0.
pub(super) fn free_address(listen: &Address) -> anyhow::Result<Address> {
    let Address::Tcp(host_port) = listen else { return Ok(listen.clone()) };
    let socket =
        std::net::TcpListener::bind(host_port).with_context(|| format!("cannot listen on {listen}"))?;
    let (host, _) = host_port.rsplit_once(':').context("an address without a port")?;
    Ok(Address::Tcp(format!("{host}:{}", socket.local_addr()?.port())))
}

fn model(source: &ModelSource) -> [String; 2] {
    match source {
        ModelSource::Folder(dir) => ["--model".to_owned(), dir.to_string_lossy().into_owned()],
        ModelSource::Synth(spec) => ["--synth".to_owned(), spec.to_string()],
    }
}
