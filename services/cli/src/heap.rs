//! What a burst of requests has left in the heap is given back once it is over.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// How often a service looks at itself.
const LOOK: Duration = Duration::from_millis(500);
/// Processor time between two looks up to which a service rests.
const REST: Duration = Duration::from_millis(2);
/// Processor time after which a heap is worth trimming.
const WORK: Duration = Duration::from_millis(5);

/// Trims the heap each time that work has ended. While there is work the pages are about to be used again.
pub(crate) async fn trim_when_idle() {
    let mut trimmed = processor_time();
    let mut before = trimmed;
    loop {
        tokio::time::sleep(LOOK).await;
        let now = processor_time();
        let rests = now.saturating_sub(before) <= REST;
        before = now;
        if rests && now.saturating_sub(trimmed) > WORK {
            // It waits for the heap's locks and the kernel.
            let _ = tokio::task::spawn_blocking(eyrie_region::trim_heap).await;
            // The trim itself is no work.
            trimmed = processor_time();
        }
    }
}

/// What all threads of this process have used.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}
