//! Reading captured rows where a `Propose` says they lie.

use eyrie_region::{RingError, RingGeometry, RingReader, SlotRef};
use eyrie_wire::v1::feature_ref::At;
use eyrie_wire::v1::{FeatureRef, ItemError, RingSlot};
use eyrie_wire::{Reason, item_error};

/// Where an attachment's rows are read.
#[derive(Debug)]
pub(crate) enum FeatureSource {
    /// In the target's mapped ring.
    Ring(RingReader),
    /// In the frame: the ring of this geometry cannot be mapped, and references into it that are left stand for rows that
    /// could not be had.
    Inline(RingGeometry),
}

impl FeatureSource {
    /// Values a row.
    pub(super) fn row_width(&self) -> usize {
        self.geometry().row_width as usize
    }

    fn geometry(&self) -> RingGeometry {
        match self {
            Self::Ring(ring) => ring.geometry(),
            Self::Inline(geometry) => *geometry,
        }
    }

    /// Appends `take` rows of `part`, which lie in the ring at `at`, to `rows`; false where they are gone.
    fn append(
        &self,
        part: &FeatureRef,
        at: RingSlot,
        skip: u32,
        take: u32,
        rows: &mut Vec<f32>,
    ) -> Result<bool, ItemError> {
        let slot = SlotRef { slot: at.slot, generation: at.generation, rows: part.rows };
        let ring = match self {
            Self::Ring(ring) => ring,
            Self::Inline(geometry) if at.slot < geometry.slots => return Ok(false),
            Self::Inline(geometry) => {
                let what = format!("slot must be below {}, given {}", geometry.slots, at.slot);
                return Err(invalid(part, what));
            }
        };
        let mut copied = Vec::new();
        match ring.read_rows(slot, skip, take, &mut copied) {
            Ok(()) => rows.append(&mut copied),
            Err(stale @ RingError::Stale { .. }) => {
                tracing::debug!(position = part.first + skip, "features are gone: {stale}");
                return Ok(false);
            }
            Err(other) => return Err(invalid(part, other.to_string())),
        }
        Ok(true)
    }
}

/// Copies the rows of positions `from..` below `end` that `refs` (ascending) give without a gap, row-major. It stops
/// at the first gap and at the first slot that was overwritten: what follows cannot be used without the rows before.
///
/// # Errors
/// A reference that no target of this geometry could have made, and a row with a value that is no number: slots built
/// from it would be handed on to every sequence that begins alike.
pub(super) fn collect(
    refs: &[FeatureRef],
    from: u32,
    end: u32,
    source: &FeatureSource,
) -> Result<Vec<f32>, ItemError> {
    let mut rows = Vec::new();
    let mut next = from;
    for part in refs {
        let Some(last) = part.first.checked_add(part.rows) else {
            return Err(invalid(part, format!("{} rows end past the last position", part.rows)));
        };
        if last <= next {
            continue;
        }
        if part.first > next || next >= end {
            break;
        }
        let (skip, take) = (next - part.first, last.min(end) - next);
        match &part.at {
            Some(At::Ring(at)) => {
                if !source.append(part, *at, skip, take, &mut rows)? {
                    break;
                }
            }
            Some(At::Inline(bytes)) => {
                let width = source.row_width();
                rows.extend(inline(part, bytes, width, skip as usize, take as usize)?);
            }
            None => return Err(invalid(part, "neither a ring slot nor inline rows".to_owned())),
        }
        next += take;
    }
    match rows.iter().position(|value| !value.is_finite()) {
        None => Ok(rows),
        Some(at) => {
            let position = from + (at / source.row_width()) as u32;
            let what = format!("features of position {position}: values must be finite, given {}", rows[at]);
            Err(item_error(Reason::InvalidArgument, what))
        }
    }
}

fn inline(
    part: &FeatureRef,
    bytes: &[u8],
    width: usize,
    skip: usize,
    take: usize,
) -> Result<impl Iterator<Item = f32>, ItemError> {
    let row_bytes = width * 4;
    let wanted = part.rows as usize * row_bytes;
    if bytes.len() != wanted {
        let what = format!("{} rows of {width} values need {wanted} bytes, given {}", part.rows, bytes.len());
        return Err(invalid(part, what));
    }
    let values = bytes[skip * row_bytes..(skip + take) * row_bytes].chunks_exact(4);
    Ok(values.map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])))
}

fn invalid(part: &FeatureRef, what: String) -> ItemError {
    item_error(Reason::InvalidArgument, format!("features of position {}: {what}", part.first))
}

#[cfg(test)]
mod tests {
    use super::*;
    use eyrie_region::{Epoch, RingWriter};

    const WIDTH: u32 = 2;

    fn ring() -> (RingWriter, FeatureSource) {
        let geometry = RingGeometry { slots: 2, slot_rows: 3, row_width: WIDTH };
        let epoch = Epoch::random().unwrap();
        let writer = RingWriter::create(geometry, epoch).unwrap();
        let fd = writer.fd().try_clone_to_owned().unwrap();
        let reader = RingReader::open(fd, geometry, epoch).unwrap();
        (writer, FeatureSource::Ring(reader))
    }

