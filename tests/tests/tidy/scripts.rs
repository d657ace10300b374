//! The scripts that a newcomer runs, and the samples that an operator copies.

use std::process::Command;

use super::tree;

#[test]
fn shell_scripts_parse() {
    for script in ["demo", "test", ".ci/run", "scripts/environment.sh"] {
        let path = tree::root().join(script);
        let status = Command::new("bash").arg("-n").arg(&path).status().expect("bash starts");
        assert!(status.success(), "{script} does not parse");
    }
}

#[cfg(unix)]
#[test]
fn entry_points_can_be_run() {
    use std::os::unix::fs::PermissionsExt as _;
    for script in ["demo", "test", ".ci/run"] {
        let metadata = std::fs::metadata(tree::root().join(script)).expect("the script is there");
        assert_ne!(metadata.permissions().mode() & 0o100, 0, "{script} is not executable");
    }
}

#[test]
fn sample_configurations_are_valid() {
    use shimmer_cli::config::{ServeSettings, WorkerSettings, resolve};
    let sample = |name: &str| tree::root().join("deploy").join(name);
    let coordinator = sample("coordinator.toml");
    let settings = resolve(&ServeSettings::default(), |_| None, Some(&coordinator)).unwrap();
    settings.settings.validate().unwrap();
    let worker = sample("worker.toml");
    let settings = resolve(&WorkerSettings::default(), |_| None, Some(&worker)).unwrap();
    settings.settings.validate().unwrap();
}
