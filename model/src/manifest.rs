//! `manifest.json`: what a container holds, where, and with which digests. It is written last, so a directory without
//! one is not a container, and its own digest is the identity that coordinators and workers compare.

use std::path::Path;

use serde::{Deserialize, Serialize};
use shimmer_kernels::WeightFormat;

use crate::class::NumericClass;
use crate::config::ModelConfig;
use crate::error::{Error, Result};
use crate::files;

/// File name of the manifest.
pub const MANIFEST_FILE: &str = "manifest.json";

/// Version of the container's structure. Others are refused.
pub const SCHEMA_VERSION: u32 = 1;

/// A container, described.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// Arithmetic that the container was made for; layouts and scale search are part of it.
    pub math_id: String,
    /// blake3 over the canonical manifest, in hex: see [`Manifest::compute_digest`].
    pub digest: String,
    /// Where the container came from; for people, not part of the digest.
    pub source: SourceInfo,
    /// The model.
    pub config: ModelConfig,
    /// Formats of its numbers.
    pub numeric_class: NumericClass,
    /// Every file but the manifest.
    pub files: Vec<FileEntry>,
    /// Every tensor of the trunk.
    pub tensors: Vec<TensorEntry>,
    /// Every routed expert, by layer, then by number.
    pub experts: Vec<ExpertEntry>,
}

/// Where a container came from.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SourceInfo {
    /// Name of the model, from its directory unless given.
    pub name: String,
    /// Identifies the conversion: checkpoint, a sample of its data, formats, arithmetic.
    pub fingerprint: String,
    /// Tensors of the checkpoint.
    pub tensors: u64,
    /// Their bytes.
    pub bytes: u64,
    /// What the conversion had to say: skipped layers, keys without effect.
    pub notes: Vec<String>,
}

/// A file of the container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// Path below the container directory.
    pub file: String,
    /// Its length.
    pub bytes: u64,
    /// blake3 in hex: of the whole file for text files, of the JSON of the header for tensor files, whose
    /// data is covered by the digests of its tensors.
    pub blake3: String,
}

/// A tensor of the trunk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorEntry {
    /// Canonical name, such as `layers.3.q`.
    pub name: String,
    /// File below the container directory.
    pub file: String,
    /// First byte in the file.
    pub offset: u64,
    /// Bytes, padding included.
    pub bytes: u64,
    /// `[rows, columns]` of a matrix, `[length]` of a vector.
    pub shape: Vec<usize>,
    /// Format of a matrix in R16 layout; vectors are f32.
    pub format: WeightFormat,
    /// blake3 of the bytes, in hex.
    pub blake3: String,
}

/// A routed expert.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExpertEntry {
    /// Layer.
    pub layer: u32,
    /// Number in the layer.
    pub expert: u32,
    /// File below the container directory.
    pub file: String,
    /// First byte in the file; a multiple of 4096.
    pub offset: u64,
    /// Bytes; a multiple of 4096.
    pub bytes: u64,
    /// blake3 of the bytes, in hex.
    pub blake3: String,
    /// Digest of the expert's output for the self-test row, in hex: see [`crate::self_test`].
    pub self_test: String,
}

impl Manifest {
    /// blake3 over the compact JSON of the manifest with empty `digest` and `source`: the container's identity. Fields are
    /// in the order of this type and numbers in their shortest form, so equal manifests have equal bytes.
    #[must_use]
    pub fn compute_digest(&self) -> String {
        let canonical =
            Self { digest: String::new(), source: SourceInfo::default(), ..self.clone() };
        let bytes =
            serde_json::to_vec(&canonical).expect("a manifest has no value that JSON lacks");
        blake3::hash(&bytes).to_hex().to_string()
    }

    /// Reads and checks the manifest of a container directory: version, arithmetic, digest.
    pub fn read(directory: &Path) -> Result<Self> {
        let file = directory.join(MANIFEST_FILE);
        if !file.is_file() {
            let hint =
                "this is not a complete container; run shimmer convert, or run it again to finish"
                    .to_owned();
            return Err(Error::MissingFile { path: file, hint });
        }
        Self::parse(&file, &files::read_small(&file)?)
    }

    /// Parses and checks the bytes of a manifest.
    pub(crate) fn parse(file: &Path, bytes: &[u8]) -> Result<Self> {
        let refuse =
            |problem, hint| Err(Error::Manifest { file: file.to_path_buf(), problem, hint });
        // The version is looked at first: the rest of another version need not parse.
        #[derive(Deserialize)]
        struct Version {
            schema_version: u32,
            math_id: String,
        }
        let version: Version = serde_json::from_slice(bytes).map_err(Error::json(file))?;
        if version.schema_version != SCHEMA_VERSION {
            let problem =
                format!("schema version {} is not {SCHEMA_VERSION}", version.schema_version);
            return refuse(problem, "convert the checkpoint with this version of shimmer");
        }
        if version.math_id != shimmer_kernels::MATH_ID {
            let problem =
                format!("arithmetic {:?} is not {:?}", version.math_id, shimmer_kernels::MATH_ID);
            return refuse(problem, "convert the checkpoint with this version of shimmer");
        }
        let manifest: Self = serde_json::from_slice(bytes).map_err(Error::json(file))?;
        let found = manifest.compute_digest();
        if found != manifest.digest {
            let what = "the manifest".to_owned();
            return Err(Error::Digest {
                file: file.to_path_buf(),
                what,
                expected: manifest.digest,
                found,
            });
        }
        Ok(manifest)
    }

    /// The bytes of the file.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes =
            serde_json::to_vec_pretty(self).expect("a manifest has no value that JSON lacks");
        bytes.push(b'\n');
        bytes
    }
}
