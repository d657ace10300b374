//! Generates the Rust side of the contract with protox (no `protoc` binary needed) and keeps the descriptor set for
//! gRPC reflection.

use std::path::PathBuf;

use prost::Message as _;

const FILES: [&str; 3] = [
    "shimmer/admin/v1/admin.proto",
    "shimmer/expert/v1/expert.proto",
    "shimmer/v1/inference.proto",
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    let descriptors = protox::compile(FILES, ["proto"])?;
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out.join("descriptors.bin"), descriptors.encode_to_vec())?;
    tonic_prost_build::configure().bytes(".").compile_fds(descriptors)?;
    Ok(())
}
