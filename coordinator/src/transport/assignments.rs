//! Which generations one session has been given, and how far the worker is with each: loading, proving, ready.
//!
//! A plain state machine. It holds two generations at most, the one in force first. The next one is given while the first
//! one serves, and never before the worker has done with the one before it.

use std::{
    collections::{BTreeSet, VecDeque},
    time::{Duration, Instant},
};

use shimmer_proto::expert::v1::{
    Assign, LayerExperts, Ready, Release, SelfTest, SelfTestResult, session_request::Body as Ask,
};

use super::{ClusterModel, plans::Plan};

/// Self-tests that are out at a time.
const TESTS_OUT: usize = 32;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Assignments {
    held: Vec<Assignment>,
}

#[derive(Debug)]
struct Assignment {
    generation: u64,
    /// By layer, ascending.
    owned: Vec<(u32, Vec<u32>)>,
    experts: u64,
    bytes: u64,
    phase: Phase,
    /// When the worker last told progress.
    heard: Instant,
}

#[derive(Debug)]
enum Phase {
    Loading,
    Proving {
        unasked: VecDeque<(u32, u32)>,
        asked: BTreeSet<(u32, u32)>,
    },
    Ready,
    /// The worker cannot load it; it serves the other one.
    Failed,
}

/// What a worker said about an assignment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum News {
    /// Nothing that anybody needs to know.
    Nothing,
    /// It tests itself.
    Proving,
    /// The generation can be served.
    Ready(u64),
}

impl Assignments {
    /// What to tell the worker so that it follows the plans: the one in force, then the next one.
    pub(super) fn follow(
        &mut self,
        in_force: Option<&Plan>,
        next: Option<&Plan>,
        worker: usize,
        epoch: u64,
        model: &ClusterModel,
        now: Instant,
    ) -> Vec<Ask> {
        let mut asks = Vec::new();
        if let Some(plan) = in_force
            && self.held.iter().any(|held| held.generation < plan.generation)
        {
            self.held.retain(|held| held.generation >= plan.generation);
            asks.push(Ask::Release(Release { epoch, generation: plan.generation }));
        }
        for plan in in_force.into_iter().chain(next) {
            if self.held.iter().any(|held| held.generation == plan.generation) {
                continue;
            }
            let is_current = |held: &Assignment| {
                [in_force, next].into_iter().flatten().any(|p| p.generation == held.generation)
            };
            if self.held.iter().any(|held| is_current(held) && held.is_busy()) {
                break;
            }
            // What is no plan any more was the next one once. The worker forgets it by itself.
            self.held.retain(is_current);
            let assignment = Assignment::new(plan, worker, model, now);
            asks.push(assignment.message(epoch));
            self.held.push(assignment);
        }
        asks
    }

    /// Takes the worker's word that it has loaded a generation; says what it has to prove. Whether what it holds is what
    /// was asked for, or else why not.
    pub(super) fn loaded(
        &mut self,
        ready: &Ready,
        now: Instant,
    ) -> Result<(News, Vec<Ask>), String> {
        let known: BTreeSet<(u32, u32)> = self
            .held
            .iter()
            .filter(|held| held.is_proved())
            .flat_map(Assignment::experts)
            .collect();
        let Some(held) = self.held.iter_mut().find(|held| held.generation == ready.generation)
        else {
            return Ok((News::Nothing, Vec::new()));
        };
        held.heard = now;
        if !matches!(held.phase, Phase::Loading) {
            return Ok((News::Nothing, Vec::new()));
        }
        if (ready.experts, ready.bytes) != (held.experts, held.bytes) {
            let Ready { experts, bytes, .. } = ready;
            return Err(format!(
                "it says it holds {experts} experts in {bytes} bytes, {} in {} were assigned",
                held.experts, held.bytes
            ));
        }
        // One expert of every layer, another one in each layer, so that they spread; none that was proved before.
        let pick = |(place, (layer, experts)): (usize, &(u32, Vec<u32>))| {
            let fresh: Vec<u32> =
                experts.iter().copied().filter(|&e| !known.contains(&(*layer, e))).collect();
            (!fresh.is_empty()).then(|| (*layer, fresh[place % fresh.len()]))
        };
        let unasked = held.owned.iter().enumerate().filter_map(pick).collect();
        held.phase = Phase::Proving { unasked, asked: BTreeSet::new() };
        Ok(held.prove())
    }

