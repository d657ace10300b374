//! A hand in the stream: a server between the coordinator and a worker that passes on what both say, doubles some of it,
//! holds some of it back, and repeats what belongs to earlier steps and to sessions long ended.

use std::{
    collections::VecDeque,
    io,
    sync::{Arc, Mutex},
    time::Duration,
};

use shimmer_proto::{
    checksum,
    expert::v1::{
        ExpertResult, ExpertWork, SessionRequest, SessionResponse,
        expert_result::Payload,
        expert_service_client::ExpertServiceClient,
        expert_service_server::{ExpertService, ExpertServiceServer},
        session_request::Body as Asked,
        session_response::Body as Said,
    },
    tls::Dialer,
};
use shimmer_worker::serve::Port as _;
use tokio::{sync::mpsc, task::JoinSet, time::sleep};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming, transport::Server};
use tonic_health::server::health_reporter;

use super::{
    Planted,
    host::{FromHost, PORT, Shared, SimulatedPort, lock},
};
use crate::dice::Dice;

/// Messages of each kind that are remembered.
const REMEMBERED: usize = 64;
/// Messages that wait in one direction.
const QUEUE: usize = 1024;
/// For the worker behind the relay to take the connection.
const CONNECT_LIMIT: Duration = Duration::from_secs(1);

/// What a relay has done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Meddled {
    /// Results that were passed on twice.
    pub(super) doubled: u64,
    /// Results of earlier work that were passed on again.
    pub(super) repeated: u64,
    /// Of these, those of an earlier session.
    pub(super) of_old_sessions: u64,
    /// Results that others overtook.
    pub(super) held: u64,
    /// Works that the worker was sent twice, or again later.
    pub(super) asked_again: u64,
    /// Results that were given the stamp of others.
    pub(super) forged: u64,
}

/// What relays of a worker remember beyond their own processes.
pub(super) struct Meddler {
    dice: Dice,
    planted: Option<Planted>,
    session: u64,
    results: VecDeque<(u64, ExpertResult)>,
    works: VecDeque<ExpertWork>,
    meddles: bool,
    pub(super) done: Meddled,
}

/// A message and how late it is passed on.
type Late<T> = (Duration, T);

impl Meddler {
    pub(super) fn new(dice: Dice, planted: Option<Planted>) -> Self {
        Self {
            dice,
            planted,
            session: 0,
            results: VecDeque::new(),
            works: VecDeque::new(),
            meddles: false,
            done: Meddled::default(),
        }
    }

    pub(super) fn meddle(&mut self, meddles: bool) {
        self.meddles = meddles;
    }

    /// What is said to the worker in place of a work.
    fn asked(&mut self, work: ExpertWork) -> Vec<ExpertWork> {
        let mut out = Vec::new();
        if self.meddles && self.planted.is_none() && self.dice.chance(10) && !self.works.is_empty()
        {
            let old = self.dice.below(self.works.len());
            out.push(self.works[old].clone());
            self.done.asked_again += 1;
        }
        remember(&mut self.works, work.clone());
        out.push(work.clone());
        if self.meddles && self.planted.is_none() && self.dice.chance(10) {
            out.push(work);
            self.done.asked_again += 1;
        }
        out
    }

    /// What is said to the coordinator in place of a result.
    fn answered(&mut self, session: u64, result: ExpertResult) -> Vec<Late<ExpertResult>> {
        let mut out = Vec::new();
        if self.meddles {
            if let Some(forged) = self.forged(session, &result) {
                self.done.forged += 1;
                return vec![(Duration::ZERO, forged)];
            }
            if self.planted.is_none() {
                if self.dice.chance(12) && !self.results.is_empty() {
                    let old = self.dice.below(self.results.len());
                    let (of, old) = self.results[old].clone();
                    self.done.repeated += 1;
                    self.done.of_old_sessions += u64::from(of != session);
                    out.push((Duration::ZERO, old));
                }
                if self.dice.chance(12) {
                    self.done.doubled += 1;
                    out.push((Duration::ZERO, result.clone()));
                }
                if self.dice.chance(8) {
                    self.done.held += 1;
                    out.push((self.dice.ms(1, 80), result.clone()));
                    remember(&mut self.results, (session, result));
                    return out;
                }
            }
        }
        remember(&mut self.results, (session, result.clone()));
        out.push((Duration::ZERO, result));
        out
    }

    /// An earlier result with the stamp of this one: what the coordinator would take if it did not look at stamps.
    fn forged(&mut self, session: u64, result: &ExpertResult) -> Option<ExpertResult> {
        let planted = self.planted?;
        let is_other = |(of, old): &&(u64, ExpertResult)| {
            let is_of = match planted {
                Planted::StaleStepTaken => *of == session,
                Planted::OldSessionTaken => *of != session,
            };
            is_of && shape(old) == shape(result) && old.payload != result.payload
        };
        let (_, old) = self.results.iter().find(is_other)?;
        let mut forged = ExpertResult { fence: result.fence, ..old.clone() };
        checksum::seal_result(&mut forged);
        Some(forged)
    }
}

