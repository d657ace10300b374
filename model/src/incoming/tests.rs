use tempfile::TempDir;

use super::*;
use crate::testing::{check_text, checkpoint};
use crate::tiny::{Preset, TinyOptions};
use crate::{ConvertOptions, NumericClass, convert, verify};

/// Small enough that files have many pieces.
const PIECE: u64 = 10_000;

/// A container that somebody else has.
struct Bench {
    dir: TempDir,
    source: PathBuf,
    bytes: Vec<u8>,
    manifest: Manifest,
}

impl Bench {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let made = checkpoint(Preset::Qwen3Moe, &TinyOptions::default());
        let source = dir.path().join("source");
        let (from, out) = (made.path().to_path_buf(), source.clone());
        let options =
            ConvertOptions { source: from, out, class: NumericClass::default(), name: None };
        convert(&options, &()).unwrap();
        let bytes = fs::read(source.join(MANIFEST_FILE)).unwrap();
        let manifest = Manifest::read(&source).unwrap();
        Self { dir, source, bytes, manifest }
    }

    fn out(&self) -> PathBuf {
        self.dir.path().join("out")
    }

    fn offer(&self) -> Offer {
        Offer::check("s3://b/manifest.json", &self.bytes, &self.manifest.digest).unwrap()
    }

    fn begin(&self) -> Incoming {
        Incoming::begin(&self.out(), &self.offer()).unwrap().expect("nobody else is here")
    }

    /// Writes what is missing of a file, up to `most` bytes.
    fn bring(&self, file: &IncomingFile, most: u64) {
        let bytes = fs::read(self.source.join(file.name())).unwrap();
        let mut left = most;
        for range in file.missing() {
            let end = range.end.min(range.start.saturating_add(left));
            left -= end - range.start;
            let stretch = usize::try_from(range.start).unwrap()..usize::try_from(end).unwrap();
            file.write(range.start, &bytes[stretch]).unwrap();
        }
    }

    fn standing(&self) -> Standing {
        Standing::of(&self.out(), &self.manifest.digest).unwrap()
    }

    /// The manifest with a change, and its right digest.
    fn check_refused(&self, change: impl FnOnce(&mut Manifest), fragments: &[&str]) {
        let mut manifest = self.manifest.clone();
        change(&mut manifest);
        manifest.digest = manifest.compute_digest();
        let result = Offer::check("https://h/manifest.json", &manifest.encode(), &manifest.digest);
        check_text(&result.unwrap_err().to_string(), fragments);
    }
}

#[test]
fn a_container_that_comes_in_pieces_is_whole_at_the_end() {
    let bench = Bench::new();
    assert_eq!(bench.standing(), Standing::Wanting);
    let incoming = bench.begin();
    assert!(Incoming::begin(&bench.out(), &bench.offer()).unwrap().is_none(), "one at a time");
    for file in incoming.missing(PIECE).unwrap() {
        assert!(file.is_of("v1").unwrap());
        bench.bring(&file, u64::MAX);
        assert!(!bench.out().join(file.name()).exists(), "it is not proved yet");
        assert_eq!(file.settle(&()).unwrap(), Settled::Named);
        assert!(!bench.out().join(MANIFEST_FILE).exists(), "the manifest comes last");
    }
    assert!(incoming.missing(PIECE).unwrap().is_empty());
    incoming.finish().unwrap();
    assert!(matches!(bench.standing(), Standing::Whole(..)));
    assert!(!bench.out().join(DIRECTORY).exists());
    assert_eq!(verify(&bench.out(), &()).unwrap().faults, Vec::<String>::new());
    for entry in &bench.manifest.files {
        let read = |dir: &Path| fs::read(dir.join(&entry.file)).unwrap();
        assert!(read(&bench.source) == read(&bench.out()), "{}", entry.file);
    }
}

#[test]
fn what_has_come_is_not_missing_after_a_new_start() {
    let bench = Bench::new();
    let part = PIECE + 1234;
    let incoming = bench.begin();
    for file in incoming.missing(PIECE).unwrap() {
        assert!(file.is_of("v1").unwrap());
        bench.bring(&file, part);
    }
    drop(incoming);
    let incoming = bench.begin();
    for file in incoming.missing(PIECE).unwrap() {
        assert_eq!(file.missing_bytes(), file.bytes().saturating_sub(part), "{}", file.name());
        // Bytes of another version are not mixed with these.
        assert!(file.is_of("v1").unwrap() && !file.is_of("v2").unwrap());
        if file.bytes() > part {
            assert_eq!(file.missing()[0].start, part, "in the middle of a piece");
        }
    }
    // Pieces of another size are other pieces.
    for file in incoming.missing(PIECE * 2).unwrap() {
        assert!(!file.is_of("v1").unwrap() || file.missing_bytes() == file.bytes());
    }
}

