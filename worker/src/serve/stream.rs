//! The protocol of one stream: hello, then assignments, self-tests and work, one message at a time. Assignments are loaded
//! beside that.
//!
//! The response stream drives everything: polling it reads the next request, acts on it and yields the answer. There is no
//! task and no queue in between, and a client that goes away takes the whole session with it.

use std::{
    fmt,
    future::Future,
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::{Duration, Instant},
};

use shimmer_proto::{
    expert::v1::{
        Assign, AssignProgress, CoordinatorHello, Draining, ErrorCode, ExpertResult, ExpertWork,
        Ready, SelfTest, SessionRequest, SessionResponse, WorkerError,
        session_request::Body as Asked, session_response::Body as Answer,
    },
    identity::shown,
};
use tokio::sync::{oneshot, watch};
use tokio_stream::Stream;
use tonic::{Code, Status, Streaming};

use super::{
    apart::Apart,
    beside::Beside,
    drain::{Drain, Seat, Seats},
    loads::{Loads, News},
    room::WorkRoom,
};
use crate::{
    check::refusal,
    counters::Counters,
    expert_core::ExpertCore,
    session::{ExpertSession, Loaded},
};

/// Work below this estimate is computed on the thread of the connection: waking a pool costs more than it brings.
const INLINE_US: u64 = 200;

/// What a stream needs of its connection.
#[derive(Clone)]
pub(super) struct Shell {
    pub(super) core: Arc<ExpertCore>,
    pub(super) room: Arc<WorkRoom>,
    pub(super) peer: SocketAddr,
    pub(super) drain: Arc<Drain>,
    pub(super) seats: Arc<Seats>,
    pub(super) beside: Beside,
    pub(super) hello_timeout: Duration,
}

type Step = Pin<
    Box<dyn Future<Output = (Box<Conversation>, Option<Result<SessionResponse, Status>>)> + Send>,
>;

/// The answers of one stream.
pub(super) struct SessionStream {
    /// None after the last answer.
    step: Option<Step>,
}

impl SessionStream {
    pub(super) fn new(shell: Shell, requests: Streaming<SessionRequest>) -> Self {
        let conversation = Conversation {
            requests,
            session: Some(Box::new(shell.core.session())),
            seat: None,
            solo: None,
            apart: None,
            loads: Loads::default(),
            hints: shell.core.watch_hints(),
            told_hints: false,
            told_draining: false,
            phase: Phase::Hello,
            shell,
        };
        Self { step: Some(Box::pin(Box::new(conversation).step())) }
    }
}

impl fmt::Debug for SessionStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SessionStream").finish_non_exhaustive()
    }
}

impl Stream for SessionStream {
    type Item = Result<SessionResponse, Status>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let Some(step) = &mut self.step else { return Poll::Ready(None) };
        let (conversation, answer) = std::task::ready!(step.as_mut().poll(cx));
        self.step = answer.is_some().then(|| -> Step { Box::pin(conversation.step()) });
        Poll::Ready(answer)
    }
}

enum Phase {
    /// Nothing has been read.
    Hello,
    /// Our hello went out; theirs does not fit.
    Refused(Box<WorkerError>),
    /// Waiting for the next message.
    Open,
    /// After a fatal answer.
    Closed,
}

struct Conversation {
    shell: Shell,
    requests: Streaming<SessionRequest>,
    /// Away while a pool or the thread beside this one has it.
    session: Option<Box<ExpertSession>>,
    /// Since the hello was accepted.
    seat: Option<Seat>,
    /// Makes the thread of the connection a pool of one, so that the kernels compute small work where it is.
    solo: Option<rayon::ThreadPool>,
    /// Started when something has to be waited for.
    apart: Option<Apart>,
    loads: Loads,
    /// Whether hints are worth sending, and what was told of it last.
    hints: watch::Receiver<bool>,
    told_hints: bool,
    told_draining: bool,
    phase: Phase,
}

/// What happens next in an open stream.
enum Event {
    Asked(Result<Option<SessionRequest>, Status>),
    Load(News),
    Hints,
    Draining,
    Over,
}

impl Conversation {
    async fn step(mut self: Box<Self>) -> (Box<Self>, Option<Result<SessionResponse, Status>>) {
        let answer = match std::mem::replace(&mut self.phase, Phase::Open) {
            Phase::Hello => self.hello().await,
            Phase::Refused(error) => self.close(*error),
            Phase::Open => self.next().await,
            Phase::Closed => None,
        };
        (self, answer)
    }

