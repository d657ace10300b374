//! Stored float types, read sixteen at a time: elements of float matrices and of cache pages.

use super::lanes::Lanes;
use crate::KvFormat;
use crate::kv::read_element;

/// A stored float type.
pub(super) trait Element {
    /// Sixteen stored elements.
    type Chunk;

    const BYTES: usize;

    /// Cuts bytes into chunks; a rest is left out.
    fn chunks(bytes: &[u8]) -> &[Self::Chunk];

    /// Where a chunk begins, to ask for memory ahead of it.
    fn first_byte(chunk: &Self::Chunk) -> &u8;

    /// Widens exactly.
    fn load<V: Lanes>(chunk: &Self::Chunk) -> V;

    /// Fewer than sixteen elements, then zeros.
    fn load_some<V: Lanes>(bytes: &[u8]) -> V;
}

#[derive(Debug)]
pub(super) struct F32;
#[derive(Debug)]
pub(super) struct F16;
#[derive(Debug)]
pub(super) struct Bf16;

macro_rules! element {
    ($type:ident, $bytes:literal, $chunk:literal, $load:ident) => {
        impl Element for $type {
            type Chunk = [u8; $chunk];

            const BYTES: usize = $bytes;

            #[inline(always)]
            fn chunks(bytes: &[u8]) -> &[Self::Chunk] {
                bytes.as_chunks().0
            }

            #[inline(always)]
            fn first_byte(chunk: &Self::Chunk) -> &u8 {
                &chunk[0]
            }

            #[inline(always)]
            fn load<V: Lanes>(chunk: &Self::Chunk) -> V {
                V::$load(chunk)
            }

            #[inline(always)]
            fn load_some<V: Lanes>(bytes: &[u8]) -> V {
                let mut lanes = [0.0; 16];
                for (i, lane) in lanes.iter_mut().enumerate().take(bytes.len() / $bytes) {
                    *lane = read_element(KvFormat::$type, bytes, i);
                }
                V::load(&lanes)
            }
        }
    };
}

element!(F32, 4, 64, load_f32);
element!(F16, 2, 32, load_f16);
element!(Bf16, 2, 32, load_bf16);
