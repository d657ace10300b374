//! One answer from several coordinators: when a stream breaks, the rest comes from whoever has it, at the same place.
//!
//! [`Search`] decides, and knows no socket: what was heard goes in, whom to ask for what comes out. [`Patience`] decides how
//! long that may go on. [`Joined`] asks.

use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::time::{Duration, Instant};

use shimmer_proto::{
    backoff::Backoff,
    status,
    v1::{GenerateRequest, GenerateResponse, ResumeRequest, generate_response::Event},
};
use tonic::{Code, Request, Status, Streaming, metadata::MetadataMap};

use crate::{backend::Remote, error::Error, output};

/// Waits between rounds over all coordinators.
const MIN_WAIT: Duration = Duration::from_millis(100);
const MAX_WAIT: Duration = Duration::from_secs(2);

/// What the next call is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ask {
    /// The request itself.
    Anew,
    /// The rest behind the last event that came.
    Rest,
}

/// What to do after something went wrong.
#[derive(Debug, PartialEq, Eq)]
enum Next {
    /// Ask this coordinator, at once or after a wait.
    Ask { endpoint: usize, ask: Ask, wait: bool },
    /// Nobody has it.
    Lost,
    /// What was heard last is the answer.
    GiveUp,
}

/// What one attempt came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    /// Nobody was there, or the connection broke: it may have been heard or not.
    Broken,
    /// Refused for now, and not accepted.
    Busy,
    /// The stream ended, and the rest can be had.
    Resumable,
    /// This coordinator does not have it and never will.
    Unknown,
    /// Another attempt of ours was heard there.
    Known,
    /// No attempt can help.
    Final,
}

impl Outcome {
    fn of(status: &Status, ask: Ask) -> Self {
        let reason = status::reason(status);
        // Whatever our servers say themselves has details; what has none was said by a broken connection.
        let ours = !status.details().is_empty();
        match status.code() {
            Code::Unavailable if reason.as_deref() == Some(status::RESUMABLE) => Self::Resumable,
            Code::Unavailable | Code::ResourceExhausted if ours => Self::Busy,
            Code::Unavailable | Code::Unknown | Code::Internal | Code::Cancelled if !ours => {
                Self::Broken
            }
            Code::AlreadyExists if ask == Ask::Anew => Self::Known,
            Code::NotFound | Code::FailedPrecondition | Code::DataLoss | Code::Unimplemented
                if ask == Ask::Rest =>
            {
                Self::Unknown
            }
            _ => Self::Final,
        }
    }
}

/// How long an answer is looked for, and with which pauses. A stream that opens and ends without an event is a try like any
/// other.
#[derive(Debug)]
struct Patience {
    limit: Duration,
    /// When looking began; none while events come.
    since: Option<Instant>,
    backoff: Backoff,
}

impl Patience {
    fn new(limit: Duration, seed: u64) -> Self {
        Self { limit, since: None, backoff: Backoff::new(MIN_WAIT, MAX_WAIT, seed) }
    }

    /// An event came. Whether it had been looked for.
    fn rewarded(&mut self) -> bool {
        self.backoff.succeed();
        self.since.take().is_some()
    }

    /// Something went wrong.
    fn tried(&mut self, now: Instant) {
        self.since.get_or_insert(now);
    }

    /// The pause before the next round, not shorter than the coordinator `asked` for; none when time is over.
    fn pause(&mut self, asked: Option<Duration>, now: Instant) -> Option<Duration> {
        let since = *self.since.get_or_insert(now);
        let left = self.limit.saturating_sub(now.saturating_duration_since(since));
        // The last round comes at the end of the time, not after it.
        let wait = self.backoff.fail().max(asked.unwrap_or_default()).min(left);
        (!left.is_zero()).then_some(wait)
    }
}

/// Whom to ask for what.
#[derive(Debug)]
struct Search {
    endpoints: usize,
    at: usize,
    ask: Ask,
    /// Attempts since the last event.
    tries: usize,
    /// An attempt broke, so that somebody may have accepted the request.
    doubtful: bool,
    /// Who does not have it.
    unknown: Vec<bool>,
    /// Events came.
    begun: bool,
    /// A coordinator said that the rest can be had.
    resumable: bool,
}

impl Search {
    fn new(endpoints: usize, at: usize) -> Self {
        Self {
            endpoints,
            at,
            ask: Ask::Anew,
            tries: 0,
            doubtful: false,
            unknown: vec![false; endpoints],
            begun: false,
            resumable: false,
        }
    }

