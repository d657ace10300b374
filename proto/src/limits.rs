//! Sizes that both ends of the expert stream agree on.

use crate::expert::v1::Limits;

/// Version of the expert stream. Raised by any change that an older peer would misread.
pub const PROTOCOL_VERSION: u32 = 2;

/// Most workers that one cluster has, those that have gone and may come back included.
pub const MAX_WORKERS: usize = 64;

/// Most copies of one expert.
pub const MAX_COPIES: usize = 8;

/// Largest encoded message of the expert stream in either direction, bytes. Four times [`PART_BYTES`], so that rows,
/// indices and gates of a full part fit with room to spare.
pub const MAX_MESSAGE_BYTES: usize = 16 << 20;

/// Cap of the activation rows in one work message and of the payload in one result, bytes. Work above it is cut by
/// rows into parts.
pub const PART_BYTES: usize = 4 << 20;

/// Largest number of distinct rows in one work message, whatever their size.
pub const MAX_PART_ROWS: u32 = 4096;

/// Most experts in one hint. One thread that reads slabs of ten megabytes at 3 GB/s gets through a handful during a layer of
/// decoding and through a few dozen during one of prefill; what stands behind those would be dropped.
pub const MAX_HINT_EXPERTS: usize = 64;

/// Largest encoded message of the public API, bytes.
pub const MAX_API_MESSAGE_BYTES: usize = 64 << 20;

/// The limits this build announces in its hello.
pub fn announced() -> Limits {
    Limits { max_message_bytes: MAX_MESSAGE_BYTES as u64, max_rows: MAX_PART_ROWS }
}

/// Rows that fit in one part, given what one row costs in a work message and in a result. At least one, because a row
/// cannot be cut. A result never takes more than one i64 row per input row.
pub fn part_rows(row_bytes: usize, hidden: usize, peer_max_rows: u32) -> usize {
    let by_count = usize::try_from(peer_max_rows.min(MAX_PART_ROWS)).unwrap_or(usize::MAX);
    let result_bytes = hidden.saturating_mul(size_of::<i64>());
    let by_bytes = PART_BYTES / row_bytes.max(result_bytes).max(1);
    by_bytes.min(by_count).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(row_bytes: usize, hidden: usize, peer_max_rows: u32, expected: usize) {
        assert_eq!(part_rows(row_bytes, hidden, peer_max_rows), expected);
    }

    #[test]
    fn the_larger_direction_and_the_peer_bind() {
        check(2048 + 128, 2048, 4096, 256);
        check(8 * 2048, 1024, 4096, 256);
        check(64, 16, 100, 100);
        check(64, 16, 1 << 30, 4096);
    }

    #[test]
    fn a_row_is_never_cut() {
        check(64 << 20, 8 << 20, 4096, 1);
        check(64, 16, 0, 1);
    }
}
