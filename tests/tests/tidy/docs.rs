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
