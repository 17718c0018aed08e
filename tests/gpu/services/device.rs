//! The GPU, seen from beside the services.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use eyrie_region::{CudaError, Gpu};

pub(crate) const MIB: u64 = 1 << 20;
/// What the driver may keep for page tables, and lend in pieces of 2 MiB.
pub(crate) const TABLES: u64 = 32 * MIB;
/// For so long nothing may change in what is free before it counts.
const STEADY: Duration = Duration::from_millis(300);

/// The first GPU, by a context that computes nothing.
pub(crate) struct Device(Arc<Gpu>);

impl Device {
    pub(crate) fn open() -> Result<Self, CudaError> {
        Gpu::open(0).map(Self)
    }

    /// Bytes free now.
    pub(crate) fn free(&self) -> u64 {
        self.0.memory().unwrap().0
    }

    /// Bytes free once that no longer changes: the driver gives a killed process's memory back a little later than the
    /// kernel reports its end.
    pub(crate) async fn settled(&self) -> u64 {
        let (begun, mut since, mut free) = (Instant::now(), Instant::now(), self.free());
        while since.elapsed() < STEADY {
            assert!(begun.elapsed() < 20 * STEADY, "what is free still changes, now {} MiB", free / MIB);
            tokio::time::sleep(Duration::from_millis(10)).await;
            let now = self.free();
            if now != free {
                (since, free) = (Instant::now(), now);
            }
        }
        free
    }

    /// Waits until `wanted` bytes are free but for [`TABLES`]; returns how long it took.
    pub(crate) async fn has_again(&self, wanted: u64, within: Duration) -> Duration {
        let begun = Instant::now();
        loop {
            let free = self.free();
            if free + TABLES >= wanted {
                return begun.elapsed();
            }
            let lacking = (wanted - free) / MIB;
            assert!(begun.elapsed() < within, "{lacking} of {} MiB not free after {within:?}", wanted / MIB);
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (free, total) = self.0.memory().unwrap_or_default();
        let driver = self.0.driver_version();
        write!(f, "{}, driver {driver}, {} of {} MiB free", self.0, free / MIB, total / MIB)
    }
}

/// Smallest and largest of some amounts of memory, in MiB.
pub(crate) fn range(amounts: &[u64]) -> String {
    let (least, most) = (amounts.iter().min().unwrap(), amounts.iter().max().unwrap());
    format!("{} to {} MiB", least / MIB, most / MIB)
}
