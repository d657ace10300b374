//! What a sampled request tells: its own span, and those of its steps.
//!
//! A request that is not sampled has none of this. Spans of steps are made after the step's tokens have been sent.

use std::time::{Instant, SystemTime};

use shimmer_proto::trace::{Kind, SpanRecord, TRACEPARENT, TraceContext, Tracer, Value, names};
use tonic::metadata::MetadataMap;

use crate::dispatch::{StepTrace, WorkerInfo};

/// Decode steps of a request that are recorded all; of the later ones each [`LATER`]th is. An answer of 4000 tokens makes 280
/// steps of spans, and not as many as the queue takes.
const FIRST: usize = 32;
/// See [`FIRST`].
const LATER: usize = 16;

/// Whether the decode step behind so many generated tokens is recorded.
pub(crate) fn records(generated: usize) -> bool {
    generated <= FIRST || generated.is_multiple_of(LATER)
}

/// Tells something of a request, with its ids if it is sampled.
pub(crate) fn within<R>(request: Option<&RequestTrace>, tell: impl FnOnce() -> R) -> R {
    match request {
        Some(request) => request.log.in_scope(tell),
        None => tell(),
    }
}

/// The span of a sampled request; it ends when this is dropped.
#[derive(Debug)]
pub struct RequestTrace {
    tracer: Tracer,
    context: TraceContext,
    parent: Option<TraceContext>,
    begun: SystemTime,
    attributes: Vec<(&'static str, Value)>,
    error: Option<String>,
    /// Gives log lines the ids.
    log: tracing::Span,
}

impl RequestTrace {
    /// Begins the span if the request is sampled: as the caller decided, or by chance.
    pub(crate) fn begin(tracer: &Tracer, metadata: &MetadataMap) -> Option<Box<Self>> {
        if !tracer.is_on() {
            return None;
        }
        let parent = metadata.get(TRACEPARENT).and_then(|text| text.to_str().ok());
        let parent = parent.and_then(TraceContext::parse);
        let context = tracer.begin(parent)?;
        let (trace_id, span_id) = (context.trace_id(), context.span_id());
        Some(Box::new(Self {
            tracer: tracer.clone(),
            context,
            parent,
            begun: SystemTime::now(),
            attributes: Vec::new(),
            error: Some("refused".to_owned()),
            log: tracing::error_span!("request", trace_id, span_id),
        }))
    }

    /// What the span is to say.
    pub(crate) fn say(&mut self, name: &'static str, value: impl Into<Value>) {
        self.attributes.push((name, value.into()));
    }

    /// How the request ended.
    pub(crate) fn ended(&mut self, error: Option<String>) {
        self.error = error;
    }

    /// A span below the request's.
    pub(crate) fn span(&self, name: &'static str, time: [SystemTime; 2]) {
        let id = self.tracer.span_id();
        self.tracer.finish(SpanRecord::below(self.context, id, name, time, Vec::new()));
    }
}

impl Drop for RequestTrace {
    fn drop(&mut self) {
        let time = [self.begun, SystemTime::now()];
        let attributes = std::mem::take(&mut self.attributes);
        let span =
            SpanRecord::below(self.context, self.context.span, names::REQUEST, time, attributes);
        self.tracer.finish(SpanRecord {
            parent: self.parent.map_or(0, |parent| parent.span),
            remote: self.parent.is_some(),
            kind: Kind::Server,
            error: self.error.take(),
            ..span
        });
    }
}

/// The part of one sampled request in a step.
#[derive(Debug)]
struct Part {
    tracer: Tracer,
    request: TraceContext,
    span: u64,
    name: &'static str,
    rows: usize,
    first: usize,
}

/// A step with rows of sampled requests. The rounds with workers stand below the first of them; the others have links to
/// that one.
#[derive(Debug)]
pub(crate) struct TracedStep {
    step: u64,
    begun: Instant,
    clock: SystemTime,
    parts: Vec<Part>,
}

impl TracedStep {
    pub(crate) fn begin(step: u64) -> Self {
        Self { step, begun: Instant::now(), clock: SystemTime::now(), parts: Vec::new() }
    }

