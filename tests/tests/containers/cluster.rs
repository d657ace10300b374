//! The cluster of deploy/compose.yaml, and what can happen to its containers while it answers.

use std::{
    sync::{Arc, atomic::AtomicUsize, atomic::Ordering},
    time::Duration,
};

use shimmer_tests::{
    compose::Compose,
    engine::docker,
    resuming::{Address, Seen, follow, reasons},
    wait::wait_until,
    workload::{Job, Outcome},
};

use super::{Bench, job};

const SOON: Duration = Duration::from_secs(60);
/// Long enough to be under way while something happens.
const TOKENS: u32 = 500;
const STREAMS: u64 = 3;

/// Runs the jobs at the same time and does something when all of them are under way.
fn during(compose: &Compose, jobs: &[Job], name: &str, what: impl FnOnce()) -> Vec<Seen> {
    let port = compose.port();
    let address: Address = Arc::new(move || port);
    let deltas: Arc<Vec<AtomicUsize>> =
        Arc::new(jobs.iter().map(|_| AtomicUsize::new(0)).collect());
    let tasks: Vec<_> = (jobs.iter().enumerate())
        .map(|(index, job)| {
            let (address, deltas) = (Arc::clone(&address), Arc::clone(&deltas));
            let mut request = job.request();
            request.request_id = Some(format!("{name}-{index}"));
            let stream = async move { follow(&address, request, &deltas[index]).await };
            compose.runtime().spawn(stream)
        })
        .collect();
    wait_until("all streams to be under way", SOON, || {
        deltas.iter().all(|count| count.load(Ordering::Acquire) >= 5)
    });
    what();
    tasks.into_iter().map(|task| compose.block_on(task).unwrap()).collect()
}

/// Every answer is whole and what it would have been.
fn equal(seen: &[Seen], expected: &[Outcome], what: &str) {
    for (seen, expected) in seen.iter().zip(expected) {
        let cuts = reasons(&seen.cuts);
        match &seen.outcome {
            Ok(outcome) => assert!(outcome == expected, "{what}: other bytes after {cuts:?}"),
            Err(status) => panic!("{what}: {status:?} after {cuts:?}"),
        }
        assert_eq!(seen.silent, 0, "{what}: a stream ended without a word");
        assert!(cuts.is_empty(), "{what}: a worker's trouble cut a stream: {cuts:?}");
    }
}

/// What the engine has been told about each container.
fn confined(compose: &Compose) {
    for service in ["coordinator", "worker-1", "worker-2", "worker-3", "etcd", "prometheus"] {
        let inspected = docker(&["inspect", &compose.container(service)]).unwrap();
        let inspected: serde_json::Value = serde_json::from_str(&inspected).unwrap();
        let host = &inspected[0]["HostConfig"];
        assert_eq!(host["ReadonlyRootfs"], true, "{service}");
        assert_eq!(host["CapDrop"], serde_json::json!(["ALL"]), "{service}");
        assert_eq!(host["Privileged"], false, "{service}");
        assert!(host["Memory"].as_u64() > Some(0), "{service} has no limit");
        assert_eq!(host["Memory"], host["MemoryReservation"], "{service}");
        if service == "etcd" || service == "prometheus" {
            continue;
        }
        let probe = &inspected[0]["Config"]["Healthcheck"];
        assert!(probe["Retries"].as_u64() >= Some(3), "{service}: one hiccup is no failure");
        let grace = inspected[0]["Config"]["StopTimeout"].as_u64();
        assert!(grace > Some(25), "{service}: killed while it drains");
    }
}

#[test]
fn a_compose_cluster_answers_whatever_is_done_to_its_workers() {
    let bench = Bench::new();
    let Some((compose, rules)) = bench.compose() else { return };
    std::fs::write(
        rules.path().join("up.yaml"),
        "groups: [{name: test, rules: [{record: test:up, expr: 'sum(up{job=~\"shimmer.*\"})'}]}]",
    )
    .unwrap();
    let jobs: Vec<Job> = (0..STREAMS).map(|seed| job(seed, TOKENS)).collect();
    let expected = bench.expected(&jobs);

    // Ready is who can generate: a coordinator alone is alive and says what it waits for.
    compose.run(&["up", "--detach", "etcd", "coordinator"]);
    compose.wait("the coordinator's page", || {
        let livez =
            ["/usr/local/bin/shimmer", "healthcheck", "--url", "http://127.0.0.1:9464/livez"];
        compose.exec("coordinator", &livez).ok()
    });
    compose.wait("the coordinator to say what it waits for", || {
        compose
            .probe("coordinator")
            .is_err_and(|why| why.contains("waiting for workers"))
            .then_some(())
    });
    compose.run(&["up", "--detach"]);
    compose.wait_until_serving();
    compose.wait("every container to be healthy", || {
        let health = |service: &str| {
            let container = compose.container(service);
            docker(&["inspect", "--format", "{{.State.Health.Status}}", &container])
        };
        let all = ["coordinator", "worker-1", "worker-2", "worker-3", "etcd"];
        all.iter().all(|service| health(service).as_deref() == Ok("healthy")).then_some(())
    });

    confined(&compose);
    equal(&during(&compose, &jobs, "calm", || ()), &expected, "nothing happens");

    equal(
        &during(&compose, &jobs, "cut", || {
            compose.disconnect("worker-1", "members");
            compose.wait_for_state("worker-1", &["lost", "connecting"]);
        }),
        &expected,
        "a worker is cut off",
    );
    compose.connect("worker-1", "members");
    compose.wait_until_serving();

    equal(
        &during(&compose, &jobs, "paused", || {
            compose.act("pause", "worker-2");
            compose.wait_for_state("worker-2", &["lost", "connecting", "suspect"]);
        }),
        &expected,
        "a worker is paused",
    );
    compose.act("unpause", "worker-2");
    compose.wait_until_serving();

    equal(
        &during(&compose, &jobs, "killed", || {
            compose.act("kill", "worker-3");
            compose.wait_for_state("worker-3", &["lost", "connecting"]);
        }),
        &expected,
        "a worker is killed",
    );
    compose.act("start", "worker-3");
    compose.wait_until_serving();

    // Prometheus sees all of them and has read the rules.
    compose.wait("Prometheus to have scraped four processes", || {
        let query = ["promtool", "query", "instant", "http://127.0.0.1:9090", "test:up"];
        compose.exec("prometheus", &query).ok()?.contains("=> 4 @").then_some(())
    });

    // Nobody waits for the whole grace period where nothing is left to do.
    for service in ["coordinator", "worker-1"] {
        compose.act("stop", service);
        let container = compose.container(service);
        let state = docker(&["inspect", "--format", "{{.State.ExitCode}}", &container]).unwrap();
        assert_eq!(state, "0", "{service} was killed: it waited for its whole grace period");
    }
}
