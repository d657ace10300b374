//! The rotary embedding block, in both spellings: `rope_parameters` of newer writers and top-level `rope_theta`,
//! `rope_scaling`, `partial_rotary_factor` of older ones. Scaled positions are not implemented and are refused:
//! ignoring them would give text that looks right and is not.

use super::RopeConfig;
use super::value::Block;
use crate::error::Result;

/// Keys of a rope block that are understood.
const KNOWN: [&str; 4] = ["rope_type", "type", "rope_theta", "partial_rotary_factor"];
const SPELLINGS: [&str; 2] = ["rope_parameters", "rope_scaling"];

/// Reads the rotary embedding. `default_partial` is what the family assumes without the key. A key that is not
/// understood next to an unscaled type is reported in `warnings`.
pub(super) fn read(
    top: &Block<'_>,
    head_dim: usize,
    default_partial: f64,
    warnings: &mut Vec<String>,
) -> Result<RopeConfig> {
    let mut theta = top.opt_f64("rope_theta")?;
    let mut partial = top.opt_f64("partial_rotary_factor")?;
    for spelling in SPELLINGS {
        let Some(block) = top.block(spelling)? else { continue };
        check_type(&block)?;
        merge(&block, "rope_theta", &mut theta)?;
        merge(&block, "partial_rotary_factor", &mut partial)?;
        for key in block.keys().filter(|key| !KNOWN.contains(key)) {
            warnings.push(format!(
                "config.json: {} is not understood and has no effect with rope type default",
                block.full(key)
            ));
        }
    }
    let theta = match theta {
        Some(theta) if theta > 1.0 => theta,
        Some(theta) => {
            return Err(top.error(
                "rope_theta",
                format!("{theta} is not above 1"),
                "restore config.json",
            ));
        }
        None => {
            return Err(top.error(
                "rope_theta",
                "neither the top level nor rope_parameters has it",
                "add the value that the model was trained with; no value is assumed",
            ));
        }
    };
    let partial = partial.unwrap_or(default_partial);
    Ok(RopeConfig { theta, rotary_dim: rotary_dim(top, head_dim, partial)? })
}

fn check_type(block: &Block<'_>) -> Result<()> {
    let kind = block.one_of(&["rope_type", "type"], Block::opt_str)?;
    match kind {
        Some("default") => Ok(()),
        Some(other) => Err(block.error(
            "rope_type",
            format!("{other:?} is not implemented"),
            "only unscaled positions (type default) are; running this model without its scaling would give wrong text",
        )),
        // Some writers leave an empty block, or only the base.
        None if block.keys().all(|key| KNOWN.contains(&key)) => Ok(()),
        None => {
            let keys: Vec<&str> = block.keys().collect();
            Err(block.error(
                "rope_type",
                format!("the block has no type but has {}", keys.join(", ")),
                "add rope_type; \"default\" means unscaled positions",
            ))
        }
    }
}

/// Takes a value from the block; it must agree with one that is there already.
fn merge(block: &Block<'_>, key: &str, value: &mut Option<f64>) -> Result<()> {
    let Some(inner) = block.opt_f64(key)? else { return Ok(()) };
    match *value {
        Some(outer) if outer.to_bits() != inner.to_bits() => Err(block.error(
            key,
            format!("{inner} contradicts {outer} elsewhere in the file"),
            "remove the one that is wrong",
        )),
        _ => {
            *value = Some(inner);
            Ok(())
        }
    }
}

/// `floor(head_dim * partial)`, as the reference implementations have it; must be even and inside the head.
fn rotary_dim(top: &Block<'_>, head_dim: usize, partial: f64) -> Result<usize> {
    let key = "partial_rotary_factor";
    if !(partial > 0.0 && partial <= 1.0) {
        return Err(top.error(key, format!("{partial} is not in (0, 1]"), "restore config.json"));
    }
    #[expect(clippy::cast_precision_loss, reason = "a head dimension is far below 2^53")]
    let exact = head_dim as f64 * partial;
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "0 < exact <= head_dim, and truncation is the rule"
    )]
    let dim = exact as usize;
    if dim == 0 || !dim.is_multiple_of(2) {
        return Err(top.error(
            key,
            format!("{partial} of head_dim {head_dim} is {dim} dimensions, which do not pair up"),
            "restore config.json",
        ));
    }
    Ok(dim)
}