    async fn hello(&mut self) -> Option<Result<SessionResponse, Status>> {
        let first = tokio::select! {
            biased;
            first = tokio::time::timeout(self.shell.hello_timeout, self.requests.message()) => first,
            () = self.shell.drain.over() => return self.leaving(),
        };
        let counters = Arc::clone(self.shell.core.counters());
        let message = match first {
            Err(_) => {
                Counters::bump(&counters.hellos_refused);
                let detail = format!("no hello within {} ms", self.shell.hello_timeout.as_millis());
                return self.close(refusal(ErrorCode::Protocol, None, detail));
            }
            Ok(Err(status)) => return self.broken(&status),
            Ok(Ok(None)) => return None,
            Ok(Ok(Some(message))) => message,
        };
        let Some(Asked::Hello(hello)) = message.body else {
            Counters::bump(&counters.hellos_refused);
            Counters::bump(&counters.messages_out_of_order);
            return self.close(refusal(
                ErrorCode::Protocol,
                None,
                "the first message must be a hello",
            ));
        };
        let greeted = self.session_mut().greet(&hello).and_then(|()| self.sit_down());
        let peer = self.shell.peer;
        let coordinator = shown(&hello.coordinator_id);
        match greeted {
            Ok(()) => {
                Counters::bump(&counters.sessions);
                tracing::info!(%peer, coordinator, "coordinator connected");
            }
            Err(error) => {
                tracing::warn!(%peer, coordinator, detail = error.detail, "coordinator refused");
                self.phase = Phase::Refused(Box::new(error));
            }
        }
        // The coordinator gets our hello in any case, so that it can name the difference itself.
        let hello = self.shell.core.hello();
        self.told_draining = hello.draining;
        answer(Answer::Hello(hello))
    }

    /// Takes a seat, which the memory of this worker was planned for.
    fn sit_down(&mut self) -> Result<(), WorkerError> {
        self.seat = self.shell.seats.take();
        if self.seat.is_some() {
            return Ok(());
        }
        Counters::bump(&self.shell.core.counters().hellos_refused);
        let (worker, most) = (self.shell.core.id(), self.shell.seats.most());
        let detail = format!(
            "worker {worker} serves {most} coordinators already, as its --max-coordinators says"
        );
        Err(refusal(ErrorCode::Incompatible, None, detail))
    }

    async fn next(&mut self) -> Option<Result<SessionResponse, Status>> {
        loop {
            let handled = match self.event().await {
                Event::Asked(Ok(Some(SessionRequest { body }))) => self.asked(body).await,
                Event::Asked(Ok(None)) => return None,
                Event::Asked(Err(status)) => return self.broken(&status),
                Event::Load(news) => self.load_news(news),
                Event::Hints => self.hints_changed(),
                Event::Draining => self.draining(),
                Event::Over => return self.leaving(),
            };
            if handled.is_some() {
                return handled;
            }
        }
    }

    /// Requests come last, so that a coordinator that always asks hears the rest as well.
    async fn event(&mut self) -> Event {
        let drain = &self.shell.drain;
        let draining = async {
            if self.told_draining {
                std::future::pending::<()>().await;
            }
            drain.begun().await;
        };
        tokio::select! {
            biased;
            () = drain.over() => Event::Over,
            () = draining => Event::Draining,
            news = self.loads.news() => Event::Load(news),
            Ok(()) = self.hints.changed() => Event::Hints,
            message = self.requests.message() => Event::Asked(message),
        }
    }

    /// Acts on a request. None if it has no answer.
    async fn asked(&mut self, body: Option<Asked>) -> Option<Result<SessionResponse, Status>> {
        match body {
            Some(Asked::Work(work)) => self.work(work).await,
            Some(Asked::Hint(hint)) => {
                self.session_mut().hint(&hint);
                None
            }
            Some(Asked::Adopt(adopt)) => {
                self.session_mut().adopt(&adopt);
                None
            }
            Some(Asked::Release(release)) => {
                self.session_mut().release(&release);
                self.give_up_loads()
            }
            Some(Asked::Assign(assign)) => self.assign(&assign),
            Some(Asked::SelfTest(test)) => self.self_test(test).await,
            Some(Asked::Hello(CoordinatorHello { .. })) => self.out_of_order("a second hello"),
            None => self.out_of_order("a message without a body this build knows"),
        }
    }

