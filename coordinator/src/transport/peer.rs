//! What the step thread knows about one worker.

use std::{
    collections::{BTreeSet, VecDeque},
    sync::Arc,
    time::{Duration, Instant},
};

use shimmer_proto::expert::v1::Fence;

use super::{RemoteConfig, board::Member, lane::Lane, latency::LatencyTracker, pace::WorkerPace};

/// Looking through the last answers takes a tenth of a microsecond, which is not worth it for each.
const TELL_EVERY: u32 = 16;

/// Messages to one worker that may be left behind in a layer and still be of interest.
const STRAYS_MAX: usize = 16;

/// See the module.
#[derive(Debug)]
pub(super) struct Peer {
    /// How many other workers had the place before.
    pub(super) holder: u64,
    pub(super) lane: Arc<Lane>,
    pub(super) absent_layers: Arc<[u32]>,
    pub(super) weight: f64,
    pub(super) latency: LatencyTracker,
    pub(super) pace: WorkerPace,
    /// Work that is out, oldest first. A worker answers in order.
    out: VecDeque<Out>,
    /// Work whose answer nobody awaits any more, but which says how long the worker takes, oldest first.
    strays: VecDeque<Out>,
    /// Answers since observers were told what is usual.
    untold: u32,
    /// The session that the work went to.
    session: u64,
    /// It was asked to prove itself in that session.
    proving: bool,
    /// When the worker last answered: it may take its time for each message, not for the queue before it.
    answered: Instant,
    /// When it was last asked whether it is alive.
    doubted: Option<Instant>,
    /// What it adopted in this session under the generation in force.
    adopted: BTreeSet<(u32, u32)>,
    /// The session that adopted it.
    adopted_in: u64,
}

/// Work that is out.
#[derive(Debug, Clone, Copy)]
pub(super) struct Out {
    pub(super) fence: Fence,
    pub(super) rows: u32,
    pub(super) sent: Instant,
    pub(super) limit: Duration,
}

/// What a worker that owes an answer gives cause for.
#[derive(Debug, Clone, Copy)]
pub(super) enum Due {
    /// Nothing before this moment.
    At(Instant),
    /// It is asked whether it is alive.
    Doubt,
    /// It is given up.
    Overdue(Out),
}

impl Peer {
    pub(super) fn new(member: &Member, config: &RemoteConfig) -> Self {
        Self {
            holder: member.holder,
            lane: Arc::clone(&member.lane),
            absent_layers: Arc::clone(&member.absent_layers),
            weight: member.weight,
            latency: LatencyTracker::new(config.layer_floor, config.layer_ceiling),
            pace: WorkerPace::default(),
            out: VecDeque::new(),
            strays: VecDeque::new(),
            untold: 0,
            session: 0,
            proving: false,
            answered: config.stage.now(),
            doubted: None,
            adopted: BTreeSet::new(),
            adopted_in: 0,
        }
    }

    /// Whether news of a session concern work that is out, or a proof.
    pub(super) fn awaits(&self, session: u64) -> bool {
        session == self.session && (self.proving || !self.out.is_empty())
    }

    /// The worker is asked to prove itself: that it could not is heard of although it owes no answer.
    pub(super) fn prove(&mut self) {
        self.proving = true;
    }

    /// Takes down that work went out.
    pub(super) fn sent(&mut self, session: u64, out: Out) {
        self.session = session;
        self.out.push_back(out);
    }

    /// Forgets what is out at other places than this.
    pub(super) fn keep_place(&mut self, fence: &Fence) {
        let place = |f: &Fence| (f.epoch, f.generation, f.step, f.layer);
        if self.out.iter().any(|out| place(&out.fence) != place(fence)) {
            let is_here = |out: &Out| place(&out.fence) == place(fence);
            self.strays.extend(self.out.iter().filter(|out| !is_here(out)));
            self.out.retain(is_here);
            let above = self.strays.len().saturating_sub(STRAYS_MAX);
            self.strays.drain(..above);
        }
    }

    /// Whether it owes no answer, awaited or not.
    pub(super) fn owes_nothing(&self, now: Instant, config: &RemoteConfig) -> bool {
        // One that has not come for so long will not come any more.
        let comes = |out: &Out| now.saturating_duration_since(out.sent) < config.layer_ceiling;
        self.out.is_empty() && !self.strays.iter().any(comes)
    }