    /// Both values of the row of position `p` are `p`.
    fn publish(writer: &mut RingWriter, first: u32, rows: u32) -> FeatureRef {
        let values: Vec<f32> = (first..first + rows).flat_map(|p| [p as f32; WIDTH as usize]).collect();
        let slot = writer.publish(&values).unwrap();
        let at = RingSlot { slot: slot.slot, generation: slot.generation };
        FeatureRef { first, rows, at: Some(At::Ring(at)) }
    }

    fn positions(rows: &[f32]) -> Vec<u32> {
        rows.chunks(WIDTH as usize).map(|row| row[0] as u32).collect()
    }

    #[test]
    fn overlap_is_skipped_and_reading_ends_at_base_len() {
        let (mut writer, reader) = ring();
        let refs = [publish(&mut writer, 0, 3), publish(&mut writer, 2, 3)];
        assert_eq!(positions(&collect(&refs, 1, 9, &reader).unwrap()), [1, 2, 3, 4]);
        assert_eq!(positions(&collect(&refs, 1, 4, &reader).unwrap()), [1, 2, 3]);
        assert!(collect(&refs, 5, 9, &reader).unwrap().is_empty());
    }

    #[test]
    fn a_gap_or_an_overwritten_slot_ends_the_run() {
        let (mut writer, reader) = ring();
        let refs = [publish(&mut writer, 0, 2), publish(&mut writer, 3, 1)];
        assert_eq!(positions(&collect(&refs, 0, 9, &reader).unwrap()), [0, 1]);
        let third = publish(&mut writer, 4, 1);
        let refs = [refs[0].clone(), refs[1].clone(), third];
        assert!(collect(&refs, 0, 9, &reader).unwrap().is_empty(), "slot 0 was overwritten");
        assert_eq!(positions(&collect(&refs, 3, 9, &reader).unwrap()), [3, 4]);
    }

    #[test]
    fn inline_rows_are_read_and_their_length_checked() {
        let (_writer, reader) = ring();
        let bytes: Vec<u8> = [7.0f32, 7.0, 8.0, 8.0].iter().flat_map(|v| v.to_le_bytes()).collect();
        let part = |bytes: Vec<u8>| FeatureRef { first: 7, rows: 2, at: Some(At::Inline(bytes.into())) };
        assert_eq!(positions(&collect(&[part(bytes.clone())], 8, 9, &reader).unwrap()), [8]);
        let error = collect(&[part(bytes[1..].to_vec())], 7, 9, &reader).unwrap_err();
        assert!(error.message.contains("position 7") && error.message.contains("16 bytes, given 15"));
    }

    #[test]
    fn rows_that_are_no_numbers_are_refused_where_they_are_used() {
        let (mut writer, reader) = ring();
        let slot = writer.publish(&[1.0, 1.0, 2.0, f32::NEG_INFINITY, 3.0, 3.0]).unwrap();
        let at = Some(At::Ring(RingSlot { slot: slot.slot, generation: slot.generation }));
        let parts = [FeatureRef { first: 7, rows: 3, at }];
        let error = collect(&parts, 7, 10, &reader).unwrap_err();
        assert_eq!(error.reason, "INVALID_ARGUMENT");
        assert_eq!(error.message, "features of position 8: values must be finite, given -inf");
        assert_eq!(positions(&collect(&parts, 9, 10, &reader).unwrap()), [3]);
    }

    #[test]
    fn references_into_a_ring_that_is_not_mapped_are_missing_rows() {
        let (mut writer, mapped) = ring();
        let source = FeatureSource::Inline(mapped.geometry());
        let bytes: Vec<u8> = [7.0f32, 7.0].iter().flat_map(|v| v.to_le_bytes()).collect();
        let first = FeatureRef { first: 7, rows: 1, at: Some(At::Inline(bytes.into())) };
        let left = publish(&mut writer, 8, 2);
        assert_eq!(positions(&collect(&[first, left.clone()], 7, 10, &source).unwrap()), [7]);
        let at = Some(At::Ring(RingSlot { slot: 2, generation: 2 }));
        let error = collect(&[FeatureRef { at, ..left }], 8, 10, &source).unwrap_err();
        assert!(error.message.contains("slot must be below 2, given 2"), "{}", error.message);
    }

    #[test]
    fn references_no_ring_could_have_made_are_refused() {
        let (mut writer, reader) = ring();
        let good = publish(&mut writer, 0, 1);
        let slot = |slot| Some(At::Ring(RingSlot { slot, generation: 2 }));
        for bad in [
            FeatureRef { at: slot(2), ..good.clone() },
            FeatureRef { rows: 4, ..good.clone() },
            FeatureRef { rows: u32::MAX, first: 1, ..good.clone() },
            FeatureRef { at: None, ..good.clone() },
        ] {
            let at = bad.first;
            let error = collect(&[bad], at, at + 9, &reader).unwrap_err();
            assert_eq!(error.reason, "INVALID_ARGUMENT", "{error:?}");
        }
    }
}
