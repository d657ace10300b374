//! What is in the images.

use std::collections::BTreeSet;

use shimmer_tests::engine::docker;

use super::engine;

/// Files of an image, without the ones that the engine puts into every container.
fn files(image: &str) -> BTreeSet<String> {
    let container = docker(&["create", image]).unwrap();
    let script = format!("docker export {container} | tar -t");
    let list = std::process::Command::new("sh").args(["-c", &script]).output().unwrap();
    docker(&["rm", &container]).unwrap();
    let list = String::from_utf8(list.stdout).unwrap();
    let engines = [".dockerenv", "dev/", "proc/", "sys/", "etc/hostname", "etc/hosts", "etc/mtab"];
    let ours = |path: &&str| !path.ends_with('/') && !engines.iter().any(|e| path.starts_with(e));
    list.lines().filter(ours).map(str::to_owned).collect()
}

#[test]
fn the_image_has_the_program_its_libraries_and_no_shell() {
    let Some(engine) = engine() else { return };
    let image = engine.image("runtime");
    let files = files(&image);
    let programs: Vec<_> = files.iter().filter(|path| path.contains("bin/")).collect();
    assert_eq!(programs, ["usr/local/bin/shimmer"]);
    let libraries: BTreeSet<&str> = files
        .iter()
        .filter(|path| path.contains(".so"))
        .filter_map(|path| path.rsplit('/').next()?.split(".so").next())
        .collect();
    let c_library = [
        "ld-linux-x86-64",
        "ld-linux-aarch64",
        "libc",
        "libdl",
        "libm",
        "libmvec",
        "libnss_dns",
        "libnss_files",
        "libpthread",
        "libresolv",
        "librt",
        "libutil",
    ];
    let others: Vec<_> = libraries.iter().filter(|name| !c_library.contains(name)).collect();
    assert_eq!(others, [&"libgcc_s", &"libhwloc", &"libudev"]);
    assert!(files.contains("etc/ssl/certs/ca-certificates.crt"), "https sources need authorities");
    let shell = docker(&["run", "--rm", "--entrypoint", "/bin/sh", &image, "-c", "true"]);
    assert!(shell.is_err(), "there is a shell");
    assert!(docker(&["run", "--rm", &image, "--version"]).unwrap().starts_with("shimmer "));

    let config = docker(&["image", "inspect", "--format", "{{json .Config}}", &image]).unwrap();
    let config: serde_json::Value = serde_json::from_str(&config).unwrap();
    assert_eq!(config["User"], "65532:0", "a number, so that a kubelet sees that it is not root");
    assert_eq!(config["Healthcheck"]["Test"][2], "healthcheck");
    assert_eq!(config["StopSignal"], "SIGTERM");
    let labels = config["Labels"].as_object().unwrap();
    for label in ["title", "description", "source", "licenses", "version", "revision", "created"] {
        let value = labels.get(&format!("org.opencontainers.image.{label}"));
        assert!(value.is_some_and(|value| value != ""), "{label}: {labels:?}");
    }
    assert_eq!(labels["org.opencontainers.image.revision"], "under-test");
    assert_eq!(labels["org.opencontainers.image.version"], env!("CARGO_PKG_VERSION"));
}

#[test]
fn the_debug_image_has_a_shell_and_the_same_program() {
    let Some(engine) = engine() else { return };
    let (runtime, debug) = (engine.image("runtime"), engine.image("debug"));
    let run = |entry: &str, args: &[&str]| {
        docker(
            &[&["run", "--rm", "--network", "none", "--entrypoint", entry, &debug], args].concat(),
        )
    };
    assert_eq!(run("/bin/sh", &["-c", "id -u; id -g"]).unwrap(), "65532\n0");
    for tool in ["ps", "strace", "ip"] {
        assert!(run("/bin/sh", &["-c", &format!("command -v {tool}")]).is_ok(), "no {tool}");
    }
    let config = |image: &str| {
        let format =
            "{{json .Config.Env}} {{json .Config.Entrypoint}} {{json .Config.Healthcheck}}";
        docker(&["image", "inspect", "--format", format, image]).unwrap()
    };
    assert_eq!(config(&debug), config(&runtime));
    assert_eq!(run("shimmer", &["--version"]), docker(&["run", "--rm", &runtime, "--version"]));
}
