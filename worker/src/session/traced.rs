//! What a work of a traced step tells: how long it waited for the session, for drives, and computed.

use std::time::{Duration, Instant, SystemTime};

use shimmer_proto::{
    expert::v1::{ExpertWork, Fence, WorkerError},
    trace::{Kind, SpanRecord, TraceContext, names},
};

use crate::{
    expert_core::ExpertCore,
    store::{ReadyExpert, Round, StoreError},
};

/// A work whose message carries the context of a span.
#[derive(Debug)]
pub(super) struct WorkTrace {
    above: TraceContext,
    fence: Fence,
    experts: usize,
    missed: usize,
    queued: Duration,
    begun: Instant,
    clock: SystemTime,
    /// From the first wait for experts to the end of the last one, and the waits alone.
    wait: Option<(Instant, Instant, Duration)>,
}

impl WorkTrace {
    /// None if the work is not traced, or this worker tells nobody.
    pub(super) fn begin(
        core: &ExpertCore,
        work: &ExpertWork,
        missed: usize,
        [received, begun]: [Instant; 2],
    ) -> Option<Self> {
        let (wire, fence) = (work.trace?, work.fence?);
        let above = TraceContext::from_wire(wire).filter(|_| core.tracer().is_on())?;
        let clock = SystemTime::now();
        Some(Self {
            above,
            fence,
            experts: work.experts.len(),
            missed,
            queued: begun.saturating_duration_since(received),
            begun,
            clock: clock.checked_sub(begun.elapsed()).unwrap_or(clock),
            wait: None,
        })
    }

    /// Measures how long the round is waited for.
    pub(super) fn watch<'a>(&'a mut self, round: &'a mut dyn Round) -> Watched<'a> {
        Watched { round, trace: self }
    }

    /// Hands the spans on.
    pub(super) fn finish(self, core: &ExpertCore, error: Option<&WorkerError>) {
        let tracer = core.tracer();
        let own = TraceContext { span: tracer.span_id(), ..self.above };
        let waited = self.wait.map_or(Duration::ZERO, |(_, _, waited)| waited);
        let Fence { step, layer, part, .. } = self.fence;
        let attributes = vec![
            ("shimmer.worker", core.id().into()),
            ("shimmer.step", step.into()),
            ("shimmer.layer", layer.into()),
            ("shimmer.part", part.into()),
            ("shimmer.experts", self.experts.into()),
            ("shimmer.ram_hits", (self.experts - self.missed).into()),
            ("shimmer.misses", self.missed.into()),
            ("shimmer.queue_us", micros(self.queued).into()),
            ("shimmer.read_wait_us", micros(waited).into()),
        ];
        let begun = self.clock.checked_sub(self.queued).unwrap_or(self.clock);
        let time = [begun, self.at(Instant::now())];
        let span = SpanRecord::below(self.above, own.span, names::EXPERT_WORK, time, attributes);
        tracer.finish(SpanRecord {
            remote: true,
            kind: Kind::Server,
            error: error.map(|error| error.detail.clone()),
            ..span
        });
        if let Some((from, to, waited)) = self.wait {
            let attributes = vec![
                ("shimmer.worker", core.id().into()),
                ("shimmer.layer", layer.into()),
                ("shimmer.tier", "drive".into()),
                ("shimmer.drives", core.drive().into()),
                ("shimmer.experts", self.missed.into()),
                ("shimmer.read_wait_us", micros(waited).into()),
            ];
            let (id, time) = (tracer.span_id(), [self.at(from), self.at(to)]);
            tracer.finish(SpanRecord::below(own, id, names::TIER_READ, time, attributes));
        }
    }

    fn at(&self, instant: Instant) -> SystemTime {
        self.clock + instant.saturating_duration_since(self.begun)
    }
}

/// A round whose waits are measured. Experts that are in memory come first, so that their time is not counted.
#[derive(Debug)]
pub(super) struct Watched<'a> {
    round: &'a mut dyn Round,
    trace: &'a mut WorkTrace,
}

impl Round for Watched<'_> {
    fn next(&mut self, ready: &mut Vec<ReadyExpert>) -> Result<(), StoreError> {
        let before = Instant::now();
        let result = self.round.next(ready);
        if self.trace.missed > 0 {
            let after = Instant::now();
            let (from, _, waited) = self.trace.wait.unwrap_or((before, after, Duration::ZERO));
            self.trace.wait = Some((from, after, waited + after.duration_since(before)));
        }
        result
    }

    fn missed(&self) -> usize {
        self.round.missed()
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}
