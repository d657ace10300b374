//! The exact sum of expert outputs: 64-bit fixed point with quantum 2^-30.
//!
//! Integer addition is associative, so any worker may add its own experts first and replies may come in any order.

/// Terms of this magnitude or more are refused: 2^21 leaves room for 4096 terms in the 64-bit sum.
pub const TERM_LIMIT: f32 = 2_097_152.0;
/// One in fixed point.
pub(crate) const ONE: f64 = 1_073_741_824.0;
/// The quantum, 2^-30.
pub(crate) const QUANTUM: f32 = 1.0 / 1_073_741_824.0;
/// 1.5 * 2^52: adding it rounds an f64 of magnitude at most 2^51 half to even into the low bits of the sum.
pub(crate) const ROUND_F64: f64 = 6_755_399_441_055_744.0;

/// A term that cannot be added exactly.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum CombineError {
    /// NaN, infinite, or at least 2^21.
    #[error(
        "expert output times gate at element {index} is {term}, outside the exact range of +-2^21"
    )]
    OutOfRange {
        /// Position in the row.
        index: usize,
        /// The product.
        term: f32,
    },
}

/// Adds `gate * y` to a fixed-point row: one f32 multiply per element, rounded half to even to 2^-30.
///
/// On an error the row must be thrown away: some elements may hold the refused term.
pub fn accumulate(acc: &mut [i64], gate: f32, y: &[f32]) -> Result<(), CombineError> {
    assert_eq!(acc.len(), y.len(), "one sum per element");
    if accumulate_all(acc, gate, y) { Ok(()) } else { Err(first_out_of_range(gate, y)) }
}

/// The error that names the first element out of range.
pub(crate) fn first_out_of_range(gate: f32, y: &[f32]) -> CombineError {
    let in_range = |term: f32| term.abs() < TERM_LIMIT;
    let index = y
        .iter()
        .position(|v| !in_range(gate * v))
        .expect("the caller found an element out of range");
    CombineError::OutOfRange { index, term: gate * y[index] }
}

/// Adds every term and says whether all were in range. Without branches, so that it compiles to vector code.
#[inline(always)]
pub(crate) fn accumulate_all(acc: &mut [i64], gate: f32, y: &[f32]) -> bool {
    let mut in_range = true;
    for (sum, value) in acc.iter_mut().zip(y) {
        let term = gate * value;
        in_range &= term.abs() < TERM_LIMIT;
        let fixed = f64::from(term) * ONE + ROUND_F64;
        let fixed = fixed.to_bits().wrapping_sub(ROUND_F64.to_bits()).cast_signed();
        *sum = sum.wrapping_add(fixed);
    }
    in_range
}

/// Converts a fixed-point row back: f32(sum), rounded once, times 2^-30.
pub fn finish(acc: &[i64], out: &mut [f32]) {
    assert_eq!(acc.len(), out.len(), "one value per sum");
    finish_all(acc, out);
}

#[inline(always)]
#[expect(clippy::cast_precision_loss, reason = "the one rounding of the combine")]
pub(crate) fn finish_all(acc: &[i64], out: &mut [f32]) {
    for (value, sum) in out.iter_mut().zip(acc) {
        *value = (*sum as f32) * QUANTUM;
    }
}

#[cfg(test)]
mod tests;
