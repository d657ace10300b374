//! Waiting for a condition, never for a time.

use std::{
    thread,
    time::{Duration, Instant},
};

/// How often a condition is looked at.
const POLL: Duration = Duration::from_millis(10);

/// Returns what `condition` gives as soon as it gives something.
///
/// # Panics
/// Nothing came within `deadline`; the message says what was waited for.
pub fn wait_for<T>(what: &str, deadline: Duration, mut condition: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(value) = condition() {
            return value;
        }
        assert!(start.elapsed() < deadline, "waited {deadline:?} in vain for {what}");
        thread::sleep(POLL);
    }
}

/// [`wait_for`] with a yes-or-no condition.
///
/// # Panics
/// It stayed false for `deadline`.
pub fn wait_until(what: &str, deadline: Duration, mut condition: impl FnMut() -> bool) {
    wait_for(what, deadline, || condition().then_some(()));
}
