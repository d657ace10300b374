//! HOT PATH. Who computes an expert: a copy that serves, rather one that has not become slow; else a worker that reads it
//! from its own drive; else the coordinator's own copy; else one that is late. A sans-I/O core.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::{ExpertTransport, Pace, Standing};

/// Who a message goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Recipient {
    /// A worker.
    Worker(usize),
    /// The coordinator's own copy of the experts.
    Own,
    /// Nobody can compute these.
    Nobody,
}

/// What the choice of recipients remembers. Buffers keep their size from layer to layer.
#[derive(Debug, Default)]
pub(super) struct Recipients {
    /// Experts given to each worker in this layer.
    loads: Vec<u32>,
    /// How each worker is treated in this layer.
    paces: Vec<Pace>,
    /// Rounds since a worker was last tried that is slow.
    spared: Vec<u32>,
    /// Workers that are slow and get their work in this layer as if they were not.
    tried: Vec<usize>,
    /// By expert, the choice of this layer: an expert's weights are read by one worker.
    chosen: Vec<Option<Recipient>>,
    /// Experts that a worker could not read lately, and until when others are asked first.
    sick: BTreeMap<(usize, u32, u32), Instant>,
}

/// Which recipients are out of the question.
#[derive(Clone, Copy, Debug)]
pub(super) struct Except<'a> {
    /// Workers that were asked before.
    pub(super) tried: &'a [usize],
    /// Whether the coordinator's own copy and workers that are late may be asked.
    pub(super) last_resorts: bool,
}

/// A worker that is slow gets its work in one of so many rounds, to show whether it is well again. A prime number, so that
/// these are not always rounds of the same layer.
const TRIED_EVERY: u32 = 17;

impl Recipients {
    /// Begins a layer. Workers that are slow are avoided where `paced`.
    pub(super) fn begin(&mut self, transport: &dyn ExpertTransport, paced: bool, now: Instant) {
        let workers = transport.workers().len();
        self.loads.clear();
        self.loads.resize(workers, 0);
        self.paces.clear();
        self.tried.clear();
        self.spared.resize(workers, 0);
        for (worker, spared) in self.spared.iter_mut().enumerate() {
            let pace = if paced { transport.pace(worker) } else { Pace::Usual };
            *spared = if pace == Pace::Usual { 0 } else { *spared + 1 };
            // What it still owes would be in the way of the answer, and says as much.
            if *spared >= TRIED_EVERY && transport.owes_nothing(worker) {
                *spared = 0;
                self.tried.push(worker);
                self.paces.push(Pace::Usual);
            } else {
                self.paces.push(pace);
            }
        }
        self.chosen.clear();
        if !self.sick.is_empty() {
            self.sick.retain(|_, until| *until > now);
        }
    }

    /// Asks others first for an expert that a worker could not read.
    pub(super) fn fell_sick(&mut self, worker: usize, layer: u32, expert: u32, until: Instant) {
        /// Beyond so many the drive is broken as a whole and the worker is better lost than avoided.
        const SICK_MAX: usize = 4096;
        if self.sick.len() < SICK_MAX {
            self.sick.insert((worker, layer, expert), until);
        }
    }

    /// Whether a worker that has become slow gets its work in this layer as if it had not.
    pub(super) fn tries(&self, worker: usize) -> bool {
        self.tried.contains(&worker)
    }

    /// Another worker has this place now.
    pub(super) fn forget(&mut self, worker: usize) {
        self.sick.retain(|(of, ..), _| *of != worker);
    }

    /// Who computes an expert in this layer.
    pub(super) fn first(
        &mut self,
        transport: &dyn ExpertTransport,
        layer: u32,
        expert: u32,
    ) -> Recipient {
        let place = expert as usize;
        if let Some(&Some(chosen)) = self.chosen.get(place) {
            return chosen;
        }
        let except = Except { tried: &[], last_resorts: true };
        let chosen = self.choose(transport, layer, expert, except);
        if self.chosen.len() <= place {
            self.chosen.resize(place + 1, None);
        }
        self.chosen[place] = Some(chosen);
        chosen
    }