    async fn work(&mut self, work: ExpertWork) -> Option<Result<SessionResponse, Status>> {
        let received = Instant::now();
        let room = Arc::clone(&self.shell.room);
        let _room = room.wait(&self.shell.core, &work).await;
        if !self.session_mut().is_ready(&work) {
            return self.work_apart(work, received).await;
        }
        if self.session_mut().estimate_us(&work) <= INLINE_US {
            self.become_a_pool();
            return match self.session_mut().try_work(&work, received) {
                Some(result) => self.worked(result),
                None => self.work_apart(work, received).await,
            };
        }
        let mut session = self.session.take().expect("no pool has it");
        let (done, result) = oneshot::channel();
        self.shell.beside.compute(self.shell.core.pool(), move || {
            let result = session.try_work(&work, received);
            // The stream may be gone; then nobody wants the result.
            drop(done.send((session, work, result)));
        });
        let Ok((session, work, result)) = result.await else { return self.aborted() };
        self.session = Some(session);
        match result {
            Some(result) => self.worked(result),
            None => self.work_apart(work, received).await,
        }
    }

    /// Work that waits for a drive: neither the connection's thread nor one of the pool may do that.
    async fn work_apart(
        &mut self,
        work: ExpertWork,
        received: Instant,
    ) -> Option<Result<SessionResponse, Status>> {
        match self.apart(move |session| session.work_received(&work, received)).await {
            Some(result) => self.worked(result),
            None => self.aborted(),
        }
    }

