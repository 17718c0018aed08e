//! Rings whose rows lie on the GPU.

use std::error::Error;
use std::io::Write;
use std::sync::Arc;
use std::time::Instant;

use cudarc::driver::{CudaContext, sys};
use eyrie_region::{
    DeviceBuffer, DeviceRingGeometry, DeviceRingReader, DeviceRingWriter, DeviceRows, Epoch, Gpu, Grant,
    ImportedIpc, ImportedVmm, RegionKind, RingError, RingGeometry, RingMemory, SlotPart, SlotRef, Stream,
    StreamId, TensorGrant,
};

use crate::Outcome;
use crate::checks::door;
use crate::spec::{NAME, Other, fetch, grant, ring_geometry};

/// Three residual streams of 7,168 bf16 values a row; few slots, so that the writer overtakes often.
const GEOMETRY: DeviceRingGeometry =
    DeviceRingGeometry { ring: RingGeometry { slots: 3, slot_rows: 8, row_width: 3 * 7168 }, value_bytes: 2 };
const PUBLICATIONS: u32 = 10_000;

fn writer(gpu: &Arc<Gpu>, kind: RegionKind, epoch: Epoch) -> Result<DeviceRingWriter, RingError> {
    let memory = RingMemory::new(gpu, kind, GEOMETRY)?;
    DeviceRingWriter::create(
        memory,
        GEOMETRY,
        epoch,
        Stream::new(gpu).map_err(eyrie_region::RegionError::from)?,
    )
}

fn slot_bytes() -> usize {
    (GEOMETRY.row_bytes() * u64::from(GEOMETRY.ring.slot_rows)) as usize
}

/// All words of publication `n` are `n`.
fn words(n: u32) -> Vec<u8> {
    n.to_le_bytes().repeat(slot_bytes() / 4)
}

fn check_words(n: u64, bytes: &[u8]) -> Result<(), Box<dyn Error>> {
    let wanted = (n as u32).to_le_bytes();
    match bytes.chunks_exact(4).position(|word| word != wanted) {
        None if bytes.len() == slot_bytes() => Ok(()),
        torn => Err(format!("publication {n} is torn at word {torn:?} of {}", bytes.len() / 4).into()),
    }
}

fn rows(source: &DeviceBuffer, slot: usize, order: StreamId) -> DeviceRows<'_> {
    let ptr = source.span().ptr + (slot * slot_bytes()) as u64;
    // SAFETY: within the buffer, which was written and waited for, and is borrowed by the value.
    unsafe { DeviceRows::new(ptr, GEOMETRY.ring.slot_rows, GEOMETRY.row_bytes(), order) }
}

pub(crate) fn race(gpu: &Arc<Gpu>, kind: RegionKind) -> Outcome {
    let epoch = Epoch::random()?;
    let mut writer = writer(gpu, kind, epoch)?;
    let mut fds = vec![writer.fd().try_clone_to_owned()?];
    if let Some(fd) = writer.memory().fd() {
        fds.push(fd.try_clone_to_owned()?);
    }
    let payload = writer.payload();
    let grant = Grant {
        epoch,
        export_id: 1,
        kind,
        bytes: 2,
        tensors: vec![TensorGrant {
            name: NAME.to_owned(),
            layout: "plain".to_owned(),
            dtype: "bf16".to_owned(),
            shape: vec![1],
            strides: vec![1],
            offset: 0,
            bytes: 2,
            checksum: [0; 32],
        }],
        ring: Some(GEOMETRY.ring),
        ring_payload: Some(payload),
        device: gpu.uuid().to_string(),
        ipc: payload.ipc,
    };
    let (_dir, door) = door(fds)?;
    let mut other = Other::start("ring", &door, &grant)?;
    other.told("reading")?;
    let mut source = DeviceBuffer::zeroed(gpu, "source", slot_bytes() as u64)?;
    let order = writer.stream().id();
    let mut times = Vec::new();
    for n in 1..=PUBLICATIONS {
        source.write(0, &words(n))?;
        let begun = Instant::now();
        writer.publish(&[rows(&source, 0, order)])?;
        times.push(begun.elapsed());
        if n % 10 == 0 {
            writeln!(other.input.as_mut().ok_or("no input")?, "{n}")?;
        }
    }
    drop(other.input.take());
    let (whole, stale) = (other.number("whole")?, other.number("stale")?);
    other.end()?;
    times.sort_unstable();
    if whole < 100.0 {
        return Err(format!("only {whole} reads met their publication, {stale} were stale").into());
    }
    let (p50, p99) = (times[times.len() / 2], times[times.len() * 99 / 100]);
    Ok(format!("{whole} read whole, {stale} stale, none torn; publish p50 {p50:?}, p99 {p99:?}"))
}

