//! Compiles `proto/` with a pure-Rust protobuf compiler: no `protoc` is needed.

use std::path::PathBuf;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let root = PathBuf::from(std::env::var("CARGO_MANIFEST_DIR")?).join("../../proto");
    let files = ["common", "target", "draft", "generation"].map(|f| root.join(format!("eyrie/v1/{f}.proto")));
    for f in &files {
        println!("cargo:rerun-if-changed={}", f.display());
    }
    let descriptors = protox::compile(&files, [&root])?;
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out.join("eyrie.v1.fds"), prost_encode(&descriptors))?;
    tonic_prost_build::configure().bytes(".").compile_fds(descriptors)?;
    Ok(())
}

fn prost_encode(fds: &impl prost::Message) -> Vec<u8> {
    fds.encode_to_vec()
}
