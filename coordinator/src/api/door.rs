//! The public port's door: how many may be inside, who is let in, and how long a silent guest may stay.
//!
//! A connection takes a seat before its handshake and gives it back when it closes. Who finds no seat is told so and shown
//! out. A guest that makes no call holds his seat for a limited time only. Keys are looked at for each call.

use std::{
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    task::Context,
    time::Duration,
};

use serde::Serialize;
use shimmer_proto::{
    flood::Flood,
    tls::{AcceptError, Acceptor, Companion, PeerStream, Refusal, ServerTls, refuse},
};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore, mpsc},
    task::JoinSet,
    time::Sleep,
};
use tokio_stream::{Stream, wrappers::ReceiverStream};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Status, service::Interceptor, transport::server::TcpConnectInfo};

use super::keys::{ApiKeys, KeyRefusal};

/// Refusals under way at a time; who comes beyond that is closed without a word.
const REFUSALS: usize = 16;
/// Time that one who is refused gets to take it in.
const REFUSAL_LIMIT: Duration = Duration::from_secs(2);
/// Connections that wait for the server to take them.
const HALL: usize = 64;

/// Limits of the public port.
#[derive(Debug, Clone)]
pub struct DoorOptions {
    /// TLS of the port; absent: plaintext.
    pub tls: Option<ServerTls>,
    /// Keys of which every call must show one; absent: none is asked for. Health and reflection are open.
    pub keys: Option<ApiKeys>,
    /// Connections at the same time.
    pub max_connections: usize,
    /// Calls at the same time on one connection; more wait at the client.
    pub max_streams: u32,
    /// Time for the TLS handshake, or on a plaintext port for the first byte.
    pub handshake_timeout: Duration,
    /// A connection that has made no call for this long is closed.
    pub first_call_timeout: Duration,
}

impl Default for DoorOptions {
    fn default() -> Self {
        Self {
            tls: None,
            keys: None,
            max_connections: 1024,
            max_streams: 1024,
            handshake_timeout: Duration::from_secs(5),
            // Clients that connect ahead of their first call are common; connecting again costs them a round trip.
            first_call_timeout: Duration::from_secs(30),
        }
    }
}

/// What happened at the door.
#[derive(Debug, Default)]
pub struct DoorCounters {
    connections: AtomicU64,
    open: AtomicU64,
    full: AtomicU64,
    handshake: AtomicU64,
    silent: AtomicU64,
    missing_key: AtomicU64,
    unknown_key: AtomicU64,
}

/// The counters at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct DoorReport {
    /// Connections accepted, those that were refused included.
    pub connections: u64,
    /// Connections that are open now.
    pub open: u64,
    /// Connections refused because all seats were taken.
    pub full: u64,
    /// Connections whose handshake failed, or that spoke plaintext to TLS or TLS to plaintext.
    pub handshake: u64,
    /// Connections that made no handshake or no call in time.
    pub silent: u64,
    /// Calls without a key.
    pub missing_key: u64,
    /// Calls with an unknown key.
    pub unknown_key: u64,
}

impl DoorCounters {
    /// Reads all counters.
    pub fn report(&self) -> DoorReport {
        let read = |counter: &AtomicU64| counter.load(Relaxed);
        DoorReport {
            connections: read(&self.connections),
            open: read(&self.open),
            full: read(&self.full),
            handshake: read(&self.handshake),
            silent: read(&self.silent),
            missing_key: read(&self.missing_key),
            unknown_key: read(&self.unknown_key),
        }
    }
}

fn bump(counter: &AtomicU64) {
    counter.fetch_add(1, Relaxed);
}

/// The door of one listener.
pub(crate) struct Door {
    acceptor: Acceptor,
    seats: Arc<Semaphore>,
    refusals: Arc<Semaphore>,
    options: DoorOptions,
    counters: Arc<DoorCounters>,
    guests: mpsc::Sender<io::Result<PeerStream<Guest>>>,
    /// Lines about those who find no seat.
    full: Flood,
    /// Lines about those who could not be let in.
    turned_away: Arc<Flood>,
}

impl Door {
    /// A door, and the guests that come through it.
    pub(crate) fn new(
        options: DoorOptions,
        counters: Arc<DoorCounters>,
    ) -> (Self, impl Stream<Item = io::Result<PeerStream<Guest>>> + use<>) {
        let (guests, incoming) = mpsc::channel(HALL);
        let door = Self {
            acceptor: Acceptor::new(options.tls.clone(), options.handshake_timeout),
            seats: Arc::new(Semaphore::new(options.max_connections)),
            refusals: Arc::new(Semaphore::new(REFUSALS)),
            options,
            counters,
            guests,
            full: Flood::default(),
            turned_away: Arc::default(),
        };
        (door, ReceiverStream::new(incoming))
    }

    /// Lets guests in until `close` is cancelled. A failing accept is a shortage that passes, never the end.
    pub(crate) async fn attend(self, listener: TcpListener, close: CancellationToken) {
        let mut tasks = JoinSet::new();
        loop {
            tokio::select! {
                () = close.cancelled() => return,
                accepted = listener.accept() => match accepted {
                    Ok((socket, peer)) => {
                        bump(&self.counters.connections);
                        self.receive(&mut tasks, socket, peer);
                    }
                    Err(error) => {
                        tracing::warn!(%error, "accepting a client");
                        tokio::time::sleep(Duration::from_millis(50)).await;
                    }
                },
                Some(ended) = tasks.join_next() => if let Err(error) = ended {
                    tracing::error!(%error, "a handshake failed");
                },
            }
        }
    }

