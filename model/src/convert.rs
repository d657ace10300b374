//! From a Hugging Face checkpoint to a container: tensor by tensor in bounded memory, continued where it was stopped, and
//! with the same bytes however often it was.
//!
//! A file is written under a temporary name, flushed, renamed, and then recorded in the state directory. The manifest is
//! written when all files are there; only then the state goes. Killed at any point, the same command continues with the
//! first file that is not recorded.

mod experts;
mod state;
mod trunk;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use shimmer_kernels::MATH_ID;

use crate::class::NumericClass;
use crate::container::Container;
use crate::error::{Error, Result};
use crate::files;
use crate::manifest::{
    ExpertEntry, FileEntry, MANIFEST_FILE, Manifest, SCHEMA_VERSION, SourceInfo, TensorEntry,
};
use crate::plan::Plan;
use crate::safetensors::Written;
use crate::schema::{EXPERTS_DIRECTORY, TEXT_FILES};
use state::{Start, State};

/// What to convert, and into what.
#[derive(Debug, Clone)]
pub struct ConvertOptions {
    /// Checkpoint directory.
    pub source: PathBuf,
    /// Container directory; made if it does not exist.
    pub out: PathBuf,
    /// Formats.
    pub class: NumericClass,
    /// Name of the model; that of the checkpoint directory if not given.
    pub name: Option<String>,
}

/// Told about the course of a conversion, a verification or the staging of a mirror. All methods may be called from several threads.
pub trait ConvertProgress: Sync {
    /// Work begins: bytes that will be written or read, without those that are done already.
    fn start(&self, _total_bytes: u64) {}
    /// A file is begun.
    fn file(&self, _name: &str) {}
    /// So many more bytes are done.
    fn advance(&self, _bytes: u64) {}
    /// Something that the user should read.
    fn note(&self, _text: &str) {}
    /// Asked between pieces: whether to stop.
    fn stop(&self) -> bool {
        false
    }
}

/// Tells nobody.
impl ConvertProgress for () {}

/// What a conversion did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConvertReport {
    /// Identity of the container.
    pub digest: String,
    /// Bytes of all files of the container but the manifest.
    pub bytes: u64,
    /// Files written by this call.
    pub files_written: usize,
    /// Files that an earlier call had finished.
    pub files_kept: usize,
    /// What the user should know.
    pub notes: Vec<String>,
}

impl FileEntry {
    fn of(name: &str, written: Written) -> Self {
        Self {
            file: name.to_owned(),
            bytes: written.bytes,
            blake3: written.header_digest.to_hex().to_string(),
        }
    }
}

/// One file of the container with its contents, as recorded in the state.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Unit {
    entry: FileEntry,
    tensors: Vec<TensorEntry>,
    experts: Vec<ExpertEntry>,
}

/// Converts a checkpoint. Runs on the current rayon pool; the bytes do not depend on it.
pub fn convert(options: &ConvertOptions, progress: &dyn ConvertProgress) -> Result<ConvertReport> {
    let mut plan = Plan::make(&options.source, &options.class)?;
    if !options.source.join("tokenizer.json").is_file() {
        plan.warnings.push(
            "there is no tokenizer.json: the container can be given token ids only, no text"
                .to_owned(),
        );
    }
    for warning in &plan.warnings {
        tracing::warn!(checkpoint = %options.source.display(), "{warning}");
        progress.note(warning);
    }
    let fingerprint = fingerprint(&plan, &options.class)?;
    let state = match State::begin(&options.out, &options.source, &fingerprint)? {
        Start::Complete(container) => return Ok(complete(&container, &plan)),
        Start::Work(state) => state,
    };
    let job = Job { plan: &plan, options, progress };
    let (units, written) = job.run(&state)?;
    let manifest = job.manifest(fingerprint, units);
    files::write_atomic(&options.out.join(MANIFEST_FILE), &manifest.encode())?;
    state.remove()?;
    // The same checks that every user of the container makes.
    let container = Container::open(&options.out)?;
    Ok(ConvertReport {
        files_written: written,
        files_kept: manifest.files.len() - written,
        ..complete(&container, &plan)
    })
}

fn complete(container: &Container, plan: &Plan) -> ConvertReport {
    let files = &container.manifest().files;
    ConvertReport {
        digest: container.digest().to_owned(),
        bytes: files.iter().map(|entry| entry.bytes).sum(),
        files_written: 0,
        files_kept: files.len(),
        notes: plan.warnings.clone(),
    }
}

/// Identifies a conversion: the checkpoint with its text files and a sample of its data, the formats, and the arithmetic.
fn fingerprint(plan: &Plan, class: &NumericClass) -> Result<String> {
    let mut hasher = blake3::Hasher::new();
    hasher.update(plan.checkpoint.fingerprint()?.as_bytes());
    hasher.update(format!("{class} {MATH_ID} {SCHEMA_VERSION}").as_bytes());
    Ok(hasher.finalize().to_hex().to_string())
}

