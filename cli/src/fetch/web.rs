//! Requests to the source, one at a time, each with a limit on silence.

use std::{
    error::Error as _,
    hash::{BuildHasher as _, Hasher as _, RandomState},
    ops::Range,
    path::Path,
    sync::Arc,
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use reqwest::{Client, Response, header, redirect};
use shimmer_model::{ConvertProgress as _, MANIFEST_FILE};
use shimmer_proto::tls;

use super::{
    answer::{self, Answer, Head},
    failure::{Failure, FetchError},
    source::Source,
    tries::Tries,
};
use crate::{commands::BUILD, progress::Progress};

/// A manifest has about 300 bytes for each expert; a model with a hundred thousand of them has half of this.
const MANIFEST_BYTES: usize = 64 << 20;
/// Redirects that one request follows: file servers have one or two.
const REDIRECTS: usize = 5;
/// Of a refusal's body, so much is shown.
const SAID_CHARS: usize = 300;

/// Patience.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// For a connection, for an answer, and between two arrivals of bytes.
    pub(crate) stall: Duration,
    /// Failures in a row.
    pub(crate) retries: u32,
}

/// The source, over HTTP. Clones share connections.
#[derive(Debug, Clone)]
pub(super) struct Web {
    client: Client,
    source: Arc<Source>,
    pub(super) limits: Limits,
}

impl Web {
    /// Proxies come from HTTPS_PROXY, HTTP_PROXY, ALL_PROXY and NO_PROXY; authorities from `ca`, or else from the system.
    pub(super) fn new(
        source: &Source,
        ca: Option<&Path>,
        limits: Limits,
    ) -> Result<Self, FetchError> {
        let tls = tls::web_client(ca, source.is_https()).map_err(|error| FetchError::Setting {
            file: error.file.display().to_string(),
            reason: error.reason,
        })?;
        let follow = redirect::Policy::custom(|attempt| {
            let from = attempt.previous().last().map(|url| url.scheme().to_owned());
            if attempt.previous().len() > REDIRECTS {
                attempt.error(format!("more than {REDIRECTS} redirects"))
            } else if from.as_deref() == Some("https") && attempt.url().scheme() != "https" {
                attempt.error("a redirect from https to plain http")
            } else {
                attempt.follow()
            }
        });
        let follows = source.follows_redirects();
        let client = Client::builder()
            .tls_backend_preconfigured(tls)
            .redirect(if follows { follow } else { redirect::Policy::none() })
            .connect_timeout(limits.stall)
            .user_agent(BUILD)
            // A connection for each piece: one that carries all of them is no faster than its slowest link.
            .http1_only()
            .build()
            .map_err(|error| FetchError::Odd {
                url: source.url("").to_string(),
                problem: chain(error),
            })?;
        Ok(Self { client, source: Arc::new(source.clone()), limits })
    }

    /// The URL of a file, for messages.
    pub(super) fn shown(&self, file: &str) -> String {
        self.source.url(file).to_string()
    }

    /// New tries of something.
    pub(super) fn tries(&self) -> Tries {
        Tries::new(self.limits.retries, RandomState::new().build_hasher().finish())
    }

    /// The bytes of the manifest.
    pub(super) async fn manifest(&self, progress: &Progress) -> Result<Vec<u8>, FetchError> {
        let mut tries = self.tries();
        loop {
            match self.small(MANIFEST_FILE).await {
                Ok(bytes) => return Ok(bytes),
                Err(failure) => self.again(MANIFEST_FILE, failure, 0, &mut tries, progress).await?,
            }
        }
    }

    /// Waits before the next try, or says why there is none.
    pub(super) async fn again(
        &self,
        file: &str,
        failure: Failure,
        gained: u64,
        tries: &mut Tries,
        progress: &Progress,
    ) -> Result<(), FetchError> {
        let url = self.shown(file);
        let (why, after) = match failure {
            Failure::Passing { why, after } => (why, after),
            Failure::Changed => return Err(FetchError::Changing { url, times: 1 }),
            Failure::Final(error) => return Err(error),
        };
        let Some(wait) = tries.failed(gained, after) else {
            return Err(FetchError::GaveUp { url, tries: tries.count(), why });
        };
        progress.note(&format!("{url}: {why}; next try in {:.1} s", wait.as_secs_f64()));
        tokio::time::sleep(wait).await;
        Ok(())
    }

    async fn small(&self, file: &str) -> Result<Vec<u8>, Failure> {
        let (answer, _, mut response) = self.ask(file, None, None).await?;
        assert!(answer == Answer::Whole, "no part was asked for");
        let mut bytes = Vec::new();
        while let Some(chunk) = self.chunk(&mut response).await? {
            bytes.extend_from_slice(&chunk);
            if bytes.len() > MANIFEST_BYTES {
                let problem = format!("is no manifest: it has more than {MANIFEST_BYTES} bytes");
                return Err(Failure::Final(FetchError::Odd { url: self.shown(file), problem }));
            }
        }
        Ok(bytes)
    }

