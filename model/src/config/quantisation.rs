//! The `quantization_config` block. One published form is read; any other is refused by name, because a quantised
//! tensor that is taken for an unquantised one gives numbers, just not the right ones.

use std::path::Path;

use super::value::Block;
use crate::error::{Error, Result};

/// Side of the square blocks that share one scale in the FP8 form.
const FP8_BLOCK: usize = 128;

/// Suffix of the tensor that holds the scales of an FP8 weight.
pub(crate) const SCALE_SUFFIX: &str = "_scale_inv";

/// How weights of a checkpoint are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Quantisation {
    /// Plain floats.
    None,
    /// `F8_E4M3` weights; value = weight * scale of its block, scales in `NAME_scale_inv` of `ceil(rows / block)` by
    /// `ceil(cols / block)`. Tensors without such a companion are plain.
    Fp8 {
        /// Side of a block.
        block: usize,
    },
}

pub(super) fn read(file: &Path, top: &Block<'_>) -> Result<Quantisation> {
    let refuse = |what: &str, detail: String| {
        Err(Error::Quantised {
            file: file.to_path_buf(),
            what: what.to_owned(),
            detail,
            hint: "convert from the bf16 release of this model, or from its fp8 release with 128x128 blocks",
        })
    };
    if top.get("compression_config").is_some() {
        return refuse("compression_config", "compressed-tensors".to_owned());
    }
    let key = "quantization_config";
    let Some(block) = top.block(key)? else { return Ok(Quantisation::None) };
    let method = block.opt_str("quant_method")?.unwrap_or("no quant_method");
    if method != "fp8" {
        return refuse(key, method.to_owned());
    }
    if let Some(other) = block.opt_str("fmt")?.filter(|fmt| *fmt != "e4m3") {
        return refuse(key, format!("fp8 in format {other}"));
    }
    let sides: Option<Vec<u64>> = block
        .list("weight_block_size")?
        .map(|sides| sides.iter().filter_map(serde_json::Value::as_u64).collect());
    match sides.as_deref() {
        Some([128, 128]) => Ok(Quantisation::Fp8 { block: FP8_BLOCK }),
        Some(other) => refuse(key, format!("fp8 with blocks of {other:?}")),
        None => refuse(key, "fp8 without weight_block_size".to_owned()),
    }
}
