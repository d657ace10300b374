//! The bill of materials.

use std::{collections::BTreeSet, path::Path, process::Command};

use serde_json::Value;
use shimmer_tests::engine::docker;

use super::engine;

fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

fn bill(args: &[&str]) -> Option<Value> {
    let script = root().join("scripts/sbom.py");
    let python = Command::new("python3").args(["-c", "import tomllib"]).output();
    if !python.is_ok_and(|output| output.status.success()) {
        println!("skipped: bill of materials: no Python 3.11");
        return None;
    }
    let output = Command::new("python3").arg(script).args(args).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(serde_json::from_slice(&output.stdout).unwrap())
}

/// Components of a bill whose address begins with this.
fn components<'a>(bill: &'a Value, kind: &str) -> Vec<&'a Value> {
    let all = bill["components"].as_array().unwrap().iter();
    all.filter(|one| one["purl"].as_str().unwrap().starts_with(kind)).collect()
}

fn name_and_version(component: &Value) -> (String, String) {
    let text = |key: &str| component[key].as_str().unwrap().to_owned();
    (text("name"), text("version"))
}

/// What cargo itself says is linked.
fn linked() -> BTreeSet<(String, String)> {
    let args = ["tree", "--package", "shimmer-cli", "--edges", "normal", "--prefix", "none"];
    let output = Command::new(env!("CARGO"))
        .args(args)
        .args(["--target", "x86_64-unknown-linux-gnu", "--locked", "--format", "{p}"])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    let crates = text.lines().filter_map(|line| {
        let mut words = line.split(' ');
        Some((words.next()?.to_owned(), words.next()?.strip_prefix('v')?.to_owned()))
    });
    crates.collect()
}

#[test]
fn the_bill_of_materials_agrees_with_the_lock_file() {
    let packages = tempfile::TempDir::new().unwrap();
    let record = "Package: libhwloc15\nStatus: install ok installed\nArchitecture: amd64\nVersion: 2.9.0-1+b1\nDescription: x\n Version: none\n";
    std::fs::write(packages.path().join("libhwloc15"), record).unwrap();
    let args = ["--packages", packages.path().to_str().unwrap()];
    let Some(one) = bill(&args) else { return };
    assert_eq!(bill(&args), Some(one.clone()), "the same input gives the same bill");
    assert_eq!((&one["bomFormat"], &one["specVersion"]), (&"CycloneDX".into(), &"1.5".into()));

    let mut crates: BTreeSet<_> =
        components(&one, "pkg:cargo/").into_iter().map(name_and_version).collect();
    crates.insert(name_and_version(&one["metadata"]["component"]));
    assert_eq!(crates, linked(), "what cargo says is linked");
    for tests_only in ["criterion", "loom", "proptest", "turmoil", "shimmer-tests"] {
        assert!(crates.iter().all(|(name, _)| name != tests_only), "{tests_only} does not ship");
    }

    let lock = std::fs::read_to_string(root().join("Cargo.lock")).unwrap();
    let lock: toml::Table = lock.parse().unwrap();
    let locked = lock["package"].as_array().unwrap();
    for component in components(&one, "pkg:cargo/") {
        let (name, version) = name_and_version(component);
        let found = locked.iter().find(|package| {
            package["name"].as_str() == Some(&name) && package["version"].as_str() == Some(&version)
        });
        let found = found.unwrap_or_else(|| panic!("{name} {version} is not locked"));
        let checksum = found.get("checksum").and_then(toml::Value::as_str);
        assert_eq!(component["hashes"][0]["content"].as_str(), checksum, "{name}");
        assert!(component["licenses"][0]["expression"].is_string(), "{name} has no licence");
    }
    let debian = components(&one, "pkg:deb/");
    assert_eq!(debian.len(), 1);
    assert_eq!(debian[0]["purl"], "pkg:deb/debian/libhwloc15@2.9.0-1%2Bb1?arch=amd64");
    let program = one["metadata"]["component"]["bom-ref"].as_str().unwrap();
    let edges = one["dependencies"].as_array().unwrap();
    let direct = edges.iter().find(|edge| edge["ref"] == program).unwrap();
    let direct: Vec<_> = direct["dependsOn"].as_array().unwrap().iter().collect();
    assert!(direct.contains(&&debian[0]["bom-ref"]));
    assert!(direct.iter().any(|one| one.as_str().unwrap().starts_with("pkg:cargo/clap@")));
}

#[test]
fn the_bill_of_an_image_has_its_debian_packages() {
    let Some(engine) = engine() else { return };
    let image = engine.image("runtime");
    let Some(bill) = bill(&[&image]) else { return };
    let named: BTreeSet<_> =
        components(&bill, "pkg:deb/").into_iter().map(name_and_version).collect();
    // The debug image is made from the same base and can be asked.
    let query = "dpkg-query --show --showformat '${Package} ${Version}\\n' libc6 libgcc-s1 libhwloc15 libudev1 ca-certificates";
    let debug = engine.image("debug");
    let installed = docker(&["run", "--rm", "--entrypoint", "sh", &debug, "-c", query]).unwrap();
    let installed: BTreeSet<_> = installed
        .lines()
        .filter_map(|line| line.split_once(' '))
        .map(|(name, version)| (name.to_owned(), version.to_owned()))
        .collect();
    assert_eq!(named, installed);
}
