//! The services on a GPU, as processes of their own: prints a table and fails where a line of it does.
//!
//!     cargo test --release -p eyrie --features cuda,gpu-tests --test gpu [PART OF A NAME]

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a table is what this test is for"
)]

mod crashes;
mod device;
mod memory;
mod namespaces;
mod services;

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use device::Device;
use tokio::runtime::Runtime;

/// The binary under test.
const EYRIE: &str = env!("CARGO_BIN_EXE_eyrie");

/// Longer than any check takes, by far.
const LIMIT: Duration = Duration::from_secs(100);

struct Table {
    runtime: Runtime,
    /// Part of the names of the checks to run.
    wanted: String,
    run: usize,
    failed: usize,
}

impl Table {
    fn line(&mut self, name: &str, check: impl Future<Output = String>) {
        if !name.contains(&self.wanted) {
            return;
        }
        self.run += 1;
        let begun = Instant::now();
        let bounded = async {
            let done = tokio::time::timeout(LIMIT, check).await;
            done.unwrap_or_else(|_| panic!("not over after {} s", LIMIT.as_secs()))
        };
        // What a failed check has started ends while its panic unwinds.
        let (mark, text) = match catch_unwind(AssertUnwindSafe(|| self.runtime.block_on(bounded))) {
            Ok(text) => ("ok  ", text),
            Err(panic) => {
                self.failed += 1;
                ("FAIL", message(panic.as_ref()))
            }
        };
        println!("{mark} | {name:<56} | {text} | {:.1} s", begun.elapsed().as_secs_f64());
    }
}

/// The first line of what a panic said.
fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("it panicked");
    text.lines().next().unwrap_or_default().to_owned()
}

fn main() -> ExitCode {
    let device = match Device::open() {
        Ok(device) => device,
        Err(error) => {
            println!("FAIL: {error}");
            return ExitCode::FAILURE;
        }
    };
    println!("{device}");
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let wanted = std::env::args().nth(1).unwrap_or_default();
    let mut table = Table { runtime: runtime.unwrap(), wanted, run: 0, failed: 0 };
    table.line("bundled pair: what drafts own, one and two", memory::bundled_pair(&device));
    table.line("head of 163,840 x 7,168: what a draft owns", memory::large_head(&device));
    table.line("ten drafts killed beside running streams", crashes::ten_drafts(&device));
    table.line("target killed in a stream", crashes::target_in_a_stream(&device));
    table.line("target killed under a head of 163,840 x 7,168", crashes::target_with_large_head(&device));
    table.line("cuda_ipc without --allow-writable-ipc", memory::handle_without_leave(&device));
    table.line("cuda_ipc with it, and a killed draft", memory::handle_with_leave(&device));
    for kind in ["cuda_vmm", "cuda_ipc"] {
        for space in namespaces::ALL {
            table.line(&format!("{kind}: a draft in {}", space.name), namespaces::draft_in(kind, space));
        }
    }
    println!(
        "see  | another GPU, a stale epoch, a wrong checksum by name     | false grants in shared/region/tests/cuda"
    );
    match (table.run, table.failed) {
        (0, _) => println!("FAIL: no name contains {:?}", table.wanted),
        (_, 0) => println!("all passed"),
        (_, failed) => println!("{failed} FAILED"),
    }
    if table.run > 0 && table.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
