//! Every alert has a runbook, asks for what is there, and fires when it should.

use std::{collections::BTreeSet, fs, path::PathBuf, process::Command};

use super::catalogue::{Catalogue, root};

/// The rule files and those with their tests have the same names.
const FILES: [&str; 3] = ["cluster", "coordinator", "worker"];

pub(super) fn rule_files() -> Vec<PathBuf> {
    files("helm/shimmer/rules")
}

fn files(directory: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(root().join(directory)).unwrap();
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let names: Vec<_> =
        files.iter().map(|file| file.file_name().unwrap().to_string_lossy()).collect();
    assert_eq!(names, FILES.map(|name| format!("{name}.yaml")), "{directory}");
    files
}

/// An alert, by the lines of its rule.
#[derive(Debug, Default)]
struct Alert {
    name: String,
    expr: String,
    severity: String,
    summary: String,
    description: String,
    runbook_url: String,
}

/// The files have one shape: a key per line, an expression of several lines as a block. What does not is refused by Prometheus
/// or by the checks below.
fn alerts() -> Vec<Alert> {
    let mut alerts: Vec<Alert> = Vec::new();
    for file in rule_files() {
        let text = fs::read_to_string(file).unwrap();
        let mut in_block = false;
        for line in text.lines() {
            if let Some(name) = line.trim().strip_prefix("- alert: ") {
                alerts.push(Alert { name: name.to_owned(), ..Alert::default() });
                continue;
            }
            let Some(alert) = alerts.last_mut() else { continue };
            if in_block && line.starts_with("          ") {
                alert.expr.push_str(line);
                alert.expr.push('\n');
                continue;
            }
            in_block = false;
            let Some((key, value)) = line.trim().split_once(':') else { continue };
            let value = value.trim().trim_matches('\'').replace("''", "'");
            match key {
                "expr" if value == "|" => in_block = true,
                "expr" => alert.expr = value,
                "severity" => alert.severity = value,
                "summary" => alert.summary = value,
                "description" => alert.description = value,
                "runbook_url" => alert.runbook_url = value,
                _ => {}
            }
        }
    }
    alerts
}

#[test]
fn every_alert_has_a_runbook_and_every_runbook_an_alert() {
    let text = fs::read_to_string(root().join("docs/OPERATIONS.md")).unwrap();
    let section = text.split("\n## ").find(|part| part.starts_with("Alerts\n")).unwrap();
    let mut runbooks = section.split("\n### ");
    runbooks.next();
    let mut named = Vec::new();
    for runbook in runbooks {
        let (name, body) = runbook.split_once('\n').unwrap();
        let parts = ["**Meaning.** ", "**Impact.** ", "**Look at**\n\n* ", "**Do**\n\n* "];
        assert!(parts.iter().all(|part| body.contains(part)), "{name} lacks one of {parts:?}");
        named.push(name);
    }
    let alerts = alerts();
    let rules: Vec<&str> = alerts.iter().map(|alert| alert.name.as_str()).collect();
    let unique: BTreeSet<&str> = rules.iter().copied().collect();
    assert_eq!(unique.len(), rules.len(), "an alert twice");
    assert_eq!(named.iter().copied().collect::<BTreeSet<_>>(), unique);
    assert_eq!(named.len(), rules.len(), "a runbook twice");
    for alert in &alerts {
        let anchor = format!("/docs/OPERATIONS.md#{}", alert.name.to_lowercase());
        assert!(alert.runbook_url.ends_with(&anchor), "{alert:?}");
        assert!(["critical", "warning"].contains(&alert.severity.as_str()), "{alert:?}");
        assert!(!alert.summary.is_empty() && !alert.summary.ends_with('.'), "{alert:?}");
        assert!(alert.description.ends_with('.'), "{alert:?}");
    }
    // Requests go on without the store: nobody is to be woken.
    let etcd = alerts.iter().find(|alert| alert.name == "EtcdUnreachable").unwrap();
    assert_eq!(etcd.severity, "warning");
}

#[test]
fn alerts_ask_only_for_what_is_there() {
    let catalogue = Catalogue::read();
    for alert in alerts() {
        assert!(!alert.expr.is_empty(), "{alert:?}");
        assert_eq!(catalogue.unknown(&alert.expr), [""; 0], "{alert:?}");
    }
}

#[test]
fn every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not() {
    let text: String = files("tests/fixtures/rules")
        .iter()
        .map(|file| fs::read_to_string(file).unwrap())
        .collect();
    let cases = |fires: bool| -> BTreeSet<String> {
        let of_kind = |case: &&str| case.contains("exp_alerts: []") != fires;
        let name = |case: &str| Some(case.split_once("alertname: ")?.1.lines().next()?.to_owned());
        text.split("\n  - name: ").skip(1).filter(of_kind).filter_map(name).collect()
    };
    let rules: BTreeSet<String> = alerts().into_iter().map(|alert| alert.name).collect();
    assert_eq!(cases(true), rules, "fires");
    assert_eq!(cases(false), rules, "stays silent");
}

/// promtool is what Prometheus itself says about rules. ./test installs it.
#[test]
fn every_alert_fires_and_stays_silent_where_it_should() {
    for (verb, files) in [("check", rule_files()), ("test", files("tests/fixtures/rules"))] {
        let Ok(output) = Command::new("promtool").args([verb, "rules"]).args(&files).output()
        else {
            println!("skipped: promtool is not installed (Debian: prometheus)");
            return;
        };
        let said = [output.stdout, output.stderr].concat();
        let said = String::from_utf8_lossy(&said);
        assert!(output.status.success(), "{said}");
        assert_eq!(said.matches("SUCCESS").count(), FILES.len(), "{said}");
    }
}
