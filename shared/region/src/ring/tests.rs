use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use memmap2::MmapOptions;

use super::*;
use crate::memfd;

const SMALL: RingGeometry = RingGeometry { slots: 3, slot_rows: 4, row_width: 5 };

fn ring(geometry: RingGeometry) -> (RingWriter, RingReader) {
    let epoch = Epoch::random().unwrap();
    let writer = RingWriter::create(geometry, epoch).unwrap();
    let reader = RingReader::open(writer.fd().try_clone_to_owned().unwrap(), geometry, epoch).unwrap();
    (writer, reader)
}

#[test]
fn rows_come_back_bit_for_bit_until_their_slot_is_reused() {
    let (mut writer, reader) = ring(SMALL);
    let rows: Vec<f32> = (0..20).map(|i| i as f32 * 0.1).collect();
    let mut special = rows.clone();
    special[3] = f32::from_bits(0x7fc0_1234);
    let first = writer.publish(&special).unwrap();
    assert_eq!((first.slot, first.rows), (0, 4));
    let mut out = vec![1.0; 3];
    reader.read_into(first, &mut out).unwrap();
    let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&out), bits(&special));
    reader.read_rows(first, 1, 2, &mut out).unwrap();
    assert_eq!(out, rows[5..15]);
    reader.read_slot(0, first.generation, &mut out).unwrap();
    assert_eq!(bits(&out), bits(&special));

    let others: Vec<SlotRef> = (0..2).map(|_| writer.publish(&rows[..5]).unwrap()).collect();
    assert_eq!(others.iter().map(|r| r.slot).collect::<Vec<_>>(), [1, 2]);
    reader.read_into(first, &mut out).unwrap();
    let second = writer.publish(&rows[..10]).unwrap();
    assert_eq!((second.slot, second.rows), (0, 2));
    reader.read_slot(0, second.generation, &mut out).unwrap();
    assert_eq!(out, rows[..10], "a slot tells how many rows it holds");
    assert!(matches!(reader.read_slot(0, first.generation, &mut out), Err(RingError::Stale { .. })));
    assert!(matches!(reader.read_slot(3, 2, &mut out), Err(RingError::Reference { .. })));
    assert!(out.is_empty());
    let error = reader.read_into(first, &mut out).unwrap_err();
    assert!(
        matches!(error, RingError::Stale { slot: 0, wanted, found }
            if wanted == first.generation && found == second.generation),
        "{error}"
    );
    assert!(out.is_empty());
    reader.read_into(others[0], &mut out).unwrap();
}

#[test]
fn references_nobody_gave_out_are_refused() {
    let (mut writer, reader) = ring(SMALL);
    let good = writer.publish(&[1.0; 10]).unwrap();
    let mut out = Vec::new();
    let fresh = SlotRef { slot: 1, generation: 0, rows: 0 };
    assert!(matches!(reader.read_into(fresh, &mut out), Err(RingError::Stale { found: 0, .. })));
    for (bad, what) in [
        (SlotRef { slot: 3, ..good }, "slot index"),
        (SlotRef { rows: 5, ..good }, "rows"),
        (SlotRef { rows: 3, ..good }, "rows"),
        (SlotRef { rows: 1, ..good }, "rows"),
    ] {
        let error = reader.read_into(bad, &mut out).unwrap_err();
        assert!(matches!(error, RingError::Reference { what: w, .. } if w == what), "{error}");
        assert!(out.is_empty());
    }
    let error = reader.read_rows(good, 1, u32::MAX, &mut out).unwrap_err();
    assert!(matches!(error, RingError::Reference { what: "last row wanted", .. }), "{error}");
}

#[test]
fn a_write_cut_short_is_never_read() {
    let (mut writer, reader) = ring(SMALL);
    let good = writer.publish(&[1.0; 5]).unwrap();
    let slot = writer.ring.stamps(good.slot);
    slot.before.store(good.generation + 1, Ordering::Relaxed);
    let mut out = Vec::new();
    for generation in [good.generation, good.generation + 1, good.generation + 2] {
        let error = reader.read_into(SlotRef { generation, ..good }, &mut out).unwrap_err();
        assert!(matches!(error, RingError::Stale { .. }), "{error}");
    }
}

