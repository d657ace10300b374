//! Alert rules of several releases under one Prometheus: each asks for its own series.

use std::{fs, path::Path, process::Command};

use serde_json::{Value, json};
use shimmer_tests::chart::{Helm, Tools, describe};

use super::Case;

/// Labels that both monitors give the series of the release that the tests render.
const SCOPE: &str = r#"namespace="models",job="rel""#;

/// The rules of a release that is scraped by a monitor of the chart, by the name of their file.
fn rules(tools: &Tools, file: &str) -> Value {
    let objects = Case::of("glm5-values.yaml").render(tools, Helm::Four, "1.37.0");
    let name = format!("PrometheusRule rel-shimmer-rules-{file}");
    let found = objects.iter().find(|object| describe(object) == name);
    found.unwrap_or_else(|| panic!("there is no {name}"))["spec"].clone()
}

#[test]
fn every_series_that_a_rule_asks_for_is_of_its_release() {
    let Some(tools) = Tools::find() else { return };
    let mut seen = 0;
    for file in ["cluster", "coordinator", "worker"] {
        let rules = rules(&tools, file);
        for rule in rules["groups"][0]["rules"].as_array().unwrap() {
            let expr = rule["expr"].as_str().unwrap();
            let word = |c: char| c.is_ascii_alphanumeric() || "_:".contains(c);
            let metric = |name: &&str| {
                ["shimmer_", "vllm:", "process_"].iter().any(|prefix| name.starts_with(prefix))
            };
            for name in expr.split(|c| !word(c)).filter(metric) {
                let all = expr.matches(name).count();
                let scoped = expr.matches(&format!("{name}{{{SCOPE}")).count();
                assert_eq!(scoped, all, "{name} in {expr}");
                seen += 1;
            }
        }
    }
    assert!(seen > 20, "{seen} series");
}

fn promtool(directory: &Path, verb: &str, file: &str) -> Option<(bool, String)> {
    let mut command = Command::new("promtool");
    let Ok(output) = command.current_dir(directory).args([verb, "rules", file]).output() else {
        println!("skipped: promtool is not installed (Debian: prometheus)");
        return None;
    };
    let said = [output.stdout, output.stderr].concat();
    Some((output.status.success(), String::from_utf8_lossy(&said).into_owned()))
}

#[test]
fn coordinators_of_another_release_do_not_hide_that_this_one_has_none() {
    let Some(tools) = Tools::find() else { return };
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    for file in ["cluster", "coordinator", "worker"] {
        fs::write(root.join(file), rules(&tools, file).to_string()).unwrap();
        let Some((taken, said)) = promtool(root, "check", file) else { return };
        assert!(taken, "{said}");
    }
    let rules = rules(&tools, "coordinator");
    let absent = &rules["groups"][0]["rules"][0];
    assert_eq!(absent["alert"], "CoordinatorAbsent");
    let fires = json!([{
        "exp_labels": {
            "severity": "critical", "role": "coordinator", "namespace": "models", "job": "rel",
        },
        "exp_annotations": absent["annotations"],
    }]);
    let case = |series: &str, expected: &Value| {
        json!({
            "interval": "1m",
            "input_series": [{
                "series": format!("shimmer_build_info{{role=\"coordinator\", {series}}}"),
                "values": "1+0x30",
            }],
            "alert_rule_test": [
                { "eval_time": "10m", "alertname": "CoordinatorAbsent", "exp_alerts": expected },
            ],
        })
    };
    let silent = json!([]);
    let tests = json!({
        "rule_files": ["coordinator"],
        "evaluation_interval": "1m",
        "tests": [
            case(r#"namespace="models", job="other""#, &fires),
            case(r#"namespace="elsewhere", job="rel""#, &fires),
            case(SCOPE, &silent),
        ],
    });
    fs::write(root.join("tests"), tests.to_string()).unwrap();
    let Some((passed, said)) = promtool(root, "test", "tests") else { return };
    assert!(passed, "{said}");
}
