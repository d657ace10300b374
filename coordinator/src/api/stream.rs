//! One generation's events as the numbered messages of its gRPC stream.

use std::future::Future;
use std::pin::{Pin, pin};
use std::task::{Context, Poll};

use shimmer_proto::v1::{self, GenerateResponse, generate_response};
use tokio::sync::watch;
use tokio_stream::Stream;
use tonic::Status;

use super::{ClusterStatus, convert, status};
use crate::engine::{Event, EventStream};

/// Started, any number of Deltas, and Finished or a status. Dropping it ends the generation within one step.
#[derive(Debug)]
pub struct GenerateStream {
    events: EventStream,
    request_id: String,
    fingerprint: v1::Fingerprint,
    cluster: watch::Receiver<ClusterStatus>,
    sequence: u64,
    ended: bool,
}

impl GenerateStream {
    pub(super) fn new(
        events: EventStream,
        request_id: String,
        fingerprint: v1::Fingerprint,
        cluster: watch::Receiver<ClusterStatus>,
    ) -> Self {
        Self { events, request_id, fingerprint, cluster, sequence: 0, ended: false }
    }

    fn message(&mut self, event: Event) -> Result<GenerateResponse, Status> {
        let event = match event {
            Event::Started { prompt_tokens, max_tokens, seed } => {
                generate_response::Event::Started(v1::Started {
                    request_id: self.request_id.clone(),
                    fingerprint: Some(self.fingerprint.clone()),
                    prompt_tokens,
                    seed,
                    max_tokens,
                })
            }
            Event::Delta { text, token_ids, logprobs } => {
                generate_response::Event::Delta(v1::Delta {
                    text,
                    token_ids,
                    logprobs: logprobs.into_iter().map(convert::logprobs).collect(),
                })
            }
            Event::Finished(finished) => {
                self.ended = true;
                generate_response::Event::Finished(convert::finished(
                    finished,
                    &self.cluster.borrow(),
                ))
            }
            Event::Failed(error) => {
                self.ended = true;
                tracing::warn!(request_id = self.request_id, %error, "a generation failed");
                return Err(status::generation(&error));
            }
        };
        let sequence = self.sequence;
        self.sequence += 1;
        Ok(GenerateResponse { sequence, event: Some(event) })
    }
}

impl Stream for GenerateStream {
    type Item = Result<GenerateResponse, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.ended {
            return Poll::Ready(None);
        }
        let Poll::Ready(event) = pin!(self.events.recv()).poll(context) else {
            return Poll::Pending;
        };
        let Some(event) = event else {
            self.ended = true;
            return Poll::Ready(Some(Err(status::engine_gone())));
        };
        Poll::Ready(Some(self.message(event)))
    }
}