/// The other process's side of [`race`].
pub(crate) fn read() -> Result<(), Box<dyn Error>> {
    let grant = grant();
    let gpu = Gpu::by_uuid(grant.gpu()?)?;
    let geometry = ring_geometry(&grant);
    let mut fds = fetch().into_iter();
    let control = fds.next().ok_or("no descriptor of the ring")?;
    let len = geometry.payload_len()?;
    let stream = Stream::new(&gpu)?;
    let mut reader = match fds.next() {
        Some(fd) => {
            let payload = ImportedVmm::import(&gpu, fd, len)?;
            DeviceRingReader::open(control, payload, geometry, grant.epoch, 8, stream)?
        }
        None => {
            let handle = grant.ring_payload.and_then(|payload| payload.ipc).ok_or("no handle")?;
            let payload = ImportedIpc::open(&gpu, &handle, len, true)?;
            DeviceRingReader::open(control, payload, geometry, grant.epoch, 8, stream)?
        }
    };
    let context = CudaContext::new(gpu.ordinal())?;
    println!("reading yes");
    let (mut whole, mut stale) = (0_u32, 0_u32);
    for line in std::io::stdin().lines() {
        let newest: u64 = line?.parse()?;
        // The oldest that may still be there: it is the one that is overwritten next.
        for n in newest.saturating_sub(2).max(1).. {
            match read_one(&mut reader, &context, n)? {
                Ok(bytes) => {
                    check_words(n, &bytes)?;
                    whole += 1;
                }
                Err(RingError::Stale { wanted, found, .. }) if found < wanted => break,
                Err(RingError::Stale { .. }) => stale += 1,
                Err(other) => return Err(other.into()),
            }
        }
    }
    println!("whole {whole}");
    println!("stale {stale}");
    Ok(())
}

/// Publication `n`, by turns through the host and as rows on the device.
fn read_one(
    reader: &mut DeviceRingReader,
    context: &Arc<CudaContext>,
    n: u64,
) -> Result<Result<Vec<u8>, RingError>, Box<dyn Error>> {
    let ring = GEOMETRY.ring;
    let slot = ((n - 1) % u64::from(ring.slots)) as u32;
    let mut bytes = Vec::new();
    if n.is_multiple_of(2) {
        return Ok(reader.read_slot(slot, 2 * n, &mut bytes).map(|()| bytes));
    }
    let published = SlotRef { slot, generation: 2 * n, rows: ring.slot_rows };
    let verdict = reader.read(&[SlotPart { published, first: 0, rows: ring.slot_rows }])?.remove(0);
    if let Err(error) = verdict {
        return Ok(Err(error));
    }
    bytes.resize(slot_bytes(), 0);
    context.bind_to_thread()?;
    // SAFETY: the rows are as many as were read, and the buffer is as long.
    let code = unsafe {
        sys::cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), reader.rows(ring.slot_rows).ptr(), bytes.len())
    };
    code.result()?;
    Ok(Ok(bytes))
}

pub(crate) fn batches(gpu: &Arc<Gpu>) -> Outcome {
    let geometry = DeviceRingGeometry { ring: RingGeometry { slots: 64, ..GEOMETRY.ring }, ..GEOMETRY };
    let memory = RingMemory::new(gpu, RegionKind::CudaVmm, geometry)?;
    let mut writer = DeviceRingWriter::create(memory, geometry, Epoch::random()?, Stream::new(gpu)?)?;
    let source = DeviceBuffer::zeroed(gpu, "source", slot_bytes() as u64)?;
    let order = writer.stream().id();
    let mut said = Vec::new();
    for count in [1, 8, 64] {
        let batch = vec![rows(&source, 0, order); count];
        let mut times: Vec<_> = (0..200)
            .map(|_| {
                let begun = Instant::now();
                writer.publish(&batch).map(|_| begun.elapsed())
            })
            .collect::<Result<_, _>>()?;
        times.sort_unstable();
        said.push(format!("{count} slots {:?}", times[100]));
    }
    Ok(format!("p50 of {} KiB a slot: {}", slot_bytes() >> 10, said.join(", ")))
}

pub(crate) fn own_reader(gpu: &Arc<Gpu>) -> Outcome {
    let mut said = Vec::new();
    for kind in [RegionKind::CudaVmm, RegionKind::CudaIpc] {
        let mut writer = writer(gpu, kind, Epoch::random()?)?;
        let mut reader = writer.reader(1, Stream::new(gpu)?)?;
        let order = writer.stream().id();
        let mut source = DeviceBuffer::zeroed(gpu, "source", 2 * slot_bytes() as u64)?;
        source.write(0, &[words(1), words(2)].concat())?;
        let published = writer.publish(&[0, 1].map(|slot| rows(&source, slot, order)))?;
        for (n, slot) in (1..).zip(&published) {
            let mut bytes = Vec::new();
            reader.read_slot(slot.slot, slot.generation, &mut bytes)?;
            check_words(n, &bytes)?;
        }
        let foreign = rows(&source, 0, Stream::new(gpu)?.id());
        if writer.publish(&[foreign]).is_ok() {
            return Err("rows of another stream were published".into());
        }
        let batch = writer.publish(&[rows(&source, 0, order); 2])?;
        let overwritten = reader.read_slot(0, published[0].generation, &mut Vec::new());
        if batch[1].slot != 0 || !matches!(overwritten, Err(RingError::Stale { .. })) {
            return Err(format!("{overwritten:?} of an overwritten slot").into());
        }
        said.push(kind.to_string());
    }
    Ok(said.join(", "))
}