    /// Adds the rows of a sampled request.
    pub(crate) fn add(&mut self, request: &RequestTrace, decodes: bool, rows: usize, first: usize) {
        self.parts.push(Part {
            tracer: request.tracer.clone(),
            request: request.context,
            span: request.tracer.span_id(),
            name: if decodes { names::DECODE_STEP } else { names::PREFILL_CHUNK },
            rows,
            first,
        });
    }

    /// The span that the rounds belong to, and a source of ids.
    pub(crate) fn above(&self) -> Option<(TraceContext, u64)> {
        let first = self.parts.first()?;
        Some((TraceContext { span: first.span, ..first.request }, first.tracer.span_id()))
    }

    /// Makes the spans.
    pub(crate) fn end(self, rounds: &StepTrace, workers: &[WorkerInfo], rows: usize) {
        let Some((above, _)) = self.above() else { return };
        let time = [self.clock, self.at(Instant::now())];
        for part in &self.parts {
            let mut attributes = vec![
                ("shimmer.step", self.step.into()),
                ("shimmer.rows", part.rows.into()),
                ("shimmer.first_position", part.first.into()),
                ("shimmer.batch_rows", rows.into()),
            ];
            if let Some(slowest) = rounds.slowest() {
                let id = workers.get(slowest.worker).map_or("", |worker| worker.id.as_str());
                attributes.push(("shimmer.slowest.worker", id.into()));
                attributes.push(("shimmer.slowest.layer", slowest.layer.into()));
            }
            let span = SpanRecord::below(part.request, part.span, part.name, time, attributes);
            let link = (part.span != above.span).then_some(above);
            part.tracer.finish(SpanRecord { link, ..span });
        }
        self.rounds(above, rounds, workers);
    }

    fn rounds(&self, above: TraceContext, rounds: &StepTrace, workers: &[WorkerInfo]) {
        let tracer = &self.parts[0].tracer;
        for round in rounds.rounds() {
            let time = [self.at(round.begun), self.at(round.ended)];
            let attributes = vec![
                ("shimmer.layer", round.layer.into()),
                ("shimmer.wait_us", micros(round.sent, round.ended).into()),
            ];
            tracer.finish(SpanRecord::below(above, round.span, names::LAYER, time, attributes));
        }
        for work in rounds.works() {
            let layer = TraceContext { span: work.above, ..above };
            let id = workers.get(work.worker).map_or("", |worker| worker.id.as_str());
            let mut attributes = vec![
                ("shimmer.worker", id.into()),
                ("shimmer.layer", work.layer.into()),
                ("shimmer.part", work.part.into()),
                ("shimmer.attempt", work.attempt.into()),
                ("shimmer.experts", work.experts.into()),
            ];
            if let Some(answer) = &work.answer {
                attributes.push(("shimmer.compute_us", answer.compute_us.into()));
                attributes.push(("shimmer.queue_us", answer.queue_us.into()));
                attributes.push(("shimmer.ram_hits", answer.ram_hits.into()));
            }
            let ended = work.answer.as_ref().map_or_else(Instant::now, |answer| answer.at);
            let time = [self.at(work.sent), self.at(ended)];
            let span = SpanRecord::below(layer, work.span, names::WORKER, time, attributes);
            let error = work.answer.is_none().then(|| "no answer was used".to_owned());
            tracer.finish(SpanRecord { kind: Kind::Client, error, ..span });
        }
    }

    fn at(&self, instant: Instant) -> SystemTime {
        self.clock + instant.saturating_duration_since(self.begun)
    }
}

fn micros(from: Instant, to: Instant) -> u64 {
    u64::try_from(to.saturating_duration_since(from).as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::records;

    #[test]
    fn first_decode_steps_are_recorded_and_then_some() {
        let recorded: Vec<usize> = (1..100).filter(|&generated| records(generated)).collect();
        let expected: Vec<usize> = (1..=32).chain([48, 64, 80, 96]).collect();
        assert_eq!(recorded, expected);
    }
}
