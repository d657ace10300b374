//! Conversion of weights into the R16 layout: rounding, and scales by least squared error.
//!
//! Runs once, when a container is made; not a hot path, but a checkpoint has billions of weights.

use half::{bf16, f16};
use rayon::prelude::*;

use crate::layout::{LayoutError, MatrixLayout, check_length};
use crate::{BLOCK_ROWS, ExpertLayout, GROUP, WeightFormat};

/// Scales tried for a group, as factors on the largest magnitude divided by the largest integer. Clipping the extremes of
/// a group often costs less than coarser steps for everything else, most of all at 4 bits.
const FACTORS_Q8: [f32; 5] = [1.0, 0.996, 0.992, 0.988, 0.984];
const FACTORS_Q4: [f32; 15] =
    [1.0, 0.98, 0.96, 0.94, 0.92, 0.90, 0.88, 0.86, 0.84, 0.82, 0.80, 0.77, 0.74, 0.71, 0.68];

/// Packs a row-major matrix. Runs on the caller's rayon pool. The bytes depend on the source alone.
///
/// Refuses values that are not finite or beyond the range of the format.
pub fn pack_matrix(
    layout: &MatrixLayout,
    source: &[f32],
    weights: &mut [u8],
    scales: &mut [u8],
) -> Result<(), LayoutError> {
    check_length("source", "values", layout.rows() * layout.cols(), source.len())?;
    check_length("weights", "bytes", layout.weight_bytes(), weights.len())?;
    check_length("scales", "bytes", layout.scale_bytes(), scales.len())?;
    let cols = layout.cols();
    let block_bytes = layout.block_bytes();
    let scale_bytes = layout.scale_bytes() / layout.blocks();
    let rows = source.par_chunks(BLOCK_ROWS * cols).zip(weights.par_chunks_exact_mut(block_bytes));
    if layout.format().is_integer() {
        rows.zip(scales.par_chunks_exact_mut(scale_bytes)).enumerate().try_for_each(
            |(block, ((rows, w), s))| pack_integer_block(layout, block * BLOCK_ROWS, rows, w, s),
        )
    } else {
        rows.enumerate().try_for_each(|(block, (rows, w))| {
            pack_float_block(layout, block * BLOCK_ROWS, rows, w)
        })
    }
}

/// Packs the three matrices of an expert into its slab; the padding between parts is zeroed.
pub fn pack_expert(
    layout: &ExpertLayout,
    gate: &[f32],
    up: &[f32],
    down: &[f32],
    slab: &mut [u8],
) -> Result<(), LayoutError> {
    check_length("expert slab", "bytes", layout.slab_bytes(), slab.len())?;
    slab.fill(0);
    for ((matrix, weights_at, scales_at), source) in
        layout.parts().into_iter().zip([gate, up, down])
    {
        let (weights, scales) = slab.split_at_mut(scales_at);
        let weights = &mut weights[weights_at..weights_at + matrix.weight_bytes()];
        pack_matrix(&matrix, source, weights, &mut scales[..matrix.scale_bytes()])?;
    }
    Ok(())
}

fn out_of_range(layout: &MatrixLayout, row: usize, col: usize, value: f32) -> LayoutError {
    LayoutError::OutOfRange { row, col, value: value.to_string(), format: layout.format() }
}

fn pack_float_block(
    layout: &MatrixLayout,
    first_row: usize,
    rows: &[f32],
    weights: &mut [u8],
) -> Result<(), LayoutError> {
    weights.fill(0);
    let unit = layout.format().unit_bytes();
    for (lane, values) in rows.chunks_exact(layout.cols()).enumerate() {
        for (col, &value) in values.iter().enumerate() {
            let row = first_row + lane;
            if !value.is_finite() {
                return Err(LayoutError::NonFinite { row, col });
            }
            let bytes = &mut weights[(col * BLOCK_ROWS + lane) * unit..][..unit];
            let finite = match layout.format() {
                WeightFormat::Bf16 => {
                    let rounded = bf16::from_f32(value);
                    bytes.copy_from_slice(&rounded.to_le_bytes());
                    rounded.is_finite()
                }
                WeightFormat::F16 => {
                    let rounded = f16::from_f32(value);
                    bytes.copy_from_slice(&rounded.to_le_bytes());
                    rounded.is_finite()
                }
                _ => {
                    bytes.copy_from_slice(&value.to_le_bytes());
                    true
                }
            };
            if !finite {
                return Err(out_of_range(layout, row, col, value));
            }
        }
    }
    Ok(())
}

