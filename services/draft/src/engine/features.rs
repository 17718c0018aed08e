//! Reading captured rows where a `Propose` says they lie.

use std::collections::VecDeque;
use std::fmt;

use candle_core::Tensor;
use eyrie_kernels::{Activations, Backend, KernelError};
use eyrie_model::{Aux, ModelError};
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
    Device(Box<dyn DeviceSource>),
    /// In the frame: the ring of this geometry cannot be mapped, and references into it that are left stand for rows that
    /// could not be had.
    Inline(RingGeometry),
}

/// A ring whose rows never visit the host.
pub(crate) trait DeviceSource: fmt::Debug + Send {
    fn geometry(&self) -> RingGeometry;

    /// Rows that can be read at a time.
    fn room(&self) -> u64;

    /// Reads `parts`, as [`DeviceRingReader::read`].
    fn read(&mut self, parts: &[SlotPart]) -> Result<Vec<Result<(), RingError>>, RingError>;

    /// The first `rows` rows of the last read; where a part was not there they are whatever was.
    fn take_in(&self, rows: u32, backend: &Backend) -> Result<Tensor, KernelError>;
}

/// The target's ring on the GPU.
#[derive(Debug)]
pub(crate) struct DeviceRing {
    pub(crate) reader: DeviceRingReader,
    /// What its rows consist of.
    pub(crate) numbers: Activations,
}

impl DeviceSource for DeviceRing {
    fn geometry(&self) -> RingGeometry {
        self.reader.geometry().ring
    }

    fn room(&self) -> u64 {
        DEVICE_ROOM.max(self.geometry().slot_rows.into())
    }

    fn read(&mut self, parts: &[SlotPart]) -> Result<Vec<Result<(), RingError>>, RingError> {
        self.reader.read(parts)
    }

    fn take_in(&self, rows: u32, backend: &Backend) -> Result<Tensor, KernelError> {
        backend.take_in(self.reader.rows(rows), self.numbers)
    }
}

/// Rows that a round wants: those of positions `from..` below `end`, where `refs` (ascending) say they lie.
#[derive(Debug, Clone, Copy)]
pub(super) struct Request<'a> {
    pub(super) refs: &'a [FeatureRef],
    pub(super) from: u32,
    pub(super) end: u32,
}

/// A part of the rows that are wanted, and where it is to be had.
#[derive(Debug, Clone, Copy)]
struct Piece<'a> {
    part: &'a FeatureRef,
    skip: u32,
    take: u32,
}

impl<'a> Request<'a> {
    /// The parts that give the rows without a gap.
    fn pieces(&self) -> Result<Vec<Piece<'a>>, ItemError> {
        let mut pieces = Vec::with_capacity(self.refs.len());
        let mut next = self.from;
        for part in self.refs {
            let Some(last) = part.first.checked_add(part.rows) else {
                return Err(invalid(part, format!("{} rows end past the last position", part.rows)));
            };
            if last <= next {
                continue;
            }
            if part.first > next || next >= self.end {
                break;
            }
            let (skip, take) = (next - part.first, last.min(self.end) - next);
            pieces.push(Piece { part, skip, take });
            next += take;
        }
        Ok(pieces)
    }

    /// Refuses rows with a value that is no number: slots built from it would be handed on to every sequence that begins
    /// alike.
    fn check(&self, rows: &Aux, backend: &Backend) -> Result<(), ItemError> {
        let Some(row) = backend.first_not_finite(rows.tensor()).map_err(internal)? else { return Ok(()) };
        let found = rows.slice(row..row + 1).and_then(|row| row.to_vec()).map_err(internal)?;
        let given = found.into_iter().find(|value| !value.is_finite()).unwrap_or(f32::NAN);
        let position = self.from + row as u32;
        let what = format!("features of position {position}: values must be finite, given {given}");
        Err(item_error(Reason::InvalidArgument, what))
    }
}

