//! Reading captured rows where a `Propose` says they lie.

use eyrie_kernels::{Activations, Backend};
use eyrie_model::Aux;
use eyrie_region::{DeviceRingReader, RingError, RingGeometry, RingReader, SlotPart, SlotRef};
use eyrie_wire::v1::feature_ref::At;
use eyrie_wire::v1::{FeatureRef, ItemError, RingSlot};
use eyrie_wire::{Reason, item_error};

/// Rows that are copied out of a GPU's ring at a time.
pub(crate) const DEVICE_ROOM: u64 = 256;

/// Where an attachment's rows are read.
#[derive(Debug)]
pub(crate) enum FeatureSource {
    /// In the target's mapped ring.
    Ring(RingReader),
    /// In the target's mapped ring on the GPU that the head computes on.
    Device(DeviceRing),
    /// In the frame: the ring of this geometry cannot be mapped, and references into it that are left stand for rows that
    /// could not be had.
    Inline(RingGeometry),
}

/// A ring whose rows never visit the host.
#[derive(Debug)]
pub(crate) struct DeviceRing {
    pub(crate) reader: DeviceRingReader,
    /// What its rows consist of.
    pub(crate) numbers: Activations,
}

/// A part of the rows that are wanted, and where it is to be had.
struct Piece<'a> {
    part: &'a FeatureRef,
    skip: u32,
    take: u32,
}

impl Piece<'_> {
    fn slot(&self, at: RingSlot) -> SlotPart {
        let published = SlotRef { slot: at.slot, generation: at.generation, rows: self.part.rows };
        SlotPart { published, first: self.skip, rows: self.take }
    }

    /// What a read of the ring came to: true where the rows are there, false where they are gone.
    fn judge(&self, read: Result<(), RingError>) -> Result<bool, ItemError> {
        match read {
            Ok(()) => Ok(true),
            Err(stale @ RingError::Stale { .. }) => {
                tracing::debug!(position = self.part.first + self.skip, "features are gone: {stale}");
                Ok(false)
            }
            Err(RingError::Region(error)) => Err(internal(error)),
            Err(other) => Err(invalid(self.part, other.to_string())),
        }
    }
}

impl FeatureSource {
    /// Values a row.
    pub(super) fn row_width(&self) -> usize {
        let geometry = match self {
            Self::Ring(ring) => ring.geometry(),
            Self::Device(ring) => ring.reader.geometry().ring,
            Self::Inline(geometry) => *geometry,
        };
        geometry.row_width as usize
    }

