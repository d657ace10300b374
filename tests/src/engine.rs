//! A Docker engine, where one runs: images of the binary under test, made from a base that needs no registry.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
    time::UNIX_EPOCH,
};

use sha2::{Digest as _, Sha256};
use tempfile::TempDir;

use crate::process::{shimmer_binary, without_variables};

/// Names the root file system that ./test has made.
const BASE_VARIABLE: &str = "SHIMMER_TEST_CONTAINER_BASE";
/// Before the names of all images of these tests.
const PREFIX: &str = "shimmer-test";

/// An engine that answers.
#[derive(Debug)]
pub struct Engine {
    base: PathBuf,
}

impl Engine {
    /// The engine of this machine.
    ///
    /// # Errors
    /// Why there are no containers here.
    pub fn find() -> Result<Self, String> {
        docker(&["version", "--format", "{{.Server.Version}}"])
            .map_err(|_| "no Docker engine answers here".to_owned())?;
        let base = env::var_os(BASE_VARIABLE).map(PathBuf::from);
        let base = base.filter(|base| base.is_file());
        let base = base.ok_or_else(|| {
            format!("{BASE_VARIABLE} names no root file system; ./test makes one with debootstrap")
        })?;
        Ok(Self { base })
    }

    /// The image of a target of deploy/Dockerfile, with the binary of this build. It is built once for each binary.
    ///
    /// # Panics
    /// It cannot be built.
    pub fn image(&self, target: &str) -> String {
        let base = self.base();
        let file = deploy().join("Dockerfile");
        let text = fs::read_to_string(&file).expect("the Dockerfile can be read");
        made(target, &[&text, &base, &stamp(&shimmer_binary())], |tag| {
            let context = TempDir::new().expect("a temporary directory can be made");
            strip(&shimmer_binary(), &context.path().join("shimmer"));
            let argument =
                |name: &str, value: &str| [String::from("--build-arg"), format!("{name}={value}")];
            let mut args: Vec<String> =
                ["build", "--quiet", "--tag", tag, "--target", target, "--file"]
                    .map(str::to_owned)
                    .to_vec();
            args.push(file.display().to_string());
            args.extend(argument("BUILD_IMAGE", &base));
            args.extend(argument("BASE_IMAGE", &base));
            args.extend(argument("SHIMMER_BINARY", "shimmer"));
            args.extend(argument("REVISION", "under-test"));
            args.push(context.path().display().to_string());
            docker(&args).unwrap_or_else(|error| panic!("building {target}: {error}"));
        })
    }

    /// An image that differs from another one by a label, as that of the next version does.
    ///
    /// # Panics
    /// It cannot be built.
    pub fn next_version(&self, image: &str) -> String {
        let text = format!("FROM {image}\nLABEL org.opencontainers.image.version=next\n");
        self.derived("next", &text, &[])
    }

    /// An image of some programs of this host on the base.
    ///
    /// # Errors
    /// A program is not there.
    ///
    /// # Panics
    /// The image cannot be built.
    pub fn host_image(
        &self,
        name: &str,
        programs: &[&str],
        directives: &str,
    ) -> Result<String, String> {
        let paths: Vec<PathBuf> = (programs.iter())
            .map(|program| on_path(program).ok_or_else(|| format!("{program} is not on the path")))
            .collect::<Result<_, _>>()?;
        let text = format!("FROM {}\nCOPY . /bin/\n{directives}\n", self.base());
        Ok(self.derived(name, &text, &paths))
    }

    fn derived(&self, name: &str, text: &str, files: &[PathBuf]) -> String {
        let stamps: Vec<String> = files.iter().map(|file| stamp(file)).collect();
        let parts: Vec<&str> =
            [text].into_iter().chain(stamps.iter().map(String::as_str)).collect();
        made(name, &parts, |tag| {
            let context = TempDir::new().expect("a temporary directory can be made");
            for file in files {
                let name = file.file_name().expect("a program has a name");
                fs::copy(file, context.path().join(name)).expect("a program can be copied");
            }
            let outside = TempDir::new().expect("a temporary directory can be made");
            let dockerfile = outside.path().join("Dockerfile");
            fs::write(&dockerfile, text).expect("a file can be written");
            let (file, context) = (dockerfile.display(), context.path().display());
            docker(&[
                "build",
                "--quiet",
                "--tag",
                tag,
                "--file",
                &file.to_string(),
                &context.to_string(),
            ])
            .unwrap_or_else(|error| panic!("building {name}: {error}"));
        })
    }

    fn base(&self) -> String {
        made("base", &[&stamp(&self.base)], |tag| {
            docker(&["import", &self.base.display().to_string(), tag])
                .unwrap_or_else(|error| panic!("importing {}: {error}", self.base.display()));
        })
    }
}

/// Standard output of `docker ARGS`.
///
/// # Errors
/// What it said instead.
pub fn docker<A: AsRef<str>>(args: &[A]) -> Result<String, String> {
    // The classic builder is the one that every engine has.
    let mut command = Command::new("docker");
    command.env("DOCKER_BUILDKIT", "0");
    output(command.args(args.iter().map(AsRef::as_ref)))
}

/// Standard output of a command that succeeds, without the variables of the caller's settings.
pub(crate) fn output(command: &mut Command) -> Result<String, String> {
    let output = without_variables(command).output().map_err(|error| error.to_string())?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim_end().to_owned();
    if output.status.success() {
        return Ok(text(&output.stdout));
    }
    Err(format!("{}: {}\n{}", output.status, text(&output.stderr), text(&output.stdout)))
}

/// The directory with the Dockerfile.
pub(crate) fn deploy() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy")
}

/// The image of a name and of what it is made of; images of the name that are made of something else go.
fn made(name: &str, of: &[&str], make: impl FnOnce(&str)) -> String {
    let mut hasher = Sha256::new();
    of.iter().for_each(|part| hasher.update(part));
    let digest = hex::encode(hasher.finalize());
    let (repository, tag) = (format!("{PREFIX}/{name}"), &digest[..16]);
    let image = format!("{repository}:{tag}");
    if docker(&["image", "inspect", &image]).is_err() {
        let known = docker(&["image", "ls", "--format", "{{.Repository}}:{{.Tag}}", &repository]);
        make(&image);
        for old in known.unwrap_or_default().lines() {
            // One that a container still uses stays.
            drop(docker(&["image", "rm", old]));
        }
    }
    image
}

/// Changes whenever a file does.
fn stamp(file: &Path) -> String {
    let metadata = fs::metadata(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    let changed = metadata.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    format!("{} {} {changed:?}\n", file.display(), metadata.len())
}

/// Copies a program, without its debug information where there is a tool for that.
fn strip(from: &Path, to: &Path) {
    let stripped = Command::new("strip").arg("-o").arg(to).arg(from).status();
    if !stripped.is_ok_and(|status| status.success()) {
        fs::copy(from, to).expect("a program can be copied");
    }
}

fn on_path(program: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH")?;
    env::split_paths(&path).map(|directory| directory.join(program)).find(|path| path.is_file())
}
