//! The one error type of this crate. Every variant names the file, and the tensor where there is one, and says what
//! to do: a checkpoint of hundreds of gigabytes that is refused must not leave its user guessing.

use std::path::{Path, PathBuf};

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a checkpoint or a container is refused, or could not be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system refused a file operation.
    #[error("{action} {}: {source}", path.display())]
    Io { action: &'static str, path: PathBuf, source: std::io::Error },

    /// A JSON file is not valid JSON or not of the expected shape.
    #[error("{}: not the expected JSON: {source}", path.display())]
    Json { path: PathBuf, source: serde_json::Error },

    /// A file that must exist does not.
    #[error("{} is missing: {hint}", path.display())]
    MissingFile { path: PathBuf, hint: String },

    /// Shards that the index names are not in the directory.
    #[error(
        "{}: {} of the {named} files named by {index} are missing ({}); {diagnosis}",
        directory.display(), absent.len(), listing(absent)
    )]
    MissingShards {
        directory: PathBuf,
        index: String,
        named: usize,
        absent: Vec<String>,
        diagnosis: String,
    },

    /// The header of a safetensors file breaks a rule of the format.
    #[error("{}: bad safetensors header{}: {problem}; {hint}", file.display(), of_tensor(tensor.as_deref()))]
    Header { file: PathBuf, tensor: Option<String>, problem: String, hint: &'static str },

    /// A file is shorter or longer than its header says.
    #[error("{}: {expected} bytes expected, the file has {found}; {hint}", file.display())]
    FileLength { file: PathBuf, expected: u64, found: u64, hint: &'static str },

    /// The index sends a tensor to a file whose header does not have it.
    #[error(
        "{index} maps tensor {tensor} to {file}, whose header does not have it ({found}); {hint}"
    )]
    IndexMismatch { index: String, tensor: String, file: String, found: String, hint: &'static str },

    /// One tensor name in two files.
    #[error(
        "tensor {tensor} is in both {first} and {second}; remove the file that does not belong to this checkpoint"
    )]
    DuplicateTensor { tensor: String, first: String, second: String },

    /// A tensor that the architecture needs is not there.
    #[error("tensor {tensor} is missing in {}: {case}; {hint}", place.display())]
    MissingTensor { place: PathBuf, tensor: String, case: MissingCase, hint: String },

    /// Tensors that nothing reads: they would be dropped in silence.
    #[error(
        "{}: {count} tensors that a {family} model with this config does not have, first {tensor} in {file}; {hint}",
        directory.display()
    )]
    UnexpectedTensors {
        directory: PathBuf,
        family: String,
        count: usize,
        tensor: String,
        file: String,
        hint: &'static str,
    },

    /// A tensor has another shape than the architecture needs.
    #[error("{}: tensor {tensor} has shape {found:?}, expected {expected:?}; {hint}", file.display())]
    Shape { file: PathBuf, tensor: String, expected: Vec<u64>, found: Vec<u64>, hint: String },

    /// A tensor has a data type that cannot be read.
    #[error("{}: tensor {tensor} has data type {found}; {hint}", file.display())]
    DataType { file: PathBuf, tensor: String, found: String, hint: &'static str },

    /// A weight is NaN or infinite.
    #[error("{}: tensor {tensor} holds a value that is not finite at element {element}; the file is damaged or was saved from a diverged training run", file.display())]
    NotFinite { file: PathBuf, tensor: String, element: u64 },

    /// A key of the model configuration is missing, malformed, or asks for something that is not implemented.
    #[error("{}: {key}: {problem}; {hint}", file.display())]
    Config { file: PathBuf, key: String, problem: String, hint: String },

    /// The model family is not one of the supported ones.
    #[error("{}: model_type {found} is not supported; supported are {supported}", file.display())]
    UnsupportedFamily { file: PathBuf, found: String, supported: String },

    /// The checkpoint is quantised in a way that is not understood.
    #[error("{}: {what} says that the weights are quantised ({detail}); {hint}", file.display())]
    Quantised { file: PathBuf, what: String, detail: String, hint: &'static str },

    /// A manifest is not acceptable.
    #[error("{}: {problem}; {hint}", file.display())]
    Manifest { file: PathBuf, problem: String, hint: &'static str },

    /// Stored bytes do not have the digest that the manifest promises.
    #[error("{}: {what} has digest {found}, the manifest says {expected}; the file is damaged: restore it or convert again", file.display())]
    Digest { file: PathBuf, what: String, expected: String, found: String },

    /// A layer file is not in this container directory.
    #[error("{}: experts of layer {layer} are not in this container directory; copy the file here or give the layer to another worker", file.display())]
    AbsentLayer { file: PathBuf, layer: u32 },

    /// A question about something that the container does not have.
    #[error("{}: there is no {what}", place.display())]
    NoSuch { place: PathBuf, what: String },

    /// The output directory cannot be written to as asked.
    #[error("{}: {problem}; {hint}", path.display())]
    Output { path: PathBuf, problem: String, hint: &'static str },

    /// The file system has not enough room.
    #[error("{}: {needed} more bytes are needed, the file system has {free} free; make room or choose another directory", path.display())]
    NoSpace { path: PathBuf, needed: u64, free: u64 },

    /// The work was told to stop.
    #[error("work on {} was stopped; run the same command again to continue", path.display())]
    Stopped { path: PathBuf },

    /// A GGUF file is malformed or holds something that is not implemented.
    #[error("{}: bad GGUF{}: {problem}; {hint}", file.display(), of_tensor(tensor.as_deref()))]
    Gguf { file: PathBuf, tensor: Option<String>, problem: String, hint: &'static str },

    /// The source of the demo model is not the expected one.
    #[error("{}: {problem}; {hint}", file.display())]
    DemoSource { file: PathBuf, problem: String, hint: &'static str },

    /// A matrix or expert has impossible dimensions.
    #[error("{what}: {source}")]
    Layout { what: String, source: shimmer_kernels::LayoutError },
}

/// The three ways in which a tensor can be missing from a checkpoint or container.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MissingCase {
    /// An index exists and does not name the tensor, and no header has it.
    #[error("the name is not in {index} and no header has it")]
    NotInIndex { index: String },
    /// The index names a file for it, but that file's header lacks it.
    #[error("{index} maps it to {file}, whose header lacks it")]
    HeaderLacksIt { index: String, file: String },
    /// There is one file, and its header lacks it.
    #[error("the header of {file} lacks it")]
    NotInFile { file: String },
}

impl Error {
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Self::Io { action, path, source }
    }

    pub(crate) fn json(path: &Path) -> impl FnOnce(serde_json::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Self::Json { path, source }
    }

    pub(crate) fn layout(
        what: impl Into<String>,
    ) -> impl FnOnce(shimmer_kernels::LayoutError) -> Self {
        let what = what.into();
        move |source| Self::Layout { what, source }
    }
}

fn of_tensor(tensor: Option<&str>) -> String {
    tensor.map(|name| format!(", tensor {name}")).unwrap_or_default()
}

/// At most eight names, then how many more there are.
fn listing(names: &[String]) -> String {
    const SHOWN: usize = 8;
    let mut text = names.iter().take(SHOWN).map(String::as_str).collect::<Vec<_>>().join(", ");
    if names.len() > SHOWN {
        text.push_str(&format!(" and {} more", names.len() - SHOWN));
    }
    text
}
