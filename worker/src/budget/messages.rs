//! What one coordinator's stream holds at most.
//!
//! Every size here is a limit that the shell sets: the window of a connection, the largest message that it reads. Nothing is
//! shared between coordinators, so that one that stops in mid message holds up nobody else.

use shimmer_model::ModelConfig;
use shimmer_proto::limits;

/// Fence, checksum, lengths and whatever else a message has once.
const ENVELOPE_BYTES: usize = 4 << 10;

/// Least window of HTTP/2: a connection begins with it.
const WINDOW_MIN: usize = 64 << 10;

/// Stack and runtime of the connection's thread, and what its sockets hold.
const THREAD_BYTES: usize = 256 << 10;

/// Sizes of the messages between a worker and one coordinator, bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MessageShape {
    /// The largest request that is read.
    pub request: usize,
    /// Rows of work as decoded, and what is kept of their order.
    pub decoded: usize,
    /// The largest answer.
    pub answer: usize,
}

impl MessageShape {
    /// Of a worker that announces `max_rows`. Coordinators cut work so that neither its rows nor their sums are larger than
    /// a part.
    pub fn of(model: &ModelConfig, max_rows: u32) -> Self {
        /// A row index of at most three bytes, a gate, and their lengths.
        const PAIR_BYTES: usize = 8;
        /// The number of an expert and of its rows; the same bounds one in an assignment.
        const EXPERT_BYTES: usize = 8;
        let hidden = model.hidden_size;
        // Values of 8 bits with a scale per group, or of 32 bits: at most the latter.
        let row = hidden * size_of::<f32>();
        let rows = limits::part_rows(row, hidden, max_rows);
        let experts = || model.moe_layers().map(|(_, experts)| experts as usize);
        let pairs = rows * model.gating.map_or(0, |gating| gating.top_k);
        let work = rows * row + pairs * PAIR_BYTES + experts().max().unwrap_or(0) * EXPERT_BYTES;
        let assignment = experts().sum::<usize>() * EXPERT_BYTES;
        let request = (work.max(assignment) + ENVELOPE_BYTES).min(limits::MAX_MESSAGE_BYTES);
        Self {
            request,
            decoded: rows * row + pairs * 2 * size_of::<usize>(),
            answer: rows * hidden * size_of::<i64>() + ENVELOPE_BYTES,
        }
    }

    /// Flow-control window of a connection, bytes: one message is on its way while another one is worked on.
    pub fn window(&self) -> u32 {
        u32::try_from(self.request.max(WINDOW_MIN)).unwrap_or(u32::MAX >> 1)
    }

    /// All that a coordinator's stream holds.
    pub fn bytes(&self) -> usize {
        let Self { request, decoded, answer } = *self;
        // One request in the window and one being read, one answer being sent and the next one.
        self.window() as usize + request + decoded + 2 * answer + THREAD_BYTES
    }
}
