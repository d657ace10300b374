//! Memory that a device knows: registered once it is mapped, unregistered before it is given back.

#![expect(unsafe_code, reason = "addresses that cross threads")]

use std::{
    fmt,
    ptr::NonNull,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

/// The most that one call registers. A driver holds its locks while it pins: 700 GB in one call stalled every process on
/// the node for 12 minutes, and some kernels pin no more than 2 GiB at once.
const PIECE_BYTES: usize = 1 << 30;

/// A driver that must know host memory before its device copies from it at full speed.
///
/// Never called under a lock of the memory module. It must not panic in `unregister`.
pub trait DeviceRegistration: Send + Sync + fmt::Debug {
    /// Makes the range known.
    ///
    /// # Errors
    /// The driver refused; then the range is not known.
    fn register(&self, range: DeviceRange) -> Result<(), RegistrationError>;

    /// Takes a registered range back. The memory may be gone as soon as this returns.
    ///
    /// # Errors
    /// The driver refused; the memory goes anyway.
    fn unregister(&self, range: DeviceRange) -> Result<(), RegistrationError>;
}

/// Whole pages of a slot. They stay mapped from `register` to the end of `unregister`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DeviceRange {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: an address and a length; only a driver gives them a meaning.
unsafe impl Send for DeviceRange {}
// SAFETY: as above.
unsafe impl Sync for DeviceRange {}

impl DeviceRange {
    /// First byte.
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Length in bytes, at most 1 GiB.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

/// What a driver said.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct RegistrationError {
    /// In the driver's words.
    pub message: String,
}

/// A registered range; dropping it unregisters.
#[derive(Debug)]
pub(super) struct Registered {
    device: Arc<dyn DeviceRegistration>,
    /// Bytes that the device knows, of all ranges.
    total: Arc<AtomicU64>,
    start: NonNull<u8>,
    /// How much of the range the device knows.
    known: usize,
    piece: usize,
}

impl Registered {
    /// Registers in pieces. On an error, or a panic of the driver, what was registered is unregistered again.
    pub(super) fn new(
        device: &Arc<dyn DeviceRegistration>,
        total: &Arc<AtomicU64>,
        start: NonNull<u8>,
        bytes: usize,
    ) -> Result<Self, RegistrationError> {
        Self::in_pieces(device, total, start, bytes, PIECE_BYTES)
    }

    fn in_pieces(
        device: &Arc<dyn DeviceRegistration>,
        total: &Arc<AtomicU64>,
        start: NonNull<u8>,
        bytes: usize,
        piece: usize,
    ) -> Result<Self, RegistrationError> {
        let (device, total) = (Arc::clone(device), Arc::clone(total));
        let mut registered = Self { device, total, start, known: 0, piece };
        while registered.known < bytes {
            let next = registered.range(registered.known, bytes);
            registered.device.register(next)?;
            registered.known += next.bytes;
            registered.total.fetch_add(next.bytes as u64, Relaxed);
        }
        Ok(registered)
    }

    /// The piece that begins at an offset.
    fn range(&self, offset: usize, end: usize) -> DeviceRange {
        let bytes = (end - offset).min(self.piece);
        DeviceRange { start: self.start.map_addr(|at| at.saturating_add(offset)), bytes }
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        let mut offset = 0;
        while offset < self.known {
            let range = self.range(offset, self.known);
            offset += range.bytes;
            if let Err(error) = self.device.unregister(range) {
                tracing::error!(%error, ?range, "a device kept memory that is given back");
            }
            self.total.fetch_sub(range.bytes as u64, Relaxed);
        }
    }
}

#[cfg(test)]
pub(super) mod tests;
