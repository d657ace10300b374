use std::collections::BTreeMap;
use std::fs;
use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::json;
use shimmer_kernels::{Expert, ExpertScratch, Isa, Kernels, WeightFormat};

use super::*;
use crate::testing::{check_text, checkpoint, edit_json, edit_tensor};
use crate::tiny::{Preset, TinyOptions};

fn options(source: &Path, out: &Path, class: NumericClass) -> ConvertOptions {
    ConvertOptions {
        source: source.to_path_buf(),
        out: out.to_path_buf(),
        class,
        name: Some("tiny".to_owned()),
    }
}

/// All files below a directory with their bytes.
fn contents(directory: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut all = BTreeMap::new();
    for name in files::names(directory).unwrap() {
        let path = directory.join(&name);
        if path.is_dir() {
            all.extend(
                contents(&path)
                    .into_iter()
                    .map(|(below, bytes)| (format!("{name}/{below}"), bytes)),
            );
        } else {
            all.insert(name, fs::read(&path).unwrap());
        }
    }
    all
}

/// Says stop after so many bytes.
struct StopAfter {
    bytes: AtomicU64,
    limit: u64,
}

impl StopAfter {
    fn new(limit: u64) -> Self {
        Self { bytes: 0.into(), limit }
    }
}

impl ConvertProgress for StopAfter {
    fn advance(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    fn stop(&self) -> bool {
        self.bytes.load(Ordering::Relaxed) >= self.limit
    }
}

fn check_refused(options: &ConvertOptions, fragments: &[&str]) {
    check_text(
        &convert(options, &()).expect_err("the conversion must be refused").to_string(),
        fragments,
    );
}

#[test]
fn every_family_converts_in_every_format() {
    for (preset, format) in Preset::ALL.into_iter().zip(WeightFormat::ALL.iter().cycle().copied()) {
        let source = checkpoint(preset, &TinyOptions::default());
        let out = tempfile::tempdir().unwrap();
        let class = NumericClass::uniform(format);
        let report = convert(&options(source.path(), out.path(), class), &()).unwrap();
        let container = Container::open(out.path()).unwrap();
        assert_eq!(container.digest(), report.digest);
        assert_eq!(container.absent_layers(), Vec::<u32>::new());
        check_self_tests(&container);
        let names: Vec<String> =
            contents(out.path()).into_keys().filter(|name| name.contains(".convert")).collect();
        assert_eq!(names, Vec::<String>::new(), "no state is left");
    }
}

/// The stored digests are those of the experts as they are read back, on any instruction set.
fn check_self_tests(container: &Container) {
    let class = container.manifest().numeric_class;
    for (layer, experts) in container.config().moe_layers() {
        let layout = container.expert_layout(layer).unwrap();
        let mut slab = vec![0; layout.slab_bytes()];
        for expert in 0..experts {
            container.read_expert(layer, expert, &mut slab).unwrap();
            let kernels = Kernels::new(Some(Isa::Scalar)).unwrap();
            let view = Expert::from_slab(&layout, &slab).unwrap();
            let scratch = &mut ExpertScratch::default();
            let found = crate::self_test::run(
                &kernels,
                &layout,
                &view,
                class.expert_activations(),
                scratch,
            );
            assert_eq!(
                hex::encode(found),
                container.expert_entry(layer, expert).unwrap().self_test
            );
        }
    }
}

/// A matrix that passes through memory in pieces has the bytes of one that does not; vectors are exact.
#[test]
fn the_trunk_holds_what_the_checkpoint_says() {
    let source = checkpoint(Preset::Glm4Moe, &TinyOptions::default());
    let out = tempfile::tempdir().unwrap();
    let class = NumericClass::uniform(WeightFormat::F32);
    convert(&options(source.path(), out.path(), class), &()).unwrap();
    let trunk = Container::open(out.path()).unwrap().trunk().unwrap();
    let plan = Plan::make(source.path(), &class).unwrap();
    for (tensor, source) in &plan.trunk {
        let expected = plan.reader(source).unwrap().all().unwrap();
        if tensor.shape.len() == 1 {
            assert_eq!(trunk.vector(&tensor.name).unwrap(), expected, "{}", tensor.name);
            continue;
        }
        let matrix = trunk.matrix(&tensor.name).unwrap();
        let mut row = vec![0.0; matrix.cols()];
        for (index, expected) in expected.chunks(matrix.cols()).enumerate() {
            matrix.row(index, &mut row);
            assert_eq!(row, expected, "{}", tensor.name);
        }
    }
    check_text(&trunk.matrix("norm").unwrap_err().to_string(), &["matrix norm"]);
    check_text(&trunk.vector("embed").unwrap_err().to_string(), &["vector embed"]);
    check_text(&trunk.vector("no").unwrap_err().to_string(), &["tensor no"]);
}

#[test]
fn files_and_types_of_the_checkpoint_do_not_change_the_container() {
    let convert_with = |variation: &TinyOptions, threads: usize| {
        let source = checkpoint(Preset::Olmoe, variation);
        let out = tempfile::tempdir().unwrap();
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| convert(&options(source.path(), out.path(), NumericClass::default()), &()))
            .unwrap();
        Container::open(out.path()).unwrap().digest().to_owned()
    };
    let expected = convert_with(&TinyOptions::default(), 1);
    assert_eq!(convert_with(&TinyOptions { shards: 4, ..TinyOptions::default() }, 3), expected);
    assert_eq!(convert_with(&TinyOptions { fused: true, ..TinyOptions::default() }, 2), expected);
}

