//! Values of GGUF blocks, as the format's reference computes them: one multiply, and one add where there is a minimum.

use half::{bf16, f16};

use super::GgufType;

/// Dequantises whole blocks.
pub(super) fn values(kind: GgufType, bytes: &[u8]) -> Vec<f32> {
    match kind {
        GgufType::F32 => bytes.as_chunks::<4>().0.iter().map(|&b| f32::from_le_bytes(b)).collect(),
        GgufType::F16 => {
            bytes.as_chunks::<2>().0.iter().map(|&b| f16::from_le_bytes(b).to_f32()).collect()
        }
        GgufType::Bf16 => {
            bytes.as_chunks::<2>().0.iter().map(|&b| bf16::from_le_bytes(b).to_f32()).collect()
        }
        GgufType::Q4_0 => {
            let block = |b: &[u8; 18]| nibbles(&b[2..]).map(|q| (f32::from(q) - 8.0) * float(b, 0));
            bytes.as_chunks().0.iter().flat_map(block).collect()
        }
        GgufType::Q4_1 => {
            let block =
                |b: &[u8; 20]| nibbles(&b[4..]).map(|q| f32::from(q) * float(b, 0) + float(b, 2));
            bytes.as_chunks().0.iter().flat_map(block).collect()
        }
        GgufType::Q8_0 => {
            let block = |b: &[u8; 34]| {
                let scale = float(b, 0);
                let mut values = [0.0; 32];
                values
                    .iter_mut()
                    .zip(&b[2..])
                    .for_each(|(value, &q)| *value = f32::from(q.cast_signed()) * scale);
                values
            };
            bytes.as_chunks().0.iter().flat_map(block).collect()
        }
    }
}

fn float(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// The low nibbles are the first half of a block, the high ones the second.
fn nibbles(bytes: &[u8]) -> [u8; 32] {
    std::array::from_fn(|index| if index < 16 { bytes[index] & 15 } else { bytes[index - 16] >> 4 })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(kind: GgufType, bytes: &[u8], expected: &[f32]) {
        assert_eq!(values(kind, bytes), expected);
    }

    #[test]
    fn blocks_follow_the_format() {
        let half = |value: f32| f16::from_f32(value).to_le_bytes();
        let quants: Vec<u8> = (0..16).map(|i| i | ((15 - i) << 4)).collect();
        let order: Vec<u8> = (0..16).chain((0..16).rev()).collect();

        let bytes = [&half(0.5)[..], &quants].concat();
        let expected: Vec<f32> = order.iter().map(|&q| (f32::from(q) - 8.0) * 0.5).collect();
        check(GgufType::Q4_0, &bytes, &expected);

        let bytes = [&half(0.5)[..], &half(-1.0), &quants].concat();
        let expected: Vec<f32> = order.iter().map(|&q| f32::from(q) * 0.5 - 1.0).collect();
        check(GgufType::Q4_1, &bytes, &expected);

        let signed: Vec<u8> = (-16..16_i8).map(i8::cast_unsigned).collect();
        let expected: Vec<f32> = (-16..16_i8).map(|q| f32::from(q) * 0.25).collect();
        check(GgufType::Q8_0, &[&half(0.25)[..], &signed].concat(), &expected);

        check(GgufType::F16, &half(1.5), &[1.5]);
        check(GgufType::Bf16, &[0xC0, 0x3F], &[1.5]);
        check(GgufType::F32, &1.5_f32.to_le_bytes(), &[1.5]);
    }
}
