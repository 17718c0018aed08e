//! Weights: what holds between an exporter and its importers.

use std::error::Error;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use eyrie_region::{
    CudaError, DeviceBuffer, Epoch, FdDoor, Gpu, Grant, Ipc, IpcBuilder, Region, RegionError, RegionKind,
    TensorGrant, Token, Vmm, VmmBuilder,
};

use crate::Outcome;
use crate::spec::{NAME, Other, TOKEN};

/// lm_head of 163,840 × 7,168 in bf16.
const LARGE: u64 = 163_840 * 7_168 * 2;
const SMALL: u64 = (5 << 20) + 128;
/// What the driver may keep for a mapping's page tables.
const TABLES: u64 = 8 << 20;
const PIECE: usize = 16 << 20;

#[derive(Debug)]
enum Memory {
    Vmm(Arc<Vmm>),
    Ipc(Arc<Ipc>),
}

pub(crate) struct Exporter {
    gpu: Arc<Gpu>,
    memory: Memory,
    pub(crate) grant: Grant,
    pub(crate) door: FdDoor,
    _dir: tempfile::TempDir,
}

/// The bytes from `at` on, which differ from piece to piece.
fn pattern(at: u64, out: &mut [u8]) {
    let salt = at / PIECE as u64;
    for (i, word) in out.chunks_mut(8).enumerate() {
        let value = (i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ salt;
        word.copy_from_slice(&value.to_le_bytes()[..word.len()]);
    }
}

impl Exporter {
    pub(crate) fn large(gpu: &Arc<Gpu>, kind: RegionKind) -> Result<Self, Box<dyn Error>> {
        Self::new(gpu, kind, LARGE)
    }

    fn new(gpu: &Arc<Gpu>, kind: RegionKind, bytes: u64) -> Result<Self, Box<dyn Error>> {
        let memory = match kind {
            RegionKind::CudaVmm => {
                let mut builder = VmmBuilder::new(gpu, "weights", bytes)?;
                fill(bytes, |at, piece| builder.write(at, piece))?;
                Memory::Vmm(Arc::new(builder.seal()?))
            }
            _ => {
                let mut builder = IpcBuilder::new(gpu, "weights", bytes)?;
                fill(bytes, |at, piece| builder.write(at, piece))?;
                Memory::Ipc(Arc::new(builder.seal()))
            }
        };
        let region = memory.region();
        let (fds, ipc) = match &memory {
            Memory::Vmm(vmm) => (vec![vmm.fd().try_clone_to_owned()?], None),
            Memory::Ipc(ipc) => (Vec::new(), Some(*ipc.handle())),
        };
        let grant = Grant {
            epoch: Epoch::random()?,
            export_id: 1,
            kind,
            bytes,
            tensors: vec![TensorGrant::row_major(region.as_ref(), NAME, "bf16", &[bytes / 2], 0)?],
            ring: None,
            ring_payload: None,
            device: gpu.uuid().to_string(),
            ipc,
        };
        let (dir, door) = door(fds)?;
        Ok(Self { gpu: Arc::clone(gpu), memory, grant, door, _dir: dir })
    }

    fn free(&self) -> Result<u64, CudaError> {
        Ok(self.gpu.memory()?.0)
    }

    /// The exporter's own bytes are what they were.
    fn check_own(&self) -> Result<(), Box<dyn Error>> {
        let (mut wanted, mut found) = (vec![0; 4096], vec![0; 4096]);
        pattern(0, &mut wanted);
        self.memory.region().read(0, &mut found)?;
        if wanted == found { Ok(()) } else { Err("the exporter's memory has changed".into()) }
    }

    pub(crate) fn maps_without_copy(&self) -> Outcome {
        let mut other = Other::start("map", &self.door, &self.grant)?;
        let map_ms = other.number("map_ms")?;
        let taken = other.number("taken")? as u64;
        let verify_ms = other.number("verify_ms")?;
        other.end()?;
        self.check_own()?;
        if taken > TABLES {
            return Err(format!("mapping took {} MiB of the device", taken >> 20).into());
        }
        let rate = self.grant.bytes as f64 / verify_ms / 1e6;
        Ok(format!("map {map_ms:.2} ms, {taken} bytes taken, verify {verify_ms:.0} ms ({rate:.1} GB/s)"))
    }

    pub(crate) fn survives_killed_importers(&self) -> Outcome {
        let mut frees = Vec::new();
        for _ in 0..10 {
            let mut other = Other::start("map", &self.door, &self.grant)?;
            other.number("map_ms")?;
            other.kill()?;
            frees.push(self.settled_free(frees.first().copied())?);
        }
        self.check_own()?;
        let (first, last) = (frees[0], frees[9]);
        let lost = first.saturating_sub(last);
        if lost > TABLES {
            return Err(format!("{} MiB were lost over ten importers", lost >> 20).into());
        }
        Ok(format!("free after the first {} MiB, after the tenth {} MiB", first >> 20, last >> 20))
    }

    /// The driver gives a killed process's memory back a little later than the kernel reports its end.
    fn settled_free(&self, wanted: Option<u64>) -> Result<u64, Box<dyn Error>> {
        let begun = Instant::now();
        loop {
            let free = self.free()?;
            let enough = wanted.is_none_or(|wanted| free + TABLES >= wanted);
            if enough && begun.elapsed() > Duration::from_millis(300)
                || begun.elapsed() > Duration::from_secs(5)
            {
                return Ok(free);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    pub(crate) fn serves_two(&self) -> Outcome {
        let mut others =
            [Other::start("map", &self.door, &self.grant)?, Other::start("map", &self.door, &self.grant)?];
        for other in &mut others {
            other.number("map_ms")?;
            other.number("taken")?;
        }
        for other in &mut others {
            other.number("verify_ms")?;
        }
        let [a, b] = others;
        a.end()?;
        b.kill()?;
        self.check_own()?;
        Ok("both verified".to_owned())
    }
}

impl Memory {
    fn region(&self) -> Arc<dyn Region> {
        match self {
            Self::Vmm(memory) => memory.clone(),
            Self::Ipc(memory) => memory.clone(),
        }
    }
}

fn fill(bytes: u64, mut write: impl FnMut(u64, &[u8]) -> Result<(), RegionError>) -> Result<(), RegionError> {
    let mut piece = vec![0; PIECE];
    for at in (0..bytes).step_by(PIECE) {
        let part = &mut piece[..PIECE.min((bytes - at) as usize)];
        pattern(at, part);
        write(at, part)?;
    }
    Ok(())
}

pub(crate) fn door(fds: Vec<OwnedFd>) -> Result<(tempfile::TempDir, FdDoor), Box<dyn Error>> {
    let dir = tempfile::tempdir()?;
    let door = FdDoor::bind(dir.path().join("door.sock"))?;
    door.offer(Token::from(TOKEN), fds)?;
    Ok((dir, door))
}

pub(crate) fn memory_returns(gpu: &Arc<Gpu>, before: u64) -> Outcome {
    let begun = Instant::now();
    loop {
        let free = gpu.memory()?.0;
        // Loaded modules and pools of the context stay.
        if free + (64 << 20) >= before {
            return Ok(format!("{} MiB free, {} MiB at the start", free >> 20, before >> 20));
        }
        if begun.elapsed() > Duration::from_secs(5) {
            return Err(format!("{} MiB free, {} MiB at the start", free >> 20, before >> 20).into());
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

pub(crate) fn importers_cannot_write(gpu: &Arc<Gpu>) -> Outcome {
    let exporter = Exporter::new(gpu, RegionKind::CudaVmm, SMALL)?;
    let mut said = Vec::new();
    for part in ["memset", "copy"] {
        let mut other = Other::start(part, &exporter.door, &exporter.grant)?;
        let refused = other.told("refused");
        drop(other);
        exporter.check_own()?;
        exporter.grant.verify(exporter.memory.region().as_ref(), exporter.grant.epoch)?;
        said.push(format!("{part}: {}", refused?));
    }
    Ok(said.join(", "))
}

/// Whether a driver lets an exporter give up its own right to write is not for us to demand: the line says which it is.
pub(crate) fn sealed_exporter_writes() -> Outcome {
    let (_dir, door) = door(Vec::new())?;
    let nothing = Grant {
        epoch: Epoch::random()?,
        export_id: 1,
        kind: RegionKind::CudaVmm,
        bytes: 0,
        tensors: vec![TensorGrant {
            name: NAME.to_owned(),
            layout: "plain".to_owned(),
            dtype: "bf16".to_owned(),
            shape: vec![0],
            strides: vec![1],
            offset: 0,
            bytes: 0,
            checksum: [0; 32],
        }],
        ring: None,
        ring_payload: None,
        device: String::from("cpu"),
        ipc: None,
    };
    let mut other = Other::start("seal", &door, &nothing)?;
    other.told("sealed")
}

pub(crate) fn false_grants(gpu: &Arc<Gpu>) -> Outcome {
    let exporter = Exporter::new(gpu, RegionKind::CudaVmm, SMALL)?;
    let mut other = Other::start("false", &exporter.door, &exporter.grant)?;
    let named = [
        ("uuid", "is not among the"),
        ("device", "region lies on"),
        ("epoch", "grant is stale"),
        ("checksum", "checksum does not match"),
        ("length", "the grant says"),
        ("descriptor", "import memory by its descriptor"),
    ];
    for (word, wanted) in named {
        let told = other.told(word)?;
        if !told.contains(wanted) {
            return Err(format!("{word}: {told:?} does not say {wanted:?}").into());
        }
    }
    other.end()?;
    Ok(format!("{} named", named.map(|(word, _)| word).join(", ")))
}

pub(crate) fn ipc_needs_leave(gpu: &Arc<Gpu>) -> Outcome {
    let exporter = Exporter::new(gpu, RegionKind::CudaIpc, SMALL)?;
    let mut other = Other::start("leave", &exporter.door, &exporter.grant)?;
    let refused = other.told("refused")?;
    if !refused.contains("--allow-writable-ipc") {
        return Err(format!("{refused:?} does not name the flag").into());
    }
    let own = other.told("opened")?;
    other.end()?;
    Ok(format!("refused; with it {own}"))
}

pub(crate) fn longer_than_exported(gpu: &Arc<Gpu>) -> Outcome {
    let mut said = Vec::new();
    for kind in [RegionKind::CudaVmm, RegionKind::CudaIpc] {
        let exporter = Exporter::new(gpu, kind, SMALL)?;
        let grant = Grant { bytes: SMALL + (64 << 20), ..exporter.grant.clone() };
        let mut other = Other::start("longer", &exporter.door, &grant)?;
        said.push(format!("{kind}: {}", other.told("refused")?));
        other.end()?;
    }
    Ok(said.join("; "))
}

pub(crate) fn out_of_memory(gpu: &Arc<Gpu>) -> Outcome {
    let (_, total) = gpu.memory()?;
    let too_much = total + (1 << 30);
    let errors = [
        VmmBuilder::new(gpu, "weights", too_much).map(|_| ()),
        IpcBuilder::new(gpu, "weights", too_much).map(|_| ()),
        DeviceBuffer::zeroed(gpu, "room", too_much).map(|_| ()),
    ];
    let mut line = String::new();
    for error in errors {
        match error {
            Err(error @ RegionError::Cuda(CudaError::OutOfMemory { .. })) => line = error.to_string(),
            Err(other) => return Err(other.into()),
            Ok(()) => return Err(format!("{too_much} bytes were allocated").into()),
        }
    }
    // The context is as good as before.
    DeviceBuffer::zeroed(gpu, "room", 4096)?;
    Ok(line)
}
