//! A real Prometheus scrapes a running cluster, answers what dashboards ask, and evaluates the alerts.

use std::{collections::BTreeSet, path::Path, time::Duration};

use shimmer_model::{NumericClass, tiny::Preset};
use shimmer_tests::{
    certificates::Authority,
    client::greedy,
    cluster::{Cluster, ClusterOptions, WorkerOptions},
    models::TinyModel,
    prometheus::{Prometheus, available},
    wait::wait_until,
};
use tempfile::TempDir;

use super::{
    alerts::rule_files,
    catalogue::Catalogue,
    dashboards::{all, queries},
};

const SOON: Duration = Duration::from_secs(60);

#[test]
fn a_real_prometheus_answers_every_query_of_the_dashboards() {
    if !available() {
        return;
    }
    let model = TinyModel::new(Preset::Qwen3Moe);
    let container = model.container(NumericClass::default());
    let (directory, authority) = (TempDir::new().unwrap(), Authority::new("members"));
    let member = authority.issue(directory.path());
    let flags = || {
        let mut flags = ["--metrics-listen", "127.0.0.1:0"].map(str::to_owned).to_vec();
        flags.extend(member.flags());
        flags
    };
    let worker = || WorkerOptions { args: flags(), ..WorkerOptions::default() };
    let cluster = Cluster::start(&ClusterOptions {
        workers: vec![worker(), worker()],
        args: [flags(), ["--model-name", "tiny"].map(str::to_owned).to_vec()].concat(),
        ..ClusterOptions::new(&container, 0)
    });
    let pages: Vec<String> = cluster
        .workers
        .iter()
        .map(|worker| &worker.process)
        .chain([&cluster.coordinator])
        .map(shimmer_tests::process::Process::page_address)
        .collect();
    let rules = rule_files();
    let rules: Vec<&Path> = rules.iter().map(AsRef::as_ref).collect();
    let prometheus = Prometheus::start(&pages, &rules);
    let is = |query: &str, expected: f64| {
        let near = |value: f64| (value - expected).abs() < 1e-9;
        wait_until(&format!("{query} to be {expected}"), SOON, || {
            prometheus.value(query).is_some_and(near)
        });
    };
    // Rates need a series from before what they count.
    is("sum(up)", 3.0);
    is("count(shimmer_build_info{role=\"worker\"})", 2.0);
    let generation = cluster.generate(greedy(&[1, 2, 3, 4, 5], 6)).unwrap();
    assert_eq!(generation.tokens.len(), 6);
    is("vllm:generation_tokens_total{model_name=\"tiny\"}", 6.0);
    is("vllm:prompt_tokens_total", 5.0);
    is("sum(vllm:request_success_total)", 1.0);
    is("vllm:request_success_total{finished_reason=\"length\"}", 1.0);
    is("vllm:time_to_first_token_seconds_count", 1.0);
    is("vllm:inter_token_latency_seconds_count", 5.0);
    is("vllm:e2e_request_latency_seconds_bucket{le=\"+Inf\"}", 1.0);
    is(
        "vllm:request_prompt_tokens_bucket{le=\"4.0\"} or vllm:request_prompt_tokens_bucket{le=\"4\"}",
        0.0,
    );
    is("vllm:num_requests_running + vllm:num_requests_waiting", 0.0);
    is("shimmer_coordinator_ready", 1.0);
    // From the certificate itself; rcgen's end in the year 4096 unless told otherwise.
    is(
        "count(shimmer_certificate_not_after_timestamp_seconds{certificate=\"member\"} > time())",
        3.0,
    );

    let names = prometheus.get("/api/v1/label/__name__/values");
    let names: BTreeSet<&str> =
        names["data"].as_array().unwrap().iter().filter_map(|name| name.as_str()).collect();
    let (mut asked, mut findings) = (0, Vec::new());
    for (board, json) in all() {
        for query in queries(&json) {
            asked += 1;
            if let Err(error) = prometheus.query(&query) {
                findings.push(format!("{board}: {query}: {error}"));
            }
            let absent = |name: &String| !names.contains(name.as_str());
            let absent: Vec<String> = Catalogue::named(&query).into_iter().filter(absent).collect();
            if !absent.is_empty() {
                findings.push(format!("{board}: {query}: nobody shows {absent:?}"));
            }
        }
    }
    assert!(findings.is_empty(), "{}", findings.join("\n"));
    assert!(asked > 100, "{asked} queries");

    // Every rule is evaluated, and none finds anything wrong with a healthy cluster.
    let health = || -> Vec<(String, String, String)> {
        let groups = prometheus.get("/api/v1/rules");
        let groups = groups["data"]["groups"].as_array().unwrap().clone();
        let rules = groups.iter().flat_map(|group| group["rules"].as_array().unwrap());
        let word = |rule: &serde_json::Value, key: &str| rule[key].as_str().unwrap().to_owned();
        rules.map(|rule| (word(rule, "name"), word(rule, "health"), word(rule, "state"))).collect()
    };
    let unknown = |rule: &(String, String, String)| rule.1 == "unknown";
    wait_until("every rule to be evaluated", SOON, || !health().iter().any(unknown));
    let rules = health();
    assert!(rules.len() > 20, "{rules:?}");
    for (name, health, state) in rules {
        assert_eq!((health.as_str(), state.as_str()), ("ok", "inactive"), "{name}");
    }
}