impl Piece<'_> {
    fn slot(&self, at: RingSlot) -> SlotPart {
        let published = SlotRef { slot: at.slot, generation: at.generation, rows: self.part.rows };
        SlotPart { published, first: self.skip, rows: self.take }
    }

    /// Its rows where a read found them; `None` where they are gone.
    fn judge<T>(&self, read: Result<Option<T>, Unread>) -> Result<Option<T>, ItemError> {
        read.map_err(|unread| match unread {
            Unread::Refused(what) => invalid(self.part, what),
            Unread::Failed(what) => internal(what),
        })
    }

    /// Its rows in host memory; `None` where they are gone.
    fn read_on_host(&self, source: &FeatureSource) -> Result<Option<Vec<f32>>, ItemError> {
        let width = source.row_width();
        match (&self.part.at, source) {
            (Some(At::Inline(bytes)), _) => Ok(Some(inline(self, bytes, width)?.collect())),
            (Some(At::Ring(at)), FeatureSource::Ring(ring)) => {
                let SlotPart { published, first, rows } = self.slot(*at);
                let mut values = Vec::new();
                self.judge(
                    unless_gone(ring.read_rows(published, first, rows, &mut values))
                        .map(|here| here.map(|()| values)),
                )
            }
            (Some(At::Ring(at)), FeatureSource::Inline(geometry)) if at.slot >= geometry.slots => {
                let what = format!("slot must be below {}, given {}", geometry.slots, at.slot);
                Err(invalid(self.part, what))
            }
            (Some(At::Ring(_)), FeatureSource::Inline(_) | FeatureSource::Device(_)) => Ok(None),
            (None, _) => Err(invalid(self.part, "neither a ring slot nor inline rows".to_owned())),
        }
    }
}

impl FeatureSource {
    /// Values a row.
    pub(super) fn row_width(&self) -> usize {
        let geometry = match self {
            Self::Ring(ring) => ring.geometry(),
            Self::Device(ring) => ring.geometry(),
            Self::Inline(geometry) => *geometry,
        };
        geometry.row_width as usize
    }

