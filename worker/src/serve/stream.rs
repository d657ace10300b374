//! The protocol of one stream: hello, assignment, self-tests, work, in that order, one message at a time.
//!
//! The response stream drives everything: polling it reads the next request, acts on it and yields the answer. There is no
//! task and no queue in between, and a client that goes away takes the whole session with it.

use std::{
    fmt,
    future::Future,
    net::SocketAddr,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::{Duration, Instant},
};

use shimmer_proto::{
    expert::v1::{
        Assign, AssignProgress, CoordinatorHello, ErrorCode, ExpertResult, ExpertWork, Ready,
        SelfTest, SessionRequest, SessionResponse, WorkerError, session_request::Body as Asked,
        session_response::Body as Answer,
    },
    identity::shown,
};
use tokio::sync::oneshot;
use tokio_stream::Stream;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::{Code, Status, Streaming};

use super::{apart::Apart, room::WorkRoom};
use crate::{
    check::refusal, counters::Counters, expert_core::ExpertCore, session::ExpertSession,
    store::LoadProgress,
};

/// Work below this estimate is computed on the thread of the connection: waking a pool costs more than it brings.
const INLINE_US: u64 = 200;
/// How often the progress of a load is told.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(200);

/// What a stream needs of its connection.
#[derive(Clone)]
pub(super) struct Shell {
    pub(super) core: Arc<ExpertCore>,
    pub(super) room: Arc<WorkRoom>,
    pub(super) peer: SocketAddr,
    pub(super) shutdown: CancellationToken,
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
        let session = Some(Box::new(shell.core.session()));
        let conversation =
            Conversation { shell, requests, session, solo: None, apart: None, phase: Phase::Hello };
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
    /// A load runs on a thread of its own.
    Loading(Box<Load>),
    /// After a fatal answer.
    Closed,
}

struct Load {
    progress: Arc<Progress>,
    told: u64,
    total: u64,
    done: oneshot::Receiver<(Box<ExpertSession>, Result<Ready, WorkerError>)>,
    _cancel: DropGuard,
}

#[derive(Debug)]
struct Progress {
    experts: AtomicU64,
    bytes: AtomicU64,
    cancel: CancellationToken,
}

impl LoadProgress for Progress {
    fn loaded(&self, bytes: u64) {
        self.experts.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    fn cancelled(&self) -> bool {
        self.cancel.is_cancelled()
    }
}

struct Conversation {
    shell: Shell,
    requests: Streaming<SessionRequest>,
    /// Away while a load or a pool has it.
    session: Option<Box<ExpertSession>>,
    /// Makes the thread of the connection a pool of one, so that the kernels compute small work where it is.
    solo: Option<rayon::ThreadPool>,
    /// Started when something has to be waited for.
    apart: Option<Apart>,
    phase: Phase,
}

impl Conversation {
    async fn step(mut self: Box<Self>) -> (Box<Self>, Option<Result<SessionResponse, Status>>) {
        let answer = match std::mem::replace(&mut self.phase, Phase::Open) {
            Phase::Hello => self.hello().await,
            Phase::Refused(error) => self.close(*error),
            Phase::Open => self.next().await,
            Phase::Loading(load) => self.load_step(load).await,
            Phase::Closed => None,
        };
        (self, answer)
    }

