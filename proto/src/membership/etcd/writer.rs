//! Makes writes: short tries, again after a wait, until the answer is clear or the time is up.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use etcd_client::Client;
use tokio::{
    sync::{mpsc, oneshot},
    task::JoinSet,
    time::{sleep, timeout},
};

use super::{Shared, failure::Failure, transaction::Transaction, watcher::number};
use crate::{
    backoff::Backoff,
    membership::{Condition, StoreError, Write, Written},
};

/// Writes that are tried at a time, and as many again that wait; more means that the store is away, and is said at once.
pub(super) const AT_A_TIME: usize = 32;

/// Waits between tries.
const WAIT_MIN: Duration = Duration::from_millis(50);
const WAIT_MAX: Duration = Duration::from_millis(500);

/// A write that somebody waits for.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) conditions: Vec<Condition>,
    pub(super) writes: Vec<Write>,
    pub(super) since: Instant,
    pub(super) reply: oneshot::Sender<Result<Written, StoreError>>,
}

/// Takes requests for ever.
pub(super) async fn run(shared: Arc<Shared>, mut requests: mpsc::Receiver<Request>) {
    let mut tasks = JoinSet::new();
    let mut made: u64 = 0;
    loop {
        tokio::select! {
            Some(ended) = tasks.join_next() => {
                if let Err(error) = ended
                    && error.is_panic()
                {
                    std::panic::resume_unwind(error.into_panic());
                }
            }
            request = requests.recv(), if tasks.len() < AT_A_TIME => {
                let Some(request) = request else { return };
                made += 1;
                let (shared, seed) = (Arc::clone(&shared), shared.config.seed.wrapping_add(made));
                tasks.spawn(Box::pin(async move {
                    let Request { conditions, writes, since, mut reply } = request;
                    tokio::select! {
                        // Whoever asked has gone.
                        () = reply.closed() => {}
                        written = write(&shared, &conditions, &writes, since, seed) => {
                            // Gone as well, if this fails.
                            drop(reply.send(written));
                        }
                    }
                }));
            }
        }
    }
}

async fn write(
    shared: &Shared,
    conditions: &[Condition],
    writes: &[Write],
    since: Instant,
    seed: u64,
) -> Result<Written, StoreError> {
    let deadline = since + shared.config.write();
    let leased = writes.iter().any(|write| matches!(write, Write::PutLeased { .. }));
    let mut waits = Backoff::new(WAIT_MIN, WAIT_MAX, seed);
    // An earlier try may have happened.
    let mut unsure = false;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let lease = if leased { confirmed_lease(shared, left).await } else { Some(0) };
        let left = deadline.saturating_duration_since(Instant::now());
        let failure = match lease {
            None => Failure::Unanswered("this member has no lease to write on".to_owned()),
            Some(lease) => {
                let transaction = Transaction::new(&shared.prefix, conditions, writes, lease);
                let request = transaction.request(unsure);
                let call = |mut client: Client| async move { client.txn(request).await };
                match shared.attempt(shared.config.attempt().min(left), call).await {
                    Ok(response) if response.succeeded() => {
                        let revision = response.header().map_or(0, |h| number(h.revision()));
                        return Ok(Written::Done(revision));
                    }
                    Ok(response) => {
                        let earlier = if unsure { transaction.happened(&response) } else { None };
                        return Ok(earlier.map_or(Written::Conflict, Written::Done));
                    }
                    Err(Failure::LeaseGone) => {
                        shared.lost.send_replace(lease);
                        Failure::LeaseGone
                    }
                    Err(failure) => {
                        unsure |= matches!(failure, Failure::Unanswered(_));
                        failure
                    }
                }
            }
        };
        let store = shared.config.describe();
        let detail = failure.text().to_owned();
        if let Failure::Refused(_) = failure {
            return Err(StoreError::Refused { store, detail });
        }
        let wait = waits.fail();
        if Instant::now() + wait >= deadline {
            return Err(StoreError::Unreachable { store, waited: since.elapsed(), detail });
        }
        sleep(wait).await;
    }
}

/// The lease as soon as there is one that cannot have run out.
async fn confirmed_lease(shared: &Shared, limit: Duration) -> Option<u64> {
    let gone = *shared.lost.borrow();
    let mut view = shared.view.subscribe();
    let found = view.wait_for(|view| view.lease != 0 && view.lease != gone);
    timeout(limit, found).await.ok()?.ok().map(|view| view.lease)
}
