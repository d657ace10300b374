//! One connection to a worker, from the handshake to its end.

use std::{
    collections::VecDeque,
    future::Future,
    sync::{Arc, Mutex, PoisonError, atomic::Ordering},
    time::Duration,
};

use shimmer_proto::{
    channel, checksum,
    expert::v1::{
        Assign, CoordinatorHello, ErrorCode, LayerExperts, Ready, SelfTest, SelfTestResult,
        SessionRequest, SessionResponse, WorkerError, WorkerHello,
        expert_service_client::ExpertServiceClient, session_request::Body as Ask,
        session_response::Body as Said,
    },
    identity::{self, shown},
    limits::{self, MAX_MESSAGE_BYTES},
};
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status, Streaming};

use super::{
    board::Plan,
    link::{Event, Link, News, Outlet, QUEUE},
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
    number: u64,
    requests: mpsc::Sender<SessionRequest>,
    queue: Option<mpsc::Receiver<SessionRequest>>,
    served: bool,
    give_up: CancellationToken,
    reason: Arc<Mutex<String>>,
}

type Inbound = Streaming<SessionResponse>;

impl<'a> Session<'a> {
    pub(super) fn new(link: &'a Link, number: u64) -> Self {
        let (requests, queue) = mpsc::channel(QUEUE);
        let (give_up, reason) = link.lane.arm();
        Self { link, number, requests, queue: Some(queue), served: false, give_up, reason }
    }

    /// Whether the worker ever took work in this session.
    pub(super) fn served(&self) -> bool {
        self.served
    }

    pub(super) async fn run(&mut self) -> Ending {
        let given_up = self.give_up.clone();
        tokio::select! {
            ending = self.live() => ending.unwrap_or_else(|ending| ending),
            () = given_up.cancelled() => {
                Ending::Lost(self.reason.lock().unwrap_or_else(PoisonError::into_inner).clone())
            }
        }
    }

    /// Never returns `Ok` but for the uniform type: a session lives until something ends it.
    async fn live(&mut self) -> Result<Ending, Ending> {
        let mut inbound = self.connect().await?;
        let hello = self.greet(&mut inbound).await?;
        let mut plans = self.link.plan();
        loop {
            let plan = self.planned(&mut inbound, &mut plans).await?;
            let owned = plan.placement.owned_by(self.link.worker);
            let ready = self.load(&mut inbound, &plan, &owned).await?;
            self.test(&mut inbound, &owned).await?;
            self.serve(&mut inbound, &mut plans, &hello, &ready).await?;
        }
    }

