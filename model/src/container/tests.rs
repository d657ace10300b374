//! Containers that are not as they should be. Structure is refused when a container is opened, data when it is read, and
//! `verify` names all of it.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;

use proptest::prelude::*;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::*;
use crate::manifest::MANIFEST_FILE;
use crate::testing::{check_text, checkpoint};
use crate::tiny::{Preset, TinyOptions};
use crate::{ConvertOptions, Inspection, NumericClass, convert, verify};

/// A container of three layers, the first dense, made once.
fn original() -> &'static Path {
    static DIRECTORY: OnceLock<TempDir> = OnceLock::new();
    let directory = DIRECTORY.get_or_init(|| {
        let source = checkpoint(Preset::Glm4Moe, &TinyOptions::default());
        let out = tempfile::tempdir().unwrap();
        let class = NumericClass::default();
        let options = ConvertOptions {
            source: source.path().into(),
            out: out.path().into(),
            class,
            name: None,
        };
        convert(&options, &()).unwrap();
        out
    });
    directory.path()
}

fn copy() -> TempDir {
    let copy = tempfile::tempdir().unwrap();
    fs::create_dir(copy.path().join("experts")).unwrap();
    for entry in &Manifest::read(original()).unwrap().files {
        fs::copy(original().join(&entry.file), copy.path().join(&entry.file)).unwrap();
    }
    fs::copy(original().join(MANIFEST_FILE), copy.path().join(MANIFEST_FILE)).unwrap();
    copy
}

/// Changes the manifest and gives it the digest that belongs to it.
fn edit_manifest(directory: &Path, change: impl FnOnce(&mut Manifest)) {
    let mut manifest = Manifest::read(directory).unwrap();
    change(&mut manifest);
    manifest.digest = manifest.compute_digest();
    fs::write(directory.join(MANIFEST_FILE), manifest.encode()).unwrap();
}

/// Opening a container with a changed manifest is refused with all fragments.
fn check_manifest(change: impl FnOnce(&mut Manifest), fragments: &[&str]) {
    let directory = copy();
    edit_manifest(directory.path(), change);
    check_open(directory.path(), fragments);
}

fn check_open(directory: &Path, fragments: &[&str]) {
    check_text(
        &Container::open(directory).expect_err("the container must be refused").to_string(),
        fragments,
    );
}

fn flip(path: &Path, offset: u64) {
    let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset).unwrap();
    file.write_all_at(&[byte[0] ^ 0x10], offset).unwrap();
}

#[test]
fn formats_are_stamped_and_checked_against_class_and_bytes() {
    use shimmer_kernels::WeightFormat::{Bf16, F16};
    // bf16 and f16 have the same number of bytes: only the stamp can tell.
    check_manifest(
        |manifest| manifest.numeric_class.trunk = F16,
        &["manifest.json", "embed", "q8g64", "f16"],
    );
    check_manifest(
        |manifest| manifest.tensors[2].format = Bf16,
        &["tensor layers.0.q", "stamped bf16", "q8g64"],
    );
    check_manifest(
        |manifest| manifest.tensors[2].bytes += 64,
        &["tensor layers.0.q", "its format needs"],
    );
    check_manifest(
        |manifest| manifest.numeric_class.experts = F16,
        &["expert 0 of layer 1", "its format needs"],
    );
}

#[test]
fn places_are_checked_against_the_headers() {
    check_manifest(
        |manifest| manifest.tensors[3].offset += 64,
        &["tensor layers.0.k", "its header says"],
    );
    check_manifest(
        |manifest| manifest.tensors.swap(0, 1),
        &["tensor head stands where embed should"],
    );
    check_manifest(
        |manifest| drop(manifest.tensors.pop()),
        &["tensors in the trunk, the model has"],
    );
    check_manifest(
        |manifest| manifest.experts[5].offset += 1,
        &["expert 5 of layer 1", "off page"],
    );
    check_manifest(
        |manifest| manifest.experts[5].offset += 4096,
        &["layers.1.experts.5", "its header says"],
    );
    check_manifest(
        |manifest| manifest.experts.swap(0, 1),
        &["expert 1 of layer 1", "where expert 0 of layer 1 should"],
    );
    check_manifest(
        |manifest| drop(manifest.experts.pop()),
        &["experts of layer 2 are not all listed"],
    );
    check_manifest(
        |manifest| manifest.files.retain(|entry| entry.file != "experts/layer-002.safetensors"),
        &["layer-002", "no entry"],
    );
}

