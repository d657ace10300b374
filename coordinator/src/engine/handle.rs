//! The clients' end of the engine: checks a generation before it is queued, and reaches the step thread by messages.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use crossbeam_channel::{Receiver, Sender, bounded, unbounded};
use tokio::sync::oneshot;

use super::config::{EngineConfig, ModelInfo};
use super::events::{EventSender, EventStream, GenerationError, event_channel};
use super::refusals::Refusals;
use super::stats::{EngineStats, Published};
use crate::sampler::InvalidParameter;
use crate::sequence::{Generation, Known};
use crate::trace::RequestTrace;

/// Most stop strings of one generation.
pub const MAX_STOP_STRINGS: usize = 16;
/// Most alternatives of one position's log-probabilities.
pub const MAX_LOGPROBS: u32 = 20;

/// Why a generation was not queued.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// A field is outside its range.
    #[error(transparent)]
    Invalid(#[from] InvalidParameter),
    /// The prompt leaves no room for a single token.
    #[error("context length exceeded: the prompt has {prompt} tokens, the context {context}, so nothing is left for {} generated tokens", max_tokens.map_or_else(|| "any".to_owned(), |n| n.to_string()))]
    ContextExceeded {
        /// Tokens of the prompt.
        prompt: usize,
        /// Positions of the context.
        context: u32,
        /// Tokens that were asked for.
        max_tokens: Option<u32>,
    },
    /// A queued or running generation has this id.
    #[error("request_id {id:?} belongs to a generation that is queued or running")]
    DuplicateId {
        /// The id.
        id: String,
    },
    /// The queue is full; the same request may be sent again later.
    #[error("{limit} generations are waiting already")]
    QueueFull {
        /// Its limit.
        limit: usize,
    },
    /// The engine takes nothing more.
    #[error("the engine is shutting down")]
    ShuttingDown,
}

