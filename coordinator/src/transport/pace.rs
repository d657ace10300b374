//! Whether a worker has become slow: it answers, and in time, but takes several times what it took before and what others
//! take. A plain state machine over answers; times are arguments.
//!
//! One late message says little, because a host stops a process for hundreds of milliseconds now and then; and where
//! everybody is late, the load is the reason. So a worker is slow if the mean of many answers is, while others are as ever.

use std::time::Duration;

use super::latency::{SIZES, size};
use crate::dispatch::Pace;

/// No answer counts as more times slower than this, so that a single one is not the mean of sixteen.
const RATIO_MAX: f64 = 8.0;
/// Weight of an answer in the mean. Six answers in a row that are eight times slower make a worker slow, and eleven out of
/// twenty: 1 + 7 x (1 - (15/16)^6) = 3.2.
const WEIGHT: f64 = 1.0 / 16.0;
/// A worker is slow at so many times the pace of the others. Whoever takes over its work has twice as much at worst, so it
/// pays at three.
const SLOW: f64 = 3.0;
/// And others read its experts while it is at so many.
const STILL_SLOW: f64 = 2.0;
/// An answer of a slow worker that says that it is well again.
const WELL: f64 = 1.5;
/// So many of these in a row are believed, and twice as many after each relapse: a host that is slow under load only looks
/// well while it is spared.
const WELLS_MIN: u32 = 8;
const WELLS_MAX: u32 = 256;
/// Answers without a relapse after which relapses are forgotten.
const FORGIVEN: u32 = 1024;
/// Answers of a size before it is known how long they take.
const KNOWN: u32 = 16;
/// By how much of itself what is typical follows an answer, once it is known: seventeen that make a worker slow move it by
/// seven in a hundred.
const STEP: f64 = 1.0 / 256.0;
/// Answers that are faster than this are measured by it, microseconds: a busy host delays each by milliseconds.
const LEAST_US: f64 = 1000.0;
/// What a slow worker has to cost before others read its experts from their drives for it.
const COSTLY: Duration = Duration::from_millis(250);

/// See the module.
#[derive(Debug, Clone)]
pub(super) struct WorkerPace {
    typical: [Typical; SIZES],
    /// Mean of how many times longer than typical answers took.
    ratio: f64,
    pace: Pace,
    /// Answers in a row that say that it is well, or since it is.
    wells: u32,
    wells_needed: u32,
    /// Time that it cost since it is slow.
    lost: Duration,
    /// The cost at which others read its experts.
    costly: Duration,
}

/// The median of what answers of one size took, followed in small steps: outliers do not move it by more than others.
#[derive(Debug, Clone, Copy, Default)]
struct Typical {
    micros: f64,
    seen: u32,
}

impl Typical {
    fn follow(&mut self, micros: f64) {
        if self.seen == 0 {
            self.micros = micros;
        }
        self.seen = self.seen.saturating_add(1);
        let step =
            self.micros * if self.seen < KNOWN { 1.0 / f64::from(self.seen + 1) } else { STEP };
        let to = micros.clamp(self.micros - step, self.micros + step);
        // A clock of microseconds gives zeros.
        self.micros = to.max(1.0);
    }
}

impl Default for WorkerPace {
    fn default() -> Self {
        Self {
            typical: [Typical::default(); SIZES],
            ratio: 1.0,
            pace: Pace::Usual,
            wells: 0,
            wells_needed: WELLS_MIN,
            lost: Duration::ZERO,
            costly: COSTLY,
        }
    }
}

impl WorkerPace {
    /// What it comes to.
    pub(super) fn pace(&self) -> Pace {
        self.pace
    }

    /// How many times longer than usual its answers take.
    pub(super) fn ratio(&self) -> f64 {
        self.ratio
    }

    /// Takes down an answer, with how many times longer than usual others take. True if the pace is another one now.
    pub(super) fn observe(&mut self, rows: u32, took: Duration, others: f64) -> bool {
        let before = self.pace;
        let micros = took.as_secs_f64() * 1e6;
        let typical = &mut self.typical[size(rows)];
        if before == Pace::Usual {
            typical.follow(micros);
        }
        if typical.seen < KNOWN {
            return false;
        }
        let usual = typical.micros;
        let ratio = (micros / usual.max(LEAST_US)).clamp(0.0, RATIO_MAX);
        self.ratio += (ratio - self.ratio) * WEIGHT;
        if before == Pace::Usual {
            self.judge_usual(others);
        } else {
            let usual = Duration::from_secs_f64(usual / 1e6);
            self.judge_slow(ratio, took.saturating_sub(usual), others);
        }
        self.pace != before
    }

    fn judge_usual(&mut self, others: f64) {
        self.wells = self.wells.saturating_add(1);
        if self.wells == FORGIVEN {
            (self.wells_needed, self.costly) = (WELLS_MIN, COSTLY);
        }
        if self.ratio >= SLOW * others.max(1.0) {
            (self.pace, self.wells, self.lost) = (Pace::Slow, 0, Duration::ZERO);
        }
    }

