//! A thread beside a connection's own, for what may wait for a drive: the connection goes on moving bytes meanwhile.

use std::{io, sync::mpsc};

use tokio::sync::oneshot;

use super::beside::Beside;

type Job = Box<dyn FnOnce() + Send>;

/// Runs jobs one after another. The thread ends with this.
#[derive(Debug)]
pub(super) enum Apart {
    Thread(mpsc::Sender<Job>),
    /// Jobs run where they come up.
    Here,
}

impl Apart {
    pub(super) fn start(beside: Beside) -> io::Result<Self> {
        if beside == Beside::Nothing {
            return Ok(Self::Here);
        }
        let (jobs, todo) = mpsc::channel::<Job>();
        beside.start("apart", move || {
            for job in todo {
                job();
            }
        })?;
        Ok(Self::Thread(jobs))
    }

    /// Gives what the job returns; nothing if the job panicked.
    pub(super) fn run<R: Send + 'static>(
        &self,
        job: impl FnOnce() -> R + Send + 'static,
    ) -> oneshot::Receiver<R> {
        let (done, result) = oneshot::channel();
        // Without a thread the job is dropped, and with it the sender. Without a listener nobody wants the result.
        let job = move || drop(done.send(job()));
        match self {
            Self::Thread(jobs) => drop(jobs.send(Box::new(job))),
            Self::Here => job(),
        }
        result
    }
}
