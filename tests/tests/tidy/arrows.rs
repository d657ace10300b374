//! Which crate may depend on which. docs/ARCHITECTURE.md draws the same arrows.

use cargo_metadata::{DependencyKind, MetadataCommand};

use super::tree;

/// Every crate with the crates of this workspace it may name, tests and build scripts included.
const ARROWS: [(&str, &[&str]); 7] = [
    ("shimmer-proto", &[]),
    ("shimmer-kernels", &[]),
    ("shimmer-model", &["shimmer-kernels"]),
    ("shimmer-worker", &["shimmer-proto", "shimmer-model", "shimmer-kernels"]),
    ("shimmer-coordinator", &["shimmer-proto", "shimmer-model", "shimmer-kernels"]),
    (
        "shimmer-cli",
        &[
            "shimmer-coordinator",
            "shimmer-worker",
            "shimmer-proto",
            "shimmer-model",
            "shimmer-kernels",
        ],
    ),
    (
        "shimmer-tests",
        &[
            "shimmer-cli",
            "shimmer-coordinator",
            "shimmer-worker",
            "shimmer-proto",
            "shimmer-model",
            "shimmer-kernels",
        ],
    ),
];

#[test]
fn crates_depend_only_along_the_arrows() {
    let metadata = MetadataCommand::new()
        .manifest_path(tree::root().join("Cargo.toml"))
        .no_deps()
        .exec()
        .expect("cargo describes the workspace");
    let mut findings = Vec::new();
    for package in metadata.workspace_packages() {
        let Some((_, allowed)) = ARROWS.iter().find(|(name, _)| *name == package.name.as_str())
        else {
            findings.push(format!("{} is not in the list of crates", package.name));
            continue;
        };
        for dependency in &package.dependencies {
            let ours = dependency.path.is_some() || dependency.name.starts_with("shimmer-");
            if ours && !allowed.contains(&dependency.name.as_str()) {
                findings.push(format!("{} -> {}", package.name, dependency.name));
            }
            if !ours
                && dependency.kind == DependencyKind::Normal
                && package.name.as_str() == "shimmer-kernels"
            {
                check_kernel_dependency(&dependency.name, &mut findings);
            }
        }
    }
    tree::refuse("a crate sees another one that it must not see", &findings);
}

/// The kernels touch no file and no socket; the runtime for both must not even be linked.
fn check_kernel_dependency(name: &str, findings: &mut Vec<String>) {
    if name.starts_with("tokio") || name.starts_with("tonic") {
        findings.push(format!("shimmer-kernels -> {name}"));
    }
}
