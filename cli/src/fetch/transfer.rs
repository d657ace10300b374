//! One file, piece by piece.

use std::{ops::Range, sync::Arc};

use reqwest::Response;
use shimmer_model::{ConvertProgress, Fault, IncomingFile, Settled};
use tokio::{sync::Semaphore, task::JoinSet};
use tokio_util::sync::CancellationToken;

use super::{
    answer::Answer,
    blocking,
    failure::{Failure, FetchError},
    web::Web,
};
use crate::progress::Progress;

/// Bytes that are gathered before they are written: a killed process loses less than that for each connection.
const BUFFER_BYTES: usize = 1 << 20;
/// How often one file is begun again because it changed, or because bytes of it were wrong.
const ROUNDS: u32 = 3;

/// A file on its way. Clones share it.
#[derive(Debug, Clone)]
pub(super) struct Transfer {
    web: Web,
    file: Arc<IncomingFile>,
    permits: Arc<Semaphore>,
    progress: Arc<Progress>,
    stop: CancellationToken,
}

/// What one call brought.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Brought {
    Piece,
    /// The server gives no ranges.
    Whole,
    /// Pieces of two versions of the file would be mixed.
    Nothing,
}

/// Work whose bytes are not those of the progress.
struct Silent(CancellationToken);

impl ConvertProgress for Silent {
    fn stop(&self) -> bool {
        self.0.is_cancelled()
    }
}

impl Transfer {
    pub(super) fn new(
        web: &Web,
        file: IncomingFile,
        permits: &Arc<Semaphore>,
        progress: &Arc<Progress>,
        stop: &CancellationToken,
    ) -> Self {
        Self {
            web: web.clone(),
            file: Arc::new(file),
            permits: Arc::clone(permits),
            progress: Arc::clone(progress),
            stop: stop.clone(),
        }
    }

    /// Fetches what is missing, proves the file and gives it its name.
    pub(super) async fn run(self) -> Result<(), FetchError> {
        self.progress.file(self.file.name());
        let mut wrong: Vec<Fault> = Vec::new();
        for _ in 0..ROUNDS {
            if self.pieces().await? == Brought::Nothing {
                self.progress.note(&format!("{}: changed at the source, begun again", self.url()));
                self.file.restart("")?;
                continue;
            }
            if self.file.missing_bytes() > 0 {
                continue;
            }
            let (file, silent) = (Arc::clone(&self.file), Silent(self.stop.clone()));
            match blocking(move || file.settle(&silent)).await? {
                Settled::Named => return Ok(()),
                Settled::Damaged(faults) => {
                    for fault in &faults {
                        self.progress.note(&format!(
                            "{}: {} is damaged: fetching it again",
                            self.url(),
                            fault.what
                        ));
                    }
                    wrong = faults;
                }
            }
        }
        let more = match wrong.len() {
            0 | 1 => String::new(),
            count => format!(", and {} more parts are wrong", count - 1),
        };
        match wrong.into_iter().next() {
            Some(fault) => Err(FetchError::Damaged { url: self.url(), fault, more }),
            None => Err(FetchError::Changing { url: self.url(), times: ROUNDS }),
        }
    }

    async fn pieces(&self) -> Result<Brought, FetchError> {
        let mut missing = self.file.missing().into_iter();
        let Some(first) = missing.next() else { return Ok(Brought::Piece) };
        // The first answer says whether the server gives ranges, and which version of the file it has.
        match self.clone().piece(first, true).await? {
            Brought::Piece => {}
            other => return Ok(other),
        }
        let mut tasks = JoinSet::new();
        for range in missing {
            tasks.spawn(self.clone().piece(range, false));
        }
        while let Some(done) = tasks.join_next().await {
            if done.map_err(FetchError::task)?? == Brought::Nothing {
                // Nothing may still be written when the file is begun again.
                tasks.shutdown().await;
                return Ok(Brought::Nothing);
            }
        }
        Ok(Brought::Piece)
    }

    /// One piece, as often as it takes.
    async fn piece(self, mut range: Range<u64>, first: bool) -> Result<Brought, FetchError> {
        let mut tries = self.web.tries();
        loop {
            let before = range.start;
            let result = {
                let _permit = self.permits.acquire().await.expect("nobody closes it");
                self.once(&mut range, first).await
            };
            match result {
                Ok(brought) => return Ok(brought),
                Err(Failure::Changed) => return Ok(Brought::Nothing),
                Err(failure) => {
                    let (name, gained) = (self.file.name(), range.start - before);
                    self.web.again(name, failure, gained, &mut tries, &self.progress).await?;
                }
            }
        }
    }

    /// One request. `range` is what is still missing afterwards.
    async fn once(&self, range: &mut Range<u64>, first: bool) -> Result<Brought, Failure> {
        let bytes = self.file.bytes();
        let (answer, mark, response) =
            self.web.ask(self.file.name(), Some(range), Some(bytes)).await?;
        let brought = match answer {
            Answer::Part if self.file.is_of(&mark)? => {
                self.body(response, range).await?;
                Brought::Piece
            }
            Answer::Part => return Err(Failure::Changed),
            _ if first => {
                self.file.restart(&mark)?;
                let mut whole = 0..bytes;
                self.body(response, &mut whole).await?;
                return if whole.is_empty() { Ok(Brought::Whole) } else { Err(short(&whole)) };
            }
            _ => return Err(Failure::passing("the server gave the whole file instead of a part")),
        };
        if range.is_empty() { Ok(brought) } else { Err(short(range)) }
    }

    /// Writes an answer's body to where it belongs, as far as it comes.
    async fn body(&self, mut response: Response, range: &mut Range<u64>) -> Result<(), Failure> {
        let mut held = Vec::with_capacity(BUFFER_BYTES);
        loop {
            let next = self.web.chunk(&mut response).await;
            let mut left = range.end - range.start - held.len() as u64;
            if let Ok(Some(chunk)) = &next {
                let more = chunk.len() as u64;
                let Some(rest) = left.checked_sub(more) else {
                    let (url, problem) = (self.url(), "sends more bytes than it should have");
                    let problem = problem.to_owned();
                    return Err(Failure::Final(FetchError::Odd { url, problem }));
                };
                left = rest;
                held.extend_from_slice(chunk);
                if held.len() < BUFFER_BYTES && left > 0 {
                    continue;
                }
            }
            self.write(&held, range)?;
            held.clear();
            match next {
                Ok(Some(_)) if left > 0 => {}
                Ok(_) => return Ok(()),
                Err(failure) => return Err(failure),
            }
        }
    }

    /// Writes what has come. It is done when this returns, also for a task that is aborted: nothing is written any more when a
    /// file is begun again.
    fn write(&self, held: &[u8], range: &mut Range<u64>) -> Result<(), Failure> {
        if held.is_empty() {
            return Ok(());
        }
        tokio::task::block_in_place(|| self.file.write(range.start, held))?;
        let length = held.len() as u64;
        range.start += length;
        self.progress.advance(length);
        Ok(())
    }

    fn url(&self) -> String {
        self.web.shown(self.file.name())
    }
}

fn short(left: &Range<u64>) -> Failure {
    Failure::passing(format!("the answer ended {} bytes early", left.end - left.start))
}