    /// Rows of consecutive `pieces` as tensors, up to the first that is gone.
    fn read(&mut self, pieces: &[Piece<'_>], backend: &Backend) -> Result<Vec<Aux>, ItemError> {
        let width = self.row_width();
        let (mut parts, mut values, mut queued) = (Vec::new(), Vec::new(), Vec::new());
        for piece in pieces {
            let here = match (&piece.part.at, &mut *self) {
                (Some(At::Inline(bytes)), source) => {
                    if !source.flush(&mut queued, &mut parts, backend)? {
                        break;
                    }
                    values.extend(inline(piece, bytes, width)?);
                    true
                }
                (Some(At::Ring(at)), Self::Device(_)) => {
                    push_values(&mut values, &mut parts, width, backend)?;
                    queued.push((piece, piece.slot(*at)));
                    true
                }
                (Some(At::Ring(at)), Self::Ring(ring)) => {
                    let SlotPart { published, first, rows } = piece.slot(*at);
                    let mut copied = Vec::new();
                    let read = ring.read_rows(published, first, rows, &mut copied);
                    values.append(&mut copied);
                    piece.judge(read)?
                }
                (Some(At::Ring(at)), Self::Inline(geometry)) if at.slot < geometry.slots => false,
                (Some(At::Ring(at)), Self::Inline(geometry)) => {
                    let what = format!("slot must be below {}, given {}", geometry.slots, at.slot);
                    return Err(invalid(piece.part, what));
                }
                (None, _) => {
                    return Err(invalid(piece.part, "neither a ring slot nor inline rows".to_owned()));
                }
            };
            if !here {
                break;
            }
        }
        self.flush(&mut queued, &mut parts, backend)?;
        push_values(&mut values, &mut parts, width, backend)?;
        Ok(parts)
    }

    /// Copies what is queued of a GPU's ring, a room full at a time; false where some of it is gone.
    fn flush(
        &mut self,
        queued: &mut Vec<(&Piece<'_>, SlotPart)>,
        parts: &mut Vec<Aux>,
        backend: &Backend,
    ) -> Result<bool, ItemError> {
        let queued = std::mem::take(queued);
        let Self::Device(DeviceRing { reader, numbers }) = self else { return Ok(true) };
        let room = DEVICE_ROOM.max(reader.geometry().ring.slot_rows.into());
        let mut rest = queued.as_slice();
        while !rest.is_empty() {
            let mut rows = 0;
            let fits = |(_, part): &&(&Piece<'_>, SlotPart)| {
                rows += u64::from(part.rows);
                rows <= room
            };
            // A slot fits; a part that claims more is refused by the reader.
            let count = rest.iter().take_while(fits).count().max(1);
            let (now, later) = rest.split_at(count);
            rest = later;
            let wanted: Vec<SlotPart> = now.iter().map(|&(_, part)| part).collect();
            let read = match reader.read(&wanted) {
                Ok(read) => read,
                Err(error) => return now[0].0.judge(Err(error)),
            };
            let (mut good, mut all) = (0, true);
            for ((piece, part), verdict) in now.iter().zip(read) {
                all = piece.judge(verdict)?;
                if !all {
                    break;
                }
                good += part.rows;
            }
            if good > 0 {
                let taken = backend.take_in(reader.rows(good), *numbers).map_err(internal)?;
                let width = reader.geometry().ring.row_width as usize;
                parts.push(Aux::new(taken, width).map_err(internal)?);
            }
            if !all {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// Makes a tensor of rows in host memory, if there are any.
fn push_values(
    values: &mut Vec<f32>,
    parts: &mut Vec<Aux>,
    width: usize,
    backend: &Backend,
) -> Result<(), ItemError> {
    if !values.is_empty() {
        parts.push(Aux::from_rows(backend, std::mem::take(values), width).map_err(internal)?);
    }
    Ok(())
}

/// The rows of positions `from..` below `end` that `refs` (ascending) give without a gap; `None` without any. It stops
/// at the first gap and at the first slot that was overwritten: what follows cannot be used without the rows before.
///
/// # Errors
/// A reference that no target of this geometry could have made, and a row with a value that is no number: slots built
/// from it would be handed on to every sequence that begins alike.
pub(super) fn collect(
    refs: &[FeatureRef],
    from: u32,
    end: u32,
    source: &mut FeatureSource,
    backend: &Backend,
) -> Result<Option<Aux>, ItemError> {
    let mut pieces = Vec::with_capacity(refs.len());
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
        pieces.push(Piece { part, skip, take });
        next += take;
    }
    let parts = source.read(&pieces, backend)?;
    if parts.is_empty() {
        return Ok(None);
    }
    let rows = Aux::concat(backend, &parts.iter().collect::<Vec<_>>()).map_err(internal)?;
    match backend.first_not_finite(rows.tensor()).map_err(internal)? {
        None => Ok(Some(rows)),
        Some(row) => {
            let position = from + row as u32;
            let found = rows.slice(row..row + 1).and_then(|row| row.to_vec()).map_err(internal)?;
            let given = found.into_iter().find(|value| !value.is_finite()).unwrap_or(f32::NAN);
            let what = format!("features of position {position}: values must be finite, given {given}");
            Err(item_error(Reason::InvalidArgument, what))
        }
    }
}

fn inline(piece: &Piece<'_>, bytes: &[u8], width: usize) -> Result<impl Iterator<Item = f32>, ItemError> {
    let (part, skip, take) = (piece.part, piece.skip as usize, piece.take as usize);
    let row_bytes = width * 4;
    let wanted = part.rows as usize * row_bytes;
    if bytes.len() != wanted {
        let what = format!("{} rows of {width} values need {wanted} bytes, given {}", part.rows, bytes.len());
        return Err(invalid(part, what));
    }
    let values = bytes[skip * row_bytes..(skip + take) * row_bytes].chunks_exact(4);
    Ok(values.map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])))
}

fn internal(error: impl std::fmt::Display) -> ItemError {
    item_error(Reason::Internal, format!("reading features: {error}"))
}

fn invalid(part: &FeatureRef, what: String) -> ItemError {
    item_error(Reason::InvalidArgument, format!("features of position {}: {what}", part.first))
}

#[cfg(test)]
mod tests {
    use eyrie_kernels::{Cpu, CpuOptions, Isa};
    use eyrie_region::{Epoch, RingWriter};

    use super::*;

    const WIDTH: u32 = 2;

    /// The values of the rows collected.
    fn collect(
        refs: &[FeatureRef],
        from: u32,
        end: u32,
        source: &mut FeatureSource,
    ) -> Result<Vec<f32>, ItemError> {
        let backend = Cpu::new(CpuOptions { threads: 1, isa: Isa::best() }).unwrap().into();
        let rows = super::collect(refs, from, end, source, &backend)?;
        Ok(rows.map_or_else(Vec::new, |rows| rows.to_vec().unwrap()))
    }

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
        let (mut writer, mut reader) = ring();
        let refs = [publish(&mut writer, 0, 3), publish(&mut writer, 2, 3)];
        assert_eq!(positions(&collect(&refs, 1, 9, &mut reader).unwrap()), [1, 2, 3, 4]);
        assert_eq!(positions(&collect(&refs, 1, 4, &mut reader).unwrap()), [1, 2, 3]);
        assert!(collect(&refs, 5, 9, &mut reader).unwrap().is_empty());
    }

    #[test]
    fn a_gap_or_an_overwritten_slot_ends_the_run() {
        let (mut writer, mut reader) = ring();
        let refs = [publish(&mut writer, 0, 2), publish(&mut writer, 3, 1)];
        assert_eq!(positions(&collect(&refs, 0, 9, &mut reader).unwrap()), [0, 1]);
        let third = publish(&mut writer, 4, 1);
        let refs = [refs[0].clone(), refs[1].clone(), third];
        assert!(collect(&refs, 0, 9, &mut reader).unwrap().is_empty(), "slot 0 was overwritten");
        assert_eq!(positions(&collect(&refs, 3, 9, &mut reader).unwrap()), [3, 4]);
    }

    #[test]
    fn inline_rows_are_read_and_their_length_checked() {
        let (_writer, mut reader) = ring();
        let bytes: Vec<u8> = [7.0f32, 7.0, 8.0, 8.0].iter().flat_map(|v| v.to_le_bytes()).collect();
        let part = |bytes: Vec<u8>| FeatureRef { first: 7, rows: 2, at: Some(At::Inline(bytes.into())) };
        assert_eq!(positions(&collect(&[part(bytes.clone())], 8, 9, &mut reader).unwrap()), [8]);
        let error = collect(&[part(bytes[1..].to_vec())], 7, 9, &mut reader).unwrap_err();
        assert!(error.message.contains("position 7") && error.message.contains("16 bytes, given 15"));
    }

    #[test]
    fn rows_that_are_no_numbers_are_refused_where_they_are_used() {
        let (mut writer, mut reader) = ring();
        let slot = writer.publish(&[1.0, 1.0, 2.0, f32::NEG_INFINITY, 3.0, 3.0]).unwrap();
        let at = Some(At::Ring(RingSlot { slot: slot.slot, generation: slot.generation }));
        let parts = [FeatureRef { first: 7, rows: 3, at }];
        let error = collect(&parts, 7, 10, &mut reader).unwrap_err();
        assert_eq!(error.reason, "INVALID_ARGUMENT");
        assert_eq!(error.message, "features of position 8: values must be finite, given -inf");
        assert_eq!(positions(&collect(&parts, 9, 10, &mut reader).unwrap()), [3]);
    }

    #[test]
    fn references_into_a_ring_that_is_not_mapped_are_missing_rows() {
        let (mut writer, mapped) = ring();
        let FeatureSource::Ring(mapped) = mapped else { panic!("a host's ring") };
        let mut source = FeatureSource::Inline(mapped.geometry());
        let bytes: Vec<u8> = [7.0f32, 7.0].iter().flat_map(|v| v.to_le_bytes()).collect();
        let first = FeatureRef { first: 7, rows: 1, at: Some(At::Inline(bytes.into())) };
        let left = publish(&mut writer, 8, 2);
        assert_eq!(positions(&collect(&[first, left.clone()], 7, 10, &mut source).unwrap()), [7]);
        let at = Some(At::Ring(RingSlot { slot: 2, generation: 2 }));
        let error = collect(&[FeatureRef { at, ..left }], 8, 10, &mut source).unwrap_err();
        assert!(error.message.contains("slot must be below 2, given 2"), "{}", error.message);
    }

    #[test]
    fn references_no_ring_could_have_made_are_refused() {
        let (mut writer, mut reader) = ring();
        let good = publish(&mut writer, 0, 1);
        let slot = |slot| Some(At::Ring(RingSlot { slot, generation: 2 }));
        for bad in [
            FeatureRef { at: slot(2), ..good.clone() },
            FeatureRef { rows: 4, ..good.clone() },
            FeatureRef { rows: u32::MAX, first: 1, ..good.clone() },
            FeatureRef { at: None, ..good.clone() },
        ] {
            let at = bad.first;
            let error = collect(&[bad], at, at + 9, &mut reader).unwrap_err();
            assert_eq!(error.reason, "INVALID_ARGUMENT", "{error:?}");
        }
    }
}
