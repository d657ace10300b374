//! Tensors as f32: plain floats widened exactly, FP8 multiplied by its block scales.

use half::{bf16, f16};

use crate::error::{Error, Result};
use crate::safetensors::{DType, TensorFile, TensorInfo};

/// Bytes read at once while widening.
const PIECE_BYTES: usize = 4 << 20;

/// Reads ranges of one tensor.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TensorReader<'a> {
    name: &'a str,
    file: &'a TensorFile,
    info: &'a TensorInfo,
    /// Widens one element; `None` for FP8, which needs scales.
    kind: Kind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Bf16,
    F16,
    F32,
    Fp8,
}

/// Scales of an FP8 matrix, `[ceil(rows / block)][ceil(cols / block)]`.
#[derive(Debug)]
pub(crate) struct Fp8Scales {
    pub(crate) block: usize,
    pub(crate) scales: Vec<f32>,
}

impl<'a> TensorReader<'a> {
    /// Refuses element types that are not floats. FP8 is accepted only where `scaled` says that its scales are known.
    pub(crate) fn new(
        name: &'a str,
        file: &'a TensorFile,
        info: &'a TensorInfo,
        scaled: bool,
    ) -> Result<Self> {
        let kind = match info.dtype {
            DType::BF16 => Kind::Bf16,
            DType::F16 => Kind::F16,
            DType::F32 => Kind::F32,
            DType::F8_E4M3 if scaled => Kind::Fp8,
            other => {
                return Err(Error::DataType {
                    file: file.path().to_path_buf(),
                    tensor: name.to_owned(),
                    found: other.to_string(),
                    hint: "weights are read as BF16, F16, F32, or F8_E4M3 with 128x128 block scales; \
                           use a release of the model in one of them",
                });
            }
        };
        Ok(Self { name, file, info, kind })
    }

    /// Widens `out.len()` elements from element `first` on. NaN and infinities are refused.
    pub(crate) fn read(&self, first: u64, out: &mut [f32]) -> Result<()> {
        let width =
            usize::try_from(self.info.dtype.bytes()).expect("an element has at most 8 bytes");
        let mut bytes = vec![0; out.len().saturating_mul(width).min(PIECE_BYTES)];
        let mut at = first;
        for piece in out.chunks_mut(PIECE_BYTES / width) {
            let bytes = &mut bytes[..piece.len() * width];
            self.file.read(self.info, at * self.info.dtype.bytes(), bytes)?;
            self.widen(bytes, piece);
            if let Some(bad) = piece.iter().position(|value| !value.is_finite()) {
                let (file, tensor) = (self.file.path().to_path_buf(), self.name.to_owned());
                return Err(Error::NotFinite { file, tensor, element: at + bad as u64 });
            }
            at += piece.len() as u64;
        }
        Ok(())
    }

    fn widen(&self, bytes: &[u8], out: &mut [f32]) {
        let pairs = || bytes.as_chunks::<2>().0.iter();
        match self.kind {
            Kind::Bf16 => {
                pairs().zip(out).for_each(|(&b, value)| *value = bf16::from_le_bytes(b).to_f32())
            }
            Kind::F16 => {
                pairs().zip(out).for_each(|(&b, value)| *value = f16::from_le_bytes(b).to_f32())
            }
            Kind::F32 => {
                bytes
                    .as_chunks::<4>()
                    .0
                    .iter()
                    .zip(out)
                    .for_each(|(&b, value)| *value = f32::from_le_bytes(b));
            }
            Kind::Fp8 => bytes.iter().zip(out).for_each(|(&b, value)| *value = e4m3(b)),
        }
    }
}

impl Fp8Scales {
    /// Multiplies rows of a matrix of `cols` columns, beginning with `first_row`.
    pub(crate) fn apply(&self, first_row: usize, cols: usize, values: &mut [f32]) {
        let blocks = cols.div_ceil(self.block);
        for (row, values) in (first_row..).zip(values.chunks_mut(cols)) {
            let scales = &self.scales[row / self.block * blocks..][..blocks];
            for (piece, scale) in values.chunks_mut(self.block).zip(scales) {
                piece.iter_mut().for_each(|value| *value *= scale);
            }
        }
    }
}

/// FP8 E4M3 (the variant without infinities): sign, 4 exponent bits of bias 7, 3 mantissa bits; all ones is NaN.
fn e4m3(byte: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f32::from(byte & 7));
    let magnitude = match (exponent, byte & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa * 0.001_953_125,
        _ => (1.0 + mantissa * 0.125) * power_of_two(exponent - 7),
    };
    if byte & 0x80 != 0 { -magnitude } else { magnitude }
}

/// 2^n for an n of normal f32 range.
fn power_of_two(n: i32) -> f32 {
    f32::from_bits(u32::try_from(n + 127).expect("n is above -127") << 23)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(byte: u8, expected: f32) {
        assert_eq!(e4m3(byte).to_bits(), expected.to_bits(), "{byte:#04x}");
    }

    #[test]
    fn e4m3_has_the_published_extremes() {
        check(0x00, 0.0);
        check(0x80, -0.0);
        check(0x01, 2f32.powi(-9));
        check(0x07, 7.0 * 2f32.powi(-9));
        check(0x08, 2f32.powi(-6));
        check(0x38, 1.0);
        check(0xb9, -1.125);
        check(0x7e, 448.0);
        assert!(e4m3(0x7f).is_nan() && e4m3(0xff).is_nan());
    }

    #[test]
    fn scales_apply_by_block() {
        let scales = Fp8Scales { block: 2, scales: vec![1.0, 10.0, 100.0, 1000.0] };
        let mut values = vec![1.0; 6];
        scales.apply(1, 3, &mut values);
        assert_eq!(values, [1.0, 1.0, 10.0, 100.0, 100.0, 1000.0]);
    }
}
