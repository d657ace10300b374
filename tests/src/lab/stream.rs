//! Generations whose events are timed.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    time::{Duration, Instant},
};

use shimmer_proto::v1::{GenerateRequest, generate_response::Event};
use tokio::task::JoinSet;
use tonic::Status;

use std::sync::Arc;

use crate::{client::Client, workload::Outcome};

/// One generation: what came, and when.
#[derive(Debug)]
pub struct Timed {
    /// What it gave, or the status that ended it.
    pub outcome: Result<Outcome, Status>,
    /// Time from the request to its first event, and from each event to the next.
    pub gaps: Vec<Duration>,
}

/// How far generations are that run.
#[derive(Debug)]
pub struct Progress {
    started: Vec<AtomicUsize>,
    deltas: Vec<AtomicUsize>,
    ended: AtomicUsize,
}

impl Progress {
    /// For so many.
    pub fn new(requests: usize) -> Arc<Self> {
        let zeros = || (0..requests).map(|_| AtomicUsize::new(0)).collect();
        Arc::new(Self { started: zeros(), deltas: zeros(), ended: AtomicUsize::new(0) })
    }

    /// Whether all have been accepted.
    pub fn all_started(&self) -> bool {
        self.started.iter().all(|count| count.load(Ordering::Acquire) > 0)
    }

    /// Whether none has given a token yet.
    pub fn none_decodes(&self) -> bool {
        self.deltas.iter().all(|count| count.load(Ordering::Acquire) == 0)
    }

    /// Events with tokens of the one that is furthest behind.
    pub fn least(&self) -> usize {
        self.deltas.iter().map(|count| count.load(Ordering::Acquire)).min().unwrap_or(0)
    }

    /// How many have ended, well or not.
    pub fn ended(&self) -> usize {
        self.ended.load(Ordering::Acquire)
    }
}

/// Runs all requests at the same time, to their ends.
pub async fn run_together(
    client: Client,
    requests: Vec<GenerateRequest>,
    progress: &Arc<Progress>,
) -> Vec<Timed> {
    let mut tasks = JoinSet::new();
    let mut all: Vec<Option<Timed>> = requests.iter().map(|_| None).collect();
    for (index, request) in requests.into_iter().enumerate() {
        let (client, progress) = (client.clone(), Arc::clone(progress));
        tasks.spawn(async move { (index, run(client, request, index, &progress).await) });
    }
    while let Some(task) = tasks.join_next().await {
        let (index, timed) = task.expect("a client task does not panic");
        all[index] = Some(timed);
    }
    all.into_iter().flatten().collect()
}

async fn run(
    mut client: Client,
    request: GenerateRequest,
    index: usize,
    progress: &Progress,
) -> Timed {
    let mut gaps = Vec::new();
    let outcome = follow(&mut client, request, &mut gaps, |event| match event {
        Event::Started(_) => progress.started[index].store(1, Ordering::Release),
        Event::Delta(_) => {
            progress.deltas[index].fetch_add(1, Ordering::AcqRel);
        }
        Event::Finished(_) => {}
    })
    .await;
    progress.ended.fetch_add(1, Ordering::AcqRel);
    Timed { outcome, gaps }
}

async fn follow(
    client: &mut Client,
    request: GenerateRequest,
    gaps: &mut Vec<Duration>,
    seen: impl Fn(&Event),
) -> Result<Outcome, Status> {
    let mut last = Instant::now();
    let mut outcome = Outcome { tokens: Vec::new(), logits_sha256: String::new() };
    let mut stream = client.generate(request).await?.into_inner();
    let mut expected = 0;
    while let Some(response) = stream.message().await? {
        let now = Instant::now();
        gaps.push(now - last);
        last = now;
        if response.sequence != expected {
            return Err(Status::data_loss(format!(
                "event {} came where {expected} was due",
                response.sequence
            )));
        }
        expected += 1;
        let event = response.event.ok_or_else(|| Status::data_loss("a response without event"))?;
        seen(&event);
        match event {
            Event::Started(_) => {}
            Event::Delta(delta) => outcome.tokens.extend(delta.token_ids),
            Event::Finished(finished) => {
                outcome.logits_sha256 = finished.logits_sha256.unwrap_or_default();
                return Ok(outcome);
            }
        }
    }
    Err(Status::data_loss("the stream ended without Finished"))
}