    /// An event came.
    fn progress(&mut self, resumable: Option<bool>) {
        self.begun = true;
        self.resumable = resumable.unwrap_or(self.resumable);
        self.tries = 0;
        self.unknown.fill(false);
    }

    /// An attempt or a stream ended badly.
    fn after(&mut self, outcome: Outcome) -> Next {
        match outcome {
            Outcome::Final => return Next::GiveUp,
            Outcome::Resumable => self.resumable = true,
            Outcome::Broken => self.doubtful = true,
            Outcome::Busy | Outcome::Unknown | Outcome::Known => {}
        }
        if self.begun && !self.resumable {
            return Next::GiveUp;
        }
        if self.begun || self.resumable {
            return self.rest(outcome);
        }
        match outcome {
            // The name is ours only if we were here before.
            Outcome::Known if !self.doubtful => Next::GiveUp,
            Outcome::Known => {
                self.ask = Ask::Rest;
                Next::Ask { endpoint: self.at, ask: self.ask, wait: false }
            }
            _ => {
                self.ask = Ask::Anew;
                self.move_on();
                // Who refuses need not be asked twice; whose connection broke may have accepted.
                let round = self.tries >= self.endpoints;
                if round && !self.doubtful { Next::GiveUp } else { self.next() }
            }
        }
    }

    /// Looks for the rest, first where the stream was.
    fn rest(&mut self, outcome: Outcome) -> Next {
        let first = self.ask == Ask::Anew || self.tries == 0;
        self.ask = Ask::Rest;
        if outcome == Outcome::Unknown {
            self.unknown[self.at] = true;
        }
        if self.unknown.iter().all(|unknown| *unknown) {
            return Next::Lost;
        }
        if first && outcome == Outcome::Broken {
            self.tries += 1;
            return Next::Ask { endpoint: self.at, ask: self.ask, wait: false };
        }
        self.move_on();
        self.next()
    }

    fn move_on(&mut self) {
        self.tries += 1;
        for _ in 0..self.endpoints {
            self.at = (self.at + 1) % self.endpoints;
            if !self.unknown[self.at] {
                return;
            }
        }
    }

    fn next(&self) -> Next {
        let wait = self.tries >= self.endpoints;
        Next::Ask { endpoint: self.at, ask: self.ask, wait }
    }
}

/// The events of one request, from whoever has them.
#[derive(Debug)]
pub(crate) struct Joined {
    remote: Remote,
    request: GenerateRequest,
    /// What goes beside the request.
    metadata: MetadataMap,
    search: Search,
    /// Where events come from now.
    stream: Option<Streaming<GenerateResponse>>,
    /// Number of the last event.
    last: Option<u64>,
    finished: bool,
    patience: Patience,
}

impl Joined {
    /// Asks the coordinators in turn until one accepts.
    ///
    /// # Errors
    /// Nobody can be reached, or the request is refused.
    pub(crate) async fn start(
        remote: Remote,
        mut request: GenerateRequest,
        metadata: MetadataMap,
    ) -> Result<Self, Error> {
        // With a name of our own we can ask for the answer even if no event of it ever came.
        request.request_id.get_or_insert_with(|| format!("cli-{:016x}", draw()));
        let search = Search::new(remote.len(), remote.first());
        let patience = Patience::new(remote.patience(), draw());
        let mut joined = Self {
            remote,
            request,
            metadata,
            search,
            stream: None,
            last: None,
            finished: false,
            patience,
        };
        let (endpoint, ask) = (joined.search.at, Ask::Anew);
        joined.find(endpoint, ask).await?;
        Ok(joined)
    }

    /// The next event; none after the last one.
    ///
    /// # Errors
    /// The rest cannot be had.
    pub(crate) async fn next(&mut self) -> Result<Option<GenerateResponse>, Error> {
        loop {
            if self.finished {
                return Ok(None);
            }
            let Some(stream) = &mut self.stream else { return Ok(None) };
            let status = match stream.message().await {
                Ok(Some(response)) => {
                    self.note(&response);
                    return Ok(Some(response));
                }
                Ok(None) => Status::unavailable("the stream ended without its last event"),
                Err(status) => status,
            };
            self.stream = None;
            self.patience.tried(Instant::now());
            let outcome = Outcome::of(&status, self.search.ask);
            let at = self.search.at;
            match self.search.after(outcome) {
                Next::Ask { endpoint, ask, wait } => {
                    let from = self.remote.address(at);
                    let events = self.last.map_or(0, |last| last + 1);
                    output::note(&format!(
                        "shimmer: the answer from {from} broke off after {events} events ({}); looking for the rest",
                        status.message()
                    ));
                    if wait && !self.pause(status::retry_after(&status)).await {
                        return Err(status.into());
                    }
                    self.find(endpoint, ask).await?;
                }
                Next::Lost => return Err(self.lost()),
                Next::GiveUp => {
                    if outcome != Outcome::Final {
                        output::note(UNJOURNALED);
                    }
                    return Err(status.into());
                }
            }
        }
    }

