//! Lines of a log that a peer can cause: a handful every few seconds, and in the next one how many were left out.

use std::{
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

/// Time after which lines are written again. A flood of minutes is seen as such and fills no disk.
const WINDOW: Duration = Duration::from_secs(5);
/// Lines in that time. Peers that are refused for different reasons are each seen.
const LINES: u32 = 20;

/// Lines about one kind of event.
#[derive(Debug, Default)]
pub struct Flood(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// When the window began, and the lines written in it.
    begun: Option<Instant>,
    lines: u32,
    left_out: u64,
}

impl Flood {
    /// Something happened. Whether to write a line of it: then how many were left out since the last one.
    pub fn line(&self) -> Option<u64> {
        self.line_at(Instant::now())
    }

    fn line_at(&self, now: Instant) -> Option<u64> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if state.begun.is_none_or(|begun| now.saturating_duration_since(begun) >= WINDOW) {
            (state.begun, state.lines) = (Some(now), 0);
        }
        if state.lines == LINES {
            state.left_out += 1;
            return None;
        }
        state.lines += 1;
        Some(std::mem::take(&mut state.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_has_a_handful_of_lines_for_each_time() {
        let (flood, begin) = (Flood::default(), Instant::now());
        for _ in 0..LINES {
            assert_eq!(flood.line_at(begin), Some(0));
        }
        for ms in 1..=1000 {
            assert_eq!(flood.line_at(begin + Duration::from_millis(ms)), None);
        }
        assert_eq!(flood.line_at(begin + WINDOW), Some(1000));
        assert_eq!(flood.line_at(begin + WINDOW), Some(0), "told once");
    }
}