    /// Work that an answer belongs to which nobody awaits. What went out before it will not be answered.
    pub(super) fn stray(&mut self, fence: &Fence) -> Option<Out> {
        let place = self.strays.iter().position(|out| out.fence == *fence)?;
        self.strays.drain(..=place).next_back()
    }

    /// Takes down an answer to work that is out; that work. A worker answers in order: what went out before is not answered.
    pub(super) fn settled(&mut self, part: u32, now: Instant) -> Option<Out> {
        self.answered = now;
        self.strays.clear();
        let place = self.out.iter().position(|out| out.fence.part == part)?;
        let out = self.out.remove(place)?;
        self.latency.record(out.rows, now.saturating_duration_since(out.sent));
        self.untold += 1;
        if self.untold == TELL_EVERY {
            self.untold = 0;
            self.lane.set_usual(self.latency.usual(1).unwrap_or_default());
        }
        Some(out)
    }

    /// Nothing is out any more.
    pub(super) fn forget_work(&mut self) {
        self.out.clear();
        self.strays.clear();
        self.proving = false;
    }

    /// What its oldest work gives cause for; none while it owes nothing. A worker that answers when it is asked whether it
    /// is alive gets as long as anybody ever gets.
    pub(super) fn due(&self, now: Instant, config: &RemoteConfig) -> Option<Due> {
        let oldest = self.out.front()?;
        let since = oldest.sent.max(self.answered);
        let is_alive = self
            .lane
            .vouched()
            .is_some_and(|at| at > since && now.saturating_duration_since(at) < config.alive_for());
        let limit = if is_alive { config.layer_ceiling } else { oldest.limit };
        let overdue = since + limit;
        if overdue <= now {
            return Some(Due::Overdue(*oldest));
        }
        let doubted = self.doubted.filter(|doubted| *doubted > since);
        let doubt = doubted.map_or(since + config.probe_after, |at| at + config.probe_interval);
        Some(if doubt <= now { Due::Doubt } else { Due::At(overdue.min(doubt)) })
    }

    /// Has it asked whether it is alive.
    pub(super) fn doubt(&mut self, now: Instant) {
        self.doubted = Some(now);
        self.lane.doubt();
    }

    /// Those of these experts that it has not adopted yet in a session.
    pub(super) fn unadopted(&mut self, session: u64, layer: u32, experts: &[u32]) -> Vec<u32> {
        if self.adopted_in != session {
            self.adopted.clear();
            self.adopted_in = session;
        }
        experts.iter().copied().filter(|&e| !self.adopted.contains(&(layer, e))).collect()
    }

    /// Takes down what it adopted.
    pub(super) fn adopted(&mut self, layer: u32, experts: &[u32]) {
        self.adopted.extend(experts.iter().map(|&expert| (layer, expert)));
    }

    /// Forgets what it adopted of a layer, or of all.
    pub(super) fn forget_adopted(&mut self, layer: Option<u32>) {
        self.adopted.retain(|(of, _)| layer.is_some_and(|layer| layer != *of));
    }

    /// Experts that it adopted.
    pub(super) fn adopted_count(&self) -> usize {
        self.adopted.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer() -> Peer {
        let member = Member {
            name: "a".to_owned(),
            holder: 0,
            lane: Arc::default(),
            absent_layers: Arc::default(),
            weight: 1.0,
        };
        Peer::new(&member, &RemoteConfig::default())
    }

    fn out(part: u32) -> Out {
        let fence = Fence { part, ..Fence::default() };
        Out { fence, rows: 1, sent: Instant::now(), limit: Duration::from_secs(1) }
    }

    #[test]
    fn the_end_of_a_session_is_news_for_who_waits_for_work_or_a_proof() {
        let mut peer = peer();
        assert!(!peer.awaits(0), "nothing went out");
        peer.sent(7, out(0));
        assert!(peer.awaits(7) && !peer.awaits(6));
        peer.settled(0, Instant::now());
        assert!(!peer.awaits(7), "everything is answered");
        peer.prove();
        assert!(peer.awaits(7), "it owes no answer, but a proof");
        assert!(!peer.awaits(6), "an earlier session has no part in it");
        peer.forget_work();
        assert!(!peer.awaits(7), "it is heard of once");
    }
}
