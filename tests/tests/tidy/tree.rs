//! The files of the project, read from its working tree.

use std::path::{Path, PathBuf};

/// Directories that hold nothing of the project's own.
const SKIPPED: [&str; 5] = [".git", ".cache", "target", "__pycache__", "node_modules"];

/// One text file.
pub(super) struct File {
    /// Relative to the root, with forward slashes.
    pub(super) path: String,
    pub(super) text: String,
}

/// The root of the workspace.
pub(super) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("the crate lies in the workspace")
        .to_path_buf()
}

/// Every text file whose name ends in one of these, in order of its path.
pub(super) fn files(suffixes: &[&str]) -> Vec<File> {
    let (root, mut found, mut open) = (root(), Vec::new(), vec![root()]);
    while let Some(directory) = open.pop() {
        for entry in std::fs::read_dir(&directory).expect("a directory of the tree is readable") {
            let path = entry.expect("an entry of the tree is readable").path();
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            if path.is_dir() {
                // A directory with a cache tag is somebody's build output.
                if !SKIPPED.contains(&name) && !path.join("CACHEDIR.TAG").exists() {
                    open.push(path);
                }
            } else if suffixes.iter().any(|suffix| name.ends_with(suffix)) {
                let relative = path.strip_prefix(&root).expect("found below the root");
                let text =
                    std::fs::read_to_string(&path).expect("a text file of the tree is UTF-8");
                found.push(File { path: relative.to_string_lossy().replace('\\', "/"), text });
            }
        }
    }
    found.sort_by(|a, b| a.path.cmp(&b.path));
    assert!(!found.is_empty(), "no file ends in {suffixes:?}");
    found
}

/// Fails with one line per finding.
pub(super) fn refuse(rule: &str, findings: &[String]) {
    assert!(findings.is_empty(), "{rule}:\n  {}", findings.join("\n  "));
}
