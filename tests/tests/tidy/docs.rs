//! The documents name only what exists.

use std::collections::BTreeSet;

use super::tree::{self, File};

fn documents() -> Vec<File> {
    tree::files(&[".md"])
}

/// The targets of the links of one document that stay inside the project.
fn local_links(text: &str) -> Vec<&str> {
    text.split("](")
        .skip(1)
        .filter_map(|rest| rest.split(')').next())
        .filter(|target| !target.contains("://") && !target.starts_with('#') && !target.is_empty())
        .collect()
}

/// The words of a text in back quotes.
fn quoted(text: &str) -> Vec<&str> {
    text.split('`').skip(1).step_by(2).collect()
}

#[test]
fn links_lead_somewhere() {
    let mut findings = Vec::new();
    for file in documents() {
        let path = tree::root().join(&file.path);
        let directory = path.parent().expect("a file lies in a directory");
        for link in local_links(&file.text) {
            let target = link.split('#').next().unwrap_or_default();
            if !directory.join(target).exists() {
                findings.push(format!("{}: {link}", file.path));
            }
        }
    }
    tree::refuse("a link leads nowhere", &findings);
}

#[test]
fn every_decision_is_in_the_index() {
    let index = std::fs::read_to_string(tree::root().join("docs/adr/README.md"))
        .expect("there is an index");
    let linked: BTreeSet<_> = local_links(&index).into_iter().collect();
    let findings: Vec<_> = tree::files(&[".md"])
        .iter()
        .filter_map(|file| file.path.strip_prefix("docs/adr/"))
        .filter(|name| *name != "README.md" && !linked.contains(name))
        .map(str::to_owned)
        .collect();
    tree::refuse("a decision is not in docs/adr/README.md", &findings);
}

#[test]
fn every_dependency_is_explained() {
    let text = std::fs::read_to_string(tree::root().join("docs/adr/dependencies.md"))
        .expect("there is a table");
    let explained: BTreeSet<_> = text
        .lines()
        .filter_map(|line| line.strip_prefix("| "))
        .filter_map(|row| row.split('|').next())
        .flat_map(quoted)
        .collect();
    let manifest =
        std::fs::read_to_string(tree::root().join("Cargo.toml")).expect("there is a manifest");
    let manifest: toml::Table = manifest.parse().expect("the manifest is TOML");
    let declared =
        manifest["workspace"]["dependencies"].as_table().expect("dependencies are a table");
    let ours = |name: &&String| !name.starts_with("shimmer-");
    let missing: Vec<_> = declared
        .keys()
        .filter(ours)
        .filter(|name| !explained.contains(name.as_str()))
        .cloned()
        .collect();
    tree::refuse("docs/adr/dependencies.md does not explain", &missing);
    let gone: Vec<_> = explained
        .iter()
        .filter(|name| !declared.contains_key(**name))
        .map(|name| (*name).to_owned())
        .collect();
    tree::refuse("docs/adr/dependencies.md explains what is not used", &gone);
}

/// docs/FIELD-FAILURES.md names tests; each must be a function of this tree.
#[test]
fn tests_that_documents_name_exist() {
    let sources = tree::files(&[".rs", ".py", ".sh"]);
    let functions: BTreeSet<&str> = sources
        .iter()
        .flat_map(|file| file.text.split("fn ").skip(1).chain(file.text.split("def ").skip(1)))
        .filter_map(|rest| rest.split(|c: char| !(c.is_alphanumeric() || c == '_')).next())
        .collect();
    let mut findings = Vec::new();
    for file in documents().iter().filter(|file| file.path.starts_with("docs/")) {
        for word in quoted(&file.text) {
            let Some(name) = word.strip_prefix("test:") else { continue };
            let function = name.rsplit("::").next().unwrap_or(name);
            if !functions.contains(function) {
                findings.push(format!("{}: {name}", file.path));
            }
        }
    }
    tree::refuse("a document names a test that does not exist", &findings);
}

