//! Who is let in: mutual TLS between real processes, and TLS, keys and limits of the public port.

mod members;
mod public_port;

use std::{path::Path, time::Duration};

use shimmer_tests::{
    process::{Process, shimmer_binary},
    wait::wait_until,
};

/// For anything that happens by itself on a busy machine.
const SOON: Duration = Duration::from_secs(60);

/// Waits until a process has said something.
fn wait_for_line(process: &Process, part: &str) {
    let what = format!("{} to say {part:?}", process.name());
    wait_until(&what, SOON, || process.log().contains(part));
}

/// Runs a command to its end: exit code, standard output, standard error.
fn run(args: &[&str], envs: &[(&str, &str)]) -> (i32, String, String) {
    let mut command = std::process::Command::new(shimmer_binary());
    command.args(args);
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("SHIMMER_") {
            command.env_remove(name);
        }
    }
    let output = command.envs(envs.iter().copied()).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code().unwrap_or(-1), text(&output.stdout), text(&output.stderr))
}

/// As a flag takes it.
fn flag(path: &Path) -> String {
    path.display().to_string()
}
