//! HOT PATH: the slots of one layer.

use std::sync::Arc;

use super::{
    policy::{self, DECAY_WORKS, Policy, RePin, Rules},
    slot::{Origin, Resident, Slot, State, Ticket},
};

/// Slots, experts and their use in one layer. `M` is the memory of a slot.
///
/// Time is the number of works begun on the layer. While works run, the layer is closed to prefetch: only demand changes
/// its slots. Loads that prefetch began before may still end; they hold a slot of their own, so nobody need wait for one
/// whose expert is not wanted.
#[derive(Debug)]
pub struct LayerResidency<M> {
    rules: Rules,
    slots: Vec<Slot<M>>,
    /// Slot of every expert that is reserved or resident.
    by_expert: Vec<Option<u32>>,
    /// Uses of every expert, halved now and then.
    heat: Vec<u32>,
    /// Uses of every expert since the start, for the history.
    uses: Vec<u64>,
    /// Time of the last use of every expert.
    last_used: Vec<u64>,
    /// Claims on every expert; those that nobody claims go first.
    claims: Vec<u32>,
    /// Experts that somebody claims.
    claimed: usize,
    /// Slots with memory and nothing in it; the last one is taken first.
    free: Vec<u32>,
    /// Slots without memory.
    detached: Vec<u32>,
    /// Slots that may have memory.
    cap: usize,
    running: u32,
    time: u64,
}

/// A load that somebody has to do: read the expert into the memory, then [`LayerResidency::complete`] or
/// [`LayerResidency::fail`].
#[derive(Debug)]
pub struct Load<M> {
    /// Names the load.
    pub ticket: Ticket,
    /// Where the slab goes.
    pub memory: M,
    /// Expert that lost its place.
    pub evicted: Option<u32>,
}

/// Read access to a resident expert. Give it back to [`LayerResidency::release`].
#[derive(Debug)]
pub struct Grant<M> {
    slot: u32,
    /// The slab.
    pub memory: Arc<M>,
    /// The expert is pinned.
    pub pinned: bool,
    /// The first use of an expert that prefetch brought.
    pub prefetched: bool,
}

/// Answer to work that needs an expert.
#[derive(Debug)]
pub enum Demand<M> {
    /// It is there.
    Hit(Grant<M>),
    /// Somebody loads it; ask again when a load of the layer has ended.
    Loading(Origin),
    /// Load it.
    Load(Load<M>),
    /// Every slot is pinned, leased or being loaded; ask again when one is given back.
    Full,
}

/// Why a hint is not followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Skip {
    /// The expert is resident or being loaded.
    Duplicate,
    /// Work on the layer has begun.
    LayerStarted,
    /// What it would evict is clearly hotter.
    Guard,
    /// No slot can be had.
    NoRoom,
}

/// Slots by state.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SlotCounts {
    /// Slots that may have memory.
    pub cap: usize,
    /// Memory, nothing in it.
    pub free: usize,
    /// Being loaded.
    pub reserved: usize,
    /// Loaded, the pinned ones included.
    pub resident: usize,
    /// Loaded and never evicted.
    pub pinned: usize,
    /// Loaded and being computed on.
    pub leased: usize,
}

impl<M> LayerResidency<M> {
    /// A layer of `experts` experts without slots.
    pub fn new(experts: u32, rules: Rules) -> Self {
        let experts = experts as usize;
        Self {
            rules,
            slots: Vec::new(),
            by_expert: vec![None; experts],
            heat: vec![0; experts],
            uses: vec![0; experts],
            last_used: vec![0; experts],
            claims: vec![0; experts],
            claimed: 0,
            free: Vec::new(),
            detached: Vec::new(),
            cap: 0,
            running: 0,
            time: 0,
        }
    }

    /// Adds memory: to slots that lost theirs, then as new slots. The cap grows by as many.
    pub fn attach(&mut self, memories: impl IntoIterator<Item = M>) {
        for memory in memories {
            let slot = self.detached.pop().unwrap_or_else(|| {
                self.slots.push(Slot { state: State::Detached, generation: 0 });
                u32::try_from(self.slots.len() - 1).expect("slots of a layer are few")
            });
            self.slots[slot as usize].state = State::Free(memory);
            self.free.push(slot);
            self.cap += 1;
        }
    }

