//! What a generation tells its client, and the channel that carries it.
//!
//! The step thread never waits for a client. The channel is unbounded in the type but limited in use: a generation whose
//! client leaves more than the limit of events unread ends with [`GenerationError::SlowConsumer`].

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::mpsc;

/// One event of a generation: Started, any number of Deltas, then Finished or Failed. A generation that is refused
/// after it was queued sends Failed alone.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The generation has its place in the batch.
    Started {
        /// Length of the prompt.
        prompt_tokens: u32,
        /// Limit of generated tokens after clamping to the context.
        max_tokens: u32,
        /// Seed in force.
        seed: u64,
    },
    /// Newly generated tokens and their text.
    Delta {
        /// Whole characters only, never a part of a stop string. May be empty.
        text: String,
        /// Tokens sampled since the last delta.
        token_ids: Vec<u32>,
        /// One per token when asked for, else empty.
        logprobs: Vec<PositionLogprobs>,
    },
    /// The end.
    Finished(Finished),
    /// The end by a failure.
    Failed(GenerationError),
}

/// Log-probability of one token.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprob {
    /// The token.
    pub token_id: u32,
    /// Natural logarithm of its probability under the raw logits; none when the probability is zero.
    pub logprob: Option<f32>,
    /// The bytes it stands for.
    pub token_bytes: Vec<u8>,
}

/// Log-probabilities of one generated position.
#[derive(Clone, Debug, PartialEq)]
pub struct PositionLogprobs {
    /// The token that was chosen.
    pub chosen: TokenLogprob,
    /// The most likely tokens, best first; ties by the lower id.
    pub top: Vec<TokenLogprob>,
}

/// Why a generation ended well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// An end token, a stop string or a stop token.
    Stop,
    /// The limit of tokens or the end of the context.
    Length,
    /// Cancelled by request.
    Cancelled,
}

/// Token counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Length of the prompt.
    pub prompt_tokens: u32,
    /// Generated tokens, an end token included.
    pub completion_tokens: u32,
}

/// Wall-clock times; not part of what is reproducible.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Timings {
    /// From submission to admission.
    pub queue_ms: f64,
    /// From admission to the first sampled token.
    pub prefill_ms: f64,
    /// From the first sampled token to the end.
    pub decode_ms: f64,
    /// Per worker, over the steps this generation took part in (they are shared with the rest of the batch).
    pub workers: Vec<WorkerTimings>,
}

/// What one worker did in the steps of a generation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WorkerTimings {
    /// Name of the worker.
    pub worker_id: String,
    /// Result messages.
    pub results: u64,
    /// Pairs of row and expert it computed.
    pub expert_rows: u64,
    /// Time spent computing, by its own clock.
    pub compute_ms: f64,
    /// Time the step thread had nothing left to do but wait for it.
    pub wait_ms: f64,
}

/// How a generation ended.
#[derive(Clone, Debug, PartialEq)]
pub struct Finished {
    /// Why.
    pub reason: FinishReason,
    /// The stop string that matched, when one did.
    pub matched_stop: Option<String>,
    /// Token counts.
    pub usage: Usage,
    /// Wall-clock times.
    pub timings: Timings,
    /// 64 hex digits, when asked for.
    pub logits_sha256: Option<String>,
}

/// Why a generation failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GenerationError {
    /// An expert has no live owner, or its worker was lost with this generation's rows.
    #[error("unavailable: {detail}")]
    Unavailable {
        /// Which worker or expert, and what happened.
        detail: String,
    },
    /// A NaN, an infinity or an overflow in this generation's own arithmetic.
    #[error("{what} at position {position}{}", layer.map(|layer| format!(", layer {layer}")).unwrap_or_default())]
    Arithmetic {
        /// What left the range of numbers.
        what: String,
        /// Layer, where it happened inside one.
        layer: Option<u32>,
        /// Absolute position in the sequence, from 0.
        position: u32,
    },
    /// The client left more than the limit of events unread.
    #[error("the client left {unread} events unread")]
    SlowConsumer {
        /// The limit that was passed.
        unread: usize,
    },
    /// The engine is shutting down.
    #[error("the engine is shutting down")]
    ShuttingDown,
    /// Another stream goes on with it.
    #[error("resumed elsewhere")]
    Displaced,
    /// A token came out otherwise than in an earlier run: something between the two runs is not what it says it is.
    #[error(
        "token {index} of the answer came out as {now}, but was {earlier} in an earlier run of the same request"
    )]
    Diverged {
        /// Place among the generated tokens, from 0.
        index: u32,
        /// Token of the earlier run.
        earlier: u32,
        /// Token now.
        now: u32,
    },
}

/// Makes the channel of one generation. `limit` is the largest number of unread events.
pub fn event_channel(limit: usize) -> (EventSender, EventStream) {
    let (sender, receiver) = mpsc::unbounded_channel();
    let unread = Arc::new(AtomicUsize::new(0));
    (EventSender { sender, unread: Arc::clone(&unread), limit }, EventStream { receiver, unread })
}

/// The step thread's end.
#[derive(Clone, Debug)]
pub struct EventSender {
    sender: mpsc::UnboundedSender<Event>,
    unread: Arc<AtomicUsize>,
    limit: usize,
}

impl EventSender {
    /// Sends without waiting; an event for a client that has gone is dropped.
    pub fn send(&self, event: Event) {
        self.unread.fetch_add(1, Ordering::Relaxed);
        if self.sender.send(event).is_err() {
            self.unread.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// The client dropped its stream.
    pub fn is_closed(&self) -> bool {
        self.sender.is_closed()
    }

    /// The limit, once more than that many events are unread.
    pub fn overrun(&self) -> Option<usize> {
        (self.unread.load(Ordering::Relaxed) > self.limit).then_some(self.limit)
    }
}

/// The client's end. Dropping it ends the generation within one step.
#[derive(Debug)]
pub struct EventStream {
    receiver: mpsc::UnboundedReceiver<Event>,
    unread: Arc<AtomicUsize>,
}

impl EventStream {
    /// Waits for the next event; none after the last one.
    pub async fn recv(&mut self) -> Option<Event> {
        let event = self.receiver.recv().await;
        self.count(event)
    }

    /// The same for a thread that is not inside an async runtime.
    pub fn blocking_recv(&mut self) -> Option<Event> {
        let event = self.receiver.blocking_recv();
        self.count(event)
    }

    fn count(&self, event: Option<Event>) -> Option<Event> {
        if event.is_some() {
            self.unread.fetch_sub(1, Ordering::Relaxed);
        }
        event
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unread_events_are_counted_and_a_dropped_stream_is_seen() {
        let (sender, mut stream) = event_channel(2);
        let event = || Event::Failed(GenerationError::ShuttingDown);
        for _ in 0..3 {
            assert_eq!(sender.overrun(), None);
            sender.send(event());
        }
        assert_eq!(sender.overrun(), Some(2));
        assert_eq!(stream.blocking_recv(), Some(event()));
        assert_eq!(sender.overrun(), None);
        drop(stream);
        assert!(sender.is_closed());
        sender.send(event());
    }
}
