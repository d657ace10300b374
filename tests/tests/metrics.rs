//! The pages of figures of real processes, and who reads them.

mod alerts;
mod catalogue;
mod dashboards;
mod scraped;

use shimmer_model::{NumericClass, tiny::Preset};
use shimmer_tests::{
    client::greedy,
    cluster::{Cluster, ClusterOptions, WorkerOptions},
    models::TinyModel,
};

/// The sum of all series of a metric.
fn sum(page: &str, name: &str) -> f64 {
    let series = page.lines().filter_map(|line| line.strip_prefix(name));
    let values = series.filter(|rest| rest.starts_with([' ', '{']));
    values.map(|rest| rest.rsplit_once(' ').unwrap().1.parse::<f64>().unwrap()).sum()
}

#[test]
fn both_roles_count_what_a_generation_did() {
    let model = TinyModel::new(Preset::Qwen3Moe);
    let container = model.container(NumericClass::default());
    let page = || ["--metrics-listen", "127.0.0.1:0"].map(str::to_owned).to_vec();
    let worker = || WorkerOptions { args: page(), ..WorkerOptions::default() };
    let cluster = Cluster::start(&ClusterOptions {
        workers: vec![worker(), worker()],
        args: page(),
        ..ClusterOptions::new(&container, 0)
    });
    let generation = cluster.generate(greedy(&[1, 2, 3, 4, 5], 6)).unwrap();
    assert_eq!(generation.tokens.len(), 6);

    let coordinator = cluster.coordinator.page("/metrics");
    let of = |name| sum(&coordinator, name);
    assert!((of("shimmer_coordinator_generated_tokens_total") - 6.0).abs() < 0.5);
    assert!((of("shimmer_coordinator_rows_total{kind=\"prefill\"}") - 5.0).abs() < 0.5);
    assert!(
        (of("shimmer_coordinator_rows_total") - 10.0).abs() < 0.5,
        "5 of the prompt, 5 fed back"
    );
    assert!((of("shimmer_coordinator_decode_step_seconds_count") - 5.0).abs() < 0.5);
    assert!((of("shimmer_coordinator_generations_total") - 1.0).abs() < 0.5);
    assert!(of("shimmer_coordinator_worker_results_total") > 0.0);
    let json: serde_json::Value =
        serde_json::from_str(&cluster.coordinator.page("/metrics.json")).unwrap();
    assert_eq!(json["engine"]["generated_tokens"], 6);
    assert_eq!(json["workers"][1]["state"], "serving");

    let pages: Vec<String> =
        cluster.workers.iter().map(|worker| worker.process.page("/metrics")).collect();
    let all = |name: &str| pages.iter().map(|page| sum(page, name)).sum::<f64>();
    let results = of("shimmer_coordinator_worker_results_total");
    assert!((all("shimmer_worker_work_total") - results).abs() < 0.5, "one result for each work");
    assert!((all("shimmer_worker_sessions_total") - 2.0).abs() < 0.5);
}

#[test]
fn hints_reach_workers_that_read_ahead_and_change_no_byte() {
    let model = TinyModel::new(Preset::Glm4Moe);
    let container = model.container(NumericClass::default());
    let page = ["--metrics-listen", "127.0.0.1:0"];
    let run = |flags: &[&str]| {
        let args: Vec<String> = page.iter().chain(flags).map(|&flag| flag.to_owned()).collect();
        let cluster = Cluster::start(&ClusterOptions {
            workers: vec![WorkerOptions { args, ..WorkerOptions::default() }; 2],
            args: page.map(str::to_owned).to_vec(),
            ..ClusterOptions::new(&container, 0)
        });
        let generation = cluster.generate(greedy(&[3, 1, 4, 1, 5, 9, 2, 6], 12)).unwrap();
        let coordinator = cluster.coordinator.page("/metrics");
        let workers =
            cluster.workers.iter().map(|worker| worker.process.page("/metrics")).collect();
        (generation.logits_sha256, coordinator, workers)
    };
    let (expected, coordinator, _): (String, String, Vec<String>) = run(&[]);
    let sent = sum(&coordinator, "shimmer_coordinator_hints_total");
    assert!(sent.abs() < 0.5, "everything is resident: {sent} hints");
    let (digest, coordinator, workers) = run(&["--cap", "2", "--pilot-workers", "2"]);
    assert_eq!(digest, expected);
    let all = |name: &str| workers.iter().map(|page| sum(page, name)).sum::<f64>();
    let sent = sum(&coordinator, "shimmer_coordinator_hints_total");
    assert!(sent > 10.0, "{sent} hints");
    assert!((all("shimmer_worker_hints_total") - sent).abs() < 0.5, "every hint fits");
    assert!(all("shimmer_worker_hints_dropped_total").abs() < 0.5);
    assert!(all("shimmer_prefetch_issued_total") > 0.0);
    assert!(all("shimmer_expert_misses_total") > 0.0);
}