    /// Sets how many slots may have memory, and takes the memory of as many slots above that as can be spared now: free
    /// ones, then the coldest that are neither pinned nor leased. Call it again when more slots may have become idle.
    pub fn shrink(&mut self, cap: usize) -> Vec<M> {
        self.cap = self.cap.min(cap);
        let mut taken = Vec::new();
        while self.attached() > self.cap {
            let Some(slot) = self.free.pop().or_else(|| self.victim(|_| true)) else { break };
            taken.push(self.vacate(slot).0);
            self.detached.push(slot);
        }
        taken
    }

    /// Slots that have memory, wherever it is now.
    pub fn attached(&self) -> usize {
        self.slots.len() - self.detached.len()
    }

    /// Slots that may have memory.
    pub fn cap(&self) -> usize {
        self.cap
    }

    /// Counts a claim on an expert.
    pub fn claim(&mut self, expert: u32) {
        let claims = &mut self.claims[expert as usize];
        *claims += 1;
        self.claimed += usize::from(*claims == 1);
    }

    /// Takes a claim back. Experts that nobody claims keep their slot until it is needed, but not their pin.
    pub fn unclaim(&mut self, expert: u32) {
        let claims = &mut self.claims[expert as usize];
        *claims = claims.checked_sub(1).expect("a claim was counted before");
        if *claims == 0 {
            self.claimed -= 1;
            self.set_pinned(expert, false);
        }
    }

    /// Experts that somebody claims.
    pub fn claimed(&self) -> usize {
        self.claimed
    }

    /// Whether somebody claims the expert.
    pub fn is_claimed(&self, expert: u32) -> bool {
        self.claims(expert) > 0
    }

    /// Claims on the expert.
    pub fn claims(&self, expert: u32) -> u32 {
        self.claims[expert as usize]
    }

    /// Pins a resident expert, or lets it go. Whether it is resident.
    pub fn set_pinned(&mut self, expert: u32, pinned: bool) -> bool {
        match self.resident_mut(expert) {
            Some(resident) => {
                resident.pinned = pinned;
                true
            }
            None => false,
        }
    }

    /// Whether the expert is resident and pinned.
    pub fn is_pinned(&self, expert: u32) -> bool {
        self.resident(expert).is_some_and(|resident| resident.pinned)
    }

    /// Whether one more expert may be pinned: if there are fewer slots than claimed experts, one slot stays for those that
    /// are not pinned, or their works would wait for ever.
    pub fn may_pin(&self) -> bool {
        self.counts().pinned + usize::from(self.claimed > self.cap) < self.cap
    }

    /// Takes the pin of the coldest pinned expert. None if nothing is pinned.
    pub fn unpin_coldest(&mut self) -> Option<u32> {
        let pinned = self.residents().map(|(_, resident)| resident).filter(|r| r.pinned);
        let coldest = pinned.map(|r| (self.score(r.expert), r.expert)).min();
        let (_, expert) = coldest?;
        self.set_pinned(expert, false);
        Some(expert)
    }

    /// Takes one slot that can be spared now, and lowers the cap by it. None, and nothing has changed, if every slot is
    /// pinned, leased or being loaded.
    pub fn take_idle(&mut self) -> Option<M> {
        let slot = self.free.pop().or_else(|| self.victim(|_| true))?;
        self.cap = self.cap.checked_sub(1).expect("a slot in use is one that may be");
        let (memory, _) = self.vacate(slot);
        self.detached.push(slot);
        Some(memory)
    }

    /// Whether the expert is resident.
    pub fn is_resident(&self, expert: u32) -> bool {
        self.resident(expert).is_some()
    }

    /// Who asked for the load that brings the expert now.
    pub fn loading(&self, expert: u32) -> Option<Origin> {
        let slot = self.by_expert[expert as usize]?;
        match &self.slots[slot as usize].state {
            State::Reserved { origin, .. } => Some(*origin),
            _ => None,
        }
    }

    /// Work on the layer begins: its experts are used once, and the layer is closed to prefetch until as many works have
    /// ended as have begun.
    pub fn begin_work(&mut self, experts: &[u32]) {
        self.time += 1;
        self.running += 1;
        if self.time.is_multiple_of(DECAY_WORKS) {
            self.heat.iter_mut().for_each(|heat| *heat /= 2);
        }
        for &expert in experts {
            let heat = &mut self.heat[expert as usize];
            *heat = heat.saturating_add(1);
            self.uses[expert as usize] += 1;
            self.last_used[expert as usize] = self.time;
        }
    }

    /// Work on the layer has ended.
    pub fn end_work(&mut self) {
        self.running = self.running.checked_sub(1).expect("a work was begun before");
    }

    /// Works begun so far: a hint that was queued at an earlier time comes too late.
    pub fn time(&self) -> u64 {
        self.time
    }

