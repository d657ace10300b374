//! Giving the rest of a stream from what the journal has of it.
//!
//! The events of known tokens are a function of the tokens, so they are made again without a model. What is not known
//! is generated: behind the known tokens, which are computed together with the prompt; or from the prompt on, where events need
//! logits that nobody has any more. Then each known token must come out again.

use std::collections::VecDeque;
use std::sync::Arc;

use shimmer_proto::status as statuses;
use shimmer_proto::v1;
use tonic::Status;

use super::stream::{GenerateStream, Source};
use super::{Inference, off_thread, status, validate};
use crate::engine::{Event, EventStream, FinishReason, Finished, SubmitError, Timings, Usage};
use crate::journal::{Ending, Recovered, Way};
use crate::sequence::{Generation, Known, Sequence};

/// Two clients that resume the same request again and again take turns; one that never gets its turn gives up.
const MAX_TURNS: usize = 8;

/// What the journal's tokens lead to.
#[derive(Debug)]
struct Replayed {
    /// Started, and a Delta for each token.
    events: Vec<Event>,
    /// Text that was held back, given out when a generation is cancelled.
    held: Option<Event>,
    /// How it ended by its tokens, when they are all there.
    ended: Option<Ending>,
}

impl Inference {
    /// The rest of a request that this coordinator or another one accepted.
    ///
    /// # Errors
    /// The status for the client.
    pub async fn resume_stream(
        &self,
        request: v1::ResumeRequest,
    ) -> Result<GenerateStream, Status> {
        let running = self.enter()?;
        let Some(journal) = self.journal() else {
            let message = "this coordinator keeps no journal";
            return Err(statuses::failed_precondition("NO_JOURNAL", message));
        };
        let v1::ResumeRequest { request_id, after_sequence } = request;
        let id = validate::request_id(Some(request_id)).map_err(|error| status::invalid(&error))?;
        let recovered = journal.recover(&id).await.map_err(|error| status::journal(&error))?;
        let Some(recovered) = recovered else {
            let message = format!("the journal knows no request {id:?}");
            return Err(statuses::not_found("request", &id, message));
        };
        self.check_origin(&recovered)?;
        let replayed = self.replay(&recovered).await?;
        if replayed.events.len() != recovered.tokens.len() + 1 {
            return Err(contradiction(&id, "tokens stand behind the end of the answer"));
        }
        let about = self.about(id, running);
        if let Some(events) = without_engine(&recovered, &replayed, after_sequence)? {
            journal.count_resumed(Way::Ended);
            let source = Source {
                replayed: events,
                live: None,
                journal: None,
                resumable: true,
                after: after_sequence,
            };
            return Ok(GenerateStream::new(source, about));
        }
        let output = recovered.accepted.generation.output;
        let again = output.logprobs.is_some() || output.logits_digest;
        let tokens = recovered.tokens.clone();
        let known = if again { Known::Again(tokens) } else { Known::Taken(tokens) };
        let generation = Generation { known, ..recovered.accepted.generation.clone() };
        let live = self.take_turns(generation).await?;
        journal.count_resumed(if again { Way::Again } else { Way::Continued });
        tracing::info!(
            request_id = about.request_id,
            tokens = recovered.tokens.len(),
            again,
            "resumed from the journal"
        );
        let repeated = if again { recovered.tokens.len() } else { 0 };
        let source = Source {
            replayed: if again { VecDeque::new() } else { replayed.events.into() },
            live: Some(live),
            journal: journal.take_over(recovered, repeated).await,
            resumable: true,
            after: after_sequence,
        };
        Ok(GenerateStream::new(source, about))
    }

    /// Refuses a request of other weights, of another arithmetic, or too long for this coordinator.
    fn check_origin(&self, recovered: &Recovered) -> Result<(), Status> {
        let (accepted, here) = (&recovered.accepted, self.engine().model_info());
        for (what, theirs, ours) in [
            ("container", &accepted.container_digest, &here.container_digest),
            ("arithmetic", &accepted.math_id, &here.math_id),
        ] {
            if theirs != ours {
                let message = format!(
                    "the request was accepted with {what} {theirs}, this coordinator has {ours}"
                );
                return Err(statuses::failed_precondition("OTHER_MODEL", message));
            }
        }
        let generation = &accepted.generation;
        let accepted = generation.stop.max_tokens;
        let limit = self.engine().limit(generation).map_err(|error| status::submit(&error))?;
        if accepted != Some(limit) {
            let message = format!(
                "the request was accepted with room for {} tokens, the context of this coordinator leaves {limit}",
                accepted.unwrap_or_default()
            );
            return Err(statuses::failed_precondition("SMALLER_CONTEXT", message));
        }
        Ok(())
    }