    async fn hello(&mut self) -> Option<Result<SessionResponse, Status>> {
        let first = tokio::select! {
            biased;
            first = tokio::time::timeout(self.shell.hello_timeout, self.requests.message()) => first,
            () = self.shell.shutdown.cancelled() => return self.leaving(),
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
        let greeted = self.session_mut().greet(&hello);
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
        answer(Answer::Hello(self.shell.core.hello()))
    }

    async fn next(&mut self) -> Option<Result<SessionResponse, Status>> {
        loop {
            let message = tokio::select! {
                biased;
                message = self.requests.message() => message,
                () = self.shell.shutdown.cancelled() => return self.leaving(),
            };
            return match message {
                Err(status) => self.broken(&status),
                Ok(None) => None,
                Ok(Some(SessionRequest { body: Some(Asked::Hint(hint)) })) => {
                    // Has no answer.
                    self.session_mut().hint(&hint);
                    continue;
                }
                Ok(Some(SessionRequest { body: Some(Asked::Adopt(_) | Asked::Release(_)) })) => {
                    continue;
                }
                Ok(Some(SessionRequest { body: Some(Asked::Work(work)) })) => self.work(work).await,
                Ok(Some(SessionRequest { body: Some(Asked::Assign(assign)) })) => {
                    self.assign(assign)
                }
                Ok(Some(SessionRequest { body: Some(Asked::SelfTest(test)) })) => {
                    self.self_test(test).await
                }
                Ok(Some(SessionRequest { body: Some(Asked::Hello(CoordinatorHello { .. })) })) => {
                    self.out_of_order("a second hello")
                }
                Ok(Some(SessionRequest { body: None })) => {
                    self.out_of_order("a message without a body this build knows")
                }
            };
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
        let mut session = self.session.take().expect("no load is running");
        let (done, result) = oneshot::channel();
        self.shell.core.pool().spawn(move || {
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
            let started = Apart::start();
            let logged = started.inspect_err(|error| {
                tracing::warn!(%error, "starting a thread for work that waits for a drive");
            });
            self.apart = logged.ok();
        }
        let apart = self.apart.as_ref()?;
        let mut session = self.session.take().expect("no load is running");
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

    fn assign(&mut self, assign: Assign) -> Option<Result<SessionResponse, Status>> {
        let total = assign.layers.iter().map(|layer| layer.experts.len() as u64).sum();
        let mut session = self.session.take().expect("no load is running");
        let cancel = CancellationToken::new();
        let progress = Arc::new(Progress {
            experts: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            cancel: cancel.clone(),
        });
        let (done, ready) = oneshot::channel();
        let seen = Arc::clone(&progress);
        let load = move || {
            let result = session.assign(&assign, &*seen);
            // The stream may be gone; the experts stay for the next one.
            drop(done.send((session, result)));
        };
        if let Err(error) = std::thread::Builder::new().name("load".to_owned()).spawn(load) {
            return self.close(refusal(
                ErrorCode::Load,
                None,
                format!("starting a thread to load experts: {error}"),
            ));
        }
        self.phase = Phase::Loading(Box::new(Load {
            progress,
            told: 0,
            total,
            done: ready,
            _cancel: cancel.drop_guard(),
        }));
        answer(Answer::Progress(AssignProgress {
            loaded_experts: 0,
            total_experts: total,
            loaded_bytes: 0,
        }))
    }

    /// Waits for the end of a load, or for news of it.
    async fn load_step(&mut self, mut load: Box<Load>) -> Option<Result<SessionResponse, Status>> {
        loop {
            tokio::select! {
                biased;
                ended = &mut load.done => return self.loaded(ended),
                () = self.shell.shutdown.cancelled() => return self.leaving(),
                () = tokio::time::sleep(PROGRESS_INTERVAL) => {
                    let experts = load.progress.experts.load(Ordering::Relaxed);
                    if experts != load.told {
                        load.told = experts;
                        let loaded_bytes = load.progress.bytes.load(Ordering::Relaxed);
                        let total_experts = load.total;
                        self.phase = Phase::Loading(load);
                        return answer(Answer::Progress(AssignProgress { loaded_experts: experts, total_experts, loaded_bytes }));
                    }
                }
            }
        }
    }

    fn loaded(
        &mut self,
        ended: Result<(Box<ExpertSession>, Result<Ready, WorkerError>), oneshot::error::RecvError>,
    ) -> Option<Result<SessionResponse, Status>> {
        let peer = self.shell.peer;
        match ended {
            Ok((session, Ok(ready))) => {
                self.session = Some(session);
                tracing::info!(%peer, experts = ready.experts, bytes = ready.bytes, "experts are assigned");
                answer(Answer::Ready(ready))
            }
            Ok((session, Err(error))) => {
                self.session = Some(session);
                tracing::warn!(%peer, detail = error.detail, "assignment refused");
                answer(Answer::Error(error))
            }
            Err(_) => self.close(refusal(ErrorCode::Load, None, "loading experts was aborted")),
        }
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
        self.session.as_mut().expect("no load is running and no pool has it")
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