#[test]
fn a_stopped_conversion_continues_to_the_same_bytes() {
    let source = checkpoint(Preset::Glm4Moe, &TinyOptions::default());
    let class = NumericClass::default();
    let whole = tempfile::tempdir().unwrap();
    let report = convert(&options(source.path(), whole.path(), class), &()).unwrap();
    let expected = contents(whole.path());
    for limit in [0, 5_000, 60_000, 200_000, 300_000, report.bytes - 1] {
        let out = tempfile::tempdir().unwrap();
        let options = options(source.path(), out.path(), class);
        // Stop again and again: each call finishes at least one file or nothing is left to do.
        let mut calls = 0;
        while let Err(error) = convert(&options, &StopAfter::new(limit)) {
            check_text(&error.to_string(), &["was stopped", "run the same command again"]);
            assert!(Container::open(out.path()).is_err(), "not a container before it is complete");
            // What a killed process leaves: a file that was being written.
            fs::write(out.path().join("trunk.safetensors.tmp"), b"half").unwrap();
            calls += 1;
            if limit < 60_000 || calls > 20 {
                convert(&options, &()).unwrap();
                break;
            }
        }
        assert!(contents(out.path()) == expected, "limit {limit}");
    }
}

#[test]
fn a_finished_file_is_kept_and_a_damaged_one_made_again() {
    let source = checkpoint(Preset::Mixtral, &TinyOptions::default());
    let directory = tempfile::tempdir().unwrap();
    let options = options(source.path(), directory.path(), NumericClass::default());
    let complete = convert(&options, &()).unwrap();
    assert_eq!(complete.files_kept, 0);
    let again = convert(&options, &()).unwrap();
    assert_eq!((again.files_written, again.files_kept), (0, complete.files_written));
    assert_eq!(again.digest, complete.digest);

    let out = tempfile::tempdir().unwrap();
    let options = ConvertOptions { out: out.path().to_path_buf(), ..options };
    // Up to the beginning of the last file; headers are not counted as progress.
    let files = Container::open(directory.path()).unwrap().manifest().files.clone();
    let before_last: u64 = files.iter().rev().skip(1).map(|entry| entry.bytes).sum();
    convert(&options, &StopAfter::new(before_last - 3 * 4096)).unwrap_err();
    fs::OpenOptions::new()
        .append(true)
        .open(out.path().join("trunk.safetensors"))
        .unwrap()
        .set_len(5000)
        .unwrap();
    let report = convert(&options, &()).unwrap();
    assert!(report.files_kept > 0 && report.files_written >= 2, "{report:?}");
    assert_eq!(report.digest, complete.digest);
}

/// Killed after the manifest was written and before the state was removed.
#[test]
fn a_state_that_outlived_its_conversion_is_removed() {
    let source = checkpoint(Preset::Mixtral, &TinyOptions::default());
    let out = tempfile::tempdir().unwrap();
    let options = options(source.path(), out.path(), NumericClass::default());
    convert(&options, &()).unwrap();
    let expected = contents(out.path());
    fs::create_dir(out.path().join(".convert")).unwrap();
    fs::write(out.path().join(".convert/job.json"), b"{}").unwrap();
    assert_eq!(convert(&options, &()).unwrap().files_written, 0);
    assert!(contents(out.path()) == expected);

    fs::OpenOptions::new()
        .write(true)
        .open(out.path().join("trunk.safetensors"))
        .unwrap()
        .set_len(9)
        .unwrap();
    check_refused(&options, &["cannot be opened", "trunk.safetensors", "convert again"]);
}

#[test]
fn a_checkpoint_without_tokenizer_is_converted_with_a_note() {
    let source = checkpoint(Preset::Mixtral, &TinyOptions::default());
    fs::remove_file(source.path().join("tokenizer.json")).unwrap();
    let out = tempfile::tempdir().unwrap();
    let report =
        convert(&options(source.path(), out.path(), NumericClass::default()), &()).unwrap();
    check_text(&report.notes.join("\n"), &["no tokenizer.json"]);
    assert_eq!(Container::open(out.path()).unwrap().tokenizer_json().unwrap(), None);
}

