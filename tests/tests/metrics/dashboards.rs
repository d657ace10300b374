//! The dashboards ask only for what is there, and every panel says what it shows.

use std::{collections::BTreeSet, fs};

use serde_json::Value;

use super::catalogue::{Catalogue, root};

/// Version of the format that Grafana 11 writes; later ones read it.
const SCHEMA: u64 = 39;
const NAMES: [&str; 4] = ["cluster", "overview", "request", "tiers"];
/// Units of Grafana that are used: seconds, shares, bytes, per second, and plain numbers.
const UNITS: [&str; 8] = ["s", "percentunit", "bytes", "Bps", "ops", "reqps", "none", "short"];

pub(super) fn all() -> Vec<(String, Value)> {
    let directory = root().join("helm/shimmer/dashboards");
    let mut found: Vec<(String, Value)> = fs::read_dir(directory)
        .unwrap()
        .map(|entry| {
            let path = entry.unwrap().path();
            let text = fs::read_to_string(&path).unwrap();
            let name = path.file_stem().unwrap().to_string_lossy().into_owned();
            let board = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{name}: {e}"));
            (name, board)
        })
        .collect();
    found.sort_by(|a, b| a.0.cmp(&b.0));
    found
}

fn panels(board: &Value) -> Vec<&Value> {
    board["panels"].as_array().unwrap().iter().filter(|panel| panel["type"] != "row").collect()
}

fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_default()
}

/// The queries of all panels, with variables as Grafana fills them in when everything is chosen.
pub(super) fn queries(board: &Value) -> Vec<String> {
    let filled = |query: &str| {
        let query = query.replace("$__rate_interval", "1m");
        ["$job", "$instance", "$model"].iter().fold(query, |query, name| query.replace(name, ".*"))
    };
    let of_panel = |panel: &&Value| panel["targets"].as_array().unwrap().clone();
    let targets = panels(board).iter().flat_map(of_panel).collect::<Vec<_>>();
    let queries: Vec<String> = targets.iter().map(|target| filled(text(target, "expr"))).collect();
    queries.iter().for_each(|query| assert!(!query.contains('$'), "{query}"));
    queries
}

/// Metric and label of the variables that are filled from Prometheus.
fn variables(board: &Value) -> Vec<(String, String)> {
    let list = board["templating"]["list"].as_array().unwrap();
    let asked = list.iter().filter(|variable| variable["type"] == "query");
    asked
        .map(|variable| {
            let query = text(&variable["query"], "query");
            let inner = query.strip_prefix("label_values(").and_then(|q| q.strip_suffix(')'));
            let (metric, label) = inner.and_then(|inner| inner.rsplit_once(", ")).unwrap();
            (metric.to_owned(), label.to_owned())
        })
        .collect()
}

#[test]
fn dashboards_ask_only_for_what_is_there() {
    let (catalogue, mut findings) = (Catalogue::read(), Vec::new());
    for (name, board) in all() {
        let mut asked = queries(&board);
        let variables = variables(&board);
        asked.extend(variables.iter().map(|(metric, label)| {
            let metric = metric.replace("$job", ".*");
            format!("sum by ({label}) ({metric})")
        }));
        for query in asked {
            let unknown = catalogue.unknown(&query);
            if !unknown.is_empty() {
                findings.push(format!("{name}: {query}: {unknown:?}"));
            }
        }
    }
    assert!(findings.is_empty(), "{}", findings.join("\n"));
}

#[test]
fn every_panel_says_what_it_shows() {
    let (boards, mut uids) = (all(), BTreeSet::new());
    assert_eq!(boards.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), NAMES);
    for (name, board) in &boards {
        assert_eq!(board["schemaVersion"], SCHEMA, "{name}");
        assert!(uids.insert(text(board, "uid")), "{name}: uid");
        assert!(!text(board, "title").is_empty() && !text(board, "description").is_empty());
        let names: Vec<&str> = board["templating"]["list"]
            .as_array()
            .unwrap()
            .iter()
            .map(|variable| text(variable, "name"))
            .collect();
        assert!(["datasource", "job", "instance"].iter().all(|wanted| names.contains(wanted)));
        let (mut ids, mut titles) = (BTreeSet::new(), BTreeSet::new());
        let mut cells = BTreeSet::new();
        for panel in board["panels"].as_array().unwrap() {
            let title = text(panel, "title");
            let place = format!("{name}: {title}");
            assert!(ids.insert(panel["id"].as_u64().unwrap()), "{place}: id");
            let at = |key: &str| panel["gridPos"][key].as_u64().unwrap();
            assert!(at("x") + at("w") <= 24, "{place}: wider than the page");
            for x in at("x")..at("x") + at("w") {
                for y in at("y")..at("y") + at("h") {
                    assert!(cells.insert((x, y)), "{place}: lies on another panel");
                }
            }
            if panel["type"] == "row" {
                continue;
            }
            assert!(titles.insert(title), "{place}: twice");
            let description = text(panel, "description");
            assert!(description.len() > 10 && description.ends_with('.'), "{place}: {description}");
            let unit = text(&panel["fieldConfig"]["defaults"], "unit");
            assert!(UNITS.contains(&unit), "{place}: unit {unit:?}");
            let targets = panel["targets"].as_array().unwrap();
            assert!(!targets.is_empty(), "{place}: no query");
            for source in targets.iter().chain([panel]) {
                assert_eq!(source["datasource"]["uid"], "${datasource}", "{place}");
            }
            let several = targets.len() > 1;
            let named = |target: &Value| !several || !text(target, "legendFormat").is_empty();
            assert!(targets.iter().all(named), "{place}: lines without names");
        }
    }
}