/// Results of one shape can stand for each other.
fn shape(result: &ExpertResult) -> (u32, bool, usize) {
    match &result.payload {
        Some(Payload::Accumulators(bytes)) => (result.row_count, true, bytes.len()),
        Some(Payload::Outputs(bytes)) => (result.row_count, false, bytes.len()),
        None => (result.row_count, false, 0),
    }
}

fn remember<T>(all: &mut VecDeque<T>, new: T) {
    if all.len() == REMEMBERED {
        all.pop_front();
    }
    all.push_back(new);
}

/// The relay's process.
pub(super) async fn relay(
    shared: Arc<Shared>,
    worker: String,
    meddler: Arc<Mutex<Meddler>>,
) -> turmoil::Result {
    let port = SimulatedPort::bind(&shared).await?;
    let (sockets, incoming) = mpsc::channel(QUEUE);
    let accepting = async {
        loop {
            let (socket, _) = port.accept().await?;
            if sockets.send(Ok::<_, io::Error>(socket)).await.is_err() {
                return Ok::<(), io::Error>(());
            }
        }
    };
    let (health, health_service) = health_reporter();
    health.set_serving::<ExpertServiceServer<Relay>>().await;
    let dialer = Dialer::over(Arc::new(FromHost(shared)));
    let service =
        ExpertServiceServer::new(Relay { dialer, worker, meddler, tasks: Mutex::default() });
    let serving = Server::builder()
        .add_service(health_service)
        .add_service(service)
        .serve_with_incoming(ReceiverStream::new(incoming));
    tokio::select! {
        biased;
        ended = accepting => ended?,
        ended = serving => ended?,
    }
    Ok(())
}

struct Relay {
    dialer: Dialer,
    worker: String,
    meddler: Arc<Mutex<Meddler>>,
    /// What carries the sessions; it ends with the process.
    tasks: Mutex<JoinSet<()>>,
}

#[tonic::async_trait]
impl ExpertService for Relay {
    type SessionStream = ReceiverStream<Result<SessionResponse, Status>>;

    async fn session(
        &self,
        request: Request<Streaming<SessionRequest>>,
    ) -> Result<Response<Self::SessionStream>, Status> {
        let session = {
            let mut meddler = lock(&self.meddler);
            meddler.session += 1;
            meddler.session
        };
        let address = format!("{}:{PORT}", self.worker).parse().expect("a name and a port");
        let channel = self.dialer.connect(&address, CONNECT_LIMIT).await;
        let channel = channel.map_err(|error| Status::unavailable(error.to_string()))?;
        let (ask, asked) = mpsc::channel(QUEUE);
        let (say, said) = mpsc::channel(QUEUE);
        let requests = pass_on_requests(request.into_inner(), ask, Arc::clone(&self.meddler));
        lock(&self.tasks).spawn(requests);
        let answers = ExpertServiceClient::new(channel).session(ReceiverStream::new(asked)).await?;
        let meddler = Arc::clone(&self.meddler);
        lock(&self.tasks).spawn(pass_on_answers(answers.into_inner(), say, meddler, session));
        Ok(Response::new(ReceiverStream::new(said)))
    }
}

async fn pass_on_requests(
    mut from: Streaming<SessionRequest>,
    to: mpsc::Sender<SessionRequest>,
    meddler: Arc<Mutex<Meddler>>,
) {
    while let Ok(Some(request)) = from.message().await {
        let requests: Vec<Option<Asked>> = match request.body {
            Some(Asked::Work(work)) => {
                let works = lock(&meddler).asked(work);
                works.into_iter().map(Asked::Work).map(Some).collect()
            }
            body => vec![body],
        };
        for body in requests {
            if to.send(SessionRequest { body }).await.is_err() {
                return;
            }
        }
    }
}

async fn pass_on_answers(
    mut from: Streaming<SessionResponse>,
    to: mpsc::Sender<Result<SessionResponse, Status>>,
    meddler: Arc<Mutex<Meddler>>,
    session: u64,
) {
    let mut held = JoinSet::new();
    loop {
        let answer = match from.message().await {
            Ok(Some(answer)) => answer,
            Ok(None) => return,
            // Who waits may have gone.
            Err(status) => return drop(to.send(Err(status)).await),
        };
        let answers: Vec<Late<Option<Said>>> = match answer.body {
            Some(Said::Result(result)) => {
                let results = lock(&meddler).answered(session, result);
                results
                    .into_iter()
                    .map(|(late, result)| (late, Some(Said::Result(result))))
                    .collect()
            }
            body => vec![(Duration::ZERO, body)],
        };
        for (late, body) in answers {
            let answer = Ok(SessionResponse { body });
            if late.is_zero() {
                if to.send(answer).await.is_err() {
                    return;
                }
            } else {
                let to = to.clone();
                held.spawn(async move {
                    sleep(late).await;
                    drop(to.send(answer).await);
                });
            }
        }
    }
}
