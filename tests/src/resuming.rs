//! Clients that go on with an answer that broke off, and tell how it was cut.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use shimmer_proto::{
    status,
    v1::{GenerateRequest, GenerateResponse, ResumeRequest, generate_response::Event},
};
use tonic::{Code, Status, Streaming};

use crate::{client, workload::Outcome};

/// How long a coordinator may be away.
const PATIENCE: Duration = Duration::from_secs(60);
/// Between tries to reach it.
const POLL: Duration = Duration::from_millis(50);

/// What a client saw of one request.
#[derive(Debug)]
pub struct Seen {
    /// What came, whether it ended or not.
    pub tokens: Vec<u32>,
    /// The whole answer, or the error that it ended with.
    pub outcome: Result<Outcome, Status>,
    /// Each error event that ended a stream before.
    pub cuts: Vec<Status>,
    /// Streams that ended without an end and without an error.
    pub silent: usize,
}

/// Where the coordinator is reached now, if it is.
pub type Address = Arc<dyn Fn() -> Option<u16> + Send + Sync>;

/// Runs one request to its end, over as many streams as that takes. `deltas` counts its events with tokens.
pub async fn follow(address: &Address, request: GenerateRequest, deltas: &AtomicUsize) -> Seen {
    let id = request.request_id.clone().expect("a request that is resumed has a name");
    let mut seen = Seen {
        tokens: Vec::new(),
        outcome: Err(Status::unknown("it never began")),
        cuts: Vec::new(),
        silent: 0,
    };
    let (mut began, mut last) = (false, None);
    let mut until = Instant::now() + PATIENCE;
    while Instant::now() < until {
        let stream = if began {
            let request = ResumeRequest { request_id: id.clone(), after_sequence: last };
            resume(address, request).await
        } else {
            generate(address, request.clone()).await
        };
        let mut stream = match stream {
            Ok(stream) => stream,
            // The answer to the first call was lost, but not the call.
            Err(status) if !began && status.code() == Code::AlreadyExists => {
                began = true;
                continue;
            }
            Err(status) if comes_back(&status) || unanswered(&status) => {
                seen.outcome = Err(status);
                tokio::time::sleep(POLL).await;
                continue;
            }
            Err(status) => {
                seen.outcome = Err(status);
                return seen;
            }
        };
        loop {
            match stream.message().await {
                Ok(Some(event)) => {
                    (began, until) = (true, Instant::now() + PATIENCE);
                    if let Err(gap) = take(&mut seen, event, &mut last, deltas) {
                        seen.outcome = Err(gap);
                        return seen;
                    }
                    if seen.outcome.is_ok() {
                        return seen;
                    }
                }
                Ok(None) => {
                    seen.silent += 1;
                    break;
                }
                Err(status) if comes_back(&status) => {
                    if began {
                        seen.cuts.push(status);
                    }
                    tokio::time::sleep(POLL).await;
                    break;
                }
                Err(status) => {
                    seen.outcome = Err(status);
                    return seen;
                }
            }
        }
    }
    seen
}

/// Whether the same call may succeed soon.
fn comes_back(status: &Status) -> bool {
    status.code() == Code::Unavailable
}

/// Whether nobody answered a call, because its connection was closed before: no stream was cut by that. Inside a stream no
/// error has this source.
fn unanswered(status: &Status) -> bool {
    std::error::Error::source(status).is_some_and(|source| source.is::<tonic::transport::Error>())
}

fn take(
    seen: &mut Seen,
    response: GenerateResponse,
    last: &mut Option<u64>,
    deltas: &AtomicUsize,
) -> Result<(), Status> {
    let expected = last.map_or(0, |last| last + 1);
    if response.sequence != expected {
        return Err(Status::data_loss(format!(
            "event {} came where {expected} was due",
            response.sequence
        )));
    }
    *last = Some(expected);
    match response.event.ok_or_else(|| Status::data_loss("a response without event"))? {
        Event::Started(_) => {}
        Event::Delta(delta) => {
            seen.tokens.extend(delta.token_ids);
            deltas.fetch_add(1, Ordering::AcqRel);
        }
        Event::Finished(finished) => {
            let logits_sha256 = finished.logits_sha256.unwrap_or_default();
            seen.outcome = Ok(Outcome { tokens: seen.tokens.clone(), logits_sha256 });
        }
    }
    Ok(())
}

async fn generate(
    address: &Address,
    request: GenerateRequest,
) -> Result<Streaming<GenerateResponse>, Status> {
    let port = address().ok_or_else(|| Status::unavailable("nobody listens"))?;
    Ok(client::connect(port).await?.generate(request).await?.into_inner())
}

async fn resume(
    address: &Address,
    request: ResumeRequest,
) -> Result<Streaming<GenerateResponse>, Status> {
    let port = address().ok_or_else(|| Status::unavailable("nobody listens"))?;
    Ok(client::connect(port).await?.resume(request).await?.into_inner())
}

/// Reasons of these errors, for messages and comparisons.
pub fn reasons(cuts: &[Status]) -> Vec<String> {
    cuts.iter().map(|cut| status::reason(cut).unwrap_or_else(|| format!("{cut:?}"))).collect()
}
