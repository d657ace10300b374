//! HOT PATH: the slots of one layer and who waits for them.

use std::{
    collections::VecDeque,
    fmt,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use crate::{
    memory::{ReleasedSlot, SlotMemory},
    residency::{Grant, LayerResidency, Rules},
};

pub(super) type SlotGrant = Grant<SlotMemory>;

/// Works of a layer within which an expert that was wanted before counts as warm.
const WARM_WORKS: u64 = 64;

/// One layer with experts.
pub(super) struct Layer {
    /// Layer in the model.
    pub(super) layer: u32,
    /// Bytes of a slab, and of a slot.
    pub(super) stride: usize,
    /// Experts of the layer in the model.
    pub(super) experts: u32,
    state: Mutex<LayerState>,
    changed: Condvar,
    /// Slots whose memory went back to the system.
    released: Mutex<Vec<ReleasedSlot>>,
}

/// What the lock of a layer guards.
#[derive(Debug)]
pub(super) struct LayerState {
    pub(super) slots: LayerResidency<SlotMemory>,
    /// Rounds that found every slot in use, in the order in which they came. Only the first takes a slot, so that none is
    /// passed over for ever.
    pub(super) queue: VecDeque<u64>,
    /// Rounds so far; names them.
    pub(super) rounds: u64,
    /// Claims on every expert that ask for no more than to be read when it is wanted. All claims are counted by the slots.
    lazy: Vec<u32>,
    /// Threads that wait for a change.
    waiting: u32,
    /// The round that last wanted each expert, 0 for none. For counting only: what evicts has a clock of its own.
    wanted_in: Vec<u64>,
}

impl fmt::Debug for Layer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Layer")
            .field("layer", &self.layer)
            .field("stride", &self.stride)
            .finish_non_exhaustive()
    }
}

impl Layer {
    pub(super) fn new(layer: u32, experts: u32, stride: usize, rules: Rules) -> Arc<Self> {
        let state = LayerState {
            slots: LayerResidency::new(experts, rules),
            queue: VecDeque::new(),
            rounds: 0,
            lazy: vec![0; experts as usize],
            waiting: 0,
            wanted_in: vec![0; experts as usize],
        };
        let (state, changed) = (Mutex::new(state), Condvar::new());
        Arc::new(Self { layer, stride, experts, state, changed, released: Mutex::default() })
    }

    /// Bytes of some slots.
    pub(super) fn bytes(&self, slots: usize) -> u64 {
        self.stride as u64 * slots as u64
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, LayerState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the next change of the layer.
    pub(super) fn wait<'a>(
        &self,
        mut state: MutexGuard<'a, LayerState>,
    ) -> MutexGuard<'a, LayerState> {
        state.waiting += 1;
        let mut state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        state.waiting -= 1;
        state
    }

    /// As [`Self::wait`], but not beyond `deadline`. None then.
    pub(super) fn wait_until<'a>(
        &self,
        mut state: MutexGuard<'a, LayerState>,
        deadline: Instant,
    ) -> Option<MutexGuard<'a, LayerState>> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left == Duration::ZERO {
            return None;
        }
        state.waiting += 1;
        let (mut state, _) =
            self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner);
        state.waiting -= 1;
        Some(state)
    }

    /// Ends a change of slots: takes what is above the cap, wakes who waits, and gives memory back without the lock.
    pub(super) fn changed(&self, mut state: MutexGuard<'_, LayerState>) {
        let spare = if state.slots.attached() > state.slots.cap() {
            let cap = state.slots.cap();
            state.slots.shrink(cap)
        } else {
            Vec::new()
        };
        self.wake(&state);
        drop(state);
        self.give_back(spare);
    }

    /// Lowers the cap, counts the experts that lose their place, and gives the memory of idle slots back.
    pub(super) fn shrink_to(
        &self,
        mut state: MutexGuard<'_, LayerState>,
        cap: usize,
        evictions: &AtomicU64,
    ) {
        let before = state.slots.counts().resident;
        let spare = state.slots.shrink(cap);
        let evicted = before - state.slots.counts().resident;
        evictions.fetch_add(evicted as u64, Relaxed);
        self.changed(state);
        self.give_back(spare);
    }

    /// Gives memory back to the system. Not under the lock: this calls into the kernel.
    pub(super) fn give_back(&self, memories: Vec<SlotMemory>) {
        if memories.is_empty() {
            return;
        }
        let released: Vec<_> = memories.into_iter().map(SlotMemory::release).collect();
        self.released.lock().unwrap_or_else(PoisonError::into_inner).extend(released);
    }

    /// Takes up to `count` slots into use again.
    pub(super) fn take_back(&self, count: usize) -> Vec<SlotMemory> {
        let mut released = self.released.lock().unwrap_or_else(PoisonError::into_inner);
        let left = released.len().saturating_sub(count);
        let taken = released.split_off(left);
        drop(released);
        taken.into_iter().map(ReleasedSlot::attach).collect()
    }

    /// Wakes who waits for a change.
    pub(super) fn wake(&self, state: &LayerState) {
        if state.waiting > 0 {
            self.changed.notify_all();
        }
    }

    /// A lease ends.
    pub(super) fn release(&self, grant: SlotGrant) {
        let mut state = self.lock();
        state.slots.release(grant);
        self.changed(state);
    }
}

impl LayerState {
    /// Counts a claim on an expert, which need not be read before it is wanted if the claim is lazy.
    pub(super) fn claim(&mut self, expert: u32, lazy: bool) {
        self.slots.claim(expert);
        self.lazy[expert as usize] += u32::from(lazy);
    }

    /// Takes such a claim back.
    pub(super) fn unclaim(&mut self, expert: u32, lazy: bool) {
        self.slots.unclaim(expert);
        let count = &mut self.lazy[expert as usize];
        *count = count.checked_sub(u32::from(lazy)).expect("a claim was counted before");
    }

    /// Whether nobody wants the expert before it is wanted by work.
    pub(super) fn is_lazy(&self, expert: u32) -> bool {
        self.slots.claims(expert) == self.lazy[expert as usize]
    }

    /// Names a new round.
    pub(super) fn next_round(&mut self) -> u64 {
        self.rounds += 1;
        self.rounds
    }

    /// Whether the expert was wanted in one of the last rounds before this one, which wants it now.
    pub(super) fn was_wanted(&mut self, expert: u32, round: u64) -> bool {
        let last = std::mem::replace(&mut self.wanted_in[expert as usize], round);
        last > 0 && round - last <= WARM_WORKS
    }
}