#[test]
fn publications_must_be_whole_rows_that_fit() {
    let (mut writer, _reader) = ring(SMALL);
    for values in [0, 4, 6, 21, 25] {
        let error = writer.publish(&vec![0.0; values]).unwrap_err();
        assert!(matches!(error, RingError::Publication { values: v, .. } if v == values), "{error}");
    }
}

#[test]
fn opening_checks_epoch_geometry_and_seals() {
    let (writer, _reader) = ring(SMALL);
    let fd = || writer.fd().try_clone_to_owned().unwrap();
    let expected = Epoch::random().unwrap();
    let error = RingReader::open(fd(), SMALL, expected).unwrap_err();
    assert!(matches!(error, RingError::StaleEpoch { found, .. } if found == writer.epoch().get()), "{error}");

    let turned = RingGeometry { slots: 3, slot_rows: 5, row_width: 4 };
    let error = RingReader::open(fd(), turned, writer.epoch()).unwrap_err();
    assert!(matches!(error, RingError::Header { field: "slot_rows", expected: 5, found: 4 }), "{error}");

    let longer = RingGeometry { slots: 4, ..SMALL };
    let error = RingReader::open(fd(), longer, writer.epoch()).unwrap_err();
    assert!(matches!(error, RingError::Region(RegionError::Length { .. })), "{error}");

    let open = memfd::create("open", SMALL.byte_len().unwrap()).unwrap();
    let error = RingReader::open(open, SMALL, writer.epoch()).unwrap_err();
    assert!(matches!(error, RingError::Region(RegionError::Unsealed { .. })), "{error}");
    assert!(MmapOptions::new().map_raw(&writer.fd).is_err(), "only the writer's own mapping may write");
}

#[test]
fn geometries_without_room_or_end_are_errors() {
    let max = u32::MAX;
    for (slots, slot_rows, row_width) in [(0, 1, 1), (1, 0, 1), (1, 1, 0), (max, max, max), (1, max, max)] {
        let geometry = RingGeometry { slots, slot_rows, row_width };
        assert!(matches!(geometry.byte_len(), Err(RingError::Geometry { .. })), "{geometry:?}");
    }
    let one = RingGeometry { slots: 1, slot_rows: 1, row_width: 1 };
    assert_eq!(one.byte_len().unwrap(), 4 * 64);
    assert_eq!(SMALL.byte_len().unwrap(), 64 + 3 * Layout::with_rows(SMALL).unwrap().slot_bytes() as u64);
}

/// A writer that never rests against readers that chase it: whatever is read without an error is one publication
/// and the right one.
#[test]
fn readers_see_whole_publications_or_nothing() {
    const PUBLICATIONS: u32 = 600_000;
    let geometry = RingGeometry { slots: 2, slot_rows: 4, row_width: 64 };
    let (mut writer, reader) = ring(geometry);
    let newest = AtomicU64::new(0);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let chase = || {
            let (mut whole, mut stale, mut out) = (0_u32, 0_u32, Vec::new());
            while !done.load(Ordering::Acquire) {
                let n = newest.load(Ordering::Acquire);
                if n == 0 {
                    continue;
                }
                let slot = ((n - 1) % u64::from(geometry.slots)) as u32;
                match reader.read_into(SlotRef { slot, generation: 2 * n, rows: 4 }, &mut out) {
                    Ok(()) => {
                        whole += 1;
                        assert_eq!(out.len(), 256);
                        assert!(
                            out.iter().all(|v| v.to_bits() == n as u32),
                            "publication {n} is torn: {out:?}"
                        );
                    }
                    Err(RingError::Stale { .. }) => stale += 1,
                    Err(other) => panic!("{other}"),
                }
            }
            (whole, stale)
        };
        let readers = [scope.spawn(chase), scope.spawn(chase)];
        for n in 1..=PUBLICATIONS {
            writer.publish(&[f32::from_bits(n); 256]).unwrap();
            newest.store(n.into(), Ordering::Release);
        }
        done.store(true, Ordering::Release);
        for reader in readers {
            let (whole, stale) = reader.join().unwrap();
            assert!(whole > 0, "no read succeeded, {stale} were stale");
        }
    });
}
