//! A worker that lies, stalls or repeats itself: a real session behind a service that spoils what it says.

use std::{
    sync::{Arc, Mutex},
    thread::JoinHandle,
};

use shimmer_proto::{
    checksum,
    expert::v1::{
        AssignProgress, ErrorCode, Identity, SessionRequest, SessionResponse, WorkerError,
        expert_result::Payload,
        expert_service_server::{ExpertService, ExpertServiceServer},
        session_request::Body as Asked,
        session_response::Body as Said,
    },
    limits::MAX_MESSAGE_BYTES,
};
use shimmer_worker::{ExpertSession, store::NoProgress};
use tokio::{net::TcpListener, sync::mpsc};
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::{Request, Response, Status, Streaming, transport::Server};

use super::bench;

/// What is wrong with the worker.
#[derive(Debug, Clone, Copy)]
pub(super) enum Fault {
    /// Its identity.
    Identity(fn(&mut Identity)),
    /// Its first message.
    NoHello,
    /// Its self-test digests.
    SelfTest,
    /// One bit of every result.
    FlippedBit,
    /// Results come twice, with one of an earlier step and one of nowhere before them.
    Repeats,
    /// No answer to work.
    Stalls,
    /// No answer to work before it is mended.
    Withholds,
    /// Results are larger than anybody accepts.
    Oversized,
    /// Ends the stream at the first work.
    HangsUp,
    /// Answers an assignment with progress for ever.
    NeverReady,
    /// None: it asks for hints.
    WantsHints,
}

/// A running meddler.
pub(super) struct Meddler {
    port: u16,
    stop: CancellationToken,
    thread: Option<JoinHandle<()>>,
    fault: Arc<Mutex<Option<Fault>>>,
    pub(super) core: Arc<shimmer_worker::ExpertCore>,
}

impl Meddler {
    pub(super) fn start(id: &str, fault: Fault) -> Self {
        let listener = shimmer_worker::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let stop = CancellationToken::new();
        let fault = Arc::new(Mutex::new(Some(fault)));
        let core = bench::core(bench::container(), id, 1.0);
        let service = Service {
            core: Arc::clone(&core),
            fault: Arc::clone(&fault),
            tasks: TaskTracker::new(),
        };
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let incoming = TcpListenerStream::new(TcpListener::from_std(listener).unwrap());
                let service = ExpertServiceServer::new(service)
                    .max_decoding_message_size(MAX_MESSAGE_BYTES)
                    .max_encoding_message_size(1 << 30);
                let serving = Server::builder().add_service(service).serve_with_incoming(incoming);
                tokio::select! {
                    served = serving => served.unwrap(),
                    () = stopped.cancelled() => {}
                }
            });
        });
        Self { port, stop, thread: Some(thread), fault, core }
    }

    /// Makes the worker honest from now on.
    pub(super) fn mend(&self) {
        *self.fault.lock().unwrap() = None;
    }

    pub(super) fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }
}

impl Drop for Meddler {
    fn drop(&mut self) {
        self.stop.cancel();
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

struct Service {
    core: Arc<shimmer_worker::ExpertCore>,
    fault: Arc<Mutex<Option<Fault>>>,
    tasks: TaskTracker,
}

#[tonic::async_trait]
impl ExpertService for Service {
    type SessionStream = ReceiverStream<Result<SessionResponse, Status>>;

    async fn session(
        &self,
        request: Request<Streaming<SessionRequest>>,
    ) -> Result<Response<Self::SessionStream>, Status> {
        let (answers, stream) = mpsc::channel(64);
        let (session, fault) = (self.core.session(), Arc::clone(&self.fault));
        self.tasks.spawn(async move {
            // Ends when the coordinator goes, which is what most of these tests are about.
            let _over = converse(request.into_inner(), answers, session, fault).await;
        });
        Ok(Response::new(ReceiverStream::new(stream)))
    }
}

/// None when the stream is over.
async fn converse(
    mut requests: Streaming<SessionRequest>,
    answers: mpsc::Sender<Result<SessionResponse, Status>>,
    mut session: ExpertSession,
    fault: Arc<Mutex<Option<Fault>>>,
) -> Option<()> {
    let shared = fault;
    loop {
        let asked = requests.message().await.ok()??.body?;
        let fault = *shared.lock().unwrap();
        let mut said = Vec::new();
        match asked {
            Asked::Hello(_) => {
                let mut hello = session.core().hello();
                if let Some(Fault::Identity(change)) = fault {
                    change(hello.identity.as_mut().unwrap());
                }
                if matches!(fault, Some(Fault::NoHello)) {
                    said.push(Said::Progress(AssignProgress::default()));
                } else {
                    said.push(Said::Hello(hello));
                }
            }
            Asked::Assign(_) if matches!(fault, Some(Fault::NeverReady)) => {}
            Asked::Assign(assign) => {
                let mut ready = session.assign(&assign, &NoProgress).unwrap();
                ready.wants_hints = matches!(fault, Some(Fault::WantsHints));
                said.push(Said::Ready(ready));
            }
            Asked::Adopt(_) | Asked::Release(_) => {}
            Asked::Hint(hint) => session.hint(&hint),
            Asked::SelfTest(test) => {
                let mut result = session.self_test(test.layer, test.expert).unwrap();
                if matches!(fault, Some(Fault::SelfTest)) {
                    result.digest = vec![7; 16].into();
                }
                said.push(Said::SelfTest(result));
            }
            Asked::Work(work) => {
                while matches!(*shared.lock().unwrap(), Some(Fault::Withholds)) {
                    tokio::time::sleep(std::time::Duration::from_millis(5)).await;
                }
                match session.work(&work) {
                    Ok(result) => answer_work(result, fault, &mut said)?,
                    Err(error) => said.push(Said::Error(error)),
                }
            }
        }
        for body in said {
            answers.send(Ok(SessionResponse { body: Some(body) })).await.ok()?;
        }
    }
}

fn answer_work(
    mut result: shimmer_proto::expert::v1::ExpertResult,
    fault: Option<Fault>,
    said: &mut Vec<Said>,
) -> Option<()> {
    match fault {
        Some(Fault::Stalls) => return Some(()),
        Some(Fault::HangsUp) => return None,
        Some(Fault::FlippedBit) => {
            let payload = match result.payload.as_mut()? {
                Payload::Accumulators(bytes) | Payload::Outputs(bytes) => bytes,
            };
            let mut bytes = payload.to_vec();
            bytes[3] ^= 4;
            *payload = bytes.into();
        }
        Some(Fault::Oversized) => {
            result.payload = Some(Payload::Outputs(vec![0; MAX_MESSAGE_BYTES + 1].into()));
            checksum::seal_result(&mut result);
        }
        Some(Fault::Repeats) => {
            let mut old = result.clone();
            old.fence.as_mut()?.epoch -= 1;
            checksum::seal_result(&mut old);
            let mut foreign = result.clone();
            foreign.fence.as_mut()?.part += 9;
            checksum::seal_result(&mut foreign);
            let error = WorkerError {
                code: ErrorCode::StaleFence.into(),
                detail: "late".to_owned(),
                fence: old.fence,
                ..WorkerError::default()
            };
            said.extend([
                Said::Result(old),
                Said::Result(foreign),
                Said::Error(error),
                Said::Result(result.clone()),
            ]);
        }
        _ => {}
    }
    said.push(Said::Result(result));
    Some(())
}