    /// Asks for a file or a stretch of one. The answer is a part or the whole, with the mark of its version.
    pub(super) async fn ask(
        &self,
        file: &str,
        range: Option<&Range<u64>>,
        bytes: Option<u64>,
    ) -> Result<(Answer, String, Response), Failure> {
        let url = self.source.url(file);
        let shown = || url.to_string();
        let asked = range.map(|range| format!("bytes={}-{}", range.start, range.end - 1));
        let odd = |problem| Failure::Final(FetchError::Odd { url: shown(), problem });
        let headers =
            self.source.headers(&url, asked.as_deref(), SystemTime::now()).map_err(odd)?;
        // Anything else than the plain bytes would not be what the manifest says.
        let mut request = self.client.get(url.clone()).header(header::ACCEPT_ENCODING, "identity");
        if let Some(asked) = &asked {
            request = request.header(header::RANGE, asked);
        }
        for (name, value) in headers {
            request = request.header(name, value);
        }
        let sent = tokio::time::timeout(self.limits.stall, request.send()).await;
        let response = match sent {
            Err(_) => return Err(self.silent()),
            Ok(Err(error)) => return Err(self.failed(error, shown())),
            Ok(Ok(response)) => response,
        };
        let head = head(&response);
        let (found, mark) = (answer::read(&head, range, bytes), answer::mark(&head));
        let status = head.status;
        match found {
            Answer::Part | Answer::Whole => Ok((found, mark, response)),
            Answer::Later(after) => {
                Err(Failure::Passing { why: format!("status {status}"), after })
            }
            Answer::Odd(problem) => Err(odd(problem)),
            Answer::Length(found) => Err(Failure::Final(FetchError::Length {
                url: shown(),
                expected: bytes.unwrap_or_default(),
                found,
            })),
            Answer::Refused(hint) => {
                let denied = matches!(status, 401 | 403);
                let excuse = self.source.excuse().filter(|_| denied).map(str::to_owned);
                let said = self.said(response).await;
                let hint = excuse.or(hint);
                Err(Failure::Final(FetchError::Refused { url: shown(), status, said, hint }))
            }
        }
    }

    /// The next bytes of an answer, or its end.
    pub(super) async fn chunk(&self, response: &mut Response) -> Result<Option<Bytes>, Failure> {
        match tokio::time::timeout(self.limits.stall, response.chunk()).await {
            Err(_) => Err(self.silent()),
            Ok(Err(error)) => {
                Err(Failure::passing(format!("the answer broke off: {}", chain(error))))
            }
            Ok(Ok(chunk)) => Ok(chunk),
        }
    }

    fn silent(&self) -> Failure {
        Failure::passing(format!("nothing came for {:?}", self.limits.stall))
    }

    fn failed(&self, error: reqwest::Error, url: String) -> Failure {
        if error.is_redirect() || error.is_builder() {
            return Failure::Final(FetchError::Odd { url, problem: chain(error) });
        }
        match tls::refusal_of(&error) {
            Some(reason) => Failure::Final(FetchError::Tls { url, reason }),
            None => Failure::passing(chain(error)),
        }
    }

    /// The beginning of a refusal's body, in one line of plain characters.
    async fn said(&self, mut response: Response) -> String {
        let Ok(Some(bytes)) = self.chunk(&mut response).await else { return String::new() };
        let text = String::from_utf8_lossy(&bytes);
        let words: Vec<&str> = text.split_whitespace().collect();
        let plain = words.join(" ");
        let plain: String = plain.chars().filter(|c| !c.is_control()).take(SAID_CHARS).collect();
        if plain.is_empty() { plain } else { format!(": {plain}") }
    }
}

fn head(response: &Response) -> Head<'_> {
    let text = |name: &str| response.headers().get(name).and_then(|value| value.to_str().ok());
    Head {
        status: response.status().as_u16(),
        content_range: text("content-range"),
        content_length: response.content_length(),
        content_encoding: text("content-encoding"),
        etag: text("etag"),
        last_modified: text("last-modified"),
        retry_after: text("retry-after"),
        location: text("location"),
        bucket_region: text("x-amz-bucket-region"),
    }
}

/// An error with its causes, without the URL: that of a redirect may hold a signature.
fn chain(error: reqwest::Error) -> String {
    let error = error.without_url();
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(found) = cause {
        let said = found.to_string();
        if !text.contains(&said) {
            text = format!("{text}: {said}");
        }
        cause = found.source();
    }
    text
}
