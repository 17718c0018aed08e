use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::sync::{Arc, Mutex};

use super::*;
use crate::ring::RingGeometry;
use crate::{Epoch, RegionError, StreamId};

const GEOMETRY: DeviceRingGeometry =
    DeviceRingGeometry { ring: RingGeometry { slots: 4, slot_rows: 3, row_width: 8 }, value_bytes: 2 };
/// Words of 32 bits in a row, and in a slot with its padding.
const ROW: usize = 4;
const SLOT: usize = 16;

type Words = Arc<[AtomicU32]>;

/// A device that copies word by word, and not before it is waited for.
struct Fake {
    payload: Words,
    other: Words,
    writes: bool,
    begun: Mutex<Vec<(u64, u64, u64)>>,
    fails: AtomicBool,
    /// Called before the copies and after them.
    during: Option<Box<dyn Fn() + Send + Sync>>,
}

impl fmt::Debug for Fake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Fake")
    }
}

fn words(count: usize) -> Words {
    (0..count).map(|_| AtomicU32::new(0)).collect()
}

impl Fake {
    fn new(payload: &Words, writes: bool) -> Self {
        let other = words(64);
        let payload = Arc::clone(payload);
        Self { payload, other, writes, begun: Mutex::default(), fails: AtomicBool::new(false), during: None }
    }

    /// The rows of publication `n`, all of whose words are `n`, at the place for `index`.
    fn rows(&self, index: usize, n: u32, rows: u32) -> DeviceRows<'static> {
        let at = index * SLOT;
        self.other[at..at + rows as usize * ROW].iter().for_each(|word| word.store(n, Ordering::Relaxed));
        // SAFETY: an address of this fake only.
        unsafe { DeviceRows::new(4 * at as u64, rows, GEOMETRY.row_bytes(), StreamId::none()) }
    }

    fn read(&self, count: usize) -> Vec<u32> {
        self.other[..count].iter().map(|word| word.load(Ordering::Relaxed)).collect()
    }
}

impl CopyQueue for Fake {
    fn begin(&self, at: u64, other: u64, bytes: u64) -> Result<(), RegionError> {
        self.begun.lock().unwrap().push((at / 4, other / 4, bytes / 4));
        Ok(())
    }

    fn wait(&self) -> Result<(), RegionError> {
        let during = || self.during.iter().for_each(|call| call());
        during();
        if self.fails.load(Ordering::Relaxed) {
            self.begun.lock().unwrap().clear();
            return Err(RegionError::WritableIpc);
        }
        for (at, other, count) in
            self.begun.lock().unwrap().drain(..).map(|(a, o, n)| (a as usize, o as usize, n as usize))
        {
            let (payload, other) = (&self.payload[at..at + count], &self.other[other..other + count]);
            let (to, from) = if self.writes { (payload, other) } else { (other, payload) };
            to.iter()
                .zip(from)
                .for_each(|(to, from)| to.store(from.load(Ordering::Relaxed), Ordering::Relaxed));
        }
        during();
        Ok(())
    }
}

struct Ring {
    publisher: Publisher,
    writes: Fake,
    fd: OwnedFd,
    epoch: Epoch,
    payload: Words,
}

impl Ring {
    fn new() -> Self {
        let epoch = Epoch::random().unwrap();
        let (fd, block) = Block::create("test", GEOMETRY.layout().unwrap(), epoch).unwrap();
        let payload = words(GEOMETRY.payload_len().unwrap() as usize / 4);
        let writes = Fake::new(&payload, true);
        Self { publisher: Publisher::new(block, GEOMETRY), writes, fd, epoch, payload }
    }

    fn subscriber(&self) -> (Subscriber, Fake) {
        let fd = self.fd.try_clone().unwrap();
        let block = Block::open(fd, GEOMETRY.layout().unwrap(), self.epoch).unwrap();
        (Subscriber::new(block, GEOMETRY, 6), Fake::new(&self.payload, false))
    }