    fn note(&mut self, response: &GenerateResponse) {
        let resumable = match &response.event {
            Some(Event::Started(started)) => Some(started.resumable),
            Some(Event::Finished(_)) => {
                self.finished = true;
                None
            }
            _ => None,
        };
        self.search.progress(resumable);
        self.last = Some(response.sequence);
        if self.patience.rewarded() {
            let address = self.remote.address(self.search.at);
            output::note(&match self.search.ask {
                Ask::Rest => format!("shimmer: {address} goes on with the answer"),
                Ask::Anew => format!("shimmer: {address} answers"),
            });
        }
    }

    /// Waits before another round; false, said to the user, when `--resume-timeout` is over.
    async fn pause(&mut self, asked: Option<Duration>) -> bool {
        let Some(wait) = self.patience.pause(asked, Instant::now()) else {
            let limit = self.patience.limit;
            output::note(&format!(
                "shimmer: no coordinator went on within --resume-timeout, {limit:?}"
            ));
            return false;
        };
        tokio::time::sleep(wait).await;
        true
    }

    /// Asks until somebody answers with a stream.
    async fn find(&mut self, mut endpoint: usize, mut ask: Ask) -> Result<(), Error> {
        loop {
            let error = match self.attempt(endpoint, ask).await {
                Ok(stream) => {
                    self.search.at = endpoint;
                    self.stream = Some(stream);
                    return Ok(());
                }
                Err(error) => error,
            };
            self.patience.tried(Instant::now());
            let asked = match &error {
                Error::Status(status) => status::retry_after(status),
                _ => None,
            };
            let outcome = match &error {
                Error::Status(status) => Outcome::of(status, ask),
                Error::Failed { .. } => Outcome::Broken,
                _ => Outcome::Final,
            };
            // Somebody who cannot be reached has accepted nothing.
            let unreachable = outcome == Outcome::Broken && !matches!(error, Error::Status(_));
            let outcome = if unreachable && !self.search.doubtful && !self.search.begun {
                Outcome::Busy
            } else {
                outcome
            };
            let address = self.remote.address(endpoint).to_string();
            match self.search.after(outcome) {
                Next::Ask { endpoint: to, ask: what, wait } => {
                    let text = error.render().unwrap_or_default();
                    let line = text.lines().next().unwrap_or_default();
                    output::note(&format!(
                        "shimmer: {address}: {}",
                        line.trim_start_matches("shimmer: error: ")
                    ));
                    if wait && !self.pause(asked).await {
                        return Err(error);
                    }
                    (endpoint, ask) = (to, what);
                }
                Next::Lost => return Err(self.lost()),
                Next::GiveUp => return Err(error),
            }
        }
    }

    async fn attempt(
        &mut self,
        endpoint: usize,
        ask: Ask,
    ) -> Result<Streaming<GenerateResponse>, Error> {
        let mut client = self.remote.client(endpoint).await?;
        let answer = match ask {
            Ask::Anew => {
                let mut request = Request::new(self.request.clone());
                *request.metadata_mut() = self.metadata.clone();
                client.generate(request).await
            }
            Ask::Rest => {
                let request_id = self.request.request_id.clone().unwrap_or_default();
                let after_sequence = self.last;
                client.resume(ResumeRequest { request_id, after_sequence }).await
            }
        };
        answer.map(tonic::Response::into_inner).map_err(|status| {
            self.remote.forget(endpoint);
            status.into()
        })
    }

    fn lost(&self) -> Error {
        let id = self.request.request_id.as_deref().unwrap_or_default();
        let events = self.last.map_or(0, |last| last + 1);
        Error::failed(
            "the answer is incomplete",
            format!(
                "it broke off after {events} events, and no coordinator can resume request {id}"
            ),
        )
        .with_hint("coordinators that share a --journal directory can go on for each other")
    }
}

const UNJOURNALED: &str = "shimmer: the coordinator did not write this request into a journal (`serve --journal DIR`), so that nobody can go on";

/// A number that nobody else draws: the keys of the standard library's hash maps come from the system.
fn draw() -> u64 {
    RandomState::new().build_hasher().finish()
}

#[cfg(test)]
mod tests;