#[test]
fn files_cannot_lie_outside() {
    for name in ["../secret", "/etc/passwd", "", "a/../../b"] {
        check_manifest(
            |manifest| manifest.files[0].file = name.to_owned(),
            &["leads out of the container"],
        );
    }
}

#[test]
fn impossible_descriptions_are_refused() {
    check_manifest(|manifest| manifest.config.hidden_size = 0, &["hidden_size is 0"]);
    check_manifest(|manifest| manifest.config.vocab_size = usize::MAX, &["vocab_size is"]);
    check_manifest(
        |manifest| manifest.config.attention.head_dim = (1 << 31) - 1,
        &["heads times head_dim"],
    );
    check_manifest(|manifest| manifest.config.rope.rotary_dim = 7, &["rotary_dim 7"]);
    check_manifest(|manifest| manifest.config.gating = None, &["without a gating rule"]);
    check_manifest(|manifest| manifest.config.rms_norm_eps = -f32::MIN_POSITIVE, &["rms_norm_eps"]);
}

#[test]
fn other_versions_and_arithmetics_are_refused_by_name() {
    for (key, value, fragment) in [
        ("schema_version", json!(2), "schema version 2 is not 1"),
        ("math_id", json!("shimmer-math/0"), "shimmer-math/0"),
        ("digest", json!("00"), "has digest"),
        ("extra", json!(1), "extra"),
    ] {
        let directory = copy();
        let path = directory.path().join(MANIFEST_FILE);
        let mut manifest: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        manifest[key] = value;
        fs::write(&path, manifest.to_string()).unwrap();
        check_open(directory.path(), &["manifest.json", fragment]);
    }
}

#[test]
fn missing_and_shortened_files_are_named() {
    for name in ["trunk.safetensors", "tokenizer.json"] {
        let directory = copy();
        fs::remove_file(directory.path().join(name)).unwrap();
        check_open(directory.path(), &[name, "not whole"]);
    }
    for name in ["trunk.safetensors", "tokenizer.json", "experts/layer-002.safetensors"] {
        let directory = copy();
        let path = directory.path().join(name);
        let length = fs::metadata(&path).unwrap().len();
        OpenOptions::new().write(true).open(&path).unwrap().set_len(length - 1).unwrap();
        check_open(directory.path(), &[name, &format!("{length} bytes")]);
    }
    let directory = tempfile::tempdir().unwrap();
    check_open(directory.path(), &["manifest.json is missing", "not a complete container"]);
}

#[test]
fn a_changed_header_is_refused() {
    let directory = copy();
    let path = directory.path().join("experts/layer-001.safetensors");
    // A blank of the padding becomes a line feed: still valid JSON.
    let file = OpenOptions::new().write(true).open(&path).unwrap();
    file.write_all_at(b"\n", 4095).unwrap();
    check_open(directory.path(), &["layer-001.safetensors", "the header has digest"]);
}

#[test]
fn a_worker_may_have_some_layers_only() {
    let directory = copy();
    fs::remove_file(directory.path().join("experts/layer-001.safetensors")).unwrap();
    let container = Container::open(directory.path()).unwrap();
    assert_eq!(container.absent_layers(), [1]);
    let mut slab = vec![0; container.expert_layout(1).unwrap().slab_bytes()];
    container.read_expert(2, 0, &mut slab).unwrap();
    let text = container.read_expert(1, 0, &mut slab).unwrap_err().to_string();
    check_text(&text, &["layer-001.safetensors", "layer 1 are not in this container directory"]);
    let report = verify(directory.path(), &()).unwrap();
    assert_eq!((report.absent_layers, report.faults), (vec![1], Vec::new()));
}

#[test]
fn questions_about_what_is_not_there_are_errors() {
    let container = Container::open(original()).unwrap();
    let mut slab = vec![0; container.expert_layout(1).unwrap().slab_bytes()];
    for (layer, expert, fragment) in
        [(0, 0, "layer 0"), (9, 0, "layer 9"), (1, 16, "expert 16"), (1, u32::MAX, "expert")]
    {
        check_text(
            &container.read_expert(layer, expert, &mut slab).unwrap_err().to_string(),
            &[fragment],
        );
    }
}