    fn publish(&mut self, batch: &[DeviceRows<'_>]) -> Result<Vec<SlotRef>, RingError> {
        self.publisher.publish(&self.writes, batch)
    }
}

fn whole(published: SlotRef) -> SlotPart {
    SlotPart { published, first: 0, rows: published.rows }
}

fn is_stale(verdict: &Result<(), RingError>) -> bool {
    matches!(verdict, Err(RingError::Stale { .. }))
}

#[test]
fn parts_lie_one_behind_the_other_with_a_verdict_each() {
    let mut ring = Ring::new();
    let (reader, room) = ring.subscriber();
    let batch = [ring.writes.rows(0, 1, 3), ring.writes.rows(1, 2, 1), ring.writes.rows(2, 3, 2)];
    let published = ring.publish(&batch).unwrap();
    assert_eq!(published.iter().map(|p| (p.slot, p.rows)).collect::<Vec<_>>(), [(0, 3), (1, 1), (2, 2)]);
    let parts =
        [SlotPart { first: 1, rows: 2, ..whole(published[0]) }, whole(published[1]), whole(published[2])];
    assert!(reader.read(&room, &parts).unwrap().iter().all(Result::is_ok));
    assert_eq!(room.read(5 * ROW), [[1; ROW], [1; ROW], [2; ROW], [3; ROW], [3; ROW]].concat());

    // The writer comes round to the second slot.
    let again = [ring.writes.rows(0, 4, 1), ring.writes.rows(1, 5, 1), ring.writes.rows(2, 6, 2)];
    let again = ring.publish(&again).unwrap();
    let verdicts = reader.read(&room, &[whole(published[1]), whole(again[0])]).unwrap();
    assert!(is_stale(&verdicts[0]) && verdicts[1].is_ok(), "{verdicts:?}");
    assert_eq!(room.read(2 * ROW)[ROW..], [4; ROW], "what follows a stale part stays in its place");
    assert_eq!(reader.read_slot(&room, again[2].slot, again[2].generation).unwrap(), 2);
    assert_eq!(room.read(2 * ROW), [6; 2 * ROW]);
    assert!(matches!(reader.read_slot(&room, 1, published[1].generation), Err(RingError::Stale { .. })));
}

#[test]
fn a_slot_can_be_read_only_once_its_copy_has_completed() {
    let mut ring = Ring::new();
    let first = [ring.writes.rows(0, 1, 3), ring.writes.rows(1, 2, 3), ring.writes.rows(2, 3, 3)];
    let first = ring.publish(&first).unwrap();
    let looks = Arc::new(AtomicU32::new(0));
    let seen = Arc::clone(&looks);
    let (reader, room) = ring.subscriber();
    let parts: Vec<SlotPart> = (0..2)
        .map(|at| SlotRef { slot: (3 + at) % 4, generation: 2 * (4 + u64::from(at)), rows: 1 })
        .map(whole)
        .collect();
    let (sought, old) = (parts.clone(), whole(first[0]));
    ring.writes.during = Some(Box::new(move || {
        assert!(reader.read(&room, &sought).unwrap().iter().all(is_stale), "read while it was being copied");
        assert!(
            is_stale(&reader.read(&room, &[old]).unwrap()[0]),
            "the old rows while they were overwritten"
        );
        seen.fetch_add(1, Ordering::Relaxed);
    }));
    let batch = [ring.writes.rows(0, 7, 1), ring.writes.rows(1, 8, 1)];
    let published = ring.publish(&batch).unwrap();
    assert_eq!(looks.load(Ordering::Relaxed), 2);
    assert_eq!(published.iter().copied().map(whole).collect::<Vec<_>>(), parts);
    let (reader, room) = ring.subscriber();
    assert!(reader.read(&room, &parts).unwrap().iter().all(Result::is_ok));
    assert_eq!(room.read(2 * ROW), [[7; ROW], [8; ROW]].concat());
}

#[test]
fn copies_that_failed_publish_nothing_and_the_ring_goes_on() {
    let mut ring = Ring::new();
    let (reader, room) = ring.subscriber();
    let good = ring.publish(&[ring.writes.rows(0, 1, 1)]).unwrap()[0];
    ring.writes.fails.store(true, Ordering::Relaxed);
    assert!(matches!(ring.publish(&[ring.writes.rows(0, 2, 1)]), Err(RingError::Region(_))));
    let lost = SlotRef { slot: 1, generation: 4, rows: 1 };
    let verdicts = reader.read(&room, &[whole(lost), whole(good)]).unwrap();
    assert!(is_stale(&verdicts[0]) && verdicts[1].is_ok(), "{verdicts:?}");
    ring.writes.fails.store(false, Ordering::Relaxed);
    let next = ring.publish(&[ring.writes.rows(0, 3, 1)]).unwrap()[0];
    assert_eq!((next.slot, next.generation), (2, 6), "no stamp is given twice");
    room.fails.store(true, Ordering::Relaxed);
    assert!(reader.read(&room, &[whole(next)]).is_err(), "a copy that failed is no rows");
}

#[test]
fn batches_rooms_and_references_have_limits() {
    let mut ring = Ring::new();
    let (reader, room) = ring.subscriber();
    let rows = ring.writes.rows(0, 1, 3);
    assert!(matches!(ring.publish(&[rows; 5]), Err(RingError::Batch { limit: 4, given: 5 })));
    for count in [0, 4] {
        // SAFETY: an address of this fake only.
        let wrong = unsafe { DeviceRows::new(0, count, GEOMETRY.row_bytes(), StreamId::none()) };
        let error = ring.publish(&[rows, wrong]).unwrap_err();
        assert!(matches!(error, RingError::DeviceRows { slot_rows: 3, rows } if rows == count), "{error}");
    }
    // SAFETY: as above.
    let wide = unsafe { DeviceRows::new(0, 1, 9, StreamId::none()) };
    assert!(matches!(ring.publish(&[rows, wide]), Err(RingError::RowBytes { given: 9, .. })));
    let good = ring.publish(&[rows; 4]).unwrap();
    assert_eq!(good[0].generation, 2, "a refused batch uses no stamps");
    let parts: Vec<SlotPart> = good.iter().copied().map(whole).collect();
    assert!(matches!(reader.read(&room, &parts), Err(RingError::Room { limit: 6, given: 12 })));
    for (bad, what) in [
        (SlotRef { slot: 4, ..good[0] }, "slot index"),
        (SlotRef { rows: 4, ..good[0] }, "rows"),
        (SlotRef { rows: 2, ..good[0] }, "rows"),
    ] {
        let verdict = reader.read(&room, &[SlotPart { rows: 1, ..whole(bad) }]).unwrap().remove(0);
        assert!(matches!(verdict, Err(RingError::Reference { what: w, .. }) if w == what), "{verdict:?}");
    }
    let beyond = SlotPart { first: 2, rows: 2, ..parts[0] };
    let verdict = reader.read(&room, &[beyond]).unwrap().remove(0);
    assert!(matches!(verdict, Err(RingError::Reference { what: "last row wanted", .. })), "{verdict:?}");
    assert!(matches!(reader.read_slot(&room, 4, 2), Err(RingError::Reference { .. })));
}

#[test]
fn geometries_and_headers_are_checked() {
    let ring = Ring::new();
    let open = |geometry: DeviceRingGeometry, epoch| {
        Block::open(ring.fd.try_clone().unwrap(), geometry.layout()?, epoch).map(|_| ())
    };
    open(GEOMETRY, ring.epoch).unwrap();
    let wider = DeviceRingGeometry { value_bytes: 4, ..GEOMETRY };
    let error = open(wider, ring.epoch).unwrap_err();
    assert!(matches!(error, RingError::Header { field: "value_bytes", expected: 4, found: 2 }), "{error}");
    assert!(matches!(open(GEOMETRY, Epoch::random().unwrap()), Err(RingError::StaleEpoch { .. })));
    let odd = DeviceRingGeometry { value_bytes: 3, ..GEOMETRY };
    assert!(matches!(odd.payload_len(), Err(RingError::ValueBytes { given: 3 })));
    let none = RingGeometry { slots: 0, ..GEOMETRY.ring };
    let endless = RingGeometry { slots: u32::MAX, slot_rows: u32::MAX, row_width: u32::MAX };
    for ring in [none, endless] {
        let geometry = DeviceRingGeometry { ring, ..GEOMETRY };
        assert!(matches!(geometry.payload_len(), Err(RingError::Geometry { .. })), "{geometry:?}");
    }
    assert_eq!((GEOMETRY.control_len().unwrap(), GEOMETRY.payload_len().unwrap()), (64 + 4 * 128, 4 * 64));
    // A ring with its rows in it is another thing than one without.
    let hosts = crate::RingReader::open(ring.fd.try_clone().unwrap(), GEOMETRY.ring, ring.epoch);
    assert!(hosts.is_err());
}

/// The writer comes round while a copy is on its way. What threads do to the stamps is for `tests/loom.rs` to explore, and
/// what devices do to copies for `tests/cuda`; the order of the two is held here, call by call.
#[test]
fn a_copy_that_was_overtaken_is_told() {
    let mut ring = Ring::new();
    let (reader, mut room) = ring.subscriber();
    let rows = ring.writes.rows(0, 1, 3);
    let published = ring.publish(&[rows; 2]).unwrap();
    let ring = Mutex::new(ring);
    let rounds = Arc::new(AtomicU32::new(0));
    let turn = Arc::clone(&rounds);
    room.during = Some(Box::new(move || {
        // Three publications overtake the first of the two that are read, between the reader's look and its copy.
        if turn.fetch_add(1, Ordering::Relaxed) == 0 {
            let mut ring = ring.lock().unwrap();
            let rows = ring.writes.rows(0, 9, 3);
            ring.publish(&[rows; 3]).unwrap();
        }
    }));
    let verdicts = reader.read(&room, &[whole(published[0]), whole(published[1])]).unwrap();
    assert!(is_stale(&verdicts[0]), "{verdicts:?}");
    verdicts[1].as_ref().unwrap();
    assert_eq!(
        room.read(6 * ROW),
        [[9; 3 * ROW], [1; 3 * ROW]].concat(),
        "the first was copied, and is worthless"
    );
    assert_eq!(rounds.load(Ordering::Relaxed), 2);
    let (slot, generation) = (published[1].slot, published[1].generation);
    assert_eq!(reader.read_slot(&room, slot, generation).unwrap(), 3);
}

/// As above, for a whole slot.
#[test]
fn a_slot_that_was_overtaken_is_told() {
    let mut ring = Ring::new();
    let (reader, mut room) = ring.subscriber();
    let rows = ring.writes.rows(0, 1, 1);
    let published = ring.publish(&[rows; 4]).unwrap();
    let ring = Mutex::new(ring);
    room.during = Some(Box::new(move || {
        ring.lock().unwrap().publish(&[rows]).unwrap();
    }));
    let error = reader.read_slot(&room, published[0].slot, published[0].generation).unwrap_err();
    assert!(matches!(error, RingError::Stale { slot: 0, wanted: 2, found: 10 }), "{error}");
}
