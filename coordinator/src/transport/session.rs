//! One connection to a worker, from the handshake to its end.

use std::{
    future::Future,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use shimmer_proto::{
    address::PeerAddress,
    checksum,
    expert::v1::{
        CoordinatorHello, ErrorCode, SessionRequest, SessionResponse, WorkerError, WorkerHello,
        expert_service_client::ExpertServiceClient, session_request::Body as Ask,
        session_response::Body as Said,
    },
    identity::{self, shown},
    limits::{self, MAX_MESSAGE_BYTES},
    status::told,
    tls::DialError,
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status, Streaming};

use super::{
    assignments::{Assignments, News as Told},
    lane::{LinkCounters, Outlet},
    link::{Event, Link, News, QUEUE},
    probe,
    status::LinkState,
};

/// How a session ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Ending {
    /// There was no connection.
    Unreachable(String),
    /// The connection broke, or the worker missed a deadline.
    Lost(String),
    /// The worker does not fit; another attempt will not help soon.
    Refused(String),
}

/// State of one session.
pub(super) struct Session<'a> {
    link: &'a Link,
    address: &'a PeerAddress,
    number: u64,
    requests: mpsc::Sender<SessionRequest>,
    queue: Option<mpsc::Receiver<SessionRequest>>,
    assignments: Assignments,
    max_rows: u32,
    /// As the newest Ready says.
    wants_hints: bool,
    served: bool,
    give_up: CancellationToken,
    reason: Arc<Mutex<String>>,
}

type Inbound = Streaming<SessionResponse>;

impl<'a> Session<'a> {
    pub(super) fn new(link: &'a Link, address: &'a PeerAddress, number: u64) -> Self {
        let (requests, queue) = mpsc::channel(QUEUE);
        let (give_up, reason) = link.lane.arm();
        Self {
            link,
            address,
            number,
            requests,
            queue: Some(queue),
            assignments: Assignments::default(),
            max_rows: limits::MAX_PART_ROWS,
            wants_hints: false,
            served: false,
            give_up,
            reason,
        }
    }

    /// Whether the worker ever took work in this session.
    pub(super) fn served(&self) -> bool {
        self.served
    }

    pub(super) async fn run(&mut self) -> Ending {
        let given_up = self.give_up.clone();
        let Link { config, lane, board, .. } = self.link;
        let watch = probe::watch_over(config, self.address, lane, || board.refresh());
        tokio::select! {
            biased;
            ending = self.live() => ending.unwrap_or_else(|ending| ending),
            why = watch => Ending::Lost(why),
            () = given_up.cancelled() => {
                Ending::Lost(self.reason.lock().unwrap_or_else(PoisonError::into_inner).clone())
            }
        }
    }

    /// Never returns `Ok` but for the uniform type: a session lives until something ends it.
    async fn live(&mut self) -> Result<Ending, Ending> {
        let mut inbound = self.connect().await?;
        let hello = self.greet(&mut inbound).await?;
        self.max_rows = hello.limits.as_ref().map_or(self.max_rows, |l| l.max_rows);
        let Link { config, board, .. } = self.link;
        let mut plans = board.plans();
        loop {
            self.follow(&plans.borrow_and_update().clone())?;
            let due = self.assignments.due(config.load_stall_timeout, config.hello_timeout);
            tokio::select! {
                biased;
                message = inbound.message() => self.hear(message)?,
                changed = plans.changed() => {
                    changed.map_err(|_| Ending::Lost("shutting down".to_owned()))?;
                }
                () = until(due) => self.stalled()?,
            }
        }
    }