    /// An expert for work.
    pub fn demand(&mut self, expert: u32) -> Demand<M> {
        if let Some(slot) = self.by_expert[expert as usize] {
            return match &mut self.slots[slot as usize].state {
                State::Reserved { origin, .. } => Demand::Loading(*origin),
                State::Resident(resident) => {
                    resident.leases += 1;
                    resident.last_used = self.time;
                    let prefetched = std::mem::take(&mut resident.unused);
                    let memory = Arc::clone(&resident.memory);
                    Demand::Hit(Grant { slot, memory, pinned: resident.pinned, prefetched })
                }
                State::Detached | State::Free(_) => unreachable!("the map names slots in use"),
            };
        }
        match self.free.pop().or_else(|| self.victim(|_| true)) {
            Some(slot) => Demand::Load(self.reserve(slot, expert, Origin::Demand)),
            None => Demand::Full,
        }
    }

    /// Room for an expert of an assignment, which evicts nothing but experts that nobody claims. `None` when it is there,
    /// on its way, or there is no room.
    pub fn place(&mut self, expert: u32) -> Option<Load<M>> {
        if self.by_expert[expert as usize].is_some() {
            return None;
        }
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None => self.victim(|resident| !self.is_claimed(resident.expert))?,
        };
        Some(self.reserve(slot, expert, Origin::Claim))
    }

    /// An expert that may be wanted soon.
    pub fn prefetch(&mut self, expert: u32) -> Result<Load<M>, Skip> {
        let slot = match self.prefetch_slot(expert)? {
            Some(victim) => victim,
            None => self.free.pop().expect("a slot is free"),
        };
        Ok(self.reserve(slot, expert, Origin::Prefetch))
    }

    /// Why a prefetch of the expert would not begin now. Changes nothing.
    pub fn prefetch_refused(&self, expert: u32) -> Option<Skip> {
        self.prefetch_slot(expert).err()
    }

    /// The slot to evict for a prefetch; none if one is free.
    fn prefetch_slot(&self, expert: u32) -> Result<Option<u32>, Skip> {
        if self.by_expert[expert as usize].is_some() {
            return Err(Skip::Duplicate);
        }
        if self.running > 0 {
            return Err(Skip::LayerStarted);
        }
        if !self.free.is_empty() {
            return Ok(None);
        }
        // What was prefetched for the same work was ranked higher.
        let stale = |resident: &Resident<M>| !resident.unused || resident.last_used < self.time;
        let slot = self.victim(stale).ok_or(Skip::NoRoom)?;
        let State::Resident(victim) = &self.slots[slot as usize].state else {
            unreachable!("a victim is resident")
        };
        let heat = self.heat[victim.expert as usize];
        if self.rules.guard
            && self.is_claimed(victim.expert)
            && policy::protected(heat, self.score(victim.expert), self.score(expert))
        {
            return Err(Skip::Guard);
        }
        Ok(Some(slot))
    }

    /// A load has ended well. The expert and who asked for it.
    pub fn complete(&mut self, ticket: Ticket, memory: M) -> (u32, Origin) {
        let (expert, origin) = self.reserved(ticket);
        self.slots[ticket.slot as usize].state = State::Resident(Resident {
            expert,
            memory: Arc::new(memory),
            leases: 0,
            pinned: false,
            unused: origin == Origin::Prefetch,
            last_used: self.time,
        });
        (expert, origin)
    }

    /// A load has failed; its slot is the next to be taken. The expert and who asked for it.
    pub fn fail(&mut self, ticket: Ticket, memory: M) -> (u32, Origin) {
        let (expert, origin) = self.reserved(ticket);
        self.by_expert[expert as usize] = None;
        self.slots[ticket.slot as usize].state = State::Free(memory);
        self.free.push(ticket.slot);
        (expert, origin)
    }

    /// A lease ends.
    pub fn release(&mut self, grant: Grant<M>) {
        let Grant { slot, memory, .. } = grant;
        drop(memory);
        let State::Resident(resident) = &mut self.slots[slot as usize].state else {
            unreachable!("a leased slot stays resident")
        };
        resident.leases -= 1;
    }

    /// Exchanges up to `swaps` pinned experts against resident, claimed ones that are clearly hotter. Moves no memory.
    pub fn re_pin(&mut self, swaps: usize) -> Vec<RePin> {
        let mut done = Vec::new();
        while done.len() < swaps {
            let residents = || {
                self.residents().map(|(_, resident)| {
                    ((self.score(resident.expert), resident.expert), resident.pinned)
                })
            };
            let cold = residents().filter(|(_, pinned)| *pinned).map(|(key, _)| key).min();
            let hot = residents()
                .filter(|((_, expert), pinned)| !*pinned && self.is_claimed(*expert))
                .map(|(key, _)| key)
                .max();
            let (Some((cold, released)), Some((hot, pinned))) = (cold, hot) else { break };
            if !policy::clearly_hotter(hot, cold) {
                break;
            }
            self.set_pinned(released, false);
            self.set_pinned(pinned, true);
            done.push(RePin { pinned, released });
        }
        done
    }

    /// Uses of every expert since the start: the number of works that it was part of.
    pub fn uses(&self) -> &[u64] {
        &self.uses
    }

    /// Slots by state.
    pub fn counts(&self) -> SlotCounts {
        let mut counts =
            SlotCounts { cap: self.cap, free: self.free.len(), ..SlotCounts::default() };
        for slot in &self.slots {
            match &slot.state {
                State::Detached | State::Free(_) => {}
                State::Reserved { .. } => counts.reserved += 1,
                State::Resident(resident) => {
                    counts.resident += 1;
                    counts.pinned += usize::from(resident.pinned);
                    counts.leased += usize::from(resident.leases > 0);
                }
            }
        }
        counts
    }

    fn score(&self, expert: u32) -> u64 {
        let age = self.time - self.last_used[expert as usize];
        policy::score(self.heat[expert as usize], age)
    }

    fn residents(&self) -> impl Iterator<Item = (u32, &Resident<M>)> {
        (0..).zip(&self.slots).filter_map(|(index, slot)| match &slot.state {
            State::Resident(resident) => Some((index, resident)),
            _ => None,
        })
    }

    fn resident(&self, expert: u32) -> Option<&Resident<M>> {
        let slot = self.by_expert[expert as usize]?;
        match &self.slots[slot as usize].state {
            State::Resident(resident) => Some(resident),
            _ => None,
        }
    }

    fn resident_mut(&mut self, expert: u32) -> Option<&mut Resident<M>> {
        let slot = self.by_expert[expert as usize]?;
        match &mut self.slots[slot as usize].state {
            State::Resident(resident) => Some(resident),
            _ => None,
        }
    }

    /// The slot to evict first among those that are idle and may be taken. A scan: it runs once per load, which takes a
    /// thousand times as long, and a layer has a few hundred slots.
    fn victim(&self, may: impl Fn(&Resident<M>) -> bool) -> Option<u32> {
        let idle = self
            .residents()
            .filter(|(_, resident)| resident.leases == 0 && !resident.pinned && may(resident));
        let order = |resident: &Resident<M>| {
            let frequency = match self.rules.policy {
                Policy::Lru => 0,
                Policy::Lfru => self.score(resident.expert),
            };
            (self.is_claimed(resident.expert), frequency, resident.last_used, resident.expert)
        };
        idle.min_by_key(|(_, resident)| order(resident)).map(|(slot, _)| slot)
    }

    /// Takes the memory out of a free or idle slot, and says whose it was.
    fn vacate(&mut self, slot: u32) -> (M, Option<u32>) {
        match std::mem::replace(&mut self.slots[slot as usize].state, State::Detached) {
            State::Free(memory) => (memory, None),
            State::Resident(resident) => {
                self.by_expert[resident.expert as usize] = None;
                let memory = Arc::into_inner(resident.memory);
                (memory.expect("an idle slot has no lease"), Some(resident.expert))
            }
            State::Detached | State::Reserved { .. } => unreachable!("the slot has its memory"),
        }
    }

    fn reserve(&mut self, slot: u32, expert: u32, origin: Origin) -> Load<M> {
        let (memory, evicted) = self.vacate(slot);
        let entry = &mut self.slots[slot as usize];
        entry.generation = entry.generation.wrapping_add(1);
        entry.state = State::Reserved { expert, origin };
        self.by_expert[expert as usize] = Some(slot);
        Load { ticket: Ticket { slot, generation: entry.generation }, memory, evicted }
    }

    fn reserved(&self, ticket: Ticket) -> (u32, Origin) {
        match &self.slots[ticket.slot as usize] {
            Slot { state: State::Reserved { expert, origin }, generation }
                if *generation == ticket.generation =>
            {
                (*expert, *origin)
            }
            _ => panic!("a load ends once, and its slot waits for it"),
        }
    }
}

#[cfg(all(test, feature = "loom"))]
mod model;
#[cfg(test)]
mod tests;