    async fn connect(&mut self) -> Result<Inbound, Ending> {
        let Link { config, address, lane, .. } = self.link;
        let unreachable =
            |why: String| Ending::Unreachable(format!("connecting to {address}: {why}"));
        let endpoint =
            channel::endpoint(address).map_err(|error| Ending::Refused(error.to_string()))?;
        let endpoint = endpoint.connect_timeout(config.connect_timeout);
        // Around the whole attempt: the endpoint's own limit does not cover name resolution.
        let channel = tokio::time::timeout(config.connect_timeout, endpoint.connect())
            .await
            .map_err(|_| {
                unreachable(format!("no answer within {} ms", config.connect_timeout.as_millis()))
            })?
            .map_err(|error| unreachable(causes(&error)))?;
        lane.counters.connects.fetch_add(1, Ordering::Relaxed);
        let mut client = ExpertServiceClient::new(channel)
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES);
        let hello = CoordinatorHello {
            identity: Some(self.link.model.identity.clone()),
            limits: Some(limits::announced()),
            coordinator_id: config.coordinator_id.clone(),
        };
        self.ask(Ask::Hello(hello)).await?;
        let queue = self.queue.take().expect("a session connects once");
        let started = client.session(ReceiverStream::new(queue));
        let response =
            within(config.hello_timeout, "the expert stream did not open", started).await?;
        response.map(tonic::Response::into_inner).map_err(|status| match status.code() {
            Code::Unimplemented => Ending::Refused(format!(
                "{address} is no worker of this kind: it has no expert service"
            )),
            _ => Ending::Lost(format!("opening the expert stream: {}", shown(status.message()))),
        })
    }

    async fn ask(&self, body: Ask) -> Result<(), Ending> {
        let sent = self.requests.send(SessionRequest { body: Some(body) }).await;
        sent.map_err(|_| Ending::Lost("the connection was closed".to_owned()))
    }

    /// The next message that is not an error.
    async fn hear(&self, inbound: &mut Inbound) -> Result<Said, Ending> {
        match inbound.message().await {
            Ok(Some(SessionResponse { body: Some(Said::Error(error)) })) => {
                Err(self.accused(&error))
            }
            Ok(Some(SessionResponse { body: Some(body) })) => Ok(body),
            Ok(Some(SessionResponse { body: None })) => Err(Ending::Refused(
                "the worker sent a message that this build does not know".to_owned(),
            )),
            Ok(None) => Err(Ending::Lost("the worker ended the stream".to_owned())),
            Err(status) => Err(self.broken(&status)),
        }
    }

    /// An error of the worker about the session.
    fn accused(&self, error: &WorkerError) -> Ending {
        let detail = shown(&error.detail);
        match error.code() {
            ErrorCode::Incompatible | ErrorCode::Load | ErrorCode::NotOwned => {
                Ending::Refused(detail)
            }
            code => Ending::Lost(format!("{}: {detail}", code.as_str_name())),
        }
    }

    fn broken(&self, status: &Status) -> Ending {
        if matches!(status.code(), Code::OutOfRange | Code::ResourceExhausted | Code::Internal) {
            self.link.lane.counters.unreadable_frames.fetch_add(1, Ordering::Relaxed);
        }
        let message = if status.message().is_empty() {
            status.code().description()
        } else {
            status.message()
        };
        Ending::Lost(format!("the connection broke: {}", shown(message)))
    }

    async fn greet(&self, inbound: &mut Inbound) -> Result<WorkerHello, Ending> {
        let Link { worker, config, model, board, .. } = self.link;
        let said = within(config.hello_timeout, "no hello", self.hear(inbound)).await??;
        let Said::Hello(hello) = said else {
            return Err(Ending::Refused("the worker's first message is not a hello".to_owned()));
        };
        let side = format!("coordinator {}", config.coordinator_id);
        let peer = format!("worker {}", shown(&hello.worker_id));
        let theirs = hello.identity.clone().unwrap_or_default();
        identity::compare(&side, &model.identity, &peer, &theirs)
            .map_err(|error| Ending::Refused(error.message))?;
        board.greet(*worker, &hello).map_err(Ending::Refused)?;
        board.tell(*worker, LinkState::Loading, "waiting for the other workers' hellos");
        Ok(hello)
    }

    /// Waits for a placement, listening meanwhile.
    async fn planned(
        &self,
        inbound: &mut Inbound,
        plans: &mut watch::Receiver<Option<Plan>>,
    ) -> Result<Plan, Ending> {
        loop {
            if let Some(plan) = plans.borrow_and_update().clone() {
                return Ok(plan);
            }
            tokio::select! {
                changed = plans.changed() => changed.map_err(|_| Ending::Lost("shutting down".to_owned()))?,
                said = self.hear(inbound) => return Err(unexpected(&said?)),
            }
        }
    }

    async fn load(
        &self,
        inbound: &mut Inbound,
        plan: &Plan,
        owned: &[(u32, Vec<u32>)],
    ) -> Result<Ready, Ending> {
        let Link { worker, config, model, board, epoch, .. } = self.link;
        let slab = |layer| model.layer(layer).map_or(0, |l| l.slab_bytes);
        let bytes =
            owned.iter().map(|(layer, experts)| slab(*layer) * experts.len() as u64).sum::<u64>();
        let experts = owned.iter().map(|(_, experts)| experts.len() as u64).sum::<u64>();
        board.tell(
            *worker,
            LinkState::Loading,
            format!("loading {experts} experts, {bytes} bytes"),
        );
        let layers = owned
            .iter()
            .map(|(layer, experts)| LayerExperts { layer: *layer, experts: experts.clone() });
        self.ask(Ask::Assign(Assign {
            epoch: *epoch,
            generation: plan.generation,
            layers: layers.collect(),
        }))
        .await?;
        loop {
            match within(config.load_stall_timeout, "no progress in loading", self.hear(inbound))
                .await??
            {
                Said::Progress(progress) => {
                    let (done, all) = (progress.loaded_experts, progress.total_experts);
                    board.tell(
                        *worker,
                        LinkState::Loading,
                        format!("loaded {done} of {all} experts"),
                    );
                    board.tell_resident(*worker, done, progress.loaded_bytes);
                }
                Said::Ready(ready)
                    if (ready.epoch, ready.generation) == (*epoch, plan.generation) =>
                {
                    if (ready.experts, ready.bytes) != (experts, bytes) {
                        let Ready { experts: held, bytes: size, .. } = ready;
                        return Err(Ending::Refused(format!(
                            "it says it holds {held} experts in {size} bytes, {experts} in {bytes} were assigned"
                        )));
                    }
                    board.tell_resident(*worker, ready.experts, ready.bytes);
                    return Ok(ready);
                }
                Said::Ready(_) => {}
                // Answers to work that was out when the placement changed.
                Said::Result(_) => {}
                other => return Err(unexpected(&other)),
            }
        }
    }

    /// One owned expert of every layer computes the fixed row; another one in each layer, so that they spread.
    async fn test(&self, inbound: &mut Inbound, owned: &[(u32, Vec<u32>)]) -> Result<(), Ending> {
        let Link { worker, config, model, board, .. } = self.link;
        board.tell(*worker, LinkState::Loading, "self-test");
        let spread = |(place, (layer, experts)): (usize, &(u32, Vec<u32>))| {
            (*layer, experts[place % experts.len()])
        };
        let mut asked: VecDeque<(u32, u32)> = owned.iter().enumerate().map(spread).collect();
        for batch in asked.make_contiguous().chunks(QUEUE / 2) {
            for &(layer, expert) in batch {
                self.ask(Ask::SelfTest(SelfTest { layer, expert })).await?;
            }
            for &(layer, expert) in batch {
                let said =
                    within(config.hello_timeout, "no answer to a self-test", self.hear(inbound))
                        .await??;
                let Said::SelfTest(SelfTestResult { layer: of, expert: which, digest }) = said
                else {
                    return Err(unexpected(&said));
                };
                let expected = model.layer(layer).and_then(|l| l.self_tests.get(expert as usize));
                if (of, which) != (layer, expert) || expected.map(|d| &d[..]) != Some(&digest[..]) {
                    let expected = expected.map(hex::encode).unwrap_or_default();
                    let found = hex::encode(&digest[..digest.len().min(16)]);
                    return Err(Ending::Refused(format!(
                        "self-test: it computes expert {expert} of layer {layer} differently: {found}, the container says {expected}"
                    )));
                }
            }
        }
        Ok(())
    }

    /// Carries replies until the placement changes.
    async fn serve(
        &mut self,
        inbound: &mut Inbound,
        plans: &mut watch::Receiver<Option<Plan>>,
        hello: &WorkerHello,
        ready: &Ready,
    ) -> Result<(), Ending> {
        let Link { worker, board, lane, .. } = self.link;
        let max_rows = hello.limits.as_ref().map_or(limits::MAX_PART_ROWS, |l| l.max_rows);
        lane.open(Outlet {
            session: self.number,
            requests: self.requests.clone(),
            max_rows,
            wants_hints: ready.wants_hints,
        });
        self.served = true;
        board.tell(*worker, LinkState::Serving, "");
        tracing::info!(
            name = board.name(*worker),
            experts = ready.experts,
            bytes = ready.bytes,
            "worker serves"
        );
        loop {
            tokio::select! {
                biased;
                message = inbound.message() => match message {
                    Ok(Some(SessionResponse { body: Some(said) })) => self.pass_on(said)?,
                    Ok(Some(SessionResponse { body: None })) => {
                        return Err(Ending::Refused("the worker sent a message that this build does not know".to_owned()));
                    }
                    Ok(None) => return Err(Ending::Lost("the worker ended the stream".to_owned())),
                    Err(status) => return Err(self.broken(&status)),
                },
                changed = plans.changed() => {
                    lane.shut();
                    return changed.map_err(|_| Ending::Lost("shutting down".to_owned()));
                }
            }
        }
    }

    fn pass_on(&self, said: Said) -> Result<(), Ending> {
        let outcome = match said {
            Said::Result(result) => {
                if let Err(error) = checksum::verify_result(&result) {
                    self.link.lane.counters.corrupt_frames.fetch_add(1, Ordering::Relaxed);
                    return Err(Ending::Lost(format!("a damaged result: {error}")));
                }
                Ok(result)
            }
            Said::Error(error) if error.fatal || error.fence.is_none() => {
                return Err(self.accused(&error));
            }
            Said::Error(error) => Err(WorkerError { detail: shown(&error.detail), ..error }),
            other => return Err(unexpected(&other)),
        };
        let Link { worker, events, .. } = self.link;
        let event =
            Event { worker: *worker, session: self.number, news: News::Reply(Box::new(outcome)) };
        events.try_send(event).map_err(|_| Ending::Lost("more replies than work".to_owned()))
    }
}

fn unexpected(said: &Said) -> Ending {
    let what = match said {
        Said::Hello(_) => "a second hello",
        Said::Progress(_) => "progress of a load",
        Said::Ready(_) => "ready",
        Said::SelfTest(_) => "a self-test result",
        Said::Result(_) => "a result",
        Said::Error(_) => "an error",
        Said::Draining(_) => "a farewell",
    };
    Ending::Lost(format!("the worker sent {what} out of order"))
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

/// An error with everything that led to it; the transport's own text alone says nothing.
fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}