    async fn connect(&mut self) -> Result<Inbound, Ending> {
        let Self { link: Link { config, lane, .. }, address, .. } = *self;
        let channel =
            config.dialer.connect(address, config.connect_timeout).await.map_err(|error| {
                let why = format!("connecting to {address}: {error}");
                match error {
                    // Somebody is there: files or flags must change before it helps to try again.
                    DialError::Address(_) | DialError::Tls(_) => Ending::Refused(why),
                    DialError::Late(_) | DialError::Unreachable(_) => Ending::Unreachable(why),
                }
            })?;
        LinkCounters::bump(&lane.counters.connects);
        let mut client = ExpertServiceClient::new(channel)
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES);
        let hello = CoordinatorHello {
            identity: Some(self.link.model.identity.clone()),
            limits: Some(limits::announced()),
            coordinator_id: config.coordinator_id.clone(),
        };
        self.ask(Ask::Hello(hello))?;
        let queue = self.queue.take().expect("a session connects once");
        let started = client.session(ReceiverStream::new(queue));
        let response =
            within(config.hello_timeout, "the expert stream did not open", started).await?;
        response.map(tonic::Response::into_inner).map_err(|status| match status.code() {
            Code::Unimplemented => Ending::Refused(format!(
                "{address} is no worker of this kind: it has no expert service"
            )),
            _ => Ending::Lost(format!("opening the expert stream: {}", shown(&told(&status)))),
        })
    }

    /// Queues a message. Nothing here waits for a connection that does not drain.
    fn ask(&self, body: Ask) -> Result<(), Ending> {
        let sent = self.requests.try_send(SessionRequest { body: Some(body) });
        sent.map_err(|_| Ending::Lost("the connection does not take more messages".to_owned()))
    }

    async fn greet(&self, inbound: &mut Inbound) -> Result<WorkerHello, Ending> {
        let Link { worker, config, model, board, .. } = self.link;
        let message = within(config.hello_timeout, "no hello", inbound.message()).await?;
        let hello = match self.said(message)? {
            Said::Hello(hello) => hello,
            Said::Error(error) => return Err(accused(&error)),
            _ => {
                return Err(Ending::Refused(
                    "the worker's first message is not a hello".to_owned(),
                ));
            }
        };
        let side = format!("coordinator {}", config.coordinator_id);
        let peer = format!("worker {}", shown(&hello.worker_id));
        let theirs = hello.identity.clone().unwrap_or_default();
        identity::compare(&side, &model.identity, &peer, &theirs)
            .map_err(|error| Ending::Refused(error.message))?;
        board.greet(*worker, self.number, &hello).map_err(Ending::Refused)?;
        Ok(hello)
    }

    fn said(&self, message: Result<Option<SessionResponse>, Status>) -> Result<Said, Ending> {
        match message {
            Ok(Some(SessionResponse { body: Some(body) })) => Ok(body),
            Ok(Some(SessionResponse { body: None })) => Err(Ending::Refused(
                "the worker sent a message that this build does not know".to_owned(),
            )),
            Ok(None) => Err(Ending::Lost("the worker ended the stream".to_owned())),
            Err(status) => Err(self.broken(&status)),
        }
    }

    fn broken(&self, status: &Status) -> Ending {
        if matches!(status.code(), Code::OutOfRange | Code::ResourceExhausted | Code::Internal) {
            LinkCounters::bump(&self.link.lane.counters.unreadable_frames);
        }
        let message = if status.message().is_empty() {
            status.code().description()
        } else {
            status.message()
        };
        Ending::Lost(format!("the connection broke: {}", shown(message)))
    }

    /// Tells the worker what the placements want of it.
    fn follow(&mut self, plans: &super::plans::Plans) -> Result<(), Ending> {
        let Link { worker, model, epoch, config, .. } = self.link;
        let now = config.stage.now();
        let (in_force, next) = (plans.in_force.as_ref(), plans.next.as_ref());
        let asks = self.assignments.follow(in_force, next, *worker, *epoch, model, now);
        if asks.is_empty() {
            return Ok(());
        }
        asks.into_iter().try_for_each(|ask| self.ask(ask))?;
        self.settle();
        Ok(())
    }

    /// Acts on a message.
    fn hear(&mut self, message: Result<Option<SessionResponse>, Status>) -> Result<(), Ending> {
        let Link { worker, board, model, epoch, lane, config, .. } = self.link;
        let now = config.stage.now();
        match self.said(message)? {
            Said::Result(result) => {
                if let Err(error) = checksum::verify_result(&result) {
                    LinkCounters::bump(&lane.counters.corrupt_frames);
                    return Err(Ending::Lost(format!("a damaged result: {error}")));
                }
                self.pass_on(Ok(result))
            }
            Said::Error(error) if !error.fatal && error.fence.is_some() => {
                self.pass_on(Err(WorkerError { detail: shown(&error.detail), ..error }))
            }
            Said::Error(error) => self.complained(&error),
            Said::Progress(progress) => {
                self.assignments.progressed(now);
                if !self.served {
                    let (done, all) = (progress.loaded_experts, progress.total_experts);
                    let detail = format!("loaded {done} of {all} experts");
                    board.tell(*worker, LinkState::Loading, detail);
                    board.tell_resident(*worker, done, progress.loaded_bytes);
                }
                Ok(())
            }
            Said::Ready(ready) if ready.epoch == *epoch => {
                let told = self.assignments.loaded(&ready, now).map_err(Ending::Refused)?;
                self.wants_hints = ready.wants_hints;
                if self.served {
                    lane.set_wants_hints(self.wants_hints);
                }
                self.proceed(told)
            }
            Said::Ready(_) => Ok(()),
            Said::SelfTest(result) => {
                let contested = lane.take_contested(result.layer, result.expert);
                match self.assignments.tested(&result, model, now) {
                    Ok(told) => self.proceed(told),
                    Err(detail) if contested => {
                        tracing::error!(name = board.name(*worker), detail, "worker quarantined");
                        board.quarantine(*worker, &detail);
                        Err(Ending::Lost(detail))
                    }
                    Err(detail) => Err(Ending::Refused(detail)),
                }
            }
            Said::Draining(draining) => {
                let (reason, ms) = (shown(&draining.reason), draining.left_ms);
                tracing::info!(name = board.name(*worker), reason, ms, "worker drains");
                board.tell_leaving(*worker);
                Ok(())
            }
            Said::Hello(_) => Err(Ending::Lost("the worker sent a second hello".to_owned())),
        }
    }

    /// Asks for further self-tests, or opens the way to the worker.
    fn proceed(&mut self, (news, asks): (Told, Vec<Ask>)) -> Result<(), Ending> {
        asks.into_iter().try_for_each(|ask| self.ask(ask))?;
        if news != Told::Nothing {
            self.settle();
        }
        Ok(())
    }

    /// Lets work through for what is ready, and tells everybody how far the worker is.
    fn settle(&mut self) {
        let Link { worker, board, lane, .. } = self.link;
        let ready = self.assignments.ready();
        let activity = self.assignments.activity();
        if ready == [0; 2] {
            lane.shut();
            board.tell_ready(*worker, ready);
            board.tell(*worker, LinkState::Loading, activity.unwrap_or_default());
            return;
        }
        let (session, requests) = (self.number, self.requests.clone());
        lane.open(&Outlet { session, requests, max_rows: self.max_rows }, ready);
        lane.set_wants_hints(self.wants_hints);
        let (experts, bytes) = self.assignments.resident();
        if !self.served {
            self.served = true;
            tracing::info!(name = board.name(*worker), experts, bytes, "worker serves");
        }
        board.tell_resident(*worker, experts, bytes);
        board.tell_ready(*worker, ready);
        board.tell(*worker, LinkState::Serving, activity.unwrap_or_default());
    }

    /// The load that is going on tells no progress, or a self-test has no answer.
    fn stalled(&mut self) -> Result<(), Ending> {
        let config = &self.link.config;
        let detail = match self.assignments.activity() {
            Some(activity) if activity == "self-test" => {
                format!("no answer to a self-test within {} ms", config.hello_timeout.as_millis())
            }
            _ => format!(
                "no progress in loading within {} ms",
                config.load_stall_timeout.as_millis()
            ),
        };
        self.load_failed(detail.clone()).ok_or(Ending::Lost(detail))
    }

    /// Gives up a load beside which the worker serves another generation; none if there is no other one.
    fn load_failed(&mut self, detail: String) -> Option<()> {
        let Link { worker, board, .. } = self.link;
        let generation = self.assignments.failed()?;
        tracing::warn!(
            name = board.name(*worker),
            generation,
            detail,
            "a worker cannot take its new experts"
        );
        board.tell_refused(*worker, &detail);
        self.settle();
        Some(())
    }

    /// An error of the worker that is not about work.
    fn complained(&mut self, error: &WorkerError) -> Result<(), Ending> {
        let about_load = matches!(error.code(), ErrorCode::Load | ErrorCode::Malformed);
        if about_load && !error.fatal && self.load_failed(shown(&error.detail)).is_some() {
            return Ok(());
        }
        if about_load {
            self.link.board.tell_refused(self.link.worker, &shown(&error.detail));
        }
        Err(accused(error))
    }

    fn pass_on(
        &self,
        outcome: Result<shimmer_proto::expert::v1::ExpertResult, WorkerError>,
    ) -> Result<(), Ending> {
        let Link { worker, events, lane, board, .. } = self.link;
        if lane.absolve() {
            board.refresh();
        }
        let news = News::Reply(Box::new(outcome));
        let event = Event { worker: *worker, session: self.number, news };
        events.try_send(event).map_err(|_| Ending::Lost("more replies than work".to_owned()))
    }
}

/// An error of the worker about the session.
fn accused(error: &WorkerError) -> Ending {
    let detail = shown(&error.detail);
    match error.code() {
        ErrorCode::Incompatible | ErrorCode::Load | ErrorCode::NotOwned => Ending::Refused(detail),
        code => Ending::Lost(format!("{}: {detail}", code.as_str_name())),
    }
}

/// Sleeps until then; for ever without a time.
async fn until(due: Option<Instant>) {
    match due {
        Some(due) => tokio::time::sleep_until(due.into()).await,
        None => std::future::pending().await,
    }
}

/// Runs with a deadline.
async fn within<T>(
    limit: Duration,
    what: &str,
    work: impl Future<Output = T>,
) -> Result<T, Ending> {
    let late = |_| Ending::Lost(format!("{what} within {} ms", limit.as_millis()));
    tokio::time::timeout(limit, work).await.map_err(late)
}
