//! A7: every interleaving, and every value that the memory model lets a load return, of one slot's writer and reader.
//!
//! The file of the product itself is compiled here over loom's atomics. Each test of a weakened ordering must find a
//! torn copy, which shows that the model sees what the ordering is for.
#![expect(clippy::unwrap_used, reason = "a failure here is a failed test")]

#[path = "../src/ring/seqlock.rs"]
mod seqlock;

use std::panic::{AssertUnwindSafe, catch_unwind};

use loom::sync::Arc;
use loom::thread;

use self::atomic::{AtomicU32, AtomicU64, Weakness};
use self::seqlock::{Seqlock, Stamps};

/// Loom's atomics, with one ordering of the protocol taken away on demand.
mod atomic {
    use std::cell::Cell;

    use loom::sync::atomic as model;

    pub(crate) use loom::sync::atomic::{AtomicU32, Ordering};

    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub(crate) enum Weakness {
        None,
        ReleaseFence,
        AcquireFences,
        ReleaseStores,
    }

    thread_local! {
        // Loom runs all threads of a model on the thread that checks it.
        static WEAKNESS: Cell<Weakness> = const { Cell::new(Weakness::None) };
    }

    pub(crate) fn weaken(weakness: Weakness) {
        WEAKNESS.set(weakness);
    }

    pub(crate) fn fence(ordering: Ordering) {
        match (WEAKNESS.get(), ordering) {
            (Weakness::ReleaseFence, Ordering::Release) | (Weakness::AcquireFences, Ordering::Acquire) => {}
            _ => model::fence(ordering),
        }
    }

    #[derive(Debug, Default)]
    pub(crate) struct AtomicU64(model::AtomicU64);

    impl AtomicU64 {
        pub(crate) fn load(&self, ordering: Ordering) -> u64 {
            self.0.load(ordering)
        }

        pub(crate) fn store(&self, value: u64, ordering: Ordering) {
            match WEAKNESS.get() {
                Weakness::ReleaseStores => self.0.store(value, Ordering::Relaxed),
                _ => self.0.store(value, ordering),
            }
        }
    }
}

/// The words of one slot.
#[derive(Default)]
struct Slot {
    before: AtomicU64,
    rows: AtomicU32,
    payload: [AtomicU32; 2],
    after: AtomicU64,
}

impl Slot {
    fn lock(&self) -> Seqlock<'_> {
        let stamps = Stamps { before: &self.before, rows: &self.rows, after: &self.after };
        Seqlock { stamps, payload: &self.payload }
    }

    /// Publication `n`: all of its words are `n`.
    fn publish(&self, n: u32) {
        self.lock().write(2 * u64::from(n), n, &[f32::from_bits(n); 2]);
    }

    /// Publication `n`, if it is there; panics where a copy that passed is not whole.
    fn read(&self, n: u32) -> bool {
        let mut words = Vec::new();
        let Ok(rows) = self.lock().read(2 * u64::from(n), 0..2, &mut words) else { return false };
        let bits: Vec<u32> = words.iter().map(|word| word.to_bits()).collect();
        assert_eq!((rows, bits.as_slice()), (n, &[n, n][..]), "publication {n} is torn");
        true
    }
}

/// Explores a writer that publishes 1 before and 2 while the reader looks for `wanted`; returns whether a read passed.
fn explore(weakness: Weakness, wanted: u32) -> bool {
    let passed = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let seen = std::sync::Arc::clone(&passed);
    let model = loom::model::Builder::new();
    model.check(move || {
        atomic::weaken(weakness);
        let slot = Arc::new(Slot::default());
        slot.publish(1);
        let writing = Arc::clone(&slot);
        let writer = thread::spawn(move || writing.publish(2));
        if slot.read(wanted) {
            seen.store(true, std::sync::atomic::Ordering::Relaxed);
        }
        writer.join().unwrap();
        assert!(slot.read(2) && !slot.read(1), "after the writer only its last publication is there");
    });
    passed.load(std::sync::atomic::Ordering::Relaxed)
}

#[test]
fn a_copy_that_passes_is_whole_in_every_execution() {
    for wanted in [1, 2] {
        assert!(explore(Weakness::None, wanted), "publication {wanted} is read in some execution");
    }
}

#[test]
fn every_ordering_of_the_protocol_is_needed() {
    for weakness in [Weakness::ReleaseFence, Weakness::AcquireFences, Weakness::ReleaseStores] {
        let torn = [1, 2].into_iter().any(|wanted| {
            let found = catch_unwind(AssertUnwindSafe(|| explore(weakness, wanted)));
            found.is_err_and(|why| {
                let line = why.downcast_ref::<String>().cloned().unwrap_or_default();
                assert!(line.contains("is torn"), "{weakness:?}: {line}");
                true
            })
        });
        assert!(torn, "{weakness:?} was not missed");
    }
}
