//! Checksums of the frames that carry activations: one flipped bit anywhere in a work or result message is seen before
//! any arithmetic.
//!
//! XXH3-64 over a canonical byte string, not over the protobuf encoding, because the encoding of a message is not
//! unique. The string is: a domain byte, the fence (`epoch`, `generation`, `step`, `layer`, `attempt`, `part`, each
//! as u64 little-endian), then the fields in the order of their numbers. A scalar is a u64 little-endian, a list or a
//! byte string is its element count as u64 and then its elements, little-endian in their own width. The context of a trace is
//! not part of it: it says whom to tell, not what to compute.

use xxhash_rust::xxh3::Xxh3;

use crate::expert::v1::{ExpertResult, ExpertWork, Fence, PrefetchHint, expert_result::Payload};

const DOMAIN_WORK: u8 = 1;
const DOMAIN_RESULT: u8 = 2;
const DOMAIN_HINT: u8 = 3;

/// A frame whose content does not match its checksum.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("checksum of the frame is {found:016x}, its content gives {expected:016x}")]
pub struct ChecksumMismatch {
    /// What the content gives.
    pub expected: u64,
    /// What the frame says.
    pub found: u64,
}

/// Checksum of a work message, over everything but its checksum field.
pub fn work(work: &ExpertWork) -> u64 {
    let mut hash = Hasher::new(DOMAIN_WORK, work.fence.as_ref());
    hash.scalar(u64::from(work.format.cast_unsigned()));
    hash.scalar(u64::from(work.row_count));
    hash.bytes(&work.rows);
    hash.words(&work.experts);
    hash.words(&work.item_rows);
    hash.words(&work.row_indices);
    hash.floats(&work.gates);
    hash.scalar(u64::from(work.deadline_ms));
    hash.finish()
}

/// Checksum of a result message, over everything but its checksum field.
pub fn result(result: &ExpertResult) -> u64 {
    let mut hash = Hasher::new(DOMAIN_RESULT, result.fence.as_ref());
    hash.scalar(u64::from(result.row_count));
    match &result.payload {
        None => hash.scalar(0),
        Some(Payload::Accumulators(bytes)) => {
            hash.scalar(3);
            hash.bytes(bytes);
        }
        Some(Payload::Outputs(bytes)) => {
            hash.scalar(4);
            hash.bytes(bytes);
        }
    }
    for value in [result.compute_us, result.queue_us, result.ram_hits] {
        hash.scalar(u64::from(value));
    }
    hash.finish()
}

/// Checksum of a hint, over everything but its checksum field.
pub fn hint(hint: &PrefetchHint) -> u64 {
    let mut hash = Hasher::new(DOMAIN_HINT, hint.fence.as_ref());
    hash.scalar(u64::from(hint.layer));
    hash.words(&hint.experts);
    hash.finish()
}

/// Checks a received work message.
pub fn verify_work(message: &ExpertWork) -> Result<(), ChecksumMismatch> {
    compare(work(message), message.checksum)
}

/// Checks a received result message.
pub fn verify_result(message: &ExpertResult) -> Result<(), ChecksumMismatch> {
    compare(result(message), message.checksum)
}

/// Checks a received hint.
pub fn verify_hint(message: &PrefetchHint) -> Result<(), ChecksumMismatch> {
    compare(hint(message), message.checksum)
}

/// Writes the checksum of a finished work message into it.
pub fn seal_work(message: &mut ExpertWork) {
    message.checksum = work(message);
}

/// Writes the checksum of a finished result message into it.
pub fn seal_result(message: &mut ExpertResult) {
    message.checksum = result(message);
}

/// Writes the checksum of a finished hint into it.
pub fn seal_hint(message: &mut PrefetchHint) {
    message.checksum = hint(message);
}

fn compare(expected: u64, found: u64) -> Result<(), ChecksumMismatch> {
    if expected == found { Ok(()) } else { Err(ChecksumMismatch { expected, found }) }
}

struct Hasher(Xxh3);

impl Hasher {
    fn new(domain: u8, fence: Option<&Fence>) -> Self {
        let mut hasher = Self(Xxh3::new());
        hasher.0.update(&[domain, u8::from(fence.is_some())]);
        if let Some(fence) = fence {
            for value in [
                fence.epoch,
                fence.generation,
                fence.step,
                u64::from(fence.layer),
                u64::from(fence.attempt),
                u64::from(fence.part),
            ] {
                hasher.scalar(value);
            }
        }
        hasher
    }

