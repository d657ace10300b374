//! Progress of long work: a bar for a person at a terminal, a line now and then for a log.

use std::{
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use shimmer_model::ConvertProgress;
use tokio_util::sync::CancellationToken;

use crate::output;

/// Between two lines in a log.
const LINE_INTERVAL: Duration = Duration::from_secs(5);

/// Shows the progress of one job, and hands on the wish to stop it.
#[derive(Debug)]
pub(crate) struct Progress {
    task: &'static str,
    bar: Option<ProgressBar>,
    lines: Mutex<Lines>,
    stop: CancellationToken,
}

#[derive(Debug)]
struct Lines {
    total: u64,
    done: u64,
    said: Instant,
}

impl Progress {
    /// A bar when standard error is a terminal, else lines. The job ends early once `stop` is cancelled.
    pub(crate) fn new(task: &'static str, stop: CancellationToken) -> Self {
        let bar = output::is_watched().then(|| {
            let bar =
                ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr_with_hz(10));
            let template =
                "{msg:<32!} {wide_bar} {bytes:>10}/{total_bytes:<10} {bytes_per_sec:>12} {eta:>4}";
            bar.set_style(ProgressStyle::with_template(template).expect("a valid template"));
            bar.set_message(task);
            bar
        });
        let lines = Mutex::new(Lines { total: 0, done: 0, said: Instant::now() });
        Self { task, bar, lines, stop }
    }

    /// Removes the bar.
    pub(crate) fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

impl ConvertProgress for Progress {
    fn start(&self, total_bytes: u64) {
        if let Some(bar) = &self.bar {
            bar.set_length(total_bytes);
        }
        self.lines.lock().unwrap_or_else(PoisonError::into_inner).total = total_bytes;
    }

    fn file(&self, name: &str) {
        if let Some(bar) = &self.bar {
            bar.set_message(format!("{} {name}", self.task));
        }
    }

    fn advance(&self, bytes: u64) {
        if let Some(bar) = &self.bar {
            bar.inc(bytes);
            return;
        }
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        lines.done = lines.done.saturating_add(bytes);
        if lines.said.elapsed() >= LINE_INTERVAL {
            lines.said = Instant::now();
            let percent =
                lines.done.saturating_mul(100).checked_div(lines.total).unwrap_or(100).min(100);
            output::note(&format!("{}: {percent} %", self.task));
        }
    }

    fn note(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| output::note(text)),
            None => output::note(text),
        }
    }

    fn stop(&self) -> bool {
        self.stop.is_cancelled()
    }
}
