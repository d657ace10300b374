//! What the exporters show, from the tables of docs/METRICS.md, which another test compares with the code; and what a query
//! asks for.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::PathBuf,
};

/// Labels of every series that Prometheus scrapes, and of the buckets of a histogram.
const ADDED: [&str; 3] = ["job", "instance", "le"];

pub(super) fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// The metrics by name, with their labels; a histogram has the names of its series.
pub(super) struct Catalogue(BTreeMap<String, BTreeSet<String>>);

impl Catalogue {
    pub(super) fn read() -> Self {
        let text = fs::read_to_string(root().join("docs/METRICS.md")).unwrap();
        let mut metrics = BTreeMap::new();
        for row in text.lines().filter_map(|line| line.strip_prefix("| `")) {
            let cells: Vec<&str> = row.split('|').map(str::trim).collect();
            let [name, kind, _, labels, ..] = cells[..] else { continue };
            let series: &[&str] = match kind {
                "histogram" => &["_bucket", "_sum", "_count"],
                "counter" | "gauge" => &[""],
                _ => continue,
            };
            let labels: BTreeSet<String> =
                labels.split('`').skip(1).step_by(2).map(str::to_owned).collect();
            for suffix in series {
                metrics.insert(format!("{}{suffix}", name.trim_matches('`')), labels.clone());
            }
        }
        assert!(metrics.len() > 100, "the tables have {} metrics", metrics.len());
        Self(metrics)
    }

    /// What a query asks for that is not there.
    pub(super) fn unknown(&self, query: &str) -> Vec<String> {
        let Asked { selectors, grouping } = Asked::of(query);
        let mut findings = Vec::new();
        if selectors.is_empty() {
            findings.push("no metric".to_owned());
        }
        let mut labels: BTreeSet<&str> = ADDED.into();
        for (metric, asked) in &selectors {
            let Some(has) = self.0.get(metric) else {
                findings.push(metric.clone());
                continue;
            };
            labels.extend(has.iter().map(String::as_str));
            let lacks = |label: &&String| !has.contains(*label) && !ADDED.contains(&label.as_str());
            findings.extend(asked.iter().filter(lacks).map(|label| format!("{metric}{{{label}}}")));
        }
        let lost = grouping.iter().filter(|label| !labels.contains(label.as_str()));
        findings.extend(lost.map(|label| format!("by {label}")));
        findings
    }

    /// The metrics that a query names.
    pub(super) fn named(query: &str) -> Vec<String> {
        Asked::of(query).selectors.into_iter().map(|(metric, _)| metric).collect()
    }
}

/// Words of the language that no parenthesis follows, or that group what stands in it.
const GROUPING: [&str; 6] = ["by", "without", "on", "ignoring", "group_left", "group_right"];
const WORDS: [&str; 13] = [
    "and", "or", "unless", "bool", "offset", "sum", "min", "max", "count", "avg", "topk", "stddev",
    "quantile",
];

/// What a query asks for.
#[derive(Default)]
struct Asked {
    /// Metrics with the labels that they are selected by.
    selectors: Vec<(String, Vec<String>)>,
    /// Labels that are grouped or matched by.
    grouping: Vec<String>,
}

impl Asked {
    fn of(query: &str) -> Self {
        let mut asked = Self::default();
        let mut rest = query;
        while let Some(first) = rest.chars().next() {
            let word = rest
                .find(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == ':'))
                .unwrap_or(rest.len());
            if word == 0 {
                rest = match first {
                    '"' => after(&rest[1..], '"'),
                    '[' => after(rest, ']'),
                    '{' => {
                        let (labels, left) = matchers(&rest[1..]);
                        let (_, selector) = asked.selectors.last_mut().expect("a metric first");
                        selector.extend(labels);
                        left
                    }
                    _ => &rest[first.len_utf8()..],
                };
                continue;
            }
            let name = &rest[..word];
            rest = &rest[word..];
            let next = rest.trim_start();
            if GROUPING.contains(&name) {
                let list =
                    next.strip_prefix('(').map_or("", |list| list.split(')').next().unwrap());
                asked.grouping.extend(list.split(',').map(|label| label.trim().to_owned()));
                rest = if next.starts_with('(') { after(next, ')') } else { rest };
            } else if !next.starts_with('(')
                && !WORDS.contains(&name)
                && !name.starts_with(|c: char| c.is_ascii_digit())
            {
                asked.selectors.push((name.to_owned(), Vec::new()));
            }
        }
        asked
    }
}

fn after(text: &str, end: char) -> &str {
    text.split_once(end).map_or("", |(_, rest)| rest)
}

/// The labels of what stands in braces, and what comes after.
fn matchers(text: &str) -> (Vec<String>, &str) {
    let (mut labels, mut rest) = (Vec::new(), text);
    loop {
        rest = rest.trim_start_matches([' ', ',']);
        if let Some(rest) = rest.strip_prefix('}') {
            return (labels, rest);
        }
        let Some((label, value)) = rest.split_once(['=', '!']) else { return (labels, "") };
        labels.push(label.trim().to_owned());
        rest = value.split_once('"').map_or("", |(_, quoted)| after(quoted, '"'));
    }
}

#[test]
fn what_a_query_asks_for_is_found_and_what_is_not_there_is_named() {
    let catalogue = Catalogue::read();
    let check = |query: &str, expected: &[&str]| {
        assert_eq!(catalogue.unknown(query), expected, "{query}");
    };
    let rate = "sum by (le, worker) (rate(shimmer_coordinator_worker_wait_seconds_total[5m]))";
    check(rate, &[]);
    check(&rate.replace("worker)", "werker)"), &["by werker"]);
    check(
        &rate.replace("seconds_total", "seconds"),
        &["shimmer_coordinator_worker_wait_seconds", "by worker"],
    );
    check(r#"vllm:request_success_total{job=~"a.*", finished_reason!="x{y}"} > 0.5e3"#, &[]);
    check(r#"vllm:request_success_total{reason="stop"}"#, &["vllm:request_success_total{reason}"]);
    check("histogram_quantile(0.9, vllm:time_to_first_token_seconds_bucket)", &[]);
    check("rate(vllm:time_to_first_token_seconds[5m])", &["vllm:time_to_first_token_seconds"]);
    check("process_open_fds / process_max_fds and on (job) up", &["up"]);
    check("time() - 1", &["no metric"]);
}
