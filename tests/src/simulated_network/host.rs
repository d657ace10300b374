//! What runs on a simulated host: tasks by its clock, its sockets, and what the coordinator needs of it.

use std::{
    fmt, io,
    net::{Ipv4Addr, SocketAddr},
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc::{Receiver, Sender},
    },
    task::{Context, Poll},
    time::{Duration, Instant},
};

use shimmer_coordinator::transport::{SimulatedHost, Task};
use shimmer_proto::{
    address::PeerAddress,
    tls::{BothWays, Connecting, Network},
};
use shimmer_worker::serve::{Beside, Connection, Port};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    task::JoinSet,
    time::{MissedTickBehavior, interval},
};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tonic::transport::server::Connected;

/// One turn of the simulation.
pub(super) const TICK: Duration = Duration::from_millis(1);
/// The port of every server.
pub(super) const PORT: u16 = 7000;
/// 2001, when every simulation begins.
const BEGUN: Duration = Duration::from_secs(1_000_000_000);

/// Tasks that a host is to run.
#[derive(Default)]
pub(super) struct Tasks(Mutex<Vec<Task>>);

impl Tasks {
    pub(super) fn add(&self, task: Task) {
        lock(&self.0).push(task);
    }

    /// Lets the clock of the host jump.
    pub(super) fn jump(&self, by: Duration) {
        self.add(Box::new(move || Box::pin(tokio::time::advance(by))));
    }

    /// Runs what is added, for ever; `turned` is called in every turn.
    pub(super) async fn run(&self, turned: impl Fn()) {
        let mut running = JoinSet::new();
        let mut ticks = interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            turned();
            let added = std::mem::take(&mut *lock(&self.0));
            for task in added {
                running.spawn_local(task());
            }
            while let Some(ended) = running.try_join_next() {
                ended.expect("a task of a host does not fail");
            }
            ticks.tick().await;
        }
    }
}

/// What the coordinator's host shares with the threads outside of the simulation.
#[derive(Default)]
pub(super) struct Shared {
    pub(super) tasks: Tasks,
    /// The time on the coordinator's host; none while it starts.
    pub(super) now: Mutex<Option<Instant>>,
    pub(super) turns: AtomicU64,
    /// Connections of the coordinator, by the name of the host that they lead to.
    connections: Mutex<Vec<(String, Weak<CancellationToken>)>>,
    /// A connection of a worker panicked.
    pub(super) failed: AtomicBool,
}

impl Shared {
    /// Connections that are open to a host.
    fn open(&self, host: &str) -> Vec<Arc<CancellationToken>> {
        let mut connections = lock(&self.connections);
        connections.retain(|(_, open)| open.strong_count() > 0);
        let of_host = connections.iter().filter(|(to, _)| to == host);
        of_host.filter_map(|(_, open)| open.upgrade()).collect()
    }

    pub(super) fn is_connected(&self, host: &str) -> bool {
        !self.open(host).is_empty()
    }

    /// Breaks the connections to a host.
    pub(super) fn reset(&self, host: &str) {
        self.open(host).iter().for_each(|open| open.cancel());
    }
}

/// What is asked of the thread of the simulation.
pub(super) enum Order {
    /// One turn.
    Turn,
    /// Faults begin.
    Trouble,
    /// Faults end.
    Heal,
    /// The coordinator's process dies and is started again.
    Restart,
}

/// The coordinator's host, from outside: time passes while somebody waits here, and stands still while somebody computes.
pub(super) struct CoordinatorHost {
    shared: Arc<Shared>,
    orders: Mutex<(Sender<Order>, Receiver<()>)>,
}

impl CoordinatorHost {
    pub(super) fn new(shared: Arc<Shared>, orders: Sender<Order>, done: Receiver<()>) -> Self {
        Self { shared, orders: Mutex::new((orders, done)) }
    }

    pub(super) fn order(&self, order: Order) {
        let orders = lock(&self.orders);
        let gone = "the simulation has failed";
        orders.0.send(order).expect(gone);
        orders.1.recv().expect(gone);
    }

