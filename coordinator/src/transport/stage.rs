//! Where the links and the placement run, and by which clock: on threads of this process, or on a host of a simulation.

use std::{
    fmt, io,
    pin::Pin,
    sync::Arc,
    thread::JoinHandle,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use crossbeam_channel::{Receiver, RecvTimeoutError, TryRecvError};

/// Makes a task where it is to run.
pub type Task = Box<dyn FnOnce() -> Pin<Box<dyn Future<Output = ()>>> + Send>;

/// A host whose clock and network somebody else turns.
pub trait SimulatedHost: fmt::Debug + Send + Sync {
    /// The time on this host: for its tasks that of tokio's clock.
    fn now(&self) -> Instant;

    /// Time since 1970.
    fn unix_time(&self) -> Duration;

    /// Runs a task beside the others, in a tokio runtime that goes by the clock of this host.
    fn spawn(&self, task: Task);

    /// Lets time pass until something is there, or it is that late. Called from outside of the tasks.
    fn pass(&self, until: Instant, is_there: &dyn Fn() -> bool);
}

/// See the module.
#[derive(Debug, Clone, Default)]
pub enum Stage {
    /// A thread for each task, and the clock of this host.
    #[default]
    Threads,
    /// A simulation.
    Simulated(Arc<dyn SimulatedHost>),
}

impl Stage {
    pub(super) fn now(&self) -> Instant {
        match self {
            Self::Threads => Instant::now(),
            Self::Simulated(host) => host.now(),
        }
    }

    /// Time since 1970.
    pub(super) fn unix_time(&self) -> Duration {
        match self {
            Self::Threads => SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default(),
            Self::Simulated(host) => host.unix_time(),
        }
    }

    /// Runs a task to its end; the thread to wait for, if it has one.
    pub(super) fn run<Running>(
        &self,
        name: String,
        task: impl FnOnce() -> Running + Send + 'static,
    ) -> io::Result<Option<JoinHandle<()>>>
    where
        Running: Future<Output = ()> + 'static,
    {
        match self {
            Self::Threads => {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
                let run = move || runtime.block_on(task());
                std::thread::Builder::new().name(name).spawn(run).map(Some)
            }
            Self::Simulated(host) => {
                host.spawn(Box::new(|| Box::pin(task())));
                Ok(None)
            }
        }
    }

    /// Waits for what tasks send.
    pub(super) fn receive<T>(
        &self,
        from: &Receiver<T>,
        until: Instant,
    ) -> Result<T, RecvTimeoutError> {
        match self {
            Self::Threads => from.recv_deadline(until),
            Self::Simulated(host) => {
                host.pass(until, &|| !from.is_empty());
                from.try_recv().map_err(|error| match error {
                    TryRecvError::Empty => RecvTimeoutError::Timeout,
                    TryRecvError::Disconnected => RecvTimeoutError::Disconnected,
                })
            }
        }
    }
}
