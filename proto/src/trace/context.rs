//! The W3C trace context.

use std::fmt;

use crate::expert::v1::TraceParent;

/// Name of the header and of the gRPC metadata.
pub const TRACEPARENT: &str = "traceparent";

/// Which span of which trace something belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TraceContext {
    /// Never 0.
    pub trace: u128,
    /// Never 0.
    pub span: u64,
    /// The caller records its part.
    pub sampled: bool,
}

impl TraceContext {
    /// Reads a `traceparent` as the recommendation says; none if it is not one, which is no error of the request.
    pub fn parse(text: &str) -> Option<Self> {
        let bytes = text.as_bytes();
        let (version, rest) = bytes.split_at_checked(2)?;
        let version = hex(version)?;
        // Later versions may only add fields.
        let fits = match version {
            0 => bytes.len() == 55,
            0xff => false,
            _ => bytes.len() == 55 || bytes.get(55) == Some(&b'-'),
        };
        let dashes = [0, 33, 50].map(|at| rest.get(at) == Some(&b'-'));
        if !fits || dashes != [true; 3] {
            return None;
        }
        let trace = hex(rest.get(1..33)?)?;
        let span = u64::try_from(hex(rest.get(34..50)?)?).ok()?;
        let flags = hex(rest.get(51..53)?)?;
        (trace != 0 && span != 0).then_some(Self { trace, span, sampled: flags & 1 == 1 })
    }

    /// As a work message carries it. Only work of a sampled step does.
    pub fn on_wire(self) -> TraceParent {
        let [high, low] = [self.trace >> 64, self.trace & u128::from(u64::MAX)]
            .map(|half| u64::try_from(half).expect("half of an id"));
        TraceParent { trace_high: high, trace_low: low, span: self.span }
    }

    /// Reads it from a work message; none if an id is 0.
    pub fn from_wire(wire: TraceParent) -> Option<Self> {
        let trace = u128::from(wire.trace_high) << 64 | u128::from(wire.trace_low);
        let (span, sampled) = (wire.span, true);
        (trace != 0 && span != 0).then_some(Self { trace, span, sampled })
    }

    /// The trace id as 32 digits, as log lines have it.
    pub fn trace_id(&self) -> String {
        format!("{:032x}", self.trace)
    }

    /// The span id as 16 digits.
    pub fn span_id(&self) -> String {
        format!("{:016x}", self.span)
    }
}

/// The `traceparent`.
impl fmt::Display for TraceContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "00-{:032x}-{:016x}-{:02x}", self.trace, self.span, u8::from(self.sampled))
    }
}

/// Lower-case digits only, as the recommendation has it.
fn hex(digits: &[u8]) -> Option<u128> {
    digits.iter().try_fold(0, |value, digit| {
        let digit = match digit {
            b'0'..=b'9' => digit - b'0',
            b'a'..=b'f' => digit - b'a' + 10,
            _ => return None,
        };
        Some(value << 4 | u128::from(digit))
    })
}