    /// Runs on the thread beside this one. None if that is not to be had, or the session died with it.
    async fn apart<R: Send + 'static>(
        &mut self,
        run: impl FnOnce(&mut ExpertSession) -> R + Send + 'static,
    ) -> Option<R> {
        if self.apart.is_none() {
            let started = Apart::start(self.shell.beside);
            let logged = started.inspect_err(|error| {
                tracing::warn!(%error, "starting a thread for work that waits for a drive");
            });
            self.apart = logged.ok();
        }
        let apart = self.apart.as_ref()?;
        let mut session = self.session.take().expect("no pool has it");
        let ran = apart.run(move || {
            let result = run(&mut session);
            (session, result)
        });
        let (session, result) = ran.await.ok()?;
        self.session = Some(session);
        Some(result)
    }

    fn worked(
        &self,
        result: Result<ExpertResult, WorkerError>,
    ) -> Option<Result<SessionResponse, Status>> {
        match result {
            Ok(result) => answer(Answer::Result(result)),
            Err(error) => {
                tracing::warn!(peer = %self.shell.peer, code = error.code().as_str_name(), detail = error.detail, "work refused");
                answer(Answer::Error(error))
            }
        }
    }

    fn aborted(&mut self) -> Option<Result<SessionResponse, Status>> {
        self.close(refusal(ErrorCode::Internal, None, "the computation was aborted"))
    }

    fn assign(&mut self, assign: &Assign) -> Option<Result<SessionResponse, Status>> {
        let loading = match self.session_mut().begin_assign(assign) {
            Ok(loading) => loading,
            Err(error) => return self.not_assigned(error),
        };
        let total_experts = loading.experts();
        self.loads.add(loading);
        let begun = AssignProgress { loaded_experts: 0, total_experts, loaded_bytes: 0 };
        self.give_up_loads().or_else(|| answer(Answer::Progress(begun)))
    }

    /// Ends loads that nobody wants any more, and begins the next one. An answer only if that cannot be done.
    fn give_up_loads(&mut self) -> Option<Result<SessionResponse, Status>> {
        let session = self.session.as_ref().expect("no pool has it");
        self.loads.keep(|number| session.holds(number));
        let Err(error) = self.loads.start(self.shell.beside) else { return None };
        let detail = format!("starting a thread to load experts: {error}");
        self.close(refusal(ErrorCode::Load, None, detail))
    }

    fn load_news(&mut self, news: News) -> Option<Result<SessionResponse, Status>> {
        let told = match news {
            News::Progress(progress) => return answer(Answer::Progress(progress)),
            News::Ended(loaded) => self.loaded(loaded),
            News::Aborted(number) if self.session_mut().aborted(number) => {
                return self.close(refusal(ErrorCode::Load, None, "loading experts was aborted"));
            }
            News::Aborted(_) => None,
        };
        self.give_up_loads().or(told)
    }

    /// None if nobody waits for it any more.
    fn loaded(&mut self, loaded: Loaded) -> Option<Result<SessionResponse, Status>> {
        let peer = self.shell.peer;
        match self.session_mut().loaded(loaded)? {
            Ok(ready) => {
                let Ready { generation, experts, bytes, .. } = ready;
                tracing::info!(%peer, generation, experts, bytes, "experts are assigned");
                self.ready(ready)
            }
            Err(error) => self.not_assigned(error),
        }
    }

    fn ready(&mut self, ready: Ready) -> Option<Result<SessionResponse, Status>> {
        self.told_hints = ready.wants_hints;
        answer(Answer::Ready(ready))
    }

    fn not_assigned(&self, error: WorkerError) -> Option<Result<SessionResponse, Status>> {
        tracing::warn!(peer = %self.shell.peer, detail = error.detail, "assignment refused");
        answer(Answer::Error(error))
    }

    /// Others have claimed experts or left some: whether hints are worth sending is told by another Ready.
    fn hints_changed(&mut self) -> Option<Result<SessionResponse, Status>> {
        let ready = self.session_mut().in_force()?;
        if ready.wants_hints == self.told_hints {
            return None;
        }
        self.ready(ready)
    }

    fn draining(&mut self) -> Option<Result<SessionResponse, Status>> {
        self.told_draining = true;
        let left_ms = u64::try_from(self.shell.drain.left().as_millis()).unwrap_or(u64::MAX);
        let reason = format!("worker {} was asked to stop", self.shell.core.id());
        answer(Answer::Draining(Draining { reason, left_ms }))
    }

    /// The expert may have to be read first.
    async fn self_test(&mut self, test: SelfTest) -> Option<Result<SessionResponse, Status>> {
        let SelfTest { layer, expert } = test;
        let result = if self.shell.core.store().is_ready(layer, &[expert]) {
            self.become_a_pool();
            Some(self.session_mut().self_test(layer, expert))
        } else {
            self.apart(move |session| session.self_test(layer, expert)).await
        };
        match result {
            Some(Ok(result)) => answer(Answer::SelfTest(result)),
            Some(Err(error)) => answer(Answer::Error(error)),
            None => self.aborted(),
        }
    }

    fn out_of_order(&mut self, what: &str) -> Option<Result<SessionResponse, Status>> {
        Counters::bump(&self.shell.core.counters().messages_out_of_order);
        self.close(refusal(ErrorCode::Protocol, None, format!("{what} is out of order")))
    }

    /// A frame that cannot be read, or the end of the connection.
    fn broken(&mut self, status: &Status) -> Option<Result<SessionResponse, Status>> {
        let peer = self.shell.peer;
        let counters = self.shell.core.counters();
        let (code, counter) = match status.code() {
            Code::OutOfRange | Code::ResourceExhausted => {
                (ErrorCode::Oversized, &counters.frames_oversized)
            }
            Code::Internal | Code::InvalidArgument | Code::Unimplemented => {
                (ErrorCode::Malformed, &counters.frames_malformed)
            }
            _ => {
                tracing::info!(%peer, status = status.message(), "coordinator is gone");
                return None;
            }
        };
        Counters::bump(counter);
        tracing::warn!(%peer, status = status.message(), "unreadable frame; the stream ends");
        self.close(refusal(code, None, status.message()))
    }

    fn leaving(&mut self) -> Option<Result<SessionResponse, Status>> {
        self.phase = Phase::Closed;
        Some(Err(Status::unavailable(format!("worker {} is shutting down", self.shell.core.id()))))
    }

    /// The last answer of the stream.
    fn close(&mut self, error: WorkerError) -> Option<Result<SessionResponse, Status>> {
        self.phase = Phase::Closed;
        answer(Answer::Error(WorkerError { fatal: true, ..error }))
    }

    fn session_mut(&mut self) -> &mut ExpertSession {
        self.session.as_mut().expect("no pool has it")
    }

    /// If the thread cannot become a pool, work goes to the worker's pool: slower, same bytes.
    fn become_a_pool(&mut self) {
        if self.solo.is_none() && rayon::current_thread_index().is_none() {
            self.solo =
                rayon::ThreadPoolBuilder::new().num_threads(1).use_current_thread().build().ok();
        }
    }
}

#[expect(clippy::unnecessary_wraps, reason = "the shape that every step returns")]
fn answer(body: Answer) -> Option<Result<SessionResponse, Status>> {
    Some(Ok(SessionResponse { body: Some(body) }))
}
