//! A collector: it receives spans by the official services of OTLP and keeps them.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::{
    Router,
    body::Bytes,
    http::{StatusCode, header::CONTENT_TYPE},
    routing::post,
};
use opentelemetry_proto::tonic::{
    collector::trace::v1::{
        ExportTraceServiceRequest, ExportTraceServiceResponse,
        trace_service_server::{TraceService, TraceServiceServer},
    },
    common::v1::{KeyValue, any_value::Value},
};
use prost::Message as _;
use shimmer_tests::wait::wait_for;
use tokio::{net::TcpListener, runtime::Runtime};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status, transport::Server};

/// For spans that were made to be here, on a loaded machine.
const SOON: Duration = Duration::from_secs(60);

/// A span as it was received.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Received {
    /// Name of the service that sent it.
    pub(super) service: String,
    pub(super) trace: String,
    pub(super) id: String,
    /// Empty for none.
    pub(super) parent: String,
    pub(super) name: String,
    pub(super) nanos: u64,
    pub(super) attributes: BTreeMap<String, String>,
    /// What failed; empty for nothing.
    pub(super) error: String,
}

/// What came.
#[derive(Debug, Clone, Default)]
struct Kept(Arc<Mutex<Vec<Received>>>);

impl Kept {
    fn keep(&self, request: ExportTraceServiceRequest) {
        let mut kept = self.0.lock().unwrap();
        for of_resource in request.resource_spans {
            let resource = texts(of_resource.resource.unwrap_or_default().attributes);
            let spans = of_resource.scope_spans.into_iter().flat_map(|scope| scope.spans);
            kept.extend(spans.map(|span| Received {
                service: resource["service.name"].clone(),
                trace: hex::encode(span.trace_id),
                id: hex::encode(span.span_id),
                parent: hex::encode(span.parent_span_id),
                name: span.name,
                nanos: span.end_time_unix_nano - span.start_time_unix_nano,
                attributes: texts(span.attributes),
                error: span.status.unwrap_or_default().message,
            }));
        }
    }
}

#[tonic::async_trait]
impl TraceService for Kept {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        self.keep(request.into_inner());
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

/// A collector on loopback; it ends when this is dropped.
#[derive(Debug)]
pub(super) struct Collector {
    pub(super) address: SocketAddr,
    kept: Kept,
    _runtime: Runtime,
}

impl Collector {
    /// Receives over gRPC.
    pub(super) fn grpc() -> Self {
        Self::start(|listener, kept| async move {
            let service = TraceServiceServer::new(kept);
            let incoming = TcpListenerStream::new(listener);
            Server::builder().add_service(service).serve_with_incoming(incoming).await.unwrap();
        })
    }

    /// Receives protobuf over HTTP.
    pub(super) fn http() -> Self {
        Self::start(|listener, kept| async move {
            let take = move |body: Bytes| async move {
                let Ok(request) = ExportTraceServiceRequest::decode(body) else {
                    return (StatusCode::BAD_REQUEST, [(CONTENT_TYPE, "text/plain")], Vec::new());
                };
                kept.keep(request);
                let answer = ExportTraceServiceResponse::default().encode_to_vec();
                (StatusCode::OK, [(CONTENT_TYPE, "application/x-protobuf")], answer)
            };
            let router = Router::new().route("/v1/traces", post(take));
            axum::serve(listener, router).await.unwrap();
        })
    }

    fn start<F: Future<Output = ()> + Send + 'static>(
        serve: impl FnOnce(TcpListener, Kept) -> F,
    ) -> Self {
        let runtime = Runtime::new().unwrap();
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let (address, kept) = (listener.local_addr().unwrap(), Kept::default());
        runtime.spawn(serve(listener, kept.clone()));
        Self { address, kept, _runtime: runtime }
    }

    /// Everything so far.
    pub(super) fn spans(&self) -> Vec<Received> {
        self.kept.0.lock().unwrap().clone()
    }

    /// Waits until `look` finds what it looks for.
    pub(super) fn wait<T>(&self, what: &str, mut look: impl FnMut(&[Received]) -> Option<T>) -> T {
        wait_for(what, SOON, || look(&self.spans()))
    }
}

fn texts(attributes: Vec<KeyValue>) -> BTreeMap<String, String> {
    let text = |attribute: KeyValue| {
        let text = match attribute.value?.value? {
            Value::StringValue(text) => text,
            Value::IntValue(number) => number.to_string(),
            other => panic!("{}: {other:?} is of a type that is not documented", attribute.key),
        };
        Some((attribute.key, text))
    };
    attributes.into_iter().filter_map(text).collect()
}
