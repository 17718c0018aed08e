//! Device memory and device rings between processes, on a real GPU: prints a table and fails where a line of it does.
//!
//!     cargo test --release -p eyrie-region --features cuda-tests --test cuda
//!
//! The binary starts itself again as the other process, with its part in the environment.

#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "a table is what this test is for")]

mod checks;
mod other;
mod ring;
mod spec;

use std::error::Error;
use std::process::ExitCode;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use eyrie_region::{Gpu, RegionKind};

type Outcome = Result<String, Box<dyn Error>>;

/// Longer than all checks take, by far; a process that hangs must not hold the machine.
const LIMIT: Duration = Duration::from_secs(240);

fn main() -> ExitCode {
    let (done, finished) = mpsc::sync_channel(1);
    std::thread::spawn(move || done.send(spec::part().map_or_else(table, |part| play(&part))));
    finished.recv_timeout(LIMIT).unwrap_or_else(|error| {
        println!("FAIL: after at most {} s: {error}", LIMIT.as_secs());
        ExitCode::FAILURE
    })
}

/// The other process: what it has to say before an error is the parent's to judge.
fn play(part: &str) -> ExitCode {
    match other::run(part) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("error {error}");
            ExitCode::FAILURE
        }
    }
}

fn table() -> ExitCode {
    let gpu = match Gpu::open(0) {
        Ok(gpu) => gpu,
        Err(error) => {
            println!("FAIL: {error}");
            return ExitCode::FAILURE;
        }
    };
    let (free, total) = gpu.memory().unwrap();
    println!("{gpu}, driver {}, {} of {} MiB free", gpu.driver_version(), free >> 20, total >> 20);
    let mut failed = 0;
    let mut line = |name: &str, check: &dyn Fn() -> Outcome| {
        let begun = Instant::now();
        let (mark, text) = match check() {
            Ok(text) => ("ok  ", text),
            Err(error) => {
                failed += 1;
                ("FAIL", error.to_string())
            }
        };
        println!("{mark} | {name:<44} | {text} | {:.1} s", begun.elapsed().as_secs_f64());
    };
    for kind in [RegionKind::CudaVmm, RegionKind::CudaIpc] {
        match checks::Exporter::large(&gpu, kind) {
            Ok(exporter) => {
                line(&format!("{kind}: 2,240 MiB mapped, not copied"), &|| exporter.maps_without_copy());
                line(&format!("{kind}: ten importers killed"), &|| exporter.survives_killed_importers());
                line(&format!("{kind}: two importers at once"), &|| exporter.serves_two());
            }
            Err(error) => line(&format!("{kind}: 2,240 MiB exported"), &|| Err(error.to_string().into())),
        }
    }
    line("memory is given back", &|| checks::memory_returns(&gpu, free));
    line("cuda_vmm: the importer cannot write", &|| checks::importers_cannot_write(&gpu));
    line("cuda_vmm: the exporter once it has sealed", &|| checks::sealed_exporter_writes());
    line("false grants", &|| checks::false_grants(&gpu));
    line("cuda_ipc without --allow-writable-ipc", &|| checks::ipc_needs_leave(&gpu));
    line("more than was exported", &|| checks::longer_than_exported(&gpu));
    line("out of memory", &|| checks::out_of_memory(&gpu));
    for kind in [RegionKind::CudaVmm, RegionKind::CudaIpc] {
        line(&format!("{kind}: ring, 10,000 publications, a racing reader"), &|| ring::race(&gpu, kind));
    }
    line("ring: one wait a batch", &|| ring::batches(&gpu));
    line("ring: a reader in the exporter's process", &|| ring::own_reader(&gpu));
    println!("{}", if failed == 0 { "all passed".to_owned() } else { format!("{failed} FAILED") });
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