    /// The rows of every request, `None` without any. They stop at the first gap and at the first slot that was overwritten:
    /// what follows cannot be used without the rows before. A GPU is waited for once for all of them, or for as many as there
    /// is room for.
    ///
    /// # Errors
    /// For a request by itself: a reference that no target of this geometry could have made, and a value that is no number.
    pub(super) fn collect(
        &mut self,
        requests: &[Request<'_>],
        backend: &Backend,
    ) -> Vec<Result<Option<Aux>, ItemError>> {
        let pieces: Vec<_> = requests.iter().map(Request::pieces).collect();
        let slots: Vec<SlotPart> = match self {
            Self::Device(_) => pieces.iter().flatten().flatten().filter_map(slot_of).collect(),
            Self::Ring(_) | Self::Inline(_) => Vec::new(),
        };
        let mut on_device = match self {
            Self::Device(ring) => DeviceParts::read(ring.as_mut(), &slots, backend),
            Self::Ring(_) | Self::Inline(_) => DeviceParts::default(),
        };
        let all_finite = on_device.all_finite;
        let one = |(request, pieces): (&Request<'_>, Result<Vec<Piece<'_>>, ItemError>)| {
            let pieces = pieces?;
            let mut device = on_device.take(pieces.iter().filter_map(slot_of).count());
            let (parts, on_host) = self.parts(&pieces, &mut device, backend)?;
            if parts.is_empty() {
                return Ok(None);
            }
            let rows = Aux::concat(backend, &parts.iter().collect::<Vec<_>>()).map_err(internal)?;
            if on_host || !all_finite {
                request.check(&rows, backend)?;
            }
            Ok(Some(rows))
        };
        requests.iter().zip(pieces).map(one).collect()
    }

    /// The rows of `pieces` up to the first that is gone, those of a GPU's ring out of `device`; and whether any came from
    /// the host.
    fn parts(
        &self,
        pieces: &[Piece<'_>],
        device: &mut dyn Iterator<Item = DevicePart>,
        backend: &Backend,
    ) -> Result<(Vec<Aux>, bool), ItemError> {
        let width = self.row_width();
        let (mut parts, mut values, mut on_host) = (Vec::new(), Vec::new(), false);
        for piece in pieces {
            if let (Self::Device(_), Some(_)) = (self, slot_of(piece)) {
                push_values(&mut values, &mut parts, width, backend)?;
                let Some(read) = device.next() else { break };
                let Some(rows) = piece.judge(read)? else { break };
                parts.push(rows);
            } else {
                let Some(mut rows) = piece.read_on_host(self)? else { break };
                values.append(&mut rows);
                on_host = true;
            }
        }
        push_values(&mut values, &mut parts, width, backend)?;
        Ok((parts, on_host))
    }
}

/// Where in a ring a piece lies, if in one.
fn slot_of(piece: &Piece<'_>) -> Option<SlotPart> {
    match &piece.part.at {
        Some(At::Ring(at)) => Some(piece.slot(*at)),
        Some(At::Inline(_)) | None => None,
    }
}

/// Why a slot was not read, if it is not just gone.
#[derive(Debug, Clone)]
enum Unread {
    /// The reference is none of this ring's.
    Refused(String),
    Failed(String),
}

impl From<RingError> for Unread {
    fn from(error: RingError) -> Self {
        match error {
            RingError::Region(error) => Self::Failed(error.to_string()),
            other => Self::Refused(other.to_string()),
        }
    }
}

impl From<ModelError> for Unread {
    fn from(error: ModelError) -> Self {
        Self::Failed(error.to_string())
    }
}

fn unless_gone<T>(read: Result<T, RingError>) -> Result<Option<T>, Unread> {
    match read {
        Ok(rows) => Ok(Some(rows)),
        Err(stale @ RingError::Stale { .. }) => {
            tracing::debug!("features are gone: {stale}");
            Ok(None)
        }
        Err(other) => Err(other.into()),
    }
}

/// The rows of one slot of a GPU's ring.
type DevicePart = Result<Option<Aux>, Unread>;

/// What was read of a GPU's ring, in the order in which it was asked for.
#[derive(Debug, Default)]
struct DeviceParts {
    rows: VecDeque<DevicePart>,
    /// No value of them is other than a finite number.
    all_finite: bool,
}

impl DeviceParts {
    /// Reads `slots`, as many at once as there is room for.
    fn read(ring: &mut dyn DeviceSource, slots: &[SlotPart], backend: &Backend) -> Self {
        let mut read = Self { rows: VecDeque::with_capacity(slots.len()), all_finite: true };
        let mut rest = slots;
        while !rest.is_empty() {
            let mut rows = 0;
            let fits = |part: &&SlotPart| {
                rows += u64::from(part.rows);
                rows <= ring.room()
            };
            // A slot fits; a reference that claims more is refused by the reader, alone.
            let (now, later) = rest.split_at(rest.iter().take_while(fits).count().max(1));
            rest = later;
            match at_once(ring, now, backend) {
                Ok((parts, finite)) => {
                    read.rows.extend(parts);
                    read.all_finite &= finite;
                }
                Err(unread) => read.rows.extend(now.iter().map(|_| Err(unread.clone()))),
            }
        }
        read
    }

    /// The next `count`.
    fn take(&mut self, count: usize) -> impl Iterator<Item = DevicePart> + use<> {
        let rest = self.rows.split_off(count.min(self.rows.len()));
        std::mem::replace(&mut self.rows, rest).into_iter()
    }
}

/// Reads what there is room for; also tells whether all of it is finite, with what lies in place of rows that are gone.
fn at_once(
    ring: &mut dyn DeviceSource,
    parts: &[SlotPart],
    backend: &Backend,
) -> Result<(Vec<DevicePart>, bool), Unread> {
    let verdicts = ring.read(parts)?;
    let rows: u32 = parts.iter().map(|part| part.rows).sum();
    let taken = ring.take_in(rows, backend).map_err(ModelError::from)?;
    let finite = backend.first_not_finite(&taken).map_err(ModelError::from)?.is_none();
    let all = Aux::new(taken, ring.geometry().row_width as usize)?;
    let mut next = 0;
    let cut = parts.iter().zip(verdicts).map(|(part, verdict)| {
        let first = next;
        next += part.rows as usize;
        let here = unless_gone(verdict)?;
        Ok(here.map(|()| all.slice(first..next)).transpose()?)
    });
    Ok((cut.collect(), finite))
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
        let rows = source.collect(&[Request { refs, from, end }], &backend).remove(0)?;
        Ok(rows.map_or_else(Vec::new, |rows| rows.to_vec().unwrap()))
    }

    /// A host's ring in the place of a GPU's: what was not read is no number.
    #[derive(Debug)]
    struct Fake {
        ring: RingReader,
        staged: Vec<f32>,
    }

    impl DeviceSource for Fake {
        fn geometry(&self) -> RingGeometry {
            self.ring.geometry()
        }

        fn room(&self) -> u64 {
            4
        }

        fn read(&mut self, parts: &[SlotPart]) -> Result<Vec<Result<(), RingError>>, RingError> {
            let given = parts.iter().map(|part| u64::from(part.rows)).sum();
            if given > self.room() {
                return Err(RingError::Room { limit: self.room(), given });
            }
            self.staged.clear();
            let one = |part: &SlotPart| {
                let mut values = Vec::new();
                let read = self.ring.read_rows(part.published, part.first, part.rows, &mut values);
                values.resize((part.rows * WIDTH) as usize, f32::NAN);
                self.staged.append(&mut values);
                read
            };
            Ok(parts.iter().map(one).collect())
        }

        fn take_in(&self, rows: u32, backend: &Backend) -> Result<Tensor, KernelError> {
            backend.activations(self.staged[..(rows * WIDTH) as usize].to_vec(), WIDTH as usize)
        }
    }

    /// The same ring as a host's and as a GPU's.
    fn rings() -> [(RingWriter, FeatureSource); 2] {
        let (host, other) = (ring(), ring());
        let FeatureSource::Ring(reader) = other.1 else { panic!("a host's ring") };
        [host, (other.0, FeatureSource::Device(Box::new(Fake { ring: reader, staged: Vec::new() })))]
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
        for (mut writer, mut reader) in rings() {
            let refs = [publish(&mut writer, 0, 3), publish(&mut writer, 2, 3)];
            assert_eq!(positions(&collect(&refs, 1, 9, &mut reader).unwrap()), [1, 2, 3, 4]);
            assert_eq!(positions(&collect(&refs, 1, 4, &mut reader).unwrap()), [1, 2, 3]);
            assert!(collect(&refs, 5, 9, &mut reader).unwrap().is_empty());
        }
    }

    #[test]
    fn a_gap_or_an_overwritten_slot_ends_the_run() {
        for (mut writer, mut reader) in rings() {
            let refs = [publish(&mut writer, 0, 2), publish(&mut writer, 3, 1)];
            assert_eq!(positions(&collect(&refs, 0, 9, &mut reader).unwrap()), [0, 1]);
            let third = publish(&mut writer, 4, 1);
            let refs = [refs[0].clone(), refs[1].clone(), third];
            assert!(collect(&refs, 0, 9, &mut reader).unwrap().is_empty(), "slot 0 was overwritten");
            assert_eq!(positions(&collect(&refs, 3, 9, &mut reader).unwrap()), [3, 4]);
        }
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
        for (mut writer, mut reader) in rings() {
            let slot = writer.publish(&[1.0, 1.0, 2.0, f32::NEG_INFINITY, 3.0, 3.0]).unwrap();
            let at = Some(At::Ring(RingSlot { slot: slot.slot, generation: slot.generation }));
            let parts = [FeatureRef { first: 7, rows: 3, at }];
            let error = collect(&parts, 7, 10, &mut reader).unwrap_err();
            assert_eq!(error.reason, "INVALID_ARGUMENT");
            assert_eq!(error.message, "features of position 8: values must be finite, given -inf");
            assert_eq!(positions(&collect(&parts, 9, 10, &mut reader).unwrap()), [3]);
        }
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
        for (mut writer, mut reader) in rings() {
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

    /// A step's rounds share reads: what one of them meets is its own.
    #[test]
    fn requests_read_together_are_told_apart() {
        let backend = Cpu::new(CpuOptions { threads: 1, isa: Isa::best() }).unwrap().into();
        for (mut writer, mut source) in rings() {
            let gone = publish(&mut writer, 0, 2);
            let kept = publish(&mut writer, 4, 3);
            let last = publish(&mut writer, 7, 2);
            let refused = FeatureRef { rows: 4, ..kept.clone() };
            let of = |refs, from, end| Request { refs, from, end };
            let (all, gone, wrong) = ([kept.clone(), last], [gone, kept.clone()], [refused]);
            let requests =
                [of(&gone, 0, 9), of(&all, 4, 9), of(&wrong, 4, 9), of(&[], 3, 9), of(&all[..1], 5, 6)];
            let read: Vec<_> = source
                .collect(&requests, &backend)
                .into_iter()
                .map(|rows| rows.map(|rows| rows.map(|rows| positions(&rows.to_vec().unwrap()))))
                .collect();
            assert_eq!(read[0], Ok(None), "slot 0 was overwritten");
            assert_eq!(read[1], Ok(Some(vec![4, 5, 6, 7, 8])));
            assert!(read[2].as_ref().is_err_and(|error| error.reason == "INVALID_ARGUMENT"), "{:?}", read[2]);
            assert_eq!((&read[3], &read[4]), (&Ok(None), &Ok(Some(vec![5]))));
        }
    }
}
