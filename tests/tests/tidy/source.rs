//! What Rust source may hold.

use super::tree::{self, File};

/// A file longer than this is split by noun.
const LINES_MAX: usize = 600;

/// Where `unsafe` may stand: kernels that need intrinsics, disjoint rectangles of one output, memory with special
/// placement, mapped files, and the ring of io_uring.
const UNSAFE_ALLOWED: [&str; 6] = [
    "kernels/src/simd",
    "kernels/src/arena",
    "kernels/src/strided",
    "model/src/mapping",
    "worker/src/memory",
    "worker/src/io/uring",
];

/// Cores that decide without a clock, a socket, a file, a task or a random source of their own.
const CORES: &[&str] = &[
    "kernels/src/",
    "coordinator/src/scheduler",
    "coordinator/src/sampler",
    "coordinator/src/gating",
    "coordinator/src/sequence",
    "coordinator/src/kv_cache",
    "coordinator/src/fence",
    "coordinator/src/placement",
    "coordinator/src/membership",
    "coordinator/src/heat",
    "coordinator/src/stop",
    "coordinator/src/detokenizer",
    "coordinator/src/tokenizer",
    "coordinator/src/journal/payload",
    "coordinator/src/journal/record",
    "coordinator/src/journal/retention",
    "proto/src/backoff",
    "proto/src/checksum",
    "proto/src/membership/announcements",
    "proto/src/membership/etcd/lease",
    "proto/src/membership/model",
    "worker/src/residency",
    "worker/src/placement",
    "worker/src/guard/decision",
];

/// What a core must not name.
const IMPURE: [&str; 7] =
    ["Instant::now", "SystemTime::now", "std::net", "std::fs", "tokio::", "thread_rng", "rand::"];

fn rust_files() -> Vec<File> {
    tree::files(&[".rs"])
        .into_iter()
        .filter(|file| !file.path.starts_with("tests/tests/tidy"))
        .collect()
}

/// Calls `finding` for every line of every file and collects what it says.
fn each_line(
    files: &[File],
    mut finding: impl FnMut(&File, &str) -> Option<String>,
) -> Vec<String> {
    let mut findings = Vec::new();
    for file in files {
        for (number, line) in file.text.lines().enumerate() {
            if let Some(text) = finding(file, line) {
                findings.push(format!("{}:{}: {text}", file.path, number + 1));
            }
        }
    }
    findings
}

#[test]
fn files_are_not_too_long() {
    let long: Vec<_> = rust_files()
        .iter()
        .map(|file| (file.text.lines().count(), &file.path))
        .filter(|(lines, _)| *lines > LINES_MAX)
        .map(|(lines, path)| format!("{path}: {lines} lines, the limit is {LINES_MAX}"))
        .collect();
    tree::refuse("a file is too long", &long);
}

#[test]
fn modules_are_named_by_what_they_hold() {
    let vague = ["mod.rs", "common.rs", "utils.rs", "util.rs", "helpers.rs", "misc.rs"];
    let findings: Vec<_> = rust_files()
        .iter()
        .filter(|file| vague.iter().any(|name| file.path.ends_with(&format!("/{name}"))))
        .map(|file| file.path.clone())
        .collect();
    tree::refuse("a file name says nothing", &findings);
}

#[test]
fn nothing_is_left_unfinished() {
    // Put together here, so that this file does not contain what it refuses.
    let marks = [("TO", "DO"), ("FIX", "ME"), ("XX", "X"), ("todo", "!("), ("unimplemented", "!(")]
        .map(|(head, tail)| [head, tail].concat());
    let findings = each_line(&rust_files(), |_, line| {
        marks.iter().find(|mark| line.contains(mark.as_str())).map(|mark| format!("says {mark}"))
    });
    tree::refuse("unfinished work", &findings);
}

#[test]
fn ignored_tests_say_why() {
    let findings = each_line(&rust_files(), |_, line| {
        (line.contains("#[ignore") && !line.contains("#[ignore = ")).then(|| line.trim().to_owned())
    });
    tree::refuse("a test is ignored without a reason", &findings);
}

#[test]
fn crates_begin_with_what_they_do() {
    let findings: Vec<_> = rust_files()
        .iter()
        .filter(|file| file.path.ends_with("src/lib.rs") && !file.text.starts_with("//! "))
        .map(|file| file.path.clone())
        .collect();
    tree::refuse("a crate does not begin with its purpose", &findings);
}

#[test]
fn unsafe_code_stands_in_few_places_and_is_justified() {
    let mut findings = Vec::new();
    for file in rust_files() {
        let lines: Vec<_> = file.text.lines().collect();
        for (index, line) in lines.iter().enumerate() {
            let code = line.split("//").next().unwrap_or_default();
            if !(code.contains("unsafe {") || code.contains("unsafe impl")) {
                continue;
            }
            if !UNSAFE_ALLOWED.iter().any(|prefix| file.path.starts_with(prefix)) {
                findings.push(format!("{}:{}: unsafe is not allowed here", file.path, index + 1));
            }
            let above = &lines[index.saturating_sub(8)..=index];
            if !above.iter().any(|line| line.contains("SAFETY")) {
                findings.push(format!("{}:{}: no SAFETY comment above", file.path, index + 1));
            }
        }
    }
    tree::refuse("unsafe code", &findings);
}

#[test]
fn cores_own_no_clock_and_no_socket() {
    let cores: Vec<_> = rust_files()
        .into_iter()
        .filter(|file| CORES.iter().any(|core| file.path.starts_with(core)))
        .filter(|file| !file.path.contains("/tests"))
        .collect();
    let findings = each_line(&cores, |_, line| {
        let code = line.split("//").next().unwrap_or_default();
        IMPURE.iter().find(|name| code.contains(*name)).map(|name| format!("names {name}"))
    });
    tree::refuse("a core decides with more than its arguments", &findings);
}

#[test]
fn no_file_names_a_machine() {
    // Put together here, so that this file does not contain what it refuses.
    let paths = [
        ["/ro", "ot/"].concat(),
        ["/wo", "rk/"].concat(),
        [".lib", "rary/"].concat(),
        ["/ho", "me/"].concat(),
    ];
    let texts = tree::files(&[
        ".rs", ".md", ".toml", ".proto", ".py", ".sh", ".json", ".yaml", ".yml", ".txt", "test",
        "demo", "run",
    ]);
    let findings = each_line(&texts, |file, line| {
        // Goldens hold text in every form, also paths.
        if file.path.contains("/fixtures/") || file.path.contains("/corpus/") {
            return None;
        }
        paths.iter().find(|path| line.contains(path.as_str())).map(|path| format!("names {path}"))
    });
    tree::refuse("a path of one machine", &findings);
}
