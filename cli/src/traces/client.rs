//! The span of a call of `shimmer generate`, whose context goes along with the request.

use std::time::SystemTime;

use shimmer_proto::trace::{Kind, SpanRecord, TRACEPARENT, TraceContext, Tracer, names};
use tonic::metadata::MetadataMap;

/// A call that is sampled; it ends when this is dropped.
#[derive(Debug)]
pub(crate) struct ClientTrace {
    tracer: Tracer,
    context: TraceContext,
    begun: SystemTime,
    error: Option<String>,
}

impl ClientTrace {
    /// None if the call is not sampled.
    pub(crate) fn begin(tracer: &Tracer) -> Option<Self> {
        let context = tracer.begin(None)?;
        let error = Some("the answer is incomplete".to_owned());
        Some(Self { tracer: tracer.clone(), context, begun: SystemTime::now(), error })
    }

    /// Where the spans of this process go.
    pub(crate) fn tracer(&self) -> Tracer {
        self.tracer.clone()
    }

    /// Puts the context beside a request.
    pub(crate) fn write(&self, metadata: &mut MetadataMap) {
        let value = self.context.to_string().parse().expect("hex digits and dashes");
        metadata.insert(TRACEPARENT, value);
    }

    /// The whole answer has come.
    pub(crate) fn complete(&mut self) {
        self.error = None;
    }
}

impl Drop for ClientTrace {
    fn drop(&mut self) {
        let time = [self.begun, SystemTime::now()];
        let (above, id) = (self.context, self.context.span);
        let span = SpanRecord::below(above, id, names::GENERATE, time, Vec::new());
        let error = self.error.take();
        self.tracer.finish(SpanRecord { parent: 0, kind: Kind::Client, error, ..span });
    }
}