    fn judge_slow(&mut self, ratio: f64, lost: Duration, others: f64) {
        self.wells = if ratio < WELL { self.wells + 1 } else { 0 };
        if self.wells >= self.wells_needed {
            (self.pace, self.wells, self.ratio) = (Pace::Usual, 0, 1.0);
            self.wells_needed = (self.wells_needed * 2).min(WELLS_MAX);
            return;
        }
        self.lost = self.lost.saturating_add(lost);
        if others >= self.ratio {
            // Reading its experts costs the others as much as waiting for it.
            if self.pace == Pace::Costly {
                self.costly = self.costly.saturating_mul(2);
            }
            (self.pace, self.lost) = (Pace::Slow, Duration::ZERO);
        } else if self.lost >= self.costly && self.ratio >= STILL_SLOW * others.max(1.0) {
            self.pace = Pace::Costly;
        }
    }
}

/// What is usual among others: the lower median of their ratios. One if there are none.
pub(super) fn usual_among(others: impl Iterator<Item = f64>) -> f64 {
    let mut ratios: Vec<f64> = others.collect();
    ratios.sort_unstable_by(f64::total_cmp);
    ratios.get(ratios.len().saturating_sub(1) / 2).copied().unwrap_or(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A worker that has answered for a while, and then so.
    fn check(answers: &[(u32, u64, usize)], others: f64, expected: Pace) -> WorkerPace {
        let mut worker = WorkerPace::default();
        for &(rows, ms, times) in [(32, 4, 64), (1, 1, 64)].iter().chain(answers) {
            for _ in 0..times {
                worker.observe(rows, Duration::from_millis(ms), others);
            }
        }
        assert_eq!(worker.pace(), expected, "{answers:?} beside {others}: {}", worker.ratio());
        worker
    }

    #[test]
    fn a_worker_that_takes_ten_times_as_long_is_slow_after_a_few_answers_of_any_size() {
        check(&[(32, 40, 5)], 1.0, Pace::Usual);
        check(&[(32, 40, 6)], 1.0, Pace::Slow);
        check(&[(32, 40, 3), (1, 10, 3)], 1.0, Pace::Slow);
        check(&[(32, 16, 30)], 1.0, Pace::Slow);
        check(&[(32, 8, 1000)], 1.0, Pace::Usual);
    }

    #[test]
    fn noise_is_no_slowness() {
        check(&[(32, 900, 1), (32, 4, 9), (32, 900, 1)], 1.0, Pace::Usual);
        check(&[(32, 400, 5)], 1.0, Pace::Usual);
        let every_fifth = [(32, 900, 1), (32, 4, 4)].repeat(40);
        check(&every_fifth, 1.0, Pace::Usual);
    }

    #[test]
    fn a_delay_of_a_busy_host_is_no_slowness_of_a_fast_worker() {
        let mut worker = WorkerPace::default();
        let mut answer = |us, times| {
            for _ in 0..times {
                worker.observe(8, Duration::from_micros(us), 1.0);
            }
            worker.pace()
        };
        assert_eq!(answer(200, 64), Pace::Usual);
        assert_eq!(answer(2500, 200), Pace::Usual);
        assert_eq!(answer(12_000, 20), Pace::Slow);
    }

    #[test]
    fn where_everybody_is_late_nobody_is_slow() {
        check(&[(32, 40, 200)], 4.0, Pace::Usual);
        check(&[(32, 40, 200)], 1.5, Pace::Costly);
    }

    #[test]
    fn a_size_that_is_new_says_nothing() {
        check(&[(512, 4000, 15)], 1.0, Pace::Usual);
    }

    #[test]
    fn it_is_well_when_answers_in_a_row_say_so() {
        check(&[(32, 40, 6), (32, 4, 7)], 1.0, Pace::Slow);
        check(&[(32, 40, 6), (32, 4, 8)], 1.0, Pace::Usual);
        check(&[(32, 40, 6), (32, 4, 7), (32, 40, 1), (32, 4, 7)], 1.0, Pace::Slow);
    }

    #[test]
    fn a_relapse_takes_longer_to_be_forgotten() {
        let relapsed = [(32, 40, 6), (32, 4, 8), (32, 40, 6)];
        check(&[&relapsed[..], &[(32, 4, 15)]].concat(), 1.0, Pace::Slow);
        check(&[&relapsed[..], &[(32, 4, 16)]].concat(), 1.0, Pace::Usual);
        let forgiven = [(32, 40, 6), (32, 4, 8 + 1024), (32, 40, 6), (32, 4, 8)];
        check(&forgiven, 1.0, Pace::Usual);
    }

    #[test]
    fn others_read_its_experts_only_if_that_pays() {
        check(&[(32, 40, 6 + 6)], 1.0, Pace::Slow);
        check(&[(32, 40, 6 + 7)], 1.0, Pace::Costly);
        let mut worker = check(&[(32, 40, 6 + 7)], 1.0, Pace::Costly);
        let mut answer = |others| {
            worker.observe(32, Duration::from_millis(40), others);
            worker.pace()
        };
        assert_eq!(answer(7.5), Pace::Slow, "they are as slow with it");
        let again = (0..40).position(|_| answer(1.0) == Pace::Costly);
        assert_eq!(again, Some(13), "and wait for twice the cost to try again");
    }

    #[test]
    fn what_is_usual_among_others_is_their_lower_median() {
        let check = |ratios: &[f64], expected: f64| {
            assert_eq!(usual_among(ratios.iter().copied()).to_bits(), expected.to_bits());
        };
        check(&[], 1.0);
        check(&[4.0], 4.0);
        check(&[5.0, 1.0], 1.0);
        check(&[9.0, 2.0, 1.0], 2.0);
    }
}
