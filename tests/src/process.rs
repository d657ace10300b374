//! One child process of the sandbox, with its output in a file.

use std::{
    env,
    ffi::OsStr,
    fs::{self, File},
    io::{self, Read as _, Write as _},
    net::TcpStream,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    time::Duration,
};

use crate::wait::wait_for;

/// For the answer of a page of figures.
const PAGE_DEADLINE: Duration = Duration::from_secs(30);
/// How much of a log a failing test shows.
const LOG_TAIL_BYTES: usize = 8 * 1024;

/// The `shimmer` binary of the build that this test or tool belongs to.
///
/// # Panics
/// It has not been built.
pub fn shimmer_binary() -> PathBuf {
    let own = env::current_exe().expect("a running program has a path");
    // Tests lie in PROFILE/deps, tools beside the binary.
    let mut profile = own.parent().expect("a program lies in a directory");
    if profile.ends_with("deps") {
        profile = profile.parent().expect("cargo puts tests into PROFILE/deps");
    }
    let binary = profile.join("shimmer");
    assert!(
        binary.is_file(),
        "{} is missing: these tests drive the real binary, build it first with `cargo build -p shimmer-cli`",
        binary.display()
    );
    binary
}

/// Keeps every `SHIMMER_` variable of the caller's environment from a command.
pub fn without_variables(command: &mut Command) -> &mut Command {
    for (key, _) in env::vars_os() {
        if key.to_string_lossy().starts_with("SHIMMER_") {
            command.env_remove(key);
        }
    }
    command
}

/// Arguments of a short greedy generation inside one process, which answers with a line of JSON.
///
/// # Panics
/// The path is not UTF-8.
pub fn generate_args(container: &Path, more: &[&str]) -> Vec<String> {
    let container = container.to_str().expect("a test's path is UTF-8");
    let first = ["generate", "--in-process", "--container", container, "--threads", "1"];
    let prompt = ["--prompt-tokens", "9", "--max-tokens", "6", "--ignore-eos"];
    let answer = ["--temperature", "0", "--json"];
    first.iter().chain(&prompt).chain(&answer).chain(more).map(|&arg| arg.to_owned()).collect()
}

/// A running child. Dropping it kills it and, when the test is panicking, shows the end of its log.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
    log: PathBuf,
}

impl Process {
    /// Starts `shimmer ARGS`, without any `SHIMMER_` variable of the caller's environment.
    ///
    /// # Panics
    /// The process cannot be started.
    pub fn shimmer<A: AsRef<str>, V: AsRef<OsStr>>(
        name: &str,
        args: &[A],
        envs: impl IntoIterator<Item = (&'static str, V)>,
        log_dir: &Path,
    ) -> Self {
        let mut command = Command::new(shimmer_binary());
        command.args(args.iter().map(AsRef::as_ref));
        without_variables(&mut command).envs(envs);
        Self::spawn(name, command, log_dir)
    }

    /// Starts any command with its standard output and standard error in `log_dir/NAME.log`.
    ///
    /// # Panics
    /// The process cannot be started.
    pub fn spawn(name: &str, mut command: Command, log_dir: &Path) -> Self {
        let log = log_dir.join(format!("{name}.log"));
        let open = || File::options().create(true).append(true).open(&log);
        let output =
            || open().unwrap_or_else(|error| panic!("cannot write {}: {error}", log.display()));
        command.stdin(Stdio::null()).stdout(output()).stderr(output());
        let child = command.spawn().unwrap_or_else(|error| panic!("cannot start {name}: {error}"));
        Self { name: name.to_owned(), child, log }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Everything it has written so far.
    pub fn log(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    /// The port that it says it listens on (`listening on ADDRESS:PORT`).
    ///
    /// # Panics
    /// It ends or says nothing within `deadline`.
    pub fn listening_port(&mut self, deadline: Duration) -> u16 {
        let what = format!("{} to listen", self.name);
        wait_for(&what, deadline, || {
            if let Some(status) = self.ended() {
                panic!("{} ended with {status} instead of listening:\n{}", self.name, self.log());
            }
            let log = self.log();
            let line = log.lines().find_map(|line| line.strip_prefix("listening on "))?;
            line.trim().rsplit_once(':')?.1.parse().ok()
        })
    }

    /// What it answers on its page of figures, which it was told to have; a process that still starts is waited for.
    ///
    /// # Panics
    /// It does not answer, or says for too long that it starts.
    pub fn page(&self, path: &str) -> String {
        let address = self.page_address();
        let ask = || -> io::Result<String> {
            let mut socket = TcpStream::connect(&address)?;
            socket.set_read_timeout(Some(PAGE_DEADLINE))?;
            write!(socket, "GET {path} HTTP/1.1\r\nHost: x\r\n\r\n")?;
            let mut answer = String::new();
            socket.read_to_string(&mut answer)?;
            Ok(answer)
        };
        wait_for(&format!("{path} of {}", self.name), PAGE_DEADLINE, || {
            let answer = ask().unwrap_or_else(|error| panic!("{path} of {}: {error}", self.name));
            let (head, body) = answer.split_once("\r\n\r\n").expect("an answer has a head");
            (!head.starts_with("HTTP/1.1 503")).then(|| body.to_owned())
        })
    }

    /// Where its page of figures is, which it was told to have.
    ///
    /// # Panics
    /// It does not say.
    pub fn page_address(&self) -> String {
        let what = format!("the address of the page of {}", self.name);
        wait_for(&what, PAGE_DEADLINE, || {
            let log = self.log();
            let line = log.lines().find_map(|line| line.strip_prefix("metrics on http://"))?;
            line.strip_suffix("/metrics").map(str::to_owned)
        })
    }

    /// Its status, if it has ended.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// Sends a signal by its name, for example "TERM", "STOP" or "CONT".
    ///
    /// # Panics
    /// There is no `kill` command or no such signal.
    pub fn signal(&self, signal: &str) {
        let status =
            Command::new("kill").args([&format!("-{signal}"), &self.pid().to_string()]).status();
        assert!(
            status.is_ok_and(|status| status.success()),
            "cannot send SIG{signal} to {}",
            self.name
        );
    }

    /// Kills it at once (SIGKILL) and reaps it.
    pub fn kill(&mut self) {
        let killed: io::Result<()> = self.child.kill();
        drop(killed); // It may have ended by itself.
        drop(self.child.wait());
    }

    /// Waits until it has ended.
    ///
    /// # Panics
    /// It is still running after `deadline`.
    pub fn wait_for_end(&mut self, deadline: Duration) -> ExitStatus {
        let what = format!("the end of {}", self.name);
        wait_for(&what, deadline, || self.ended())
    }
}

impl Drop for Process {
    #[expect(
        clippy::print_stderr,
        reason = "the log of a failed test is for the person who reads it"
    )]
    fn drop(&mut self) {
        self.kill();
        if std::thread::panicking() {
            let log = self.log();
            let start = log.ceil_char_boundary(log.len().saturating_sub(LOG_TAIL_BYTES));
            eprintln!("--- log of {} ---\n{}", self.name, &log[start..]);
        }
    }
}
