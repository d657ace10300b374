//! The gRPC server: the inference service, health and reflection on one listener.

use std::sync::Arc;
use std::time::Duration;

use shimmer_proto::limits::MAX_API_MESSAGE_BYTES;
use shimmer_proto::v1::inference_service_server::InferenceServiceServer;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::service::InterceptorLayer;
use tonic::service::interceptor::InterceptedService;
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

use super::door::{Door, Doorkeeper, note_call};
use super::{ClusterStatus, DoorCounters, DoorOptions, Inference};
use crate::engine::EngineHandle;

/// Full name of the service, for health and reflection.
const SERVICE: &str = "shimmer.v1.InferenceService";

/// Who is let in, and how the server ends.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// Limits, TLS and keys of the port.
    pub door: DoorOptions,
    /// Counts what happens there.
    pub counters: Arc<DoorCounters>,
    /// Time after the shutdown began in which new generations are still taken: whoever sends them learns of it late.
    pub delay: Duration,
    /// Time that running generations get after that.
    pub drain: Duration,
}

impl Default for ServerOptions {
    fn default() -> Self {
        let (door, counters) = (DoorOptions::default(), Arc::default());
        // Kubernetes kills after 30 s.
        Self { door, counters, delay: Duration::ZERO, drain: Duration::from_secs(25) }
    }
}

/// Why the server could not run.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The descriptors of the build are broken.
    #[error("cannot build the reflection service")]
    Reflection(#[from] tonic_reflection::server::Error),
    /// The listener or the HTTP/2 stack failed.
    #[error("the gRPC server failed")]
    Transport(#[from] tonic::transport::Error),
    /// The step thread panicked; what it said is in the log. Another process must take over.
    #[error("the engine has ended by itself")]
    EngineEnded,
}

/// Serves clients until `shutdown` is cancelled. From then on the service is not ready, and after the delay it refuses what is
/// new with UNAVAILABLE; running generations finish within the drain time, and the rest ends with UNAVAILABLE, resumable if there is a
/// journal. The engine has stopped when this returns.
///
/// # Errors
/// The server could not be built, its transport failed, or the engine has ended by itself.
pub async fn serve(
    inference: Inference,
    listener: TcpListener,
    shutdown: CancellationToken,
    options: ServerOptions,
) -> Result<(), ServeError> {
    let (reporter, health) = tonic_health::server::health_reporter();
    report(&reporter, false).await;
    let (v1, v1alpha) = (reflection().build_v1()?, reflection().build_v1alpha()?);
    let service = InferenceServiceServer::new(inference.clone())
        .max_decoding_message_size(MAX_API_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_API_MESSAGE_BYTES);
    // Until the last stream has ended the listener stays, so that new requests are refused by a status that says why.
    let close = CancellationToken::new();
    let ServerOptions { door, counters, .. } = &options;
    let keeper = Doorkeeper { keys: door.keys.clone(), counters: Arc::clone(counters) };
    let max_streams = door.max_streams;
    let (door, guests) = Door::new(door.clone(), Arc::clone(counters));
    let attend = door.attend(listener, close.clone());
    let serving = shimmer_proto::channel::server_builder()
        .max_concurrent_streams(max_streams)
        .layer(InterceptorLayer::new(note_call))
        .add_service(InterceptedService::new(service, keeper))
        .add_service(health)
        .add_service(v1)
        .add_service(v1alpha)
        .serve_with_incoming_shutdown(guests, close.clone().cancelled_owned());
    let server = async { tokio::join!(attend, serving).1 };
    let engine = inference.engine().clone();
    let drain = async {
        shutdown.cancelled().await;
        if !options.delay.is_zero() {
            // Meanwhile health says that it does not serve.
            tokio::time::sleep(options.delay).await;
        }
        drain(&inference, &reporter, options.drain).await;
        // The connections get a last word; one that does not take it does not hold us up.
        close.cancel();
        tokio::time::sleep(FAREWELL).await;
    };
    let follow = follow(inference.cluster(), &reporter, &shutdown);
    let served = tokio::select! {
        served = server => served,
        // Nothing new is let in before anybody hears that the service is not ready.
        ((), ()) = async { tokio::join!(biased; drain, follow) } => Ok(()),
        () = ended(&engine) => {
            report(&reporter, false).await;
            return Err(ServeError::EngineEnded);
        }
    };
    stop_engine(engine.clone()).await;
    Ok(served?)
}

/// How often the engine is looked at.
const WATCH: Duration = Duration::from_millis(500);

/// Returns when the engine has ended without being told to.
async fn ended(engine: &EngineHandle) {
    while !engine.has_ended() {
        tokio::time::sleep(WATCH).await;
    }
}

/// Time for the last messages of ended streams to leave; a client that reads nothing does not hold us up.
const FLUSH: Duration = Duration::from_millis(500);
/// Time for connections to close when no stream is left: a round trip, even a long one.
const FAREWELL: Duration = Duration::from_millis(250);

/// Takes nothing new, lets running streams finish for the given time, and ends the rest.
async fn drain(inference: &Inference, reporter: &HealthReporter, time: Duration) {
    inference.drain();
    report(reporter, false).await;
    if tokio::time::timeout(time, inference.drained()).await.is_ok() {
        return;
    }
    tracing::warn!(drain = ?time, "ending the generations that are still running");
    stop_engine(inference.engine().clone()).await;
    if tokio::time::timeout(FLUSH, inference.drained()).await.is_err() {
        tracing::warn!("a client did not take the end of its stream");
    }
}

/// Waiting for the step thread blocks, for as long as one step takes.
async fn stop_engine(engine: EngineHandle) {
    if tokio::task::spawn_blocking(move || engine.shutdown()).await.is_err() {
        tracing::error!("the engine could not be stopped");
    }
}

/// Keeps the health status in step with the cluster until the shutdown begins.
async fn follow(
    mut cluster: watch::Receiver<ClusterStatus>,
    reporter: &HealthReporter,
    shutdown: &CancellationToken,
) {
    loop {
        let complete = cluster.borrow_and_update().complete;
        // What the workers do no longer matters once the shutdown has begun.
        report(reporter, complete && !shutdown.is_cancelled()).await;
        tokio::select! {
            () = shutdown.cancelled() => break,
            changed = cluster.changed() => if changed.is_err() {
                // Whoever published it has gone; the last status stays.
                shutdown.cancelled().await;
                break;
            },
        }
    }
    report(reporter, false).await;
}

/// Sets the status of the service and of the server as a whole.
async fn report(reporter: &HealthReporter, serving: bool) {
    let status = if serving { ServingStatus::Serving } else { ServingStatus::NotServing };
    for service in ["", SERVICE] {
        reporter.set_service_status(service, status).await;
    }
}

/// Reflection over the public services; the expert stream is no business of clients.
fn reflection() -> tonic_reflection::server::Builder<'static> {
    tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(shimmer_proto::FILE_DESCRIPTOR_SET)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        .with_service_name(SERVICE)
        .with_service_name("grpc.health.v1.Health")
}
