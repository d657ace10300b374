//! A child process of this binary that listens on a port.

use std::{
    fs::File,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use tokio::{
    io::{AsyncBufReadExt as _, BufReader, Lines},
    process::{Child, ChildStdout, Command},
};

use crate::error::Error;

/// Time for a process to end when asked to.
const STOP_DEADLINE: Duration = Duration::from_secs(3);
/// Variables that a child keeps; the rest are settings for one process, not for three.
const INHERITED: [&str; 3] = ["SHIMMER_ISA", "SHIMMER_LOG", "SHIMMER_LOG_FORMAT"];

/// A running child. Dropping it kills the process.
#[derive(Debug)]
pub(in crate::commands) struct Process {
    name: String,
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
    log: PathBuf,
}

impl Process {
    /// Starts this binary with the given flags; its log goes to `logs/NAME.log`.
    pub(in crate::commands) fn start(
        name: &str,
        flags: &[&str],
        logs: &Path,
    ) -> Result<Self, Error> {
        let failed = |error| Error::failed(format!("cannot start {name}"), error);
        let log = logs.join(format!("{name}.log"));
        let mut command = Command::new(std::env::current_exe().map_err(failed)?);
        let own = std::env::vars_os().map(|(variable, _)| variable).filter(|variable| {
            variable
                .to_str()
                .is_some_and(|name| name.starts_with("SHIMMER_") && !INHERITED.contains(&name))
        });
        for variable in own {
            command.env_remove(variable);
        }
        command
            .args(flags)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(File::create(&log).map_err(failed)?)
            .kill_on_drop(true);
        let mut child = command.spawn().map_err(failed)?;
        let stdout = child.stdout.take().expect("standard output is piped");
        Ok(Self { name: name.to_owned(), child, lines: BufReader::new(stdout).lines(), log })
    }

    /// The address that it says it listens on.
    pub(in crate::commands) async fn address(
        &mut self,
        deadline: Duration,
    ) -> Result<String, Error> {
        let line = match tokio::time::timeout(deadline, self.lines.next_line()).await {
            Ok(Ok(line)) => line,
            Ok(Err(error)) => {
                return Err(Error::failed(format!("cannot hear {}", self.name), error));
            }
            Err(_) => return Err(self.failed("it did not listen in time")),
        };
        let address = line.as_deref().and_then(|line| line.strip_prefix("listening on "));
        address.map(str::to_owned).ok_or_else(|| self.failed("it ended before it listened"))
    }

    /// Where its log goes.
    pub(in crate::commands) fn log(&self) -> PathBuf {
        self.log.clone()
    }

    /// Refuses a process that has ended.
    pub(in crate::commands) fn check(&mut self) -> Result<(), Error> {
        match self.child.try_wait() {
            Ok(None) => Ok(()),
            Ok(Some(status)) => Err(self.failed(&format!("it ended with {status}"))),
            Err(error) => Err(Error::failed(format!("cannot watch {}", self.name), error)),
        }
    }

    fn failed(&self, what: &str) -> Error {
        let last = std::fs::read_to_string(&self.log).unwrap_or_default();
        let last =
            last.lines().rfind(|line| line.contains("error")).or_else(|| last.lines().last());
        let detail = last.map_or_else(|| what.to_owned(), |line| format!("{what}: {line}"));
        Error::failed(format!("{} does not run", self.name), detail)
            .with_hint(format!("its log is {}", self.log.display()))
    }

    /// Asks the process to end, and kills it if it does not.
    pub(in crate::commands) async fn stop(mut self) {
        if let Some(id) = self.child.id() {
            // The standard library can only kill.
            let asked = Command::new("kill").args(["-TERM", &id.to_string()]).status().await;
            if asked.is_ok_and(|status| status.success())
                && tokio::time::timeout(STOP_DEADLINE, self.child.wait()).await.is_ok()
            {
                return;
            }
        }
        if let Err(error) = self.child.kill().await {
            tracing::warn!(process = self.name, %error, "cannot be stopped");
        }
    }
}
