//! What the CUDA driver refused, in one line.

use cudarc::driver::sys::CUresult;

use super::GpuUuid;

/// A GPU, or memory of one, that could not be had.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// The driver's library is not on this machine, or not in this container.
    #[error("no CUDA driver (libcuda.so.1)")]
    NoDriver,
    /// The driver is older than what this build calls.
    #[error("CUDA driver must support CUDA {} or later, it supports {}", version(*.needed), version(*.found))]
    DriverTooOld {
        /// Version needed, 1000 × major + 10 × minor.
        needed: i32,
        /// Version found.
        found: i32,
    },
    /// The driver is there and cannot work, or shows no GPU.
    #[error("CUDA driver cannot be used: {}", name(*.code))]
    Driver {
        /// The driver's answer.
        code: CUresult,
    },
    /// An ordinal that this process sees no GPU at.
    #[error("no GPU {ordinal}: this process sees {count} (CUDA_VISIBLE_DEVICES)")]
    NoDevice {
        /// The ordinal wanted.
        ordinal: usize,
        /// GPUs that are seen.
        count: usize,
    },
    /// A GPU that this process does not see.
    #[error("{uuid} is not among the {count} GPUs that this process sees (CUDA_VISIBLE_DEVICES)")]
    NotVisible {
        /// The GPU wanted.
        uuid: GpuUuid,
        /// GPUs that are seen.
        count: usize,
    },
    /// The GPU or its driver lacks what is needed.
    #[error("{gpu} cannot share memory by {what}")]
    Unsupported {
        /// The GPU.
        gpu: GpuUuid,
        /// The means, in words.
        what: &'static str,
    },
    /// The GPU has no room.
    #[error("{name}: {bytes} bytes exceed the {free} bytes free on {gpu}")]
    OutOfMemory {
        /// What the memory is for.
        name: String,
        /// The GPU.
        gpu: GpuUuid,
        /// Bytes asked for.
        bytes: u64,
        /// Bytes free when they were.
        free: u64,
    },
    /// A call failed.
    #[error("{gpu}: cannot {action}: {}", name(*.code))]
    Call {
        /// The GPU.
        gpu: GpuUuid,
        /// What was tried, as a verb phrase.
        action: &'static str,
        /// The driver's answer.
        code: CUresult,
    },
    /// A stream of one GPU was to work on memory of another.
    #[error("stream is of GPU {stream}, the memory of GPU {memory}")]
    OtherDevice {
        /// Ordinal of the stream's GPU.
        stream: usize,
        /// Ordinal of the memory's.
        memory: usize,
    },
    /// Rows were handed to a stream in whose order they are not.
    #[error("rows of one stream were handed to another")]
    OtherStream,
}

fn version(number: i32) -> String {
    format!("{}.{}", number / 1000, number % 1000 / 10)
}

/// The code as CUDA spells it. Not asked of the driver, which may be what is missing.
fn name(code: CUresult) -> String {
    format!("{code:?}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_error_is_one_line_with_what_was_given() {
        let gpu = GpuUuid::from([1; 16]);
        let old = CudaError::DriverTooOld { needed: 12_000, found: 11_080 };
        assert_eq!(old.to_string(), "CUDA driver must support CUDA 12.0 or later, it supports 11.8");
        let call = CudaError::Call { gpu, action: "map it", code: CUresult::CUDA_ERROR_INVALID_VALUE };
        assert_eq!(call.to_string(), format!("{gpu}: cannot map it: CUDA_ERROR_INVALID_VALUE"));
    }
}
