//! The protocol under every fault that can be thought of: thousands of seeds, each a little fleet with real gateway and
//! real target code on one thread and a clock of its own. See [`scenario`] for what may happen and [`world`] for what must
//! hold. `EYRIE_SEED=n` runs that seed alone and prints its trace.
#![cfg_attr(test, expect(clippy::disallowed_methods, reason = "the tasks of a seed end with its runtime"))]

#[cfg(test)]
mod client;
#[cfg(test)]
mod draft;
#[cfg(test)]
mod lm;
#[cfg(test)]
mod net;
#[cfg(test)]
mod rng;
#[cfg(test)]
mod rude;
#[cfg(test)]
mod scenario;
#[cfg(test)]
mod trace;
#[cfg(test)]
mod world;

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::ops::Range;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

    use crate::lm::Fixture;
    use crate::world::run;

    const SEEDS: Range<u64> = 0..3000;
    const THREADS: usize = 2;
    /// What has to happen often for the seeds to mean something.
    const COMMON: [&str; 15] = [
        "finished",
        "failed",
        "left",
        "accepted",
        "needs",
        "breaks",
        "target deaths",
        "doubled",
        "swapped",
        "replayed",
        "preempted",
        "prefix hits",
        "repeated in peace",
        "rude rounds",
        "nonsense refused",
    ];

    /// The seeds to run: all, the one in `EYRIE_SEED`, or the range `a..b` there.
    fn seeds() -> Range<u64> {
        let Ok(given) = std::env::var("EYRIE_SEED") else { return SEEDS };
        let number =
            |text: &str| text.parse::<u64>().expect("EYRIE_SEED is a number, or two with .. between");
        match given.split_once("..") {
            Some((from, to)) => number(from)..number(to),
            None => number(&given)..number(&given) + 1,
        }
    }

    /// The first seed that fails, if one does, and what happened in all.
    fn run_all(seeds: Range<u64>, fixture: &Arc<Fixture>) -> (Option<u64>, BTreeMap<&'static str, u64>) {
        let (next, failed) = (AtomicU64::new(seeds.start), AtomicU64::new(u64::MAX));
        let worker = || {
            let mut counts = BTreeMap::<&str, u64>::new();
            loop {
                let seed = next.fetch_add(1, Relaxed);
                if seed >= seeds.end || failed.load(Relaxed) < seed {
                    return counts;
                }
                let outcome = run(seed, fixture, false);
                if outcome.result.is_err() {
                    failed.fetch_min(seed, Relaxed);
                }
                for (what, n) in outcome.counts {
                    *counts.entry(what).or_default() += n;
                }
            }
        };
        let counts = std::thread::scope(|scope| {
            let workers: Vec<_> = (0..THREADS).map(|_| scope.spawn(worker)).collect();
            let mut all = BTreeMap::<&'static str, u64>::new();
            for worker in workers {
                for (what, n) in worker.join().unwrap() {
                    *all.entry(what).or_default() += n;
                }
            }
            all
        });
        (Some(failed.into_inner()).filter(|&seed| seed < u64::MAX), counts)
    }

    /// P1, P2, P3, A1, A12: whatever happens, every request ends with its plain tokens or one allowed status, and
    /// then nothing is held.
    #[test]
    fn whatever_happens_tokens_are_plain_and_nothing_is_held() {
        let (seeds, fixture) = (seeds(), Arc::new(Fixture::load()));
        let (failed, counts) = run_all(seeds.clone(), &fixture);
        if let Some(seed) = failed {
            let outcome = run(seed, &fixture, true);
            panic!("{}\nEYRIE_SEED={seed}: {:?}", outcome.trace, outcome.result);
        }
        if seeds.end - seeds.start == 1 {
            println!("{}", run(seeds.start, &fixture, true).trace);
        }
        let lines: Vec<String> = counts.iter().map(|(what, n)| format!("{what} {n}")).collect();
        println!("{seeds:?}: {}", lines.join(", "));
        if seeds == SEEDS {
            for what in COMMON {
                assert!(counts.get(what).is_some_and(|&n| n > 100), "hardly anything {what}: {counts:?}");
            }
        }
    }

    /// The same seed makes the same course, to the last message.
    #[test]
    fn a_seed_has_one_course() {
        let fixture = Arc::new(Fixture::load());
        for seed in 0..40 {
            let (one, two) = (run(seed, &fixture, true), run(seed, &fixture, true));
            let differs = one.trace.lines().zip(two.trace.lines()).find(|(one, two)| one != two);
            assert!(one.trace == two.trace, "seed {seed} is not deterministic: {differs:#?}");
            assert!(one.trace.lines().count() > 10);
        }
    }
}