#[test]
fn another_container_is_never_written_over() {
    let source = checkpoint(Preset::Mixtral, &TinyOptions::default());
    let other = checkpoint(Preset::Olmoe, &TinyOptions::default());
    let out = tempfile::tempdir().unwrap();
    let class = NumericClass::default();
    convert(&options(source.path(), out.path(), class), &()).unwrap();
    let before = contents(out.path());
    let taken =
        "holds the container of another checkpoint, of other text files or of other formats";
    check_refused(&options(other.path(), out.path(), class), &[taken, "choose another directory"]);
    check_refused(
        &options(source.path(), out.path(), NumericClass::uniform(WeightFormat::Bf16)),
        &[taken],
    );

    // The same headers with other weights are another checkpoint.
    edit_tensor(&source.path().join("model.safetensors"), "model.norm.weight", |tensor| {
        tensor.bytes[64] ^= 1
    });
    check_refused(&options(source.path(), out.path(), class), &[taken]);
    assert!(contents(out.path()) == before);
}

#[test]
fn a_stopped_conversion_of_something_else_is_not_continued() {
    let source = checkpoint(Preset::Mixtral, &TinyOptions::default());
    let out = tempfile::tempdir().unwrap();
    convert(&options(source.path(), out.path(), NumericClass::default()), &StopAfter::new(0))
        .unwrap_err();
    let other = options(source.path(), out.path(), NumericClass::uniform(WeightFormat::F16));
    check_refused(
        &other,
        &["holds a stopped conversion of another checkpoint, of other text files"],
    );
}

#[test]
fn foreign_directories_are_refused() {
    let source = checkpoint(Preset::Mixtral, &TinyOptions::default());
    let class = NumericClass::default();
    check_refused(&options(source.path(), source.path(), class), &["is the checkpoint itself"]);
    let out = tempfile::tempdir().unwrap();
    fs::write(out.path().join("thesis.txt"), b"text").unwrap();
    check_refused(&options(source.path(), out.path(), class), &["is not empty"]);
}

#[test]
fn two_conversions_do_not_share_a_directory() {
    let source = checkpoint(Preset::Mixtral, &TinyOptions::default());
    let out = tempfile::tempdir().unwrap();
    let options = options(source.path(), out.path(), NumericClass::default());
    convert(&options, &StopAfter::new(0)).unwrap_err();
    let held = fs::File::open(out.path().join(".convert/lock")).unwrap();
    held.lock().unwrap();
    check_refused(&options, &["another conversion is writing to it"]);
    held.unlock().unwrap();
    convert(&options, &()).unwrap();
}

#[test]
fn nothing_is_written_for_a_checkpoint_that_is_refused() {
    let source = checkpoint(Preset::Mixtral, &TinyOptions::default());
    edit_json(&source.path().join("config.json"), |config| {
        config.insert("rope_scaling".to_owned(), json!({ "rope_type": "yarn", "factor": 4.0 }));
    });
    let out = tempfile::tempdir().unwrap();
    let below = out.path().join("container");
    check_refused(&options(source.path(), &below, NumericClass::default()), &["yarn"]);
    assert!(!below.exists());
}

#[test]
fn a_weight_beyond_the_format_is_refused_by_name() {
    let source = checkpoint(
        Preset::Mixtral,
        &TinyOptions { dtype: crate::tiny::TinyType::F32, ..TinyOptions::default() },
    );
    let name = "model.layers.1.self_attn.q_proj.weight";
    edit_tensor(&source.path().join("model.safetensors"), name, |tensor| {
        tensor.bytes[..4].copy_from_slice(&1e9_f32.to_le_bytes());
    });
    let out = tempfile::tempdir().unwrap();
    let class = NumericClass::uniform(WeightFormat::F16);
    check_refused(
        &options(source.path(), out.path(), class),
        &["tensor layers.1.q", "out of the range of f16"],
    );
}

#[test]
fn tokenizer_files_come_along_and_count() {
    let source = checkpoint(Preset::Mixtral, &TinyOptions::default());
    let out = tempfile::tempdir().unwrap();
    convert(&options(source.path(), out.path(), NumericClass::default()), &()).unwrap();
    let container = Container::open(out.path()).unwrap();
    assert!(container.chat_template().unwrap().unwrap().contains("<|assistant|>"));
    assert_eq!(
        container.tokenizer_json().unwrap().unwrap(),
        fs::read(source.path().join("tokenizer.json")).unwrap()
    );
    assert!(
        container.tokenizer_config().unwrap().is_some()
            && container.generation_config().unwrap().is_some()
    );

    fs::write(source.path().join("chat_template.jinja"), "another").unwrap();
    check_refused(
        &options(source.path(), out.path(), NumericClass::default()),
        &["other text files", "choose another directory"],
    );
    let second = tempfile::tempdir().unwrap();
    convert(&options(source.path(), second.path(), NumericClass::default()), &()).unwrap();
    assert_ne!(Container::open(second.path()).unwrap().digest(), container.digest());
}
