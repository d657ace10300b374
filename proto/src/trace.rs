//! Traces: the context that travels between processes, and the queue of finished spans.
//!
//! Nothing here waits. A [`Tracer`] that is off costs a branch; one that is on hands finished spans to a bounded queue and
//! counts those that find it full. Whoever exports them reads the queue in a thread of its own.

mod context;
mod record;

use std::{
    hash::{BuildHasher, RandomState},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
        mpsc::{Receiver, SyncSender, sync_channel},
    },
};

pub use context::{TRACEPARENT, TraceContext};
pub use record::{Kind, SpanRecord, Value, names};

/// Spans that may wait for the exporter: about 250 sampled steps of 20 layers and 3 workers.
pub const QUEUE_SPANS: usize = 1 << 14;

/// What became of finished spans.
#[derive(Debug, Default)]
pub struct TraceCounts {
    exported: AtomicU64,
    dropped: AtomicU64,
}

impl TraceCounts {
    /// Taken by the collector.
    pub fn exported(&self) -> u64 {
        self.exported.load(Relaxed)
    }

    /// Lost: the queue was full, or the collector did not take them.
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Relaxed)
    }

    /// Counts spans that the collector took.
    pub fn add_exported(&self, spans: usize) {
        self.exported.fetch_add(spans as u64, Relaxed);
    }

    /// Counts spans that are lost.
    pub fn add_dropped(&self, spans: usize) {
        self.dropped.fetch_add(spans as u64, Relaxed);
    }
}

/// Samples requests and takes finished spans. The default is off.
#[derive(Debug, Clone, Default)]
pub struct Tracer(Option<Arc<Inner>>);

#[derive(Debug)]
struct Inner {
    queue: SyncSender<SpanRecord>,
    counts: Arc<TraceCounts>,
    /// A request without a parent is sampled if the low half of its trace id is below.
    threshold: u128,
    /// State of the ids: they need to be unique, not secret.
    ids: AtomicU64,
}

impl Tracer {
    /// A tracer that samples `percent` of the requests that bring no decision along, and the queue that it fills.
    pub fn new(percent: f64) -> (Self, Receiver<SpanRecord>, Arc<TraceCounts>) {
        Self::with_queue(percent, QUEUE_SPANS)
    }

    /// As [`Self::new`], for another length of the queue.
    pub fn with_queue(
        percent: f64,
        spans: usize,
    ) -> (Self, Receiver<SpanRecord>, Arc<TraceCounts>) {
        let (queue, finished) = sync_channel(spans);
        let counts = Arc::<TraceCounts>::default();
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0 to 10^9")]
        let per_billion = (percent.clamp(0.0, 100.0) * 1e7).round() as u128;
        let inner = Inner {
            queue,
            counts: Arc::clone(&counts),
            threshold: (1_u128 << 64) * per_billion / 1_000_000_000,
            ids: AtomicU64::new(RandomState::new().hash_one(std::process::id())),
        };
        (Self(Some(Arc::new(inner))), finished, counts)
    }

    /// Whether spans go anywhere.
    pub fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// What became of the spans so far; nothing if this is off.
    pub fn counts(&self) -> Option<&Arc<TraceCounts>> {
        Some(&self.0.as_ref()?.counts)
    }

    /// Begins a request: the context of its span if it is sampled. A parent's decision is followed, whatever it is.
    pub fn begin(&self, parent: Option<TraceContext>) -> Option<TraceContext> {
        let inner = self.0.as_ref()?;
        let trace = match parent {
            Some(parent) if !parent.sampled => return None,
            Some(parent) => parent.trace,
            None => {
                let low = inner.id();
                if u128::from(low) >= inner.threshold {
                    return None;
                }
                u128::from(inner.id()) << 64 | u128::from(low)
            }
        };
        Some(TraceContext { trace, span: inner.id(), sampled: true })
    }

    /// An id for a span; 0 if this is off.
    pub fn span_id(&self) -> u64 {
        self.0.as_ref().map_or(0, |inner| inner.id())
    }

    /// Hands a finished span on. Never waits: a full queue loses it, and that is counted.
    pub fn finish(&self, span: SpanRecord) {
        if let Some(inner) = &self.0
            && inner.queue.try_send(span).is_err()
        {
            inner.counts.add_dropped(1);
        }
    }
}

impl Inner {
    /// `SplitMix64`: a permutation of the counter, so that no id comes twice; never 0, which means none.
    fn id(&self) -> u64 {
        let state = self.ids.fetch_add(0x9e37_79b9_7f4a_7c15, Relaxed);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)).max(1)
    }
}

#[cfg(test)]
mod tests;
