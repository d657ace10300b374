//! A thread beside a connection's own, for what may wait for a drive: the connection goes on moving bytes meanwhile.

use std::{io, sync::mpsc, thread};

use tokio::sync::oneshot;

type Job = Box<dyn FnOnce() + Send>;

/// Runs jobs one after another. The thread ends with this.
#[derive(Debug)]
pub(super) struct Apart {
    jobs: mpsc::Sender<Job>,
}

impl Apart {
    pub(super) fn start() -> io::Result<Self> {
        let (jobs, todo) = mpsc::channel::<Job>();
        thread::Builder::new().name("apart".to_owned()).spawn(move || {
            for job in todo {
                job();
            }
        })?;
        Ok(Self { jobs })
    }

    /// Gives what the job returns; nothing if the job panicked.
    pub(super) fn run<R: Send + 'static>(
        &self,
        job: impl FnOnce() -> R + Send + 'static,
    ) -> oneshot::Receiver<R> {
        let (done, result) = oneshot::channel();
        // Without a thread the job is dropped, and with it the sender. Without a listener nobody wants the result.
        let job = move || drop(done.send(job()));
        drop(self.jobs.send(Box::new(job)));
        result
    }
}
