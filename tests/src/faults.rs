//! Faults between a real process and its kernel: `preload/faults.c`, made into a library that goes before the system's.

use std::{fs, io::ErrorKind, path::PathBuf, process::Command};

use tempfile::TempDir;

const SOURCE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/preload/faults.c");

/// What processes that were started with [`Self::envs`] meet.
#[derive(Debug)]
pub struct Faults {
    directory: TempDir,
}

impl Faults {
    /// Builds the library. None, with the reason on standard output, where that cannot be done.
    ///
    /// # Panics
    /// The compiler refuses the source.
    pub fn new() -> Option<Self> {
        if !cfg!(all(target_os = "linux", target_env = "gnu")) {
            return skip("it takes the dynamic linker of glibc");
        }
        let faults = Self { directory: TempDir::new().expect("a temporary directory can be made") };
        let mut compiler = Command::new("cc");
        compiler.args(["-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", SOURCE, "-o"]);
        compiler.arg(faults.library()).args(["-ldl", "-pthread"]);
        let output = match compiler.output() {
            Ok(output) => output,
            Err(error) if error.kind() == ErrorKind::NotFound => return skip("there is no cc"),
            Err(error) => panic!("cannot run cc: {error}"),
        };
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        faults.set("none");
        Some(faults)
    }

    /// Changes what happens from now on; `preload/faults.c` lists what can.
    ///
    /// # Panics
    /// The file that the processes look at cannot be replaced.
    pub fn set(&self, fault: &str) {
        let fresh = self.directory.path().join("next");
        fs::write(&fresh, fault)
            .and_then(|()| fs::rename(&fresh, self.now()))
            .expect("the test's own directory takes files");
    }

    /// Variables of a process that is to meet them.
    pub fn envs(&self) -> Vec<(&'static str, PathBuf)> {
        vec![("LD_PRELOAD", self.library()), ("FAULTS", self.now()), ("READS", self.notes())]
    }

    /// Where these processes have read in the experts' files so far: path and offset.
    ///
    /// # Panics
    /// What the library wrote is not what it should write.
    pub fn reads(&self) -> Vec<(PathBuf, u64)> {
        let parse = |line: &str| -> Option<(PathBuf, u64)> {
            let (offset, path) = line.split_once(' ')?;
            Some((path.into(), offset.parse().ok()?))
        };
        let notes = fs::read_to_string(self.notes()).unwrap_or_default();
        notes.lines().map(|line| parse(line).expect("a line is an offset and a path")).collect()
    }

    fn notes(&self) -> PathBuf {
        self.directory.path().join("reads")
    }

    fn library(&self) -> PathBuf {
        self.directory.path().join("faults.so")
    }

    fn now(&self) -> PathBuf {
        self.directory.path().join("now")
    }
}

#[expect(clippy::print_stdout, reason = "what is skipped is for the person who reads the output")]
fn skip(reason: &str) -> Option<Faults> {
    println!("skipped: faults between a process and its kernel: {reason}");
    None
}
