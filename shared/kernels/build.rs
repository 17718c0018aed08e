//! Compiles the CUDA kernels into one fat binary when the `cuda` feature asks for them; does nothing otherwise.

use std::path::PathBuf;
use std::process::Command;
use std::{env, fs};

const SOURCES: &str = "src/cuda";

/// The compiler: `NVCC`, that of `CUDA_HOME`, or the first in the path.
fn compiler() -> PathBuf {
    if let Some(nvcc) = env::var_os("NVCC") {
        return nvcc.into();
    }
    env::var_os("CUDA_HOME").map_or("nvcc".into(), |home| PathBuf::from(home).join("bin/nvcc"))
}

fn compile(capabilities: &str, output: &PathBuf) -> Result<(), String> {
    let mut command = Command::new(compiler());
    // Only an explicit fmaf may fuse: all instantiations of a kernel have to round alike.
    command.args(["-std=c++17", "-O3", "-fmad=false", "-fatbin", "-o"]).arg(output);
    for capability in capabilities.split(',') {
        command.arg(format!("-gencode=arch=compute_{capability},code=sm_{capability}"));
    }
    command.arg(format!("{SOURCES}/kernels.cu"));
    let done = command.output().map_err(|error| {
        format!("cannot run {:?}: {error} (set NVCC or CUDA_HOME)", command.get_program())
    })?;
    if !done.status.success() {
        return Err(format!("{command:?} failed:\n{}", String::from_utf8_lossy(&done.stderr)));
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=build.rs");
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return Ok(());
    }
    for entry in fs::read_dir(SOURCES)? {
        let path = entry?.path();
        if path.extension().is_some_and(|kind| kind == "cu" || kind == "cuh") {
            println!("cargo:rerun-if-changed={}", path.display());
        }
    }
    for name in ["NVCC", "CUDA_HOME", "CUDA_COMPUTE_CAP"] {
        println!("cargo:rerun-if-env-changed={name}");
    }
    let capabilities = env::var("CUDA_COMPUTE_CAP").unwrap_or_else(|_| "90".to_owned());
    let output = PathBuf::from(env::var("OUT_DIR")?).join("kernels.fatbin");
    compile(&capabilities, &output)?;
    println!("cargo:rustc-env=EYRIE_CUDA_CAPABILITIES={capabilities}");
    println!("cargo:rustc-env=EYRIE_CUDA_MODULE={}", fs::canonicalize(output)?.display());
    Ok(())
}