    fn scalar(&mut self, value: u64) {
        self.0.update(&value.to_le_bytes());
    }

    fn length(&mut self, length: usize) {
        self.scalar(length as u64);
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.length(bytes.len());
        self.0.update(bytes);
    }

    fn words(&mut self, values: &[u32]) {
        self.length(values.len());
        for value in values {
            self.0.update(&value.to_le_bytes());
        }
    }

    fn floats(&mut self, values: &[f32]) {
        self.length(values.len());
        for value in values {
            self.0.update(&value.to_bits().to_le_bytes());
        }
    }

    fn finish(&self) -> u64 {
        self.0.digest()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use prost::Message as _;

    use super::*;

    fn sample_work() -> ExpertWork {
        let mut message = ExpertWork {
            fence: Some(Fence { epoch: 7, generation: 1, step: 9, layer: 3, attempt: 0, part: 1 }),
            format: 2,
            row_count: 2,
            rows: (0..=200).collect::<Vec<u8>>().into(),
            experts: vec![1, 5],
            item_rows: vec![1, 2],
            row_indices: vec![0, 0, 1],
            gates: vec![0.5, 0.25, 0.125],
            deadline_ms: 1000,
            checksum: 0,
            trace: None,
        };
        seal_work(&mut message);
        message
    }

    fn sample_result() -> ExpertResult {
        let mut message = ExpertResult {
            fence: sample_work().fence,
            row_count: 2,
            payload: Some(Payload::Accumulators((0..64).collect::<Vec<u8>>().into())),
            compute_us: 31,
            queue_us: 2,
            ram_hits: 2,
            checksum: 0,
        };
        seal_result(&mut message);
        message
    }

    #[test]
    fn sealed_messages_verify_after_the_wire() {
        let work = ExpertWork::decode(&*sample_work().encode_to_vec()).unwrap();
        assert_eq!(verify_work(&work), Ok(()));
        let result = ExpertResult::decode(&*sample_result().encode_to_vec()).unwrap();
        assert_eq!(verify_result(&result), Ok(()));
        let mut hint = PrefetchHint {
            fence: sample_work().fence,
            layer: 4,
            experts: vec![5, 1],
            ..PrefetchHint::default()
        };
        seal_hint(&mut hint);
        let mut hint = PrefetchHint::decode(&*hint.encode_to_vec()).unwrap();
        assert_eq!(verify_hint(&hint), Ok(()));
        hint.experts.swap(0, 1);
        assert!(verify_hint(&hint).is_err(), "the order is content");
    }

    #[test]
    fn the_definition_is_pinned() {
        // Two builds must agree, so the value is part of the protocol; changing it needs a new protocol version.
        assert_eq!(work(&ExpertWork::default()), 0xd291_d513_1fb3_0f35);
        assert_eq!(hint(&PrefetchHint::default()), 0xea8a_e47a_33f3_018f);
    }

    #[test]
    fn moving_a_value_between_lists_is_seen() {
        let mut moved = sample_work();
        let last = moved.item_rows.pop().unwrap();
        moved.row_indices.insert(0, last);
        assert!(verify_work(&moved).is_err());
    }

    #[test]
    fn outputs_are_not_taken_for_accumulators() {
        let mut swapped = sample_result();
        let Some(Payload::Accumulators(bytes)) = swapped.payload.take() else {
            panic!("sample has accumulators")
        };
        swapped.payload = Some(Payload::Outputs(bytes));
        assert!(verify_result(&swapped).is_err());
    }

    proptest! {
        // A flipped bit either breaks the encoding, or the checksum, or it hits a field number so that the message
        // decodes to the same content as before; it never passes as different content.
        #[test]
        fn one_flipped_bit_never_passes_as_other_content(bit in 0usize..8 * 250) {
            let original = sample_work();
            let mut encoded = original.encode_to_vec();
            let bit = bit % (encoded.len() * 8);
            encoded[bit / 8] ^= 1 << (bit % 8);
            if let Ok(decoded) = ExpertWork::decode(&*encoded) {
                prop_assert!(verify_work(&decoded).is_err() || decoded == original);
            }
        }
    }
}
