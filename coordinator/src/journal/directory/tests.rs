use std::io::Write as _;

use super::*;

fn directory() -> (tempfile::TempDir, Directory) {
    let temp = tempfile::tempdir().unwrap();
    let directory = Directory::open(&temp.path().join("a").join("journal")).unwrap();
    (temp, directory)
}

fn names(directory: &Directory) -> Vec<String> {
    let entries = fs::read_dir(directory.path()).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn names_are_harmless_and_differ() {
    let check = |id: &str, shown: &str| {
        let name = Directory::name(id);
        assert!(name.starts_with(shown) && name.ends_with(SUFFIX), "{name}");
        assert!(
            !name.contains(['/', '\0']) && !name.starts_with('.') && name.len() < 128,
            "{name}"
        );
    };
    check("gen-0011aa", "gen-0011aa-");
    check("../../etc/passwd", "______etc_passwd-");
    check(".", "_-");
    check("", "-");
    check("\u{4f60}\u{e9}", "__-");
    check(&"x".repeat(128), &"x".repeat(SHOWN));
    assert_ne!(Directory::name("a/b"), Directory::name("a_b"));
    assert_ne!(Directory::name(&"x".repeat(127)), Directory::name(&"x".repeat(128)));
}

#[test]
fn a_name_is_given_once_and_only_to_a_whole_file() {
    let (_temp, directory) = directory();
    assert_eq!(names(&directory), [""; 0], "the probe is gone");
    let mut file = directory.publish("a", b"first").unwrap().unwrap();
    assert!(directory.publish("a", b"second").unwrap().is_none());
    file.write_all(b", more").unwrap();
    assert_eq!(directory.read("a").unwrap().unwrap(), b"first, more");
    assert_eq!(directory.read("b").unwrap(), None);
    assert_eq!(names(&directory), [Directory::name("a")], "no draft is left");
}

#[test]
fn a_replaced_file_takes_nothing_from_its_old_writer() {
    let (_temp, directory) = directory();
    let mut old = directory.publish("a", b"old").unwrap().unwrap();
    let mut new = directory.replace("a", b"new").unwrap();
    old.write_all(b" lost").unwrap();
    new.write_all(b" kept").unwrap();
    assert_eq!(directory.read("a").unwrap().unwrap(), b"new kept");
    // Of an id that nobody has, as well: the old file may have been cleaned up meanwhile.
    drop(directory.replace("b", b"b").unwrap());
    assert_eq!(directory.read("b").unwrap().unwrap(), b"b");
}

#[test]
fn what_lies_there_is_told_with_its_age() {
    let (_temp, directory) = directory();
    drop(directory.publish("a", b"12345").unwrap());
    fs::write(directory.path().join("dead.draft"), b"1").unwrap();
    fs::write(directory.path().join("README"), b"of somebody").unwrap();
    let old = File::options().append(true).open(directory.file("a")).unwrap();
    old.set_modified(SystemTime::now() - Duration::from_secs(1000)).unwrap();
    let mut facts = directory.facts(|name| name == "dead.draft").unwrap();
    facts.retain(|fact| !fact.name.ends_with(DRAFT) || fact.name == "dead.draft");
    facts.sort_by_key(|fact| fact.bytes);
    let seen: Vec<_> =
        facts.iter().map(|fact| (fact.name.as_str(), fact.bytes, fact.open)).collect();
    let name = Directory::name("a");
    assert_eq!(seen, [("dead.draft", 1, true), (name.as_str(), 5, false)]);
    assert!((990..1100).contains(&facts[1].age.as_secs()), "{facts:?}");
    directory.remove(&name).unwrap();
    directory.remove(&name).unwrap();
}

#[test]
fn a_directory_that_cannot_be_written_is_named() {
    let temp = tempfile::tempdir().unwrap();
    let path = temp.path().join("file");
    fs::write(&path, b"").unwrap();
    let error = Directory::open(&path.join("journal")).unwrap_err();
    assert_eq!(
        error.to_string(),
        format!("the directory {} cannot hold one", path.join("journal").display())
    );
}
