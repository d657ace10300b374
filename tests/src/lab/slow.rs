//! A process that is slow, not dead: it runs for a tenth of the time.

use std::process::{Child, Command, Stdio};

/// Of every 20 ms the process stands still for all but this, in milliseconds.
const RUNS_MS: u32 = 2;
const PERIOD_MS: u32 = 20;

/// Slows a process down tenfold while it lives.
#[derive(Debug)]
pub struct Slow {
    pid: u32,
    driver: Child,
}

impl Slow {
    /// Begins.
    ///
    /// # Panics
    /// There is no bash.
    pub fn new(pid: u32) -> Self {
        // Builtins only: a process per signal would slow down everything else. Nothing ever comes from the pipe that is
        // read for the time that it takes.
        let script = format!(
            "while kill -STOP {pid} && ! read -t {} && kill -CONT {pid} && ! read -t {}; do :; done",
            seconds(PERIOD_MS - RUNS_MS),
            seconds(RUNS_MS),
        );
        let driver = Command::new("bash")
            .args(["-c", &script])
            .stdin(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("bash is installed");
        Self { pid, driver }
    }
}

fn seconds(ms: u32) -> String {
    format!("0.{ms:03}")
}

impl Drop for Slow {
    fn drop(&mut self) {
        drop(self.driver.kill());
        drop(self.driver.wait());
        // The process may have ended meanwhile.
        drop(
            Command::new("kill")
                .args(["-CONT", &self.pid.to_string()])
                .stderr(Stdio::null())
                .status(),
        );
    }
}