/// The table of constants in docs/SPECIFICATION.md, against the code.
#[test]
fn the_specification_has_the_codes_constants() {
    use shimmer_proto::{channel, limits};
    let size = |bytes: usize| match bytes {
        bytes if bytes.is_multiple_of(1 << 20) => format!("{} MiB", bytes >> 20),
        bytes => format!("{} KiB", bytes >> 10),
    };
    let small = |bytes: u32| size(bytes as usize);
    let seconds = |time: std::time::Duration| format!("{} s", time.as_secs());
    let expected = [
        ("PROTOCOL_VERSION", limits::PROTOCOL_VERSION.to_string()),
        ("MATH_ID", shimmer_kernels::MATH_ID.to_owned()),
        ("SCHEMA_VERSION", shimmer_model::SCHEMA_VERSION.to_string()),
        ("MAX_MESSAGE_BYTES", size(limits::MAX_MESSAGE_BYTES)),
        ("PART_BYTES", size(limits::PART_BYTES)),
        ("MAX_PART_ROWS", limits::MAX_PART_ROWS.to_string()),
        ("MAX_HINT_EXPERTS", limits::MAX_HINT_EXPERTS.to_string()),
        ("MAX_API_MESSAGE_BYTES", size(limits::MAX_API_MESSAGE_BYTES)),
        ("STREAM_WINDOW_BYTES", small(channel::STREAM_WINDOW_BYTES)),
        ("CONNECTION_WINDOW_BYTES", small(channel::CONNECTION_WINDOW_BYTES)),
        ("FRAME_BYTES", small(channel::FRAME_BYTES)),
        ("HEADER_LIST_BYTES", small(channel::HEADER_LIST_BYTES)),
        ("KEEPALIVE_INTERVAL", seconds(channel::KEEPALIVE_INTERVAL)),
        ("KEEPALIVE_TIMEOUT", seconds(channel::KEEPALIVE_TIMEOUT)),
        ("CONNECT_TIMEOUT", seconds(channel::CONNECT_TIMEOUT)),
        ("GROUP", shimmer_kernels::GROUP.to_string()),
        ("BLOCK_ROWS", shimmer_kernels::BLOCK_ROWS.to_string()),
        ("SEGMENTS", shimmer_kernels::SEGMENTS.to_string()),
        ("PAGE_POSITIONS", shimmer_kernels::PAGE_POSITIONS.to_string()),
        ("ATTENTION_BLOCK", shimmer_kernels::ATTENTION_BLOCK.to_string()),
        ("MAX_STOP_STRINGS", shimmer_coordinator::engine::MAX_STOP_STRINGS.to_string()),
        ("MAX_LOGPROBS", shimmer_coordinator::engine::MAX_LOGPROBS.to_string()),
    ];
    let text = std::fs::read_to_string(tree::root().join("docs/SPECIFICATION.md"))
        .expect("there is a specification");
    let section = text
        .split("\n## ")
        .find(|part| part.starts_with("Constants"))
        .expect("it has a section of constants");
    let rows: Vec<(String, String)> = section
        .lines()
        .filter_map(|line| line.strip_prefix("| `"))
        .map(|row| {
            let mut cells = row.split('|').map(|cell| cell.trim().trim_matches('`').to_owned());
            (cells.next().unwrap_or_default(), cells.next().unwrap_or_default())
        })
        .collect();
    let expected: Vec<_> =
        expected.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    assert_eq!(rows, expected);
}

/// The table of counters in worker/README.md, against the code.
#[test]
fn the_worker_page_has_the_codes_counters() {
    let text = std::fs::read_to_string(tree::root().join("worker/README.md")).expect("a page");
    let named: Vec<_> =
        text.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next()).collect();
    let counters = shimmer_worker::Counters::default().snapshot();
    let expected: Vec<_> = counters.entries().map(|(name, _)| name).collect();
    assert_eq!(named, expected);
}
