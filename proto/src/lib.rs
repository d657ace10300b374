//! The contract between Shimmer processes: generated messages and services.
//!
//! It does no arithmetic, and opens no files but those of certificates and keys. Start reading at `proto/shimmer/expert/v1/expert.proto` for the stream between
//! coordinator and worker, and at `proto/shimmer/v1/inference.proto` for the public API. [`channel`] and [`limits`] hold
//! what both ends must set alike, [`identity`] and [`checksum`] what they check of each other, [`tls`] how they know each
//! other.

pub mod address;
pub mod backoff;
pub mod channel;
pub mod checksum;
pub mod flood;
pub mod followed;
pub mod identity;
pub mod limits;
pub mod membership;
pub mod status;
pub mod tls;
pub mod trace;

pub use limits::PROTOCOL_VERSION;

/// The public API (`shimmer.v1`).
pub mod v1 {
    #![allow(
        clippy::all,
        clippy::pedantic,
        clippy::cast_possible_wrap,
        clippy::allow_attributes_without_reason,
        unreachable_pub,
        missing_debug_implementations,
        reason = "generated code"
    )]
    tonic::include_proto!("shimmer.v1");
}

/// The operators' API.
pub mod admin {
    /// Status, placement, draining (`shimmer.admin.v1`).
    pub mod v1 {
        #![allow(
            clippy::all,
            clippy::pedantic,
            clippy::cast_possible_wrap,
            clippy::allow_attributes_without_reason,
            unreachable_pub,
            missing_debug_implementations,
            reason = "generated code"
        )]
        tonic::include_proto!("shimmer.admin.v1");
    }
}

/// The internal contracts.
pub mod expert {
    /// The expert stream (`shimmer.expert.v1`).
    pub mod v1 {
        #![allow(
            clippy::all,
            clippy::pedantic,
            clippy::cast_possible_wrap,
            clippy::allow_attributes_without_reason,
            unreachable_pub,
            missing_debug_implementations,
            reason = "generated code"
        )]
        tonic::include_proto!("shimmer.expert.v1");
    }
}

/// Encoded descriptors of every service, for gRPC reflection.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));