    /// Gives no orders any more; the simulation ends.
    pub(super) fn hang_up(&self) {
        lock(&self.orders).0 = std::sync::mpsc::channel().0;
    }
}

impl SimulatedHost for CoordinatorHost {
    fn now(&self) -> Instant {
        if turmoil::in_simulation() {
            return tokio::time::Instant::now().into_std();
        }
        lock(&self.shared.now).expect("the host has started")
    }

    fn unix_time(&self) -> Duration {
        let turns = self.shared.turns.load(Ordering::Relaxed);
        BEGUN + TICK * u32::try_from(turns).expect("a simulation is short")
    }

    fn spawn(&self, task: Task) {
        self.shared.tasks.add(task);
    }

    fn pass(&self, until: Instant, is_there: &dyn Fn() -> bool) {
        while !is_there() && self.now() < until {
            self.order(Order::Turn);
        }
    }
}

impl fmt::Debug for CoordinatorHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CoordinatorHost")
    }
}

/// The simulated network, from a host in it.
#[derive(Clone)]
pub(super) struct FromHost(pub(super) Arc<Shared>);

impl Network for FromHost {
    fn connect(&self, address: &PeerAddress) -> Connecting {
        let (shared, host, port) = (Arc::clone(&self.0), address.host().to_owned(), address.port());
        Box::pin(async move {
            let stream = turmoil::net::TcpStream::connect((host.as_str(), port)).await?;
            let cut = Arc::new(CancellationToken::new());
            lock(&shared.connections).push((host, Arc::downgrade(&cut)));
            let broken = Box::pin((*cut).clone().cancelled_owned());
            let stream: Box<dyn BothWays> = Box::new(Breakable { stream, broken, _open: cut });
            Ok(stream)
        })
    }
}

impl fmt::Debug for FromHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FromHost")
    }
}

/// A connection that can be reset.
struct Breakable {
    stream: turmoil::net::TcpStream,
    broken: Pin<Box<WaitForCancellationFutureOwned>>,
    /// Tells that it is open.
    _open: Arc<CancellationToken>,
}

impl Breakable {
    fn check(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        match self.broken.as_mut().poll(cx) {
            Poll::Ready(()) => Err(io::ErrorKind::ConnectionReset.into()),
            Poll::Pending => Ok(()),
        }
    }
}

impl AsyncRead for Breakable {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.check(cx)?;
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Breakable {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.check(cx)?;
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// A socket that a simulated server has accepted.
pub(super) struct Accepted(turmoil::net::TcpStream);

impl Connected for Accepted {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

impl AsyncRead for Accepted {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buf)
    }
}

impl AsyncWrite for Accepted {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}

/// The port of a simulated host, whose connections are tasks of it.
pub(super) struct SimulatedPort {
    listener: turmoil::net::TcpListener,
    shared: Arc<Shared>,
}

impl SimulatedPort {
    pub(super) async fn bind(shared: &Arc<Shared>) -> io::Result<Self> {
        let listener = turmoil::net::TcpListener::bind((Ipv4Addr::UNSPECIFIED, PORT)).await?;
        Ok(Self { listener, shared: Arc::clone(shared) })
    }
}

impl Port for SimulatedPort {
    type Socket = Accepted;

    async fn accept(&self) -> io::Result<(Accepted, SocketAddr)> {
        let (socket, peer) = self.listener.accept().await?;
        Ok((Accepted(socket), peer))
    }

    fn carry(&self, socket: Accepted, connection: Connection) {
        let failed = OnPanic(Arc::clone(&self.shared));
        // It outlives the port while the worker drains, and ends with its host.
        drop(tokio::task::spawn_local(async move {
            let _failed = failed;
            connection.serve(socket).await;
        }));
    }

    fn beside(&self) -> Beside {
        Beside::Nothing
    }
}

/// Remembers that a task panicked.
struct OnPanic(Arc<Shared>);

impl Drop for OnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.failed.store(true, Ordering::Relaxed);
        }
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
