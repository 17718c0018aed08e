//! A small pool of threads that share out the parts of one job at a time.
//!
//! Parts are claimed, not assigned: a worker that sleeps or lost its core leaves its part to the
//! caller. Idle workers spin for a moment, so that the next kernel of a step starts at once, then park.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering::*};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle, Thread};
use std::time::{Duration, Instant};

use crate::error::{KernelError, Result};

const SPIN: Duration = Duration::from_micros(40);
const SPINS_PER_CLOCK: usize = 32;

struct Job<'a> {
    body: &'a (dyn Fn(usize) + Sync),
}

/// Generation, parts and next unclaimed part of the current job in one word, so that a claim can
/// succeed only while its job is alive.
#[derive(Clone, Copy)]
struct Ticket(u64);

impl Ticket {
    const BITS: u32 = 12;
    const MASK: u64 = (1 << Ticket::BITS) - 1;

    fn new(generation: u64, parts: usize) -> Ticket {
        Ticket(generation << (2 * Ticket::BITS) | (parts as u64 & Ticket::MASK) << Ticket::BITS)
    }

    fn generation(self) -> u64 {
        self.0 >> (2 * Ticket::BITS)
    }

    fn open(self) -> Option<usize> {
        let next = self.0 & Ticket::MASK;
        (next < (self.0 >> Ticket::BITS & Ticket::MASK)).then_some(next as usize)
    }
}

#[derive(Debug)]
struct State {
    ticket: AtomicU64,
    job: AtomicPtr<()>,
    done: AtomicUsize,
    panicked: AtomicBool,
    waiter: Mutex<Option<Thread>>,
    waiting: AtomicBool,
    parked: Vec<AtomicBool>,
    closing: AtomicBool,
}

impl State {
    /// Claims and runs parts until none is left; returns whether it ran any.
    fn work(&self) -> bool {
        let mut any = false;
        loop {
            let ticket = Ticket(self.ticket.load(Acquire));
            let Some(part) = ticket.open() else { return any };
            let job = self.job.load(Relaxed).cast::<Job<'_>>();
            if self.ticket.compare_exchange(ticket.0, ticket.0 + 1, AcqRel, Relaxed).is_err() {
                continue;
            }
            // SAFETY: the exchange succeeded, so part `part` of this generation was open: `run` of that
            // generation has not returned and waits for this part, and `job` was loaded before the next
            // generation could store its own.
            let body = unsafe { (*job).body };
            if catch_unwind(AssertUnwindSafe(|| body(part))).is_err() {
                self.panicked.store(true, Relaxed);
            }
            any = true;
            self.done.fetch_add(1, SeqCst);
            if self.waiting.load(SeqCst)
                && let Some(caller) = self.waiter.lock().unwrap_or_else(PoisonError::into_inner).as_ref()
            {
                caller.unpark();
            }
        }
    }

    fn idle(&self) -> bool {
        Ticket(self.ticket.load(SeqCst)).open().is_none() && !self.closing.load(SeqCst)
    }

    fn worker(&self, index: usize) {
        while !self.closing.load(Acquire) {
            if self.work() || spin_while(|| self.idle()) {
                continue;
            }
            self.parked[index].store(true, SeqCst);
            while self.idle() && self.parked[index].load(SeqCst) {
                thread::park();
            }
            self.parked[index].store(false, SeqCst);
        }
    }

    fn wait(&self, parts: usize) {
        let unfinished = || self.done.load(SeqCst) < parts;
        if !unfinished() || spin_while(unfinished) {
            return;
        }
        *self.waiter.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread::current());
        self.waiting.store(true, SeqCst);
        while unfinished() {
            thread::park();
        }
        self.waiting.store(false, SeqCst);
    }
}

/// Spins for at most [`SPIN`]; true when the condition ended.
fn spin_while(condition: impl Fn() -> bool) -> bool {
    let start = Instant::now();
    loop {
        for _ in 0..SPINS_PER_CLOCK {
            if !condition() {
                return true;
            }
            std::hint::spin_loop();
        }
        if start.elapsed() > SPIN {
            return false;
        }
    }
}

#[derive(Debug)]
pub(super) struct Pool {
    state: Arc<State>,
    workers: Vec<JoinHandle<()>>,
    running: Mutex<()>,
}

