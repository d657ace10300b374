//! Names that an API server takes: RFC 1123, RFC 1035 for services, and label values.

use std::collections::BTreeSet;

use serde_json::Value;
use shimmer_tests::chart::describe;

use super::{Release, items, labels, text};

pub(super) fn findings(release: &Release<'_>) -> Vec<String> {
    let mut findings = Vec::new();
    let mut seen = BTreeSet::new();
    for object in release.objects {
        let name = text(&object["metadata"]["name"]);
        if !seen.insert(describe(object)) {
            findings.push(format!("there are two of {}", describe(object)));
        }
        let good = match text(&object["kind"]) {
            "Service" => label(name, 63) && name.starts_with(|c: char| c.is_ascii_lowercase()),
            // A label that the controller adds to its pods carries the name and eleven characters more.
            "StatefulSet" => label(name, 52),
            _ => subdomain(name),
        };
        if !good {
            findings.push(format!("{} cannot have that name", describe(object)));
        }
        for (key, value) in labels(&object["metadata"]["labels"]) {
            if !label_value(&value) {
                findings.push(format!("{}: label {key} cannot be {value:?}", describe(object)));
            }
        }
    }
    for pod in &release.pods {
        let mut names = BTreeSet::new();
        let containers = pod.containers().map(|container| ("container", &container["name"]));
        let volumes = items(&pod.spec["volumes"]).map(|volume| ("volume", &volume["name"]));
        for (what, name) in containers.chain(volumes) {
            if !label(text(name), 63) || !names.insert((what, text(name))) {
                findings
                    .push(format!("{}: {what} cannot be called {name}, or two are", pod.name()));
            }
        }
        let mut ports = BTreeSet::new();
        for port in pod.ports() {
            let name = text(&port["name"]);
            let letter = name.bytes().any(|byte| byte.is_ascii_lowercase());
            if !label(name, 15) || !letter || name.contains("--") {
                findings.push(format!("{}: a port cannot be called {name:?}", pod.name()));
            }
            if !ports.insert(port["containerPort"].as_u64()) || !ports_differ(pod.ports(), name) {
                findings.push(format!("{}: two ports are {port}", pod.name()));
            }
        }
        for (key, value) in &pod.labels {
            if !label_value(value) {
                findings.push(format!("{}: label {key} cannot be {value:?}", pod.name()));
            }
        }
    }
    findings
}

fn ports_differ<'a>(ports: impl Iterator<Item = &'a Value>, name: &str) -> bool {
    ports.filter(|port| port["name"] == name).count() == 1
}

/// A label of RFC 1123.
pub(super) fn label(name: &str, longest: usize) -> bool {
    let inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    !name.is_empty()
        && name.len() <= longest
        && name.bytes().all(inner)
        && !name.starts_with('-')
        && !name.ends_with('-')
}

/// A subdomain of RFC 1123.
pub(super) fn subdomain(name: &str) -> bool {
    name.len() <= 253 && name.split('.').all(|part| label(part, 253))
}

fn label_value(value: &str) -> bool {
    let end = |c: char| c.is_ascii_alphanumeric();
    value.is_empty()
        || (value.len() <= 63
            && value.starts_with(end)
            && value.ends_with(end)
            && value.chars().all(|c| end(c) || matches!(c, '-' | '_' | '.')))
}
