//! Makes a model that is larger than the memory it will get: a checkpoint of seeded weights, and its container.
//!
//! `cargo run --release -p shimmer-tests --bin large_model -- DIR [FORMAT]`
//!
//! 24 layers of 64 experts, 8 of them for each token, of 4.3 MB each: 6.6 GB of slabs in bf16, the default format. The
//! container is DIR/container; the checkpoint is removed once it is there. Both together take 14 GB for a while; on two busy cores it took 142 s.

#![allow(clippy::print_stdout, reason = "a tool that prints its result")]

use std::{path::PathBuf, time::Instant};

use anyhow::{Context as _, Result};
use serde_json::{Value, json};
use shimmer_kernels::WeightFormat;
use shimmer_model::{
    Container, ConvertOptions, Inspection, NumericClass, convert,
    tiny::{Preset, TinyOptions, write_checkpoint},
};

/// What differs from the tiny model of the family.
fn config() -> serde_json::Map<String, Value> {
    let config = json!({
        "hidden_size": 1024,
        "num_hidden_layers": 25,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": 2816,
        "moe_intermediate_size": 704,
        "n_routed_experts": 64,
        "num_experts_per_tok": 8,
        "max_position_embeddings": 4096,
    });
    config.as_object().cloned().unwrap_or_default()
}

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let directory = PathBuf::from(args.next().context("usage: large_model DIR [FORMAT]")?);
    let format: WeightFormat = args.next().map_or(Ok(WeightFormat::Bf16), |name| name.parse())?;
    let (checkpoint, out) = (directory.join("checkpoint"), directory.join("container"));
    let begun = Instant::now();
    let options = TinyOptions { shards: 24, config: config(), ..TinyOptions::default() };
    write_checkpoint(Preset::Glm4Moe, &options, &checkpoint)?;
    println!("checkpoint after {:.0} s", begun.elapsed().as_secs_f64());
    let class = NumericClass { experts: format, ..NumericClass::default() };
    let name = Some("large-generated".to_owned());
    convert(&ConvertOptions { source: checkpoint.clone(), out: out.clone(), class, name }, &())?;
    std::fs::remove_dir_all(&checkpoint)?;
    let inspection = Inspection::of(&Container::open(&out)?);
    println!(
        "{}: {} experts in {} bytes after {:.0} s",
        out.display(),
        inspection.experts,
        inspection.expert_bytes,
        begun.elapsed().as_secs_f64()
    );
    Ok(())
}
