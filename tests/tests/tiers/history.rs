//! A usage history whose file system is full.

use std::{fs, process::Command};

use serde_json::Value;
use shimmer_tests::process::{generate_args, shimmer_binary};

use super::Bench;

/// A file system of two pages with an old history, in a mount namespace that ends with the script. The run with a full one
/// leaves the old history; the one with room again replaces it.
const SCRIPT: &str = r#"
set -eu
cd "$WORK"
mount -t tmpfs -o size=8k tmpfs small
cp old small/usage
head -c 65536 /dev/zero >small/fill 2>/dev/null || true
"$@" >full.json 2>full.log
cmp old small/usage
ls small >left
rm small/fill
"$@" >room.json 2>room.log
cp small/usage new
"#;

/// `unshare` with a mount namespace, as root of it.
fn unshare() -> Command {
    let mut command = Command::new("unshare");
    command.args(["--map-root-user", "--mount"]);
    command
}

fn digest(json: &[u8]) -> String {
    let answer: Value = serde_json::from_slice(json).unwrap();
    answer["logits_sha256"].as_str().unwrap().to_owned()
}

#[test]
fn a_full_file_system_keeps_the_old_history_and_serving_goes_on() {
    let probe = unshare().args(["mount", "-t", "tmpfs", "tmpfs", "/mnt"]).output();
    if !probe.is_ok_and(|output| output.status.success()) {
        println!("skipped: a full file system for the usage history: mounts are not allowed here");
        return;
    }
    let bench = Bench::new();
    let work = tempfile::TempDir::new().unwrap();
    let file = |name: &str| work.path().join(name);
    fs::create_dir(file("small")).unwrap();

    let old = file("old");
    let generate = |usage| generate_args(&bench.container(), &["--cap", "2", "--usage", usage]);
    let mut first = Command::new(shimmer_binary());
    let output = first.args(generate(old.to_str().unwrap())).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let expected = digest(&output.stdout);

    let mut script = unshare();
    script.args(["sh", "-c", SCRIPT, "sh"]).arg(shimmer_binary()).args(generate("small/usage"));
    let output = script.env("WORK", work.path()).output().unwrap();
    let log = fs::read_to_string(file("full.log")).unwrap_or_default();
    assert!(output.status.success(), "{}{log}", String::from_utf8_lossy(&output.stderr));

    assert!(log.contains("usage history") && log.contains("No space left"), "{log}");
    assert_eq!(fs::read_to_string(file("left")).unwrap(), "fill\nusage\n", "no leftovers");
    assert_eq!(digest(&fs::read(file("full.json")).unwrap()), expected);
    assert_eq!(digest(&fs::read(file("room.json")).unwrap()), expected);
    assert_ne!(
        fs::read(file("new")).unwrap(),
        fs::read(&old).unwrap(),
        "written when there is room"
    );
    let log = fs::read_to_string(file("room.log")).unwrap();
    assert!(!log.contains("usage history"), "{log}");
}
