//! The placements that the links follow: the one in force and the one that is being loaded.

use std::sync::Arc;

use crate::placement::Placement;

/// A generation of the placement; workers are numbered by their seats.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Plan {
    pub(super) generation: u64,
    pub(super) placement: Arc<Placement>,
    /// Experts of each seat.
    shares: Arc<[usize]>,
}

impl Plan {
    pub(super) fn new(generation: u64, placement: Arc<Placement>) -> Self {
        let shares = placement.shares().into();
        Self { generation, placement, shares }
    }

    /// Experts of a seat, copies included.
    pub(super) fn share(&self, worker: usize) -> usize {
        self.shares.get(worker).copied().unwrap_or(0)
    }
}

/// See the module.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Plans {
    /// What the step thread stamps on its work.
    pub(super) in_force: Option<Plan>,
    /// What is loaded beside it.
    pub(super) next: Option<Plan>,
    /// Whether the step thread may put the next one in force.
    pub(super) offered: bool,
}

impl Plans {
    /// Has a placement loaded. What was being loaded before is given up, even if it was offered.
    pub(super) fn prepare(&mut self, plan: Plan) {
        self.next = Some(plan);
        self.offered = false;
    }

    /// Lets the step thread put a placement in force. Whether it is still the next one.
    pub(super) fn offer(&mut self, generation: u64) -> bool {
        self.offered = self.next.as_ref().is_some_and(|next| next.generation == generation);
        self.offered
    }

    /// Puts what is offered in force. Whether there was something.
    pub(super) fn flip(&mut self) -> bool {
        if !self.offered {
            return false;
        }
        self.offered = false;
        self.in_force = self.next.take();
        true
    }

    /// The placement that the next step runs under.
    pub(super) fn coming(&self) -> Option<&Plan> {
        if self.offered { self.next.as_ref() } else { self.in_force.as_ref() }
    }

    /// Whether a worker holds experts under one of the placements.
    pub(super) fn names(&self, worker: usize) -> bool {
        [&self.in_force, &self.next].into_iter().flatten().any(|plan| plan.share(worker) > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(generation: u64) -> Plan {
        Plan::new(generation, Arc::default())
    }

    fn generations(plans: &Plans) -> (u64, u64) {
        let of = |plan: &Option<Plan>| plan.as_ref().map_or(0, |plan| plan.generation);
        (of(&plans.in_force), of(&plans.next))
    }

    #[test]
    fn only_what_is_offered_comes_into_force() {
        let mut plans = Plans::default();
        assert!(!plans.flip());
        plans.prepare(plan(1));
        assert!(!plans.flip());
        assert!(plans.coming().is_none());
        assert!(plans.offer(1));
        assert_eq!(plans.coming(), Some(&plan(1)));
        assert!(plans.flip());
        assert!(!plans.flip(), "once");
        assert_eq!(generations(&plans), (1, 0));
    }

    #[test]
    fn a_newer_placement_takes_the_place_of_one_that_is_being_loaded() {
        let mut plans = Plans { in_force: Some(plan(1)), ..Plans::default() };
        plans.prepare(plan(2));
        assert!(plans.offer(2));
        plans.prepare(plan(3));
        assert!(!plans.flip(), "generation 2 is no longer wanted");
        assert!(!plans.offer(2));
        assert_eq!(generations(&plans), (1, 3));
    }
}