struct Job<'a> {
    plan: &'a Plan,
    options: &'a ConvertOptions,
    progress: &'a dyn ConvertProgress,
}

/// A file to be made.
#[derive(Debug, Clone, Copy)]
enum Task {
    Text(&'static str),
    Trunk,
    /// Index among the plan's layers.
    Layer(usize),
}

impl Job<'_> {
    /// Makes every file that is not recorded yet; returns all and how many were made now.
    fn run(&self, state: &State) -> Result<(Vec<Unit>, usize)> {
        let out = &self.options.out;
        files::create_directory(&out.join(EXPERTS_DIRECTORY))?;
        let mut todo = Vec::new();
        let mut needed = 0;
        let mut units = Vec::new();
        for task in self.tasks() {
            let name = self.name(task);
            match state.recorded(&name)? {
                Some(unit) => units.push((name, Some(unit))),
                None => {
                    needed += self.bytes(task)?;
                    todo.push(task);
                    units.push((name, None));
                }
            }
        }
        files::require_space(out, needed + MARGIN_BYTES)?;
        self.progress.start(needed);
        let written = todo.len();
        let mut made = Vec::with_capacity(written);
        for task in todo {
            let name = self.name(task);
            self.progress.file(&name);
            let unit = self.make(task, &name)?;
            state.record(&name, &unit)?;
            made.push(unit);
        }
        let mut made = made.into_iter();
        let all = units
            .into_iter()
            .map(|(_, unit)| unit.or_else(|| made.next()).expect("what was not recorded was made"))
            .collect();
        Ok((all, written))
    }

    fn tasks(&self) -> Vec<Task> {
        let source = &self.options.source;
        let texts =
            TEXT_FILES.into_iter().filter(|name| source.join(name).is_file()).map(Task::Text);
        let layers = (0..self.plan.layers.len()).map(Task::Layer);
        texts.chain([Task::Trunk]).chain(layers).collect()
    }

    fn name(&self, task: Task) -> String {
        match task {
            Task::Text(name) => name.to_owned(),
            Task::Trunk => crate::schema::TRUNK_FILE.to_owned(),
            Task::Layer(index) => crate::schema::expert_file(self.plan.layers[index].layer),
        }
    }

    fn bytes(&self, task: Task) -> Result<u64> {
        match task {
            Task::Text(name) => {
                let path = self.options.source.join(name);
                files::length(&files::open(&path)?, &path)
            }
            Task::Trunk => trunk::bytes(self.plan),
            Task::Layer(index) => experts::bytes(self, &self.plan.layers[index]),
        }
    }

    fn make(&self, task: Task, name: &str) -> Result<Unit> {
        match task {
            Task::Text(name) => self.copy(name),
            Task::Trunk => trunk::write(self, name),
            Task::Layer(index) => experts::write(self, name, &self.plan.layers[index]),
        }
    }

    fn copy(&self, name: &str) -> Result<Unit> {
        let bytes = files::read_small(&self.options.source.join(name))?;
        files::write_atomic(&self.options.out.join(name), &bytes)?;
        self.progress.advance(bytes.len() as u64);
        let entry = FileEntry {
            file: name.to_owned(),
            bytes: bytes.len() as u64,
            blake3: blake3::hash(&bytes).to_hex().to_string(),
        };
        Ok(Unit { entry, tensors: Vec::new(), experts: Vec::new() })
    }

    /// Fails when the user wants to stop.
    fn check_stop(&self) -> Result<()> {
        if self.progress.stop() {
            Err(Error::Stopped { path: self.options.out.clone() })
        } else {
            Ok(())
        }
    }

    fn manifest(&self, fingerprint: String, units: Vec<Unit>) -> Manifest {
        let directory_name = |path: &Path| {
            let path = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
            path.file_name().map(|name| name.to_string_lossy().into_owned())
        };
        let name = self
            .options
            .name
            .clone()
            .or_else(|| directory_name(&self.options.source))
            .unwrap_or_default();
        let tensors = self.plan.checkpoint.tensors();
        let (count, bytes) =
            tensors.fold((0, 0), |(count, bytes), (_, _, info)| (count + 1, bytes + info.bytes()));
        let mut manifest = Manifest {
            schema_version: SCHEMA_VERSION,
            math_id: MATH_ID.to_owned(),
            digest: String::new(),
            source: SourceInfo {
                name,
                fingerprint,
                tensors: count,
                bytes,
                notes: self.plan.warnings.clone(),
            },
            config: self.plan.config.clone(),
            numeric_class: self.options.class,
            files: Vec::new(),
            tensors: Vec::new(),
            experts: Vec::new(),
        };
        for unit in units {
            manifest.files.push(unit.entry);
            manifest.tensors.extend(unit.tensors);
            manifest.experts.extend(unit.experts);
        }
        manifest.digest = manifest.compute_digest();
        manifest
    }
}

/// Room for the manifest, the state and the file system's own needs.
const MARGIN_BYTES: u64 = 32 << 20;

#[cfg(test)]
mod tests;