fn pack_integer_block(
    layout: &MatrixLayout,
    first_row: usize,
    rows: &[f32],
    weights: &mut [u8],
    scales: &mut [u8],
) -> Result<(), LayoutError> {
    let q4 = layout.format() == WeightFormat::Q4G64;
    // Zero weights: nibble 8 in q4, byte 0 in q8.
    weights.fill(if q4 { 0x88 } else { 0 });
    scales.fill(0);
    for (lane, values) in rows.chunks_exact(layout.cols()).enumerate() {
        for (group, values) in values.chunks(GROUP).enumerate() {
            let row = first_row + lane;
            if let Some(at) = values.iter().position(|v| !v.is_finite()) {
                return Err(LayoutError::NonFinite { row, col: group * GROUP + at });
            }
            let quantised = if q4 { quantise::<4>(values) } else { quantise::<8>(values) };
            let Some((scale, q)) = quantised else {
                return Err(out_of_range(layout, row, group * GROUP, largest(values)));
            };
            scales[layout.scale(lane, group)..][..2].copy_from_slice(&scale.to_le_bytes());
            for (i, q) in q[..values.len()].iter().enumerate() {
                let (at, high) = layout.element(lane, group * GROUP + i);
                if q4 {
                    let nibble = (q + 8).cast_unsigned();
                    weights[at] = if high {
                        weights[at] & 0x0f | nibble << 4
                    } else {
                        weights[at] & 0xf0 | nibble
                    };
                } else {
                    weights[at] = q.cast_unsigned();
                }
            }
        }
    }
    Ok(())
}

/// The value of largest magnitude, the first among equals.
fn largest(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |m: f32, &v| if v.abs() > m.abs() { v } else { m })
}

/// The best scale of a group and its integers; `None` if no f16 scale reaches the largest value.
///
/// Tries a grid of scales, then the least-squares scale of the best integers, and keeps whichever has the smallest sum of
/// squared errors (the first among equals). At 4 bits both signs of the scale are tried, since -8 has no counterpart.
fn quantise<const BITS: u32>(values: &[f32]) -> Option<(f16, [i8; GROUP])> {
    let mut padded = [0.0_f32; GROUP];
    padded[..values.len()].copy_from_slice(values);
    let peak = largest(values);
    let mut best = (f16::ZERO, [0_i8; GROUP]);
    if peak.abs() == 0.0 {
        return Some(best);
    }
    let mut best_error = f32::INFINITY;
    let mut attempt = |scale: f32| {
        let rounded = f16::from_f32(scale);
        let step = rounded.to_f32();
        if step == 0.0 || !step.is_finite() {
            return None;
        }
        let (q, error) = round_to_steps::<BITS>(&padded, step);
        if error < best_error {
            best_error = error;
            best = (rounded, q);
        }
        Some(least_squares(&padded, &q))
    };
    let mut reached = false;
    if BITS == 8 {
        for factor in FACTORS_Q8 {
            reached |= attempt(peak.abs() / 127.0 * factor).is_some();
        }
    } else {
        for factor in FACTORS_Q4 {
            for scale in [peak / -8.0, peak / 7.0] {
                if let Some(refined) = attempt(scale * factor) {
                    reached = true;
                    attempt(refined);
                }
            }
        }
    }
    // Too small for any f16 scale: zero is the nearest value. Too large: the caller refuses.
    (reached || peak.abs() < 1.0).then_some(best)
}

/// Nearest integers for one step, and the sum of squared errors in f32 (order fixed: 16 lanes, then a tree).
#[inline(always)]
fn round_to_steps<const BITS: u32>(values: &[f32; GROUP], step: f32) -> ([i8; GROUP], f32) {
    let (low, high) = if BITS == 8 { (-127.0, 127.0) } else { (-8.0, 7.0) };
    let mut q = [0_i8; GROUP];
    let mut lanes = [0.0_f32; 16];
    let inverse = 1.0 / step;
    for i in 0..GROUP {
        let rounded = crate::math::round_small((values[i] * inverse).clamp(low - 1.0, high + 1.0))
            .clamp(low, high);
        let error = values[i] - rounded * step;
        lanes[i % 16] += error * error;
        #[expect(clippy::cast_possible_truncation, reason = "an integer in -127..=127")]
        let value = rounded as i32 as i8;
        q[i] = value;
    }
    (q, crate::math::fold_lanes(lanes))
}

/// The scale that fits given integers best: sum(w q) / sum(q q).
fn least_squares(values: &[f32; GROUP], q: &[i8; GROUP]) -> f32 {
    let (mut numerator, mut denominator) = (0.0_f64, 0_i32);
    for (w, q) in values.iter().zip(q) {
        numerator += f64::from(*w) * f64::from(*q);
        denominator += i32::from(*q) * i32::from(*q);
    }
    #[expect(clippy::cast_possible_truncation, reason = "rounded to f16 next")]
    let scale = (numerator / f64::from(denominator)) as f32;
    scale
}

#[cfg(test)]
mod tests;