#[test]
fn damage_is_named_and_only_its_pieces_come_again() {
    let bench = Bench::new();
    let incoming = bench.begin();
    let files = incoming.missing(PIECE).unwrap();
    let file = files.iter().find(|file| file.name() == schema::expert_file(0)).unwrap();
    assert!(file.is_of("v1").unwrap());
    bench.bring(file, u64::MAX);
    let last = bench.manifest.experts.iter().rfind(|expert| expert.layer == 0).unwrap();
    // A power failure can take data and leave the record: what the disk has is what counts.
    file.write(last.offset, &[0xaa; 16]).unwrap();
    file.write(3, b"x").unwrap();
    let Settled::Damaged(faults) = file.settle(&()).unwrap() else { panic!("it is damaged") };
    let named: Vec<&str> = faults.iter().map(|fault| fault.what.as_str()).collect();
    assert_eq!(named, ["the header", &schema::expert_name(0, last.expert)]);
    let missing = file.missing_bytes();
    assert!(missing >= last.bytes && missing < file.bytes(), "{missing} of {}", file.bytes());
    bench.bring(file, u64::MAX);
    assert_eq!(file.settle(&()).unwrap(), Settled::Named);

    // Damage of later days is found when it is looked for.
    let path = bench.out().join(file.name());
    let mut bytes = fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&path, bytes).unwrap();
    drop(files);
    let mut incoming = incoming;
    assert_eq!(incoming.verify(&()).unwrap(), [schema::expert_file(0)]);
    assert!(
        incoming.missing(PIECE).unwrap().iter().any(|file| file.bytes() == file.missing_bytes())
    );
}

#[test]
fn manifests_that_no_conversion_made_are_refused_before_anything_is_written() {
    let bench = Bench::new();
    for name in ["../evil", "/etc/passwd", "experts/../../x", "experts", "", "trunk.bin"] {
        let text = format!("{name:?} is none that a container has");
        bench.check_refused(|manifest| manifest.files[0].file = name.to_owned(), &[&text]);
    }
    bench.check_refused(
        |manifest| {
            let twice = manifest.files[0].clone();
            manifest.files.push(twice);
        },
        &["has two entries"],
    );
    bench.check_refused(|manifest| drop(manifest.files.pop()), &["has no entry"]);
    bench.check_refused(|manifest| manifest.files[0].bytes = u64::MAX, &["more bytes than"]);
    let trunk = |manifest: &Manifest| {
        manifest.files.iter().position(|entry| entry.file == TRUNK_FILE).unwrap()
    };
    bench.check_refused(
        |manifest| {
            let trunk = trunk(manifest);
            manifest.files[trunk].bytes += 1;
        },
        &["the last 1 bytes", "have no digest"],
    );
    bench.check_refused(|manifest| manifest.experts[1].offset += 4096, &["is not where it can be"]);
    let other = "0".repeat(64);
    let error = Offer::check("https://h/manifest.json", &bench.bytes, &other).unwrap_err();
    check_text(&error.to_string(), &["https://h/manifest.json", &bench.manifest.digest, &other]);
    let text = Offer::check("https://h/manifest.json", b"<html>", &other).unwrap_err().to_string();
    check_text(&text, &["https://h/manifest.json", "not the expected JSON"]);
}

#[test]
fn directories_that_hold_something_else_are_left_alone() {
    let bench = Bench::new();
    fs::create_dir_all(bench.out().join("lost+found")).unwrap();
    assert_eq!(bench.standing(), Standing::Wanting);
    fs::write(bench.out().join("letter.txt"), "dear").unwrap();
    let error = Standing::of(&bench.out(), &bench.manifest.digest).unwrap_err();
    check_text(&error.to_string(), &["is not empty and no container"]);
    let error = Standing::of(&bench.source, &"0".repeat(64)).unwrap_err();
    check_text(&error.to_string(), &["holds another container", &bench.manifest.digest]);
}

#[test]
fn a_disk_that_is_too_small_is_refused_before_files_are_made() {
    let bench = Bench::new();
    let incoming = bench.begin();
    let mut manifest = bench.manifest.clone();
    let text = manifest.files.iter().position(|entry| entry.file == "tokenizer.json").unwrap();
    manifest.files[text].bytes = 1 << 60;
    let incoming = Incoming { manifest, ..incoming };
    let text = incoming.missing(PIECE).unwrap_err().to_string();
    check_text(&text, &["more bytes are needed", "the file system has"]);
    assert!(!bench.out().join(DIRECTORY).join("tokenizer.json").exists());
}