#[test]
fn flipped_bits_are_found_when_read_and_all_named_by_verify() {
    let directory = copy();
    let manifest = Manifest::read(directory.path()).unwrap();
    let (tensor, expert, last) =
        (&manifest.tensors[4], &manifest.experts[3], manifest.experts.last().unwrap());
    flip(&directory.path().join("trunk.safetensors"), tensor.offset + 100);
    flip(&directory.path().join(&expert.file), expert.offset);
    flip(&directory.path().join(&last.file), last.offset + last.bytes - 1);
    flip(&directory.path().join("tokenizer.json"), 10);

    let container = Container::open(directory.path()).unwrap();
    check_text(&container.trunk().unwrap_err().to_string(), &["trunk.safetensors", &tensor.name]);
    let mut slab = vec![0; container.expert_layout(1).unwrap().slab_bytes()];
    check_text(
        &container.read_expert(1, 3, &mut slab).unwrap_err().to_string(),
        &["layer-001", "layers.1.experts.3"],
    );
    container.read_expert(1, 4, &mut slab).unwrap();
    container.read_expert_unchecked(1, 3, &mut slab).unwrap();
    check_text(&container.tokenizer_json().unwrap_err().to_string(), &["tokenizer.json"]);

    let report = verify(directory.path(), &()).unwrap();
    let faults = report.faults.join("\n");
    assert_eq!(report.faults.len(), 4, "{faults}");
    check_text(
        &faults,
        &[&tensor.name, "layers.1.experts.3", "layers.2.experts.15", "tokenizer.json"],
    );
}

#[test]
fn verify_goes_on_after_a_file_that_is_not_whole() {
    let directory = copy();
    let path = directory.path().join("experts/layer-002.safetensors");
    let length = fs::metadata(&path).unwrap().len();
    OpenOptions::new().write(true).open(&path).unwrap().set_len(length - 1).unwrap();
    let manifest = Manifest::read(directory.path()).unwrap();
    flip(&directory.path().join("trunk.safetensors"), manifest.tensors[0].offset);
    let faults = verify(directory.path(), &()).unwrap().faults.join("\n");
    check_text(&faults, &["layer-002.safetensors", "layers.2.experts.15", "tensor embed"]);
}

#[test]
fn an_inspection_counts_weights() {
    let container = Container::open(original()).unwrap();
    let inspection = Inspection::of(&container);
    assert_eq!(inspection.layers.len(), 3);
    assert_eq!((inspection.layers[0].experts, inspection.layers[1].experts), (0, 16));
    assert_eq!(inspection.experts, 32);
    let routed: u64 = 2 * 16 * 3 * 64 * 32;
    let unused: u64 = 2 * 12 * 3 * 64 * 32 + 269 * 64;
    assert_eq!(inspection.parameters - inspection.active_parameters, unused);
    assert!(inspection.parameters > routed);
    // Three layers of keys and values, two heads of 16, f32.
    assert_eq!(inspection.kv_bytes_per_position, 3 * 2 * 2 * 16 * 4);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    /// A manifest from an enemy is refused or describes this container; it never panics. The digest is made to fit, so
    /// that the checks behind it are reached.
    #[test]
    fn hostile_manifests_never_panic(path in prop::collection::vec(any::<prop::sample::Index>(), 1..6), number in any::<u64>(), kind in 0..5) {
        let mut value: Value = serde_json::from_slice(&fs::read(original().join(MANIFEST_FILE)).unwrap()).unwrap();
        let mut pointer = String::new();
        for step in path {
            let key = match value.pointer(&pointer).unwrap() {
                Value::Object(map) if !map.is_empty() => map.keys().nth(step.index(map.len())).unwrap().clone(),
                Value::Array(list) if !list.is_empty() => step.index(list.len()).to_string(),
                _ => break,
            };
            pointer = format!("{pointer}/{}", key.replace('~', "~0").replace('/', "~1"));
        }
        let at = value.pointer_mut(&pointer).unwrap();
        *at = match kind {
            0 => json!(number),
            1 => json!(number % 100),
            2 => Value::Null,
            3 => json!("../x"),
            _ => json!([]),
        };
        let Ok(mut manifest) = serde_json::from_value::<Manifest>(value) else { return Ok(()) };
        manifest.digest = manifest.compute_digest();
        if let Ok(manifest) = Manifest::parse(Path::new(MANIFEST_FILE), &manifest.encode()) {
            let _outcome = open::check(original(), &manifest);
        }
    }
}