    async fn replay(&self, recovered: &Recovered) -> Result<Replayed, Status> {
        let generation = recovered.accepted.generation.clone();
        let tokens = recovered.tokens.clone();
        let end_tokens: Arc<[u32]> = self.engine().model_info().end_token_ids.as_slice().into();
        let tokenizer = self.tokenizer();
        off_thread(move || {
            let max_tokens = generation.stop.max_tokens.unwrap_or(u32::MAX);
            let mut sequence = Sequence::new(generation, max_tokens, end_tokens, tokenizer);
            let started = Event::Started {
                prompt_tokens: count(sequence.prompt_tokens()),
                max_tokens,
                seed: sequence.seed(),
            };
            let replay = sequence.replay(&tokens);
            let ended = replay.ended.map(|ended| Ending {
                reason: ended.reason,
                matched_stop: ended.matched_stop,
                completion_tokens: count(sequence.generated()),
                logits_sha256: None,
            });
            let events = [started].into_iter().chain(replay.events).collect();
            Replayed { events, held: sequence.flush_cancelled(), ended }
        })
        .await
    }

    /// Queues a generation, and takes its name from whoever streams it.
    async fn take_turns(&self, generation: Generation) -> Result<EventStream, Status> {
        let mut turn = 0;
        loop {
            self.engine().displace(&generation.id).await;
            turn += 1;
            match self.engine().submit(generation.clone()) {
                Ok(events) => return Ok(events),
                Err(SubmitError::DuplicateId { .. }) if turn < MAX_TURNS => {}
                Err(error) => return Err(status::submit(&error)),
            }
        }
    }
}

/// All events, where no logits are needed for those that the client lacks.
fn without_engine(
    recovered: &Recovered,
    replayed: &Replayed,
    after: Option<u64>,
) -> Result<Option<VecDeque<Event>>, Status> {
    let Recovered { accepted, tokens, ending } = recovered;
    let Generation { id, output, .. } = &accepted.generation;
    let complete = |ending: &Ending| ending.completion_tokens as usize == tokens.len();
    let cancelled = |ending: &Ending| ending.reason == FinishReason::Cancelled;
    let log_probabilities =
        output.logprobs.is_some() && after.is_none_or(|after| after < tokens.len() as u64);
    let mut events: VecDeque<Event> = replayed.events.iter().cloned().collect();
    let ending = match ending {
        Some(ending) if cancelled(ending) => {
            if !complete(ending) || log_probabilities {
                let message =
                    "the request was cancelled, and not all that its events need is in the journal";
                return Err(statuses::failed_precondition("CANCELLED", message));
            }
            events.extend(replayed.held.clone());
            ending.clone()
        }
        Some(ending) if complete(ending) => {
            let by_tokens = replayed.ended.as_ref();
            let same = by_tokens.is_some_and(|by_tokens| {
                (by_tokens.reason, &by_tokens.matched_stop) == (ending.reason, &ending.matched_stop)
            });
            if !same {
                return Err(contradiction(id, "the answer did not end where its tokens end it"));
            }
            ending.clone()
        }
        _ => match &replayed.ended {
            Some(ending) if !output.logits_digest => ending.clone(),
            _ => return Ok(None),
        },
    };
    if log_probabilities {
        return Ok(None);
    }
    events.push_back(Event::Finished(Finished {
        reason: ending.reason,
        matched_stop: ending.matched_stop,
        usage: Usage {
            prompt_tokens: count(accepted.generation.prompt.len()),
            completion_tokens: ending.completion_tokens,
        },
        timings: Timings::default(),
        logits_sha256: ending.logits_sha256,
    }));
    Ok(Some(events))
}

/// A journal that contradicts itself: an alarm, and no text.
fn contradiction(id: &str, what: &str) -> Status {
    tracing::error!(
        request_id = id,
        what,
        "the journal contradicts the model; nothing is given out"
    );
    statuses::internal("JOURNAL_MISMATCH", format!("the journal of {id:?}: {what}"))
}

fn count(tokens: usize) -> u32 {
    u32::try_from(tokens).expect("the context is counted in u32")
}
