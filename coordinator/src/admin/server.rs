//! The listener of the admin port.

use std::{sync::Arc, time::Duration};

use shimmer_proto::{
    admin::v1::admin_service_server::AdminServiceServer, limits::MAX_MESSAGE_BYTES, tls::ServerTls,
};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tonic::service::InterceptorLayer;

use super::Admin;
use crate::api::{Door, DoorOptions, note_call};

/// Full name of the service, for reflection.
const SERVICE: &str = "shimmer.admin.v1.AdminService";

/// Operators at the same time. A connection that is left open closes by itself only if it never made a call.
const MAX_CONNECTIONS: usize = 64;
/// Calls at the same time on one connection.
const MAX_STREAMS: u32 = 16;
/// Calls that are under way at the end get this long.
const FAREWELL: Duration = Duration::from_millis(500);

/// Who may connect.
#[derive(Debug, Clone, Default)]
pub struct AdminOptions {
    /// Mutual TLS: operators are members. Absent: plaintext, for whoever reaches the port.
    pub tls: Option<ServerTls>,
}

/// Why the port could not be served.
#[derive(Debug, thiserror::Error)]
pub enum AdminError {
    /// The descriptors of the build are broken.
    #[error("cannot build the reflection service")]
    Reflection(#[from] tonic_reflection::server::Error),
    /// The HTTP/2 stack failed.
    #[error("the admin port failed")]
    Transport(#[from] tonic::transport::Error),
}

/// Serves operators until `shutdown` is cancelled.
///
/// # Errors
/// The service could not be built, or its transport failed.
pub async fn serve(
    admin: Admin,
    listener: TcpListener,
    options: AdminOptions,
    shutdown: CancellationToken,
) -> Result<(), AdminError> {
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(shimmer_proto::FILE_DESCRIPTOR_SET)
            .with_service_name(SERVICE)
    };
    let (v1, v1alpha) = (reflection().build_v1()?, reflection().build_v1alpha()?);
    let door = DoorOptions {
        tls: options.tls,
        max_connections: MAX_CONNECTIONS,
        max_streams: MAX_STREAMS,
        ..DoorOptions::default()
    };
    let (door, guests) = Door::new(door, Arc::default());
    let attend = door.attend(listener, shutdown.clone());
    let service = AdminServiceServer::new(admin).max_encoding_message_size(MAX_MESSAGE_BYTES);
    let serving = shimmer_proto::channel::server_builder()
        .max_concurrent_streams(MAX_STREAMS)
        .layer(InterceptorLayer::new(note_call))
        .add_service(service)
        .add_service(v1)
        .add_service(v1alpha)
        .serve_with_incoming_shutdown(guests, shutdown.clone().cancelled_owned());
    let overdue = async {
        shutdown.cancelled().await;
        tokio::time::sleep(FAREWELL).await;
    };
    tokio::select! {
        ((), served) = async { tokio::join!(attend, serving) } => Ok(served?),
        () = overdue => Ok(()),
    }
}
