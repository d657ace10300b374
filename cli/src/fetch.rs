//! A container from an HTTP server or a bucket into a directory.
//!
//! [`run`] asks for the manifest, compares its digest, and then fetches file by file in pieces, several at a time. What
//! has come, what is proved and what gets its name is decided by [`shimmer_model::Incoming`]; what an answer means by
//! [`answer`], and whether to try again by [`tries`]. Nothing here needs an orderly end: a killed process goes on where
//! it was.

mod answer;
mod failure;
mod source;
mod transfer;
mod tries;
mod web;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use shimmer_model::{ConvertProgress as _, Incoming, MANIFEST_FILE, Offer, Standing};
use tokio::{sync::Semaphore, task::JoinSet};
use tokio_util::sync::CancellationToken;

pub(crate) use failure::FetchError;
pub(crate) use source::Source;
pub(crate) use web::Limits;

use crate::progress::Progress;
use transfer::Transfer;
use web::Web;

/// Between two looks whether another process that fetches into the same directory has ended.
const LOOK: Duration = Duration::from_secs(1);
/// Between two lines that say so.
const SAY: Duration = Duration::from_secs(10);

/// What to fetch, and how.
#[derive(Debug)]
pub(crate) struct Order {
    pub(crate) source: Source,
    pub(crate) out: PathBuf,
    pub(crate) digest: String,
    pub(crate) ca: Option<PathBuf>,
    /// Read every byte of what is there already.
    pub(crate) verify: bool,
    pub(crate) connections: usize,
    pub(crate) piece_bytes: u64,
    pub(crate) limits: Limits,
}

/// What was done.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Report {
    /// Files of the container, and their bytes.
    pub(crate) total: (usize, u64),
    /// Files that were completed by this call, and the bytes of them that were still missing.
    pub(crate) fetched: (usize, u64),
}

/// Fetches what the directory lacks; nothing if it holds the container already.
pub(crate) async fn run(
    order: &Order,
    progress: &Arc<Progress>,
    stop: &CancellationToken,
) -> Result<Report, FetchError> {
    let Order { out, digest, .. } = order;
    if let Some(report) = is_there(order)? {
        return Ok(report);
    }
    let web = Web::new(&order.source, order.ca.as_deref(), order.limits)?;
    let offer = match Offer::of_directory(out, digest)? {
        Some(offer) => offer,
        None => {
            let bytes = web.manifest(progress).await?;
            Offer::check(&web.shown(MANIFEST_FILE), &bytes, digest)?
        }
    };
    let incoming = match begin(out, &offer, progress).await? {
        incoming if order.verify => verified(incoming, progress).await?,
        // Another process may have done all of it meanwhile.
        incoming => match is_there(order)? {
            Some(report) => {
                incoming.finish()?;
                return Ok(report);
            }
            None => incoming,
        },
    };
    let total = incoming.total();
    let piece_bytes = order.piece_bytes;
    let (incoming, files) = blocking(move || {
        let files = incoming.missing(piece_bytes)?;
        Ok((incoming, files))
    })
    .await?;
    let missing = files.iter().map(shimmer_model::IncomingFile::missing_bytes).sum();
    let fetched = (files.len(), missing);
    progress.start(missing);
    // As many files at a time as connections: a server that gives no ranges has one connection for each.
    let (at_once, permits) = (Semaphore::new(order.connections), Semaphore::new(order.connections));
    let (at_once, permits) = (Arc::new(at_once), Arc::new(permits));
    let mut tasks = JoinSet::new();
    for file in files {
        let at_once = Arc::clone(&at_once);
        let transfer = Transfer::new(&web, file, &permits, progress, stop);
        tasks.spawn(async move {
            let _turn = at_once.acquire_owned().await.expect("nobody closes it");
            transfer.run().await
        });
    }
    while let Some(done) = tasks.join_next().await {
        done.map_err(FetchError::task)??;
    }
    blocking(move || incoming.finish()).await?;
    Ok(Report { total, fetched })
}

/// The quick look: manifest, lengths and headers.
fn is_there(order: &Order) -> Result<Option<Report>, FetchError> {
    let standing = Standing::of(&order.out, &order.digest)?;
    Ok(match standing {
        Standing::Whole(files, bytes) if !order.verify => {
            Some(Report { total: (files, bytes), fetched: (0, 0) })
        }
        _ => None,
    })
}

/// The directory, when nobody else fetches into it any more.
async fn begin(out: &Path, offer: &Offer, progress: &Progress) -> Result<Incoming, FetchError> {
    let (begun, mut said) = (Instant::now(), None::<Instant>);
    loop {
        if let Some(incoming) = Incoming::begin(out, offer)? {
            return Ok(incoming);
        }
        if said.is_none_or(|said| said.elapsed() >= SAY) {
            said = Some(Instant::now());
            let (out, waited) = (out.display(), begun.elapsed().as_secs());
            progress.note(&format!(
                "another process fetches into {out}: waiting for its end, {waited} s so far"
            ));
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// Reads all that is there, and says what has to come anew.
async fn verified(
    mut incoming: Incoming,
    progress: &Arc<Progress>,
) -> Result<Incoming, FetchError> {
    let progress = Arc::clone(progress);
    blocking(move || {
        let damaged = incoming.verify(&*progress)?;
        for name in damaged {
            progress.note(&format!("{name} is damaged: it is fetched again"));
        }
        Ok(incoming)
    })
    .await
}

/// Work on files, beside the threads that move bytes.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, shimmer_model::Error> + Send + 'static,
) -> Result<T, FetchError> {
    Ok(tokio::task::spawn_blocking(work).await.map_err(FetchError::task)??)
}
