//! The parts of the other process.

use std::error::Error;
use std::io::Read;
use std::sync::Arc;
use std::time::Instant;

use cudarc::driver::sys::{self, CUresult};
use cudarc::driver::{CudaContext, CudaStream};
use eyrie_region::{
    Epoch, Gpu, GpuUuid, Grant, ImportedIpc, ImportedVmm, MemfdBuilder, Region, RegionError, RegionKind,
    VmmBuilder,
};

use crate::ring;
use crate::spec::{fetch, grant};

type Done = Result<(), Box<dyn Error>>;

pub(crate) fn run(part: &str) -> Done {
    match part {
        "map" => map(),
        "memset" => write(|stream, ptr| {
            // SAFETY: none, and that is the point: the memory is mapped read-only and the driver or the GPU must refuse.
            unsafe { sys::cuMemsetD8Async(ptr, 0xee, 4096, stream.cu_stream()) }
        }),
        "copy" => write(|stream, ptr| {
            // SAFETY: as above.
            unsafe { sys::cuMemcpyDtoDAsync_v2(ptr, ptr + 8192, 4096, stream.cu_stream()) }
        }),
        "seal" => seal(),
        "false" => false_grants(),
        "leave" => leave(),
        "longer" => longer(),
        "ring" => ring::read(),
        other => Err(format!("no part {other:?}").into()),
    }
}

fn gpu_of(grant: &Grant) -> Result<Arc<Gpu>, Box<dyn Error>> {
    Ok(Gpu::by_uuid(grant.gpu()?)?)
}

fn import(gpu: &Arc<Gpu>, grant: &Grant) -> Result<Box<dyn Region>, RegionError> {
    match &grant.ipc {
        Some(handle) => Ok(Box::new(ImportedIpc::open(gpu, handle, grant.bytes, true)?)),
        None => Ok(Box::new(ImportedVmm::import(gpu, fetch().remove(0), grant.bytes)?)),
    }
}

fn map() -> Done {
    let grant = grant();
    let gpu = gpu_of(&grant)?;
    let before = gpu.memory()?.0;
    let begun = Instant::now();
    let region = import(&gpu, &grant)?;
    println!("map_ms {}", begun.elapsed().as_secs_f64() * 1e3);
    println!("taken {}", before.saturating_sub(gpu.memory()?.0));
    let begun = Instant::now();
    grant.verify(region.as_ref(), grant.epoch)?;
    println!("verify_ms {}", begun.elapsed().as_secs_f64() * 1e3);
    // Until it is told to end, or killed.
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

/// A stream of this process for what the library would not do.
fn stream(gpu: &Gpu) -> Result<Arc<CudaStream>, Box<dyn Error>> {
    let context = CudaContext::new(gpu.ordinal())?;
    context.bind_to_thread()?;
    Ok(context.new_stream()?)
}

fn try_write(stream: &CudaStream, begin: impl FnOnce() -> CUresult) -> CUresult {
    let begun = begin();
    if begun != CUresult::CUDA_SUCCESS {
        return begun;
    }
    // SAFETY: the stream is alive and its context is current.
    unsafe { sys::cuStreamSynchronize(stream.cu_stream()) }
}

fn write(begin: impl FnOnce(&CudaStream, u64) -> CUresult) -> Done {
    let grant = grant();
    let gpu = gpu_of(&grant)?;
    let region = import(&gpu, &grant)?;
    let ptr = region.device().ok_or("no device")?.ptr;
    let stream = stream(&gpu)?;
    match try_write(&stream, || begin(&stream, ptr)) {
        CUresult::CUDA_SUCCESS => println!("written {ptr}"),
        refused => println!("refused {refused:?}"),
    }
    Ok(())
}

fn seal() -> Done {
    let gpu = Gpu::open(0)?;
    let sealed = VmmBuilder::new(&gpu, "sealed", 4 << 20)?.seal()?;
    let ptr = sealed.device().ok_or("no device")?.ptr;
    let stream = stream(&gpu)?;
    // SAFETY: this process's own memory; whether the driver refuses is what is asked.
    let answer = try_write(&stream, || unsafe { sys::cuMemsetD8Async(ptr, 1, 64, stream.cu_stream()) });
    match answer {
        CUresult::CUDA_SUCCESS => println!("sealed may still write (the driver left it writable)"),
        refused => println!("sealed cannot write either: {refused:?}"),
    }
    Ok(())
}

fn told<T>(word: &str, result: Result<T, impl std::fmt::Display>) -> Done {
    match result {
        Ok(_) => Err(format!("{word}: accepted").into()),
        Err(error) => {
            println!("{word} {error}");
            Ok(())
        }
    }
}

fn false_grants() -> Done {
    let grant = grant();
    let gpu = gpu_of(&grant)?;
    let region = import(&gpu, &grant)?;
    grant.verify(region.as_ref(), grant.epoch)?;
    let absent = Grant { device: GpuUuid::from([0xab; 16]).to_string(), ..grant.clone() };
    told("uuid", Gpu::by_uuid(absent.gpu()?))?;
    told("device", absent.verify(region.as_ref(), grant.epoch))?;
    told("epoch", grant.verify(region.as_ref(), Epoch::random()?))?;
    let mut wrong = grant.clone();
    wrong.tensors[0].checksum[31] ^= 1;
    told("checksum", wrong.verify(region.as_ref(), grant.epoch))?;
    let short = Grant { bytes: grant.bytes - 128, ..grant.clone() };
    told("length", short.verify(region.as_ref(), grant.epoch))?;
    // A descriptor of something else.
    let memfd = MemfdBuilder::new("no-device", 4096)?.seal()?;
    told("descriptor", ImportedVmm::import(&gpu, memfd.fd().try_clone_to_owned()?, 4096))
}

fn leave() -> Done {
    let grant = grant();
    let gpu = gpu_of(&grant)?;
    let handle = grant.ipc.ok_or("no handle")?;
    told("refused", ImportedIpc::open(&gpu, &handle, grant.bytes, false))?;
    let region = ImportedIpc::open(&gpu, &handle, grant.bytes, true)?;
    grant.verify(&region, grant.epoch)?;
    // A second opening is counted; the first must not end with it.
    drop(ImportedIpc::open(&gpu, &handle, grant.bytes, true)?);
    grant.verify(&region, grant.epoch)?;
    println!("opened twice and verified");
    Ok(())
}

fn longer() -> Done {
    let grant = grant();
    let gpu = gpu_of(&grant)?;
    debug_assert!(matches!(grant.kind, RegionKind::CudaVmm | RegionKind::CudaIpc));
    told("refused", import(&gpu, &grant))
}