    /// Who computes an expert besides those that were tried.
    pub(super) fn choose(
        &mut self,
        transport: &dyn ExpertTransport,
        layer: u32,
        expert: u32,
        except: Except<'_>,
    ) -> Recipient {
        let Except { tried, last_resorts } = except;
        let copies = transport.copies(layer, expert);
        let fresh = |&worker: &usize| {
            !tried.contains(&worker) && !self.sick.contains_key(&(worker, layer, expert))
        };
        let serving = |&worker: &usize| transport.standing(worker) == Standing::Serving;
        // The first choice wins ties.
        let able = copies.iter().copied().filter(fresh).filter(serving);
        let mut best = able.min_by_key(|&worker| (self.paced(worker), self.load(worker)));
        if best.is_none_or(|worker| self.paced(worker) == Pace::Costly) {
            let stand_ins = transport.stand_ins(layer).into_iter().filter(fresh).filter(serving);
            let stand_in = stand_ins.min_by_key(|&worker| self.paced(worker));
            // A slow worker that holds an expert is better than one that has to read it.
            let slow = |&worker: &usize| self.paced(worker) != Pace::Usual;
            best = stand_in.filter(|stand_in| best.is_none() || !slow(stand_in)).or(best);
        }
        if best.is_none() && last_resorts {
            if transport.has_own_copy(layer) {
                return Recipient::Own;
            }
            let late = |&worker: &usize| {
                !tried.contains(&worker) && transport.standing(worker) != Standing::Away
            };
            best = copies.iter().copied().find(late);
            best = best.or_else(|| transport.stand_ins(layer).into_iter().find(late));
        }
        let Some(worker) = best else { return Recipient::Nobody };
        if let Some(load) = self.loads.get_mut(worker) {
            *load += 1;
        }
        Recipient::Worker(worker)
    }

    fn paced(&self, worker: usize) -> Pace {
        self.paces.get(worker).copied().unwrap_or_default()
    }

    fn load(&self, worker: usize) -> u32 {
        self.loads.get(worker).copied().unwrap_or(0)
    }

    /// Until when others are asked first, from now on.
    pub(super) fn until(now: Instant, sick: Duration) -> Instant {
        now.checked_add(sick).unwrap_or(now)
    }
}

#[cfg(test)]
mod tests {
    use shimmer_kernels::{Isa, WeightFormat};
    use shimmer_model::tiny::Preset;

    use super::*;
    use crate::test_support::{TestWorkers, kernels, tiny_model};

    const LAYER: u32 = 1;
    const EXPERT: u32 = 3;

    /// Three workers, of which two hold each expert and all can read it, and how the expert's first owner is numbered.
    fn workers() -> (TestWorkers, usize) {
        let tiny = tiny_model(Preset::Glm4Moe, WeightFormat::Q8G64, WeightFormat::Q8G64);
        let workers = TestWorkers::new(&tiny, kernels(Isa::Scalar).unwrap(), &[1.0; 3]).copied(2);
        let first = workers.copies(LAYER, EXPERT)[0];
        (workers, first)
    }

    fn chosen(workers: &TestWorkers, last_resorts: bool) -> Recipient {
        let mut recipients = Recipients::default();
        recipients.begin(workers, true, workers.now());
        recipients.choose(workers, LAYER, EXPERT, Except { tried: &[], last_resorts })
    }

    #[test]
    fn copies_stand_in_before_drives_and_the_own_copy_after_them() {
        let (workers, first) = workers();
        let mut workers = workers.standing_in().with_own_copy();
        let (second, third) = ((first + 1) % 3, (first + 2) % 3);
        assert_eq!(chosen(&workers, true), Recipient::Worker(first));
        workers.lose(first);
        assert_eq!(chosen(&workers, true), Recipient::Worker(second), "it holds the expert");
        workers.suspect(second);
        assert_eq!(chosen(&workers, true), Recipient::Worker(third), "it reads the expert");
        workers.suspect(third);
        assert_eq!(chosen(&workers, true), Recipient::Own, "nobody serves in time");
        assert_eq!(chosen(&workers, false), Recipient::Nobody, "an audit takes no last resort");
    }

    #[test]
    fn whoever_is_late_is_asked_when_nobody_else_can_be() {
        let (workers, first) = workers();
        let mut workers = workers.standing_in();
        let (second, third) = ((first + 1) % 3, (first + 2) % 3);
        [first, second, third].into_iter().for_each(|worker| workers.suspect(worker));
        assert_eq!(chosen(&workers, true), Recipient::Worker(first));
        workers.lose(first);
        assert_eq!(chosen(&workers, true), Recipient::Worker(second));
        workers.lose(second);
        assert_eq!(chosen(&workers, true), Recipient::Worker(third));
        workers.lose(third);
        assert_eq!(chosen(&workers, true), Recipient::Nobody);
    }
}