    /// Checks a self-test. Whether the worker computes as the container says, or else how it does not.
    pub(super) fn tested(
        &mut self,
        result: &SelfTestResult,
        model: &ClusterModel,
        now: Instant,
    ) -> Result<(News, Vec<Ask>), String> {
        let SelfTestResult { layer, expert, digest } = result;
        let (layer, expert) = (*layer, *expert);
        let expected = model.layer(layer).and_then(|l| l.self_tests.get(expert as usize));
        if expected.map(|d| &d[..]) != Some(&digest[..]) {
            let expected = expected.map(hex::encode).unwrap_or_default();
            let found = hex::encode(&digest[..digest.len().min(16)]);
            return Err(format!(
                "self-test: it computes expert {expert} of layer {layer} differently: {found}, the container says {expected}"
            ));
        }
        for held in &mut self.held {
            if let Phase::Proving { asked, .. } = &mut held.phase
                && asked.remove(&(layer, expert))
            {
                held.heard = now;
                return Ok(held.prove());
            }
        }
        // Of a generation that was given up meanwhile.
        Ok((News::Nothing, Vec::new()))
    }

    /// Takes down progress of the load that is going on.
    pub(super) fn progressed(&mut self, now: Instant) {
        if let Some(held) = self.held.iter_mut().rev().find(|held| held.is_busy()) {
            held.heard = now;
        }
    }

    /// Takes down that the load that is going on failed. Its generation, if the worker has another one to serve.
    pub(super) fn failed(&mut self) -> Option<u64> {
        let serves = self.held.iter().any(|held| held.is_proved());
        let held = self.held.iter_mut().rev().find(|held| held.is_busy()).filter(|_| serves)?;
        held.phase = Phase::Failed;
        Some(held.generation)
    }

    /// The generations that can be served; 0 for none.
    pub(super) fn ready(&self) -> [u64; 2] {
        let mut ready = self.held.iter().filter(|held| held.is_proved()).map(|h| h.generation);
        [ready.next().unwrap_or(0), ready.next().unwrap_or(0)]
    }

    /// Experts and bytes of the newest generation that is ready.
    pub(super) fn resident(&self) -> (u64, u64) {
        let newest = self.held.iter().rev().find(|held| held.is_proved());
        newest.map_or((0, 0), |held| (held.experts, held.bytes))
    }

    /// When the worker is overdue with what it loads or proves, if it does either.
    pub(super) fn due(&self, loading: Duration, proving: Duration) -> Option<Instant> {
        let of = |held: &Assignment| match held.phase {
            Phase::Loading => Some(held.heard + loading),
            Phase::Proving { .. } => Some(held.heard + proving),
            Phase::Ready | Phase::Failed => None,
        };
        self.held.iter().filter_map(of).min()
    }

    /// What the worker is at, for people; none if it is at nothing.
    pub(super) fn activity(&self) -> Option<String> {
        let held = self.held.iter().rev().find(|held| held.is_busy())?;
        Some(match held.phase {
            Phase::Proving { .. } => "self-test".to_owned(),
            _ => format!("loading {} experts, {} bytes", held.experts, held.bytes),
        })
    }
}

impl Assignment {
    fn new(plan: &Plan, worker: usize, model: &ClusterModel, now: Instant) -> Self {
        let owned = plan.placement.owned_by(worker);
        let slab = |layer| model.layer(layer).map_or(0, |l| l.slab_bytes);
        let bytes = owned.iter().map(|(layer, of)| slab(*layer) * of.len() as u64).sum();
        let experts = owned.iter().map(|(_, of)| of.len() as u64).sum();
        let (generation, phase) = (plan.generation, Phase::Loading);
        Self { generation, owned, experts, bytes, phase, heard: now }
    }

    fn message(&self, epoch: u64) -> Ask {
        let layers = self.owned.iter();
        let layers = layers
            .map(|(layer, experts)| LayerExperts { layer: *layer, experts: experts.clone() })
            .collect();
        Ask::Assign(Assign { epoch, generation: self.generation, layers })
    }

    fn is_busy(&self) -> bool {
        matches!(self.phase, Phase::Loading | Phase::Proving { .. })
    }

    fn is_proved(&self) -> bool {
        matches!(self.phase, Phase::Ready)
    }

    fn experts(&self) -> impl Iterator<Item = (u32, u32)> {
        self.owned.iter().flat_map(|(layer, experts)| experts.iter().map(move |&e| (*layer, e)))
    }

    /// Asks for further self-tests; ready when all are answered.
    fn prove(&mut self) -> (News, Vec<Ask>) {
        let Phase::Proving { unasked, asked } = &mut self.phase else {
            return (News::Nothing, Vec::new());
        };
        let mut asks = Vec::new();
        while asked.len() < TESTS_OUT
            && let Some((layer, expert)) = unasked.pop_front()
        {
            asked.insert((layer, expert));
            asks.push(Ask::SelfTest(SelfTest { layer, expert }));
        }
        if asked.is_empty() {
            self.phase = Phase::Ready;
            return (News::Ready(self.generation), asks);
        }
        (News::Proving, asks)
    }
}

#[cfg(test)]
mod tests;
