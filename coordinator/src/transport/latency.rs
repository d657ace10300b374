//! How long a worker may take, and how long it usually takes: by what it took lately for work of the same size. A plain state
//! machine; times are arguments.

use std::time::Duration;

/// A worker that takes this many times longer than its slowest recent reply is lost.
const MULTIPLE: u32 = 8;
/// Replies remembered per size; the slowest of so many stands for the 99th percentile.
const WINDOW: usize = 64;
/// Replies before the measurement is believed.
const ENOUGH: usize = 16;
/// One of so many replies is no measure of what is usual: it may be the one that came while the host was busy.
const ONE_OUTLIER_OF: usize = 24;
/// Sizes are told apart by the power of two of their rows, see [`size`].
pub(super) const SIZES: usize = 14;

#[derive(Debug, Clone)]
pub(super) struct LatencyTracker {
    floor: Duration,
    ceiling: Duration,
    sizes: Vec<Window>,
}

#[derive(Debug, Clone, Default)]
struct Window {
    replies: Vec<Duration>,
    next: usize,
}

impl LatencyTracker {
    pub(super) fn new(floor: Duration, ceiling: Duration) -> Self {
        Self { floor: floor.min(ceiling), ceiling, sizes: vec![Window::default(); SIZES] }
    }

    pub(super) fn record(&mut self, rows: u32, took: Duration) {
        let window = &mut self.sizes[size(rows)];
        if window.replies.len() < WINDOW {
            window.replies.push(took);
        } else {
            window.replies[window.next] = took;
            window.next = (window.next + 1) % WINDOW;
        }
    }

    /// How long work of so many rows may take.
    pub(super) fn deadline(&self, rows: u32) -> Duration {
        let window = &self.sizes[size(rows)];
        if window.replies.len() < ENOUGH {
            return self.ceiling;
        }
        let slowest = window.replies.iter().max().copied().unwrap_or(self.ceiling);
        slowest.saturating_mul(MULTIPLE).clamp(self.floor, self.ceiling)
    }

    /// How long work of so many rows takes at most, outliers aside; none while too little has been measured.
    pub(super) fn usual(&self, rows: u32) -> Option<Duration> {
        let replies = &self.sizes[size(rows)].replies;
        if replies.len() < ENOUGH {
            return None;
        }
        let mut slowest = [Duration::ZERO; WINDOW / ONE_OUTLIER_OF + 1];
        for &took in replies {
            // The smallest of the slowest makes room.
            if let Some(least) = slowest.iter_mut().min().filter(|least| **least < took) {
                *least = took;
            }
        }
        slowest.sort_unstable_by(|a, b| b.cmp(a));
        slowest.get(replies.len() / ONE_OUTLIER_OF).copied()
    }
}

/// The place of a size among [`SIZES`].
pub(super) fn size(rows: u32) -> usize {
    (rows.max(1).ilog2() as usize).min(SIZES - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(replies: &[(u32, u64, usize)], rows: u32, expected_ms: u64) {
        let ms = Duration::from_millis;
        let mut tracker = LatencyTracker::new(ms(500), ms(10_000));
        for &(rows, took, times) in replies {
            (0..times).for_each(|_| tracker.record(rows, ms(took)));
        }
        assert_eq!(tracker.deadline(rows), ms(expected_ms), "{replies:?}");
    }

    #[test]
    fn deadlines_follow_what_was_measured() {
        check(&[], 1, 10_000);
        check(&[(1, 1, 15)], 1, 10_000);
        check(&[(1, 1, 16)], 1, 500);
        check(&[(1, 100, 16)], 1, 800);
        check(&[(1, 1, 60), (1, 200, 1)], 1, 1600);
        check(&[(1, 200, 1), (1, 1, 64)], 1, 500);
        check(&[(1, 5000, 20)], 1, 10_000);
        check(&[(1, 1, 64), (512, 300, 20)], 700, 2400);
        check(&[(1, 1, 64)], 512, 10_000);
        check(&[(u32::MAX, 100, 20)], u32::MAX, 800);
    }

    #[test]
    fn what_is_usual_is_not_told_by_outliers() {
        let ms = Duration::from_millis;
        let usual = |replies: &[(u64, usize)]| {
            let mut tracker = LatencyTracker::new(ms(500), ms(10_000));
            for &(took, times) in replies {
                (0..times).for_each(|_| tracker.record(1, ms(took)));
            }
            tracker.usual(1)
        };
        assert_eq!(usual(&[(5, 15)]), None);
        assert_eq!(usual(&[(5, 16)]), Some(ms(5)));
        assert_eq!(usual(&[(5, 16), (900, 1)]), Some(ms(900)), "of a few, all count");
        assert_eq!(usual(&[(5, 40), (900, 1)]), Some(ms(5)));
        assert_eq!(usual(&[(5, 60), (900, 2)]), Some(ms(5)));
        assert_eq!(usual(&[(5, 60), (7, 1), (900, 2)]), Some(ms(7)));
        assert_eq!(usual(&[(5, 60), (900, 4)]), Some(ms(900)));
    }
}