impl Pool {
    pub(super) fn start(threads: usize) -> Result<Pool> {
        let state = Arc::new(State {
            ticket: AtomicU64::new(0),
            job: AtomicPtr::new(std::ptr::null_mut()),
            done: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
            waiter: Mutex::new(None),
            waiting: AtomicBool::new(false),
            parked: (1..threads).map(|_| AtomicBool::new(false)).collect(),
            closing: AtomicBool::new(false),
        });
        let mut pool = Pool { state, workers: Vec::new(), running: Mutex::new(()) };
        for index in 0..threads - 1 {
            let state = Arc::clone(&pool.state);
            let worker = thread::Builder::new()
                .name(format!("kernel-{}", index + 1))
                .spawn(move || state.worker(index))
                .map_err(|source| KernelError::Spawn { index: index + 1, threads, source })?;
            pool.workers.push(worker);
        }
        Ok(pool)
    }

    /// Runs `body(0)` to `body(parts - 1)`, each once, and returns when all have ended.
    pub(super) fn run(&self, parts: usize, body: &(dyn Fn(usize) + Sync)) -> Result<()> {
        // A pool in use by another thread is not waited for: the caller's own core is free.
        let guard = if parts > 1 { self.running.try_lock().ok() } else { None };
        if guard.is_none() || self.workers.is_empty() || parts as u64 > Ticket::MASK {
            let all = catch_unwind(AssertUnwindSafe(|| (0..parts).for_each(body)));
            return all.map_err(|_| KernelError::Panicked);
        }
        let state = &*self.state;
        let job = Job { body };
        state.done.store(0, Relaxed);
        state.panicked.store(false, Relaxed);
        state.job.store((&raw const job).cast_mut().cast(), Relaxed);
        let generation = Ticket(state.ticket.load(Relaxed)).generation() + 1;
        state.ticket.store(Ticket::new(generation, parts).0, SeqCst);
        for (worker, parked) in self.workers.iter().zip(&state.parked).take(parts - 1) {
            if parked.swap(false, SeqCst) {
                worker.thread().unpark();
            }
        }
        state.work();
        state.wait(parts);
        if state.panicked.load(Relaxed) { Err(KernelError::Panicked) } else { Ok(()) }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.state.closing.store(true, SeqCst);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // A worker catches the panics of its jobs, so a join error has nothing to add.
            let _ = worker.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(hits: &AtomicUsize) {
        hits.fetch_add(1, Relaxed);
    }

    #[test]
    fn every_part_runs_once() {
        for threads in 1..=4 {
            let pool = Pool::start(threads).unwrap();
            for round in 0..2000 {
                let parts = 1 + round % 5;
                let hits: Vec<_> = (0..parts).map(|_| AtomicUsize::new(0)).collect();
                pool.run(parts, &|part| count(&hits[part])).unwrap();
                assert!(hits.iter().all(|h| h.load(Relaxed) == 1), "threads {threads} parts {parts}");
            }
        }
    }

    #[test]
    fn a_panic_is_an_error_and_the_pool_goes_on() {
        for threads in 1..=3 {
            let pool = Pool::start(threads).unwrap();
            for bad in 0..3 {
                let result = pool.run(3, &|part| assert_ne!(part, bad, "deliberate"));
                assert!(matches!(result, Err(KernelError::Panicked)), "threads {threads}");
            }
            pool.run(3, &|_| ()).unwrap();
        }
    }

    #[test]
    fn callers_on_several_threads_do_not_block_each_other() {
        let pool = Pool::start(2).unwrap();
        let hits = AtomicUsize::new(0);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..500 {
                        pool.run(3, &|_| count(&hits)).unwrap();
                    }
                });
            }
        });
        assert_eq!(hits.load(Relaxed), 4 * 500 * 3);
    }

    #[test]
    fn a_nested_run_completes() {
        let pool = Pool::start(2).unwrap();
        let hits = AtomicUsize::new(0);
        pool.run(2, &|_| pool.run(2, &|_| count(&hits)).unwrap()).unwrap();
        assert_eq!(hits.load(Relaxed), 4);
    }

    #[test]
    fn idle_workers_park() {
        let pool = Pool::start(3).unwrap();
        let deadline = Instant::now() + Duration::from_secs(20);
        pool.run(3, &|_| ()).unwrap();
        while !pool.state.parked.iter().all(|p| p.load(SeqCst)) {
            assert!(Instant::now() < deadline, "workers never parked");
            thread::yield_now();
        }
        pool.run(3, &|_| ()).unwrap();
    }
}
