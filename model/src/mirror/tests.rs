use std::sync::Mutex;

use super::*;
use crate::testing::{check_text, checkpoint};
use crate::tiny::{Preset, TinyOptions};
use crate::{ConvertOptions, NumericClass, convert, verify};

/// A container in a directory, beside which mirrors can be made.
struct Bench {
    dir: tempfile::TempDir,
}

impl Bench {
    fn new(preset: Preset) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let source = checkpoint(preset, &TinyOptions::default());
        let (source, out) = (source.path().to_path_buf(), dir.path().join("container"));
        convert(&ConvertOptions { source, out, class: NumericClass::default(), name: None }, &())
            .unwrap();
        Self { dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn options(&self, target: &str, layers: Option<&str>) -> MirrorOptions {
        let layers = layers.map(|layers| layers.parse().unwrap());
        MirrorOptions { source: self.path("container"), target: self.path(target), layers }
    }

    fn stage(&self, target: &str, layers: Option<&str>) -> Result<MirrorReport> {
        stage_mirror(&self.options(target, layers), &())
    }

    fn check_refused(&self, target: &str, layers: Option<&str>, fragments: &[&str]) {
        let options = self.options(target, layers);
        check_text(&plan_mirror(&options).unwrap_err().to_string(), fragments);
        check_text(&stage_mirror(&options, &()).unwrap_err().to_string(), fragments);
    }
}

#[test]
fn a_mirror_has_every_byte_of_its_container() {
    let bench = Bench::new(Preset::Qwen3Moe);
    let plan = plan_mirror(&bench.options("mirror", None)).unwrap();
    assert!(plan.files.iter().all(|file| !file.present) && !bench.path("mirror").exists());
    let report = bench.stage("mirror", None).unwrap();
    assert_eq!(report.copied, (plan.files.len(), plan.missing_bytes()));
    assert_eq!((report.kept, report.absent_layers.len()), ((0, 0), 0));
    let found = verify(&bench.path("mirror"), &()).unwrap();
    assert_eq!((found.digest, found.faults), (plan.digest, Vec::new()));
    for file in plan.files {
        let read = |dir| fs::read(bench.path(dir).join(&file.file)).unwrap();
        assert!(read("container") == read("mirror"), "{}", file.file);
    }
    assert!(!bench.path("mirror").join(DIRECTORY).exists());
}

#[test]
fn layers_are_mirrored_as_asked_and_added_later() {
    let bench = Bench::new(Preset::Qwen3Moe);
    let layers =
        u32::try_from(Container::open(&bench.path("container")).unwrap().config().layers.len())
            .unwrap();
    let report = bench.stage("mirror", Some("1")).unwrap();
    assert_eq!(report.absent_layers, (0..layers).filter(|layer| *layer != 1).collect::<Vec<_>>());
    let mirror = Container::open(&bench.path("mirror")).unwrap();
    assert_eq!(mirror.absent_layers(), report.absent_layers);
    let plan = plan_mirror(&bench.options("mirror", Some("0"))).unwrap();
    assert_eq!(plan.files.iter().filter(|file| !file.present).count(), 1);
    let report = bench.stage("mirror", Some("0")).unwrap();
    assert_eq!(report.copied.0, 1);
    assert_eq!(report.absent_layers, (2..layers).collect::<Vec<_>>());
    let report = bench.stage("mirror", None).unwrap();
    assert_eq!(report.absent_layers, Vec::<u32>::new());
    // A mirror can be the source of another; what it lacks is not invented.
    fs::remove_file(bench.path("mirror").join(schema::expert_file(0))).unwrap();
    let options = |layers: Option<&str>| MirrorOptions {
        source: bench.path("mirror"),
        ..bench.options("second", layers)
    };
    let text = stage_mirror(&options(Some("0-1")), &()).unwrap_err().to_string();
    check_text(&text, &["layer-000", "layer 0"]);
    assert_eq!(stage_mirror(&options(None), &()).unwrap().absent_layers, [0]);
}

/// Stops at the given number of calls.
struct Stop(Mutex<usize>);

impl ConvertProgress for Stop {
    fn stop(&self) -> bool {
        let mut left = self.0.lock().unwrap();
        *left = left.saturating_sub(1);
        *left == 0
    }
}

#[test]
fn staging_that_was_stopped_continues() {
    let bench = Bench::new(Preset::Qwen3Moe);
    let options = bench.options("mirror", None);
    let mut calls = 1;
    let report = loop {
        match stage_mirror(&options, &Stop(Mutex::new(calls))) {
            Ok(report) => break report,
            Err(error) => {
                check_text(
                    &error.to_string(),
                    &["mirror", "was stopped", "run the same command again"],
                );
                assert!(
                    !bench.path("mirror").join(MANIFEST_FILE).exists(),
                    "the manifest comes last"
                );
                // A file that is there is whole: its digests were compared before it got its name.
                bench.check_partial();
            }
        }
        calls += 3;
    };
    assert!(report.kept.0 > 0, "files of the stopped calls were kept");
    assert!(verify(&bench.path("mirror"), &()).unwrap().faults.is_empty());
    let again = stage_mirror(&options, &()).unwrap();
    assert_eq!(again.copied, (0, 0));
}

impl Bench {
    fn check_partial(&self) {
        let source = Container::open(&self.path("container")).unwrap();
        for entry in &source.manifest().files {
            let path = self.path("mirror").join(&entry.file);
            if path.exists() {
                assert!(
                    fs::read(path).unwrap() == fs::read(source.dir().join(&entry.file)).unwrap()
                );
            }
        }
    }
}

#[test]
fn damage_in_the_container_is_not_copied() {
    let bench = Bench::new(Preset::Qwen3Moe);
    let path = bench.path("container").join(schema::expert_file(1));
    let mut bytes = fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&path, bytes).unwrap();
    let text = bench.stage("mirror", None).unwrap_err().to_string();
    check_text(&text, &["container/experts/layer-001", "layers.1.experts.", "damaged"]);
    assert!(!bench.path("mirror").join(schema::expert_file(1)).exists());
    assert!(!bench.path("mirror").join(MANIFEST_FILE).exists());
    // Layers that are whole can be had.
    bench.stage("mirror", Some("0")).unwrap();
}

#[test]
fn directories_that_are_something_else_are_refused() {
    let bench = Bench::new(Preset::Qwen3Moe);
    bench.check_refused("container", None, &["is the container itself"]);
    fs::create_dir(bench.path("full")).unwrap();
    fs::write(bench.path("full").join("letter.txt"), "dear").unwrap();
    bench.check_refused("full", None, &["is not empty and no mirror"]);
    let other = Bench::new(Preset::Olmoe);
    fs::rename(other.path("container"), bench.path("other")).unwrap();
    bench.check_refused("other", None, &["holds another container"]);
    bench.check_refused("mirror", Some("0-99"), &["no layer", "with experts"]);
    assert!(!bench.path("mirror").join(MANIFEST_FILE).exists());
    fs::create_dir_all(bench.path("busy").join(DIRECTORY)).unwrap();
    let _held = lock(&bench.path("busy"), &bench.path("busy").join(DIRECTORY)).unwrap();
    let text = bench.stage("busy", None).unwrap_err().to_string();
    check_text(&text, &["busy", "another process is writing to it"]);
}