    /// Starts what a connection needs before it is a guest. The seats and the places of those who are refused limit how many
    /// of these there are.
    fn receive(&self, tasks: &mut JoinSet<()>, socket: TcpStream, peer: std::net::SocketAddr) {
        let (acceptor, counters) = (self.acceptor.clone(), Arc::clone(&self.counters));
        let Ok(seat) = Arc::clone(&self.seats).try_acquire_owned() else {
            bump(&counters.full);
            let limit = self.options.max_connections;
            if let Some(more) = self.full.line() {
                tracing::warn!(%peer, limit, more, "too many connections; refusing the newest");
            }
            let Ok(place) = Arc::clone(&self.refusals).try_acquire_owned() else { return };
            tasks.spawn(async move {
                show_out(&acceptor, socket, limit).await;
                drop(place);
            });
            return;
        };
        let (guests, patience) = (self.guests.clone(), self.options.first_call_timeout);
        let turned_away = Arc::clone(&self.turned_away);
        tasks.spawn(async move {
            match acceptor.accept(socket).await {
                Ok(stream) => {
                    let guest = stream.with(Guest::new(seat, patience, counters));
                    // Without a server the process is ending.
                    drop(guests.send(Ok(guest)).await);
                }
                Err(AcceptError::Closed) => {
                    tracing::debug!(%peer, "a client left before it said anything");
                }
                Err(error) => {
                    bump(match error {
                        AcceptError::Late(_) => &counters.silent,
                        _ => &counters.handshake,
                    });
                    if let Some(more) = turned_away.line() {
                        tracing::warn!(%peer, reason = %error, more, "client refused");
                    }
                }
            }
        });
    }
}

/// Tells one who finds no seat, through TLS where that is spoken.
async fn show_out(acceptor: &Acceptor, socket: TcpStream, limit: usize) {
    let told = async {
        if let Ok(stream) = acceptor.accept(socket).await {
            let message = format!("this server has its limit of {limit} connections; try again");
            refuse(stream, Refusal::Overloaded, &message, REFUSAL_LIMIT).await;
        }
    };
    if tokio::time::timeout(REFUSAL_LIMIT, told).await.is_err() {
        tracing::trace!("a refused client was slow");
    }
}

/// What stays with a client's connection.
pub(crate) struct Guest {
    called: Arc<AtomicBool>,
    /// Runs while no call has come.
    patience: Option<Pin<Box<Sleep>>>,
    counters: Arc<DoorCounters>,
    _seat: OwnedSemaphorePermit,
}

impl Guest {
    fn new(seat: OwnedSemaphorePermit, patience: Duration, counters: Arc<DoorCounters>) -> Self {
        bump(&counters.open);
        let patience = Some(Box::pin(tokio::time::sleep(patience)));
        Self { called: Arc::default(), patience, counters, _seat: seat }
    }

    /// Whether the guest has made no call for too long.
    fn is_overdue(&mut self, cx: &mut Context<'_>) -> bool {
        if self.called.load(Relaxed) {
            self.patience = None;
        }
        self.patience.as_mut().is_some_and(|sleep| sleep.as_mut().poll(cx).is_ready())
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.counters.open.fetch_sub(1, Relaxed);
    }
}

/// What a call knows of its connection.
#[derive(Debug, Clone)]
pub(crate) struct GuestInfo {
    called: Arc<AtomicBool>,
    peer: Option<std::net::SocketAddr>,
}

impl Companion for Guest {
    type Info = GuestInfo;

    fn info(&self, tcp: TcpConnectInfo) -> GuestInfo {
        GuestInfo { called: Arc::clone(&self.called), peer: tcp.remote_addr() }
    }

    fn admit(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        if !self.is_overdue(cx) {
            return Ok(());
        }
        self.patience = None;
        bump(&self.counters.silent);
        Err(io::Error::new(io::ErrorKind::TimedOut, "no call came"))
    }
}

/// Notes that a connection has made a call; for every service.
pub(crate) fn note_call(request: Request<()>) -> Result<Request<()>, Status> {
    if let Some(guest) = request.extensions().get::<GuestInfo>() {
        guest.called.store(true, Relaxed);
    }
    Ok(request)
}

/// Lets calls with a key through; for the services that ask for one.
#[derive(Clone)]
pub(super) struct Doorkeeper {
    pub(super) keys: Option<ApiKeys>,
    pub(super) counters: Arc<DoorCounters>,
}

impl Interceptor for Doorkeeper {
    fn call(&mut self, request: Request<()>) -> Result<Request<()>, Status> {
        let Some(keys) = &self.keys else { return Ok(request) };
        match keys.check(request.metadata()) {
            Ok(name) => {
                tracing::trace!(key = name, "call");
                Ok(request)
            }
            Err(refusal) => {
                bump(match refusal {
                    KeyRefusal::Missing => &self.counters.missing_key,
                    KeyRefusal::Unknown => &self.counters.unknown_key,
                });
                let peer = request.extensions().get::<GuestInfo>().and_then(|guest| guest.peer);
                tracing::debug!(?peer, ?refusal, "call refused");
                Err(refusal.status())
            }
        }
    }
}