/// Why a text was not scored.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ScoreError {
    /// Not queued.
    #[error(transparent)]
    Submit(#[from] SubmitError),
    /// Failed on the way.
    #[error(transparent)]
    Failed(#[from] GenerationError),
}

/// A generation that passed every check.
#[derive(Debug)]
pub(super) struct Accepted {
    pub(super) generation: Generation,
    /// Clamped to the context.
    pub(super) max_tokens: u32,
    pub(super) events: EventSender,
    pub(super) ticket: Ticket,
    pub(super) submitted: Instant,
    /// Of a sampled request.
    pub(super) trace: Option<Box<RequestTrace>>,
}

/// Message to the step thread.
#[derive(Debug)]
pub(super) enum Command {
    Submit(Box<Accepted>),
    Score { tokens: Vec<u32>, reply: Sender<Result<Vec<Vec<f32>>, GenerationError>> },
    Cancel { id: String },
    Displace { id: String, released: oneshot::Sender<()> },
    Shutdown,
}

/// Ids in use and the length of the queue, shared by all handles and the step thread.
#[derive(Debug, Default)]
struct Registry {
    active: Mutex<BTreeSet<String>>,
    waiting: AtomicUsize,
}

/// Holds a generation's id, and its place in the count of waiting ones until it is admitted.
#[derive(Debug)]
pub(super) struct Ticket {
    registry: Arc<Registry>,
    id: String,
    waiting: bool,
}

impl Ticket {
    /// Leaves the queue.
    pub(super) fn admitted(&mut self) {
        if std::mem::take(&mut self.waiting) {
            self.registry.waiting.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.admitted();
        self.registry.active.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.id);
    }
}

/// Submits, cancels and scores. Clones reach the same engine; when the last one is dropped, the engine stops.
#[derive(Clone, Debug)]
pub struct EngineHandle {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    info: ModelInfo,
    max_waiting: usize,
    max_unread_events: usize,
    registry: Arc<Registry>,
    commands: Sender<Command>,
    thread: Mutex<Option<JoinHandle<()>>>,
    published: Published,
    refusals: Refusals,
}

impl EngineHandle {
    /// A handle and the queue that its engine reads.
    pub(super) fn new(info: ModelInfo, config: &EngineConfig) -> (Self, Receiver<Command>) {
        let (commands, queue) = unbounded();
        let shared = Shared {
            info,
            max_waiting: config.max_waiting,
            max_unread_events: config.max_unread_events,
            registry: Arc::default(),
            commands,
            thread: Mutex::new(None),
            published: Published::default(),
            refusals: Refusals::default(),
        };
        (Self { shared: Arc::new(shared) }, queue)
    }

    /// Remembers the step thread, so that [`EngineHandle::shutdown`] can wait for it.
    pub(super) fn attach(&self, thread: JoinHandle<()>) {
        *self.shared.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
    }

    /// Whether the step thread has ended without [`EngineHandle::shutdown`]: it panicked, and nothing will answer any more.
    pub fn has_ended(&self) -> bool {
        let thread = self.shared.thread.lock().unwrap_or_else(PoisonError::into_inner);
        thread.as_ref().is_some_and(JoinHandle::is_finished)
    }

    /// Where the step thread publishes its figures.
    pub(super) fn published(&self) -> Published {
        self.shared.published.clone()
    }

    /// What the engine has done, as of the last step that ended.
    pub fn stats(&self) -> EngineStats {
        EngineStats {
            waiting_limit: self.shared.max_waiting as u64,
            refused: self.shared.refusals.read(),
            ..self.shared.published.read()
        }
    }

    /// The model and its limits.
    pub fn model_info(&self) -> &ModelInfo {
        &self.shared.info
    }

    /// Checks a generation and queues it. Its events come from the returned stream; dropping the stream cancels it.
    pub fn submit(&self, generation: Generation) -> Result<EventStream, SubmitError> {
        self.submit_traced(generation, None)
    }

    /// As [`Self::submit`], for a request that may be sampled.
    pub(crate) fn submit_traced(
        &self,
        generation: Generation,
        trace: Option<Box<RequestTrace>>,
    ) -> Result<EventStream, SubmitError> {
        self.enqueue(generation, trace).inspect_err(|error| self.shared.refusals.count(error))
    }

    fn enqueue(
        &self,
        generation: Generation,
        trace: Option<Box<RequestTrace>>,
    ) -> Result<EventStream, SubmitError> {
        let max_tokens = self.check(&generation)?;
        let ticket = self.register(&generation.id)?;
        let (events, stream) = event_channel(self.shared.max_unread_events);
        let accepted =
            Accepted { generation, max_tokens, events, ticket, submitted: Instant::now(), trace };
        self.shared
            .commands
            .send(Command::Submit(Box::new(accepted)))
            .map_err(|_| SubmitError::ShuttingDown)?;
        Ok(stream)
    }

    /// Ends a queued or running generation within one step; false when there is none of that id.
    pub fn cancel(&self, id: &str) -> bool {
        let active =
            self.shared.registry.active.lock().unwrap_or_else(PoisonError::into_inner).contains(id);
        active && self.shared.commands.send(Command::Cancel { id: id.to_owned() }).is_ok()
    }

    /// Ends a queued or running generation with [`GenerationError::Displaced`] and waits until its id is free.
    pub async fn displace(&self, id: &str) {
        let (released, wait) = oneshot::channel();
        let command = Command::Displace { id: id.to_owned(), released };
        if self.shared.commands.send(command).is_ok() {
            // An engine that has ended holds no id any more.
            let _ended = wait.await.is_err();
        }
    }

    /// The limit of generated tokens under which a generation would be queued now.
    pub fn limit(&self, generation: &Generation) -> Result<u32, SubmitError> {
        self.check(generation)
    }

    /// Logits of every position of a text, by the same forward pass as generations. Blocks until they are there.
    pub fn score(&self, tokens: &[u32]) -> Result<Vec<Vec<f32>>, ScoreError> {
        self.check_prompt(tokens, Some(1))?;
        let (reply, answer) = bounded(1);
        let command = Command::Score { tokens: tokens.to_vec(), reply };
        self.shared.commands.send(command).map_err(|_| SubmitError::ShuttingDown)?;
        let logits = answer.recv().map_err(|_| SubmitError::ShuttingDown)?;
        Ok(logits?)
    }

    /// Ends every generation and waits for the step thread. Later submissions are refused.
    pub fn shutdown(&self) {
        let thread = self.shared.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        // A closed queue means that the step thread has ended already.
        let _ended = self.shared.commands.send(Command::Shutdown).is_err();
        if let Some(thread) = thread
            && thread.join().is_err()
        {
            tracing::error!("the step thread panicked");
        }
    }

    /// Checks every field; returns the limit of generated tokens that the context leaves.
    fn check(&self, generation: &Generation) -> Result<u32, SubmitError> {
        let info = &self.shared.info;
        generation.sampling.validate(info.vocab_size as usize)?;
        let stop = &generation.stop;
        let invalid = |field: &str, description: String| {
            Err(SubmitError::Invalid(InvalidParameter::new(field, description)))
        };
        if stop.max_tokens == Some(0) {
            return invalid("stop.max_tokens", "0 is below 1".to_owned());
        }
        if stop.stop_strings.len() > MAX_STOP_STRINGS {
            return invalid(
                "stop.stop_strings",
                format!("{} are more than {MAX_STOP_STRINGS}", stop.stop_strings.len()),
            );
        }
        if let Some(index) = stop.stop_strings.iter().position(String::is_empty) {
            return invalid(&format!("stop.stop_strings[{index}]"), "is empty".to_owned());
        }
        if let Some(index) = stop.stop_token_ids.iter().position(|&id| id >= info.vocab_size) {
            let description = format!(
                "{} is not below the vocabulary's {}",
                stop.stop_token_ids[index], info.vocab_size
            );
            return invalid(&format!("stop.stop_token_ids[{index}]"), description);
        }
        if let Some(count) = generation.output.logprobs.filter(|&count| count > MAX_LOGPROBS) {
            return invalid("output.logprobs", format!("{count} is above {MAX_LOGPROBS}"));
        }
        let limit = self.check_prompt(&generation.prompt, stop.max_tokens)?;
        let (Known::Taken(known) | Known::Again(known)) = &generation.known else {
            return Ok(limit);
        };
        if let Some(index) = known.iter().position(|&id| id >= info.vocab_size) {
            let description =
                format!("{} is not below the vocabulary's {}", known[index], info.vocab_size);
            return invalid(&format!("known[{index}]"), description);
        }
        if known.len() > limit as usize {
            return invalid(
                "known",
                format!("{} tokens are above the limit of {limit}", known.len()),
            );
        }
        Ok(limit)
    }

    fn check_prompt(&self, prompt: &[u32], max_tokens: Option<u32>) -> Result<u32, SubmitError> {
        let info = &self.shared.info;
        if prompt.is_empty() {
            return Err(InvalidParameter::new("input", "the prompt has no tokens").into());
        }
        if let Some(index) = prompt.iter().position(|&id| id >= info.vocab_size) {
            let description =
                format!("{} is not below the vocabulary's {}", prompt[index], info.vocab_size);
            return Err(
                InvalidParameter::new(format!("input.token_ids[{index}]"), description).into()
            );
        }
        let length = u32::try_from(prompt.len()).unwrap_or(u32::MAX);
        match info.context_length.checked_sub(length) {
            None | Some(0) => Err(SubmitError::ContextExceeded {
                prompt: prompt.len(),
                context: info.context_length,
                max_tokens,
            }),
            Some(left) => Ok(max_tokens.unwrap_or(left).min(left)),
        }
    }

    fn register(&self, id: &str) -> Result<Ticket, SubmitError> {
        let registry = &self.shared.registry;
        let limit = self.shared.max_waiting;
        if registry
            .waiting
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| (n < limit).then_some(n + 1))
            .is_err()
        {
            return Err(SubmitError::QueueFull { limit });
        }
        if !registry.active.lock().unwrap_or_else(PoisonError::into_inner).insert(id.to_owned()) {
            registry.waiting.fetch_sub(1, Ordering::Relaxed);
            return Err(SubmitError::DuplicateId { id: id.to_owned() });
        }
        Ok(Ticket { registry: Arc::clone(registry), id: id.to_owned(), waiting: true })
    }
}

#[cfg(test)]
mod tests;
