//! A container, a server and a directory that it comes into.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use shimmer_model::{Manifest, NumericClass, tiny::Preset};
use shimmer_tests::{
    file_server::{FileServer, Reply, Request},
    models::TinyModel,
    process::{Process, shimmer_binary, without_variables},
};
use tempfile::TempDir;

pub(super) const DEADLINE: Duration = Duration::from_secs(60);
/// Files of the tiny container have many of these.
pub(super) const PIECE: &str = "16KiB";

pub(super) struct Bench {
    pub(super) _model: TinyModel,
    pub(super) dir: TempDir,
    pub(super) source: PathBuf,
    pub(super) out: PathBuf,
    pub(super) digest: String,
}

/// How a command ended, and everything that it said.
pub(super) struct Ended {
    pub(super) ok: bool,
    pub(super) code: Option<i32>,
    pub(super) said: String,
}

impl Bench {
    pub(super) fn new() -> Self {
        let model = TinyModel::new(Preset::Glm4Moe);
        let source = model.container(NumericClass::default());
        let dir = TempDir::new().unwrap();
        let out = dir.path().join("out");
        let digest = Manifest::read(&source).unwrap().digest;
        Self { _model: model, dir, source, out, digest }
    }

    pub(super) fn serve(
        &self,
        rule: impl Fn(&Request) -> Reply + Send + Sync + 'static,
    ) -> FileServer {
        FileServer::start(&self.source, rule)
    }

    pub(super) fn args(&self, source: &str, more: &[&str]) -> Vec<String> {
        let out = self.out.to_str().unwrap();
        let first = ["fetch", source, "--out", out, "--digest", &self.digest, "--piece", PIECE];
        first.iter().chain(more).map(|&arg| arg.to_owned()).collect()
    }

    pub(super) fn shimmer(&self, args: &[&str], envs: &[(&str, &str)]) -> Ended {
        let mut command = Command::new(shimmer_binary());
        without_variables(&mut command);
        // The machine's own proxies and keys are no part of a test.
        for (name, _) in std::env::vars() {
            let upper = name.to_ascii_uppercase();
            if upper.ends_with("_PROXY") || upper.starts_with("AWS_") {
                command.env_remove(name);
            }
        }
        let output = command.args(args).envs(envs.iter().copied()).output().unwrap();
        let said = [output.stdout, output.stderr].concat();
        let said = String::from_utf8_lossy(&said).into_owned();
        Ended { ok: output.status.success(), code: output.status.code(), said }
    }

    pub(super) fn fetch(&self, source: &str, more: &[&str], envs: &[(&str, &str)]) -> Ended {
        let args = self.args(source, more);
        self.shimmer(&args.iter().map(String::as_str).collect::<Vec<_>>(), envs)
    }

    pub(super) fn must(&self, source: &str, more: &[&str]) -> String {
        let ended = self.fetch(source, more, &[]);
        assert!(ended.ok, "{}", ended.said);
        ended.said
    }

    /// The same command in the background.
    pub(super) fn start(&self, name: &str, source: &str, more: &[&str]) -> Process {
        let none: [(&'static str, &str); 1] = [("NO_PROXY", "*")];
        Process::shimmer(name, &self.args(source, more), none, self.dir.path())
    }

    /// The directory has every byte, and nothing else.
    pub(super) fn check_whole(&self) {
        let (found, expected) = (files(&self.out), files(&self.source));
        let names = |files: &[(PathBuf, Vec<u8>)]| {
            files.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>()
        };
        assert_eq!(names(&found), names(&expected));
        for ((name, found), (_, expected)) in found.iter().zip(&expected) {
            assert!(found == expected, "{} differs", name.display());
        }
    }

    /// Nothing calls itself a container.
    pub(super) fn check_not_whole(&self) {
        assert!(!self.out.join("manifest.json").exists(), "it looks like a whole container");
    }
}

fn files(root: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let (mut found, mut directories) = (Vec::new(), vec![root.to_owned()]);
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                directories.push(path);
            } else {
                let name = path.strip_prefix(root).unwrap().to_owned();
                found.push((name, fs::read(path).unwrap()));
            }
        }
    }
    found.sort();
    found
}
