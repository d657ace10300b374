//! One mapping, and what was done to it besides mapping.

use std::{
    fmt, io,
    ptr::NonNull,
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
};

use shimmer_kernels::Arena;

use super::{
    allocator::MemoryOptions,
    placement::MemoryPlacement,
    registration::{Registered, RegistrationError},
    survey::Surveyed,
    system::System,
};

/// What the mappings of an allocator share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) options: MemoryOptions,
    pub(super) totals: Totals,
    pub(super) system: Box<dyn System>,
    /// What is mapped, and some that is no more.
    mapped: Mutex<Vec<Weak<Mapping>>>,
    pub(super) surveyed: Mutex<Option<Surveyed>>,
    /// The system refused a lock once, which was said; it is not asked again.
    lock_refused: AtomicBool,
    /// As above, for the device.
    device_refused: AtomicBool,
}

#[derive(Debug, Default)]
pub(super) struct Totals {
    pub(super) mappings: AtomicU64,
    pub(super) mapped_bytes: AtomicU64,
    pub(super) locked_bytes: AtomicU64,
    pub(super) registered_bytes: Arc<AtomicU64>,
    pub(super) slots_released: AtomicU64,
    pub(super) slots_attached: AtomicU64,
}

/// An arena, counted while it lives.
pub(super) struct Mapping {
    arena: Arena,
    locked: bool,
    shared: Arc<Shared>,
}

impl Shared {
    pub(super) fn new(options: MemoryOptions, system: Box<dyn System>) -> Self {
        Self {
            options,
            totals: Totals::default(),
            system,
            mapped: Mutex::default(),
            surveyed: Mutex::default(),
            lock_refused: AtomicBool::new(false),
            device_refused: AtomicBool::new(false),
        }
    }

    /// What is mapped now.
    pub(super) fn mapped(&self) -> Vec<Arc<Mapping>> {
        let mapped = self.mapped.lock().unwrap_or_else(PoisonError::into_inner);
        mapped.iter().filter_map(Weak::upgrade).collect()
    }

    /// Locks a range if that is wanted. Whether it is locked.
    fn lock(&self, start: NonNull<u8>, bytes: usize) -> bool {
        if !self.options.lock || self.lock_refused.load(Relaxed) {
            return false;
        }
        let Err(error) = self.system.lock(start, bytes) else { return true };
        if !self.lock_refused.swap(true, Relaxed) {
            tracing::warn!(
                %error,
                bytes,
                limit = self.system.lock_limit(),
                "memory for experts is not locked and may be swapped out; raise the limit of locked memory (ulimit -l, \
                 LimitMEMLOCK= of systemd, --ulimit memlock= of container engines, the runtime's default on Kubernetes nodes)",
            );
        }
        false
    }
}

impl Mapping {
    pub(super) fn new(bytes: usize, shared: &Arc<Shared>) -> io::Result<Arc<Self>> {
        let arena = shared.system.map(bytes)?;
        if let MemoryPlacement::Interleaved(nodes) = &shared.options.placement {
            shared.system.interleave(&arena, nodes.ids())?;
        }
        let locked = shared.lock(arena.start(), arena.mapped_bytes());
        let mapping = Self { arena, locked, shared: Arc::clone(shared) };
        let (totals, bytes) = (&shared.totals, mapping.bytes() as u64);
        totals.mappings.fetch_add(1, Relaxed);
        totals.mapped_bytes.fetch_add(bytes, Relaxed);
        totals.locked_bytes.fetch_add(if locked { bytes } else { 0 }, Relaxed);
        let mapping = Arc::new(mapping);
        let mut mapped = shared.mapped.lock().unwrap_or_else(PoisonError::into_inner);
        mapped.retain(|other| other.strong_count() > 0);
        mapped.push(Arc::downgrade(&mapping));
        Ok(mapping)
    }

    pub(super) fn start(&self) -> NonNull<u8> {
        self.arena.start()
    }

    /// Bytes of address space.
    pub(super) fn bytes(&self) -> usize {
        self.arena.mapped_bytes()
    }

    /// Makes a part known to the device, if there is one and it has refused none so far.
    pub(super) fn register(
        &self,
        start: NonNull<u8>,
        bytes: usize,
    ) -> Result<Option<Registered>, RegistrationError> {
        let Some(device) = &self.shared.options.device else { return Ok(None) };
        if self.shared.device_refused.load(Relaxed) {
            return Ok(None);
        }
        Registered::new(device, &self.shared.totals.registered_bytes, start, bytes)
            .map(Some)
            .inspect_err(|error| {
                if !self.shared.device_refused.swap(true, Relaxed) {
                    tracing::warn!(
                        %error,
                        bytes,
                        "memory for experts stays unknown to the device: copies to it are slower; the limit of locked memory \
                         may be too low (ulimit -l, LimitMEMLOCK= of systemd, --ulimit memlock= of container engines)",
                    );
                }
            })
    }

    pub(super) fn released(&self) {
        self.shared.totals.slots_released.fetch_add(1, Relaxed);
    }

    /// A released part is used again.
    pub(super) fn attached(&self, start: NonNull<u8>, bytes: usize) {
        self.shared.totals.slots_attached.fetch_add(1, Relaxed);
        // Kernels before 5.18 give back locked pages only after unlocking them.
        if self.locked {
            self.shared.lock(start, bytes);
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let (totals, bytes) = (&self.shared.totals, self.bytes() as u64);
        totals.mappings.fetch_sub(1, Relaxed);
        totals.mapped_bytes.fetch_sub(bytes, Relaxed);
        totals.locked_bytes.fetch_sub(if self.locked { bytes } else { 0 }, Relaxed);
    }
}

impl fmt::Debug for Mapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mapping")
            .field("bytes", &self.bytes())
            .field("locked", &self.locked)
            .finish_non_exhaustive()
    }
}
