//! Lines of a log that a peer can cause: one every few seconds, and in the next one how many were left out.

use std::{
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

/// Time from one line to the next. A flood of minutes is seen as such and fills no disk.
const BETWEEN_LINES: Duration = Duration::from_secs(5);

/// Lines about one kind of event.
#[derive(Debug, Default)]
pub struct Flood(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    last: Option<Instant>,
    left_out: u64,
}

impl Flood {
    /// Something happened. Whether to write a line of it: then how many were left out since the last one.
    pub fn line(&self) -> Option<u64> {
        self.line_at(Instant::now())
    }

    fn line_at(&self, now: Instant) -> Option<u64> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if state.last.is_some_and(|last| now.saturating_duration_since(last) < BETWEEN_LINES) {
            state.left_out += 1;
            return None;
        }
        state.last = Some(now);
        Some(std::mem::take(&mut state.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_has_one_line_for_each_time() {
        let (flood, begin) = (Flood::default(), Instant::now());
        assert_eq!(flood.line_at(begin), Some(0));
        for ms in 1..=1000 {
            assert_eq!(flood.line_at(begin + Duration::from_millis(ms)), None);
        }
        assert_eq!(flood.line_at(begin + BETWEEN_LINES), Some(1000));
        assert_eq!(flood.line_at(begin + BETWEEN_LINES * 2), Some(0), "told once");
    }
}
