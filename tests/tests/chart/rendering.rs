//! What the chart renders, against Helm, Kubernetes and our own rules.

use std::{collections::BTreeSet, fs};

use serde_json::Value;
use shimmer_tests::chart::{Helm, Tools, chart_directory, describe, output};

use super::{CASES, Case, VERSIONS, rules};

/// Kinds of operators that a cluster may have; Kubernetes knows no schema of them.
const CUSTOM: [&str; 4] = ["PodMonitor", "ServiceMonitor", "PrometheusRule", "Certificate"];

fn refuse(what: &str, findings: &[String]) {
    assert!(findings.is_empty(), "{what}:\n  {}", findings.join("\n  "));
}

#[test]
fn every_file_of_values_is_a_case() {
    let files: BTreeSet<String> = fs::read_dir(chart_directory().join("ci"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    let cases: BTreeSet<String> =
        CASES.iter().map(|case| case.file.to_owned()).filter(|file| !file.is_empty()).collect();
    assert_eq!(files, cases);
}

#[test]
fn both_majors_of_helm_lint_every_file_of_values() {
    let Some(tools) = Tools::find() else { return };
    for helm in Helm::ALL {
        for case in &CASES {
            let home = tempfile::tempdir().unwrap();
            let mut command = tools.helm(helm, home.path());
            command.args(["lint", "--strict"]).arg(chart_directory()).args(case.args());
            let output = output(&mut command);
            let said = String::from_utf8_lossy(&output.stdout).into_owned();
            assert!(output.status.success(), "{helm:?} {}: {said}", case.file);
        }
    }
}

/// Certificates and the chart's release are new in every rendering.
fn without_secrets(objects: &[Value]) -> Vec<&Value> {
    objects.iter().filter(|object| object["kind"] != "Secret").collect()
}

#[test]
fn both_majors_of_helm_render_the_same() {
    let Some(tools) = Tools::find() else { return };
    for case in &CASES {
        let [three, four] = Helm::ALL.map(|helm| case.render(&tools, helm, "1.34.0"));
        assert_eq!(without_secrets(&three), without_secrets(&four), "{}", case.file);
    }
}

#[test]
fn what_is_rendered_fits_the_oldest_and_the_newest_kubernetes() {
    let Some(tools) = Tools::find() else { return };
    for case in &CASES {
        for version in VERSIONS {
            let objects = case.render(&tools, Helm::Four, version);
            assert!(objects.len() > 8, "{}: {} objects", case.file, objects.len());
            for object in &objects {
                let found = tools.schema_findings(object, version);
                let custom = CUSTOM.contains(&object["kind"].as_str().unwrap());
                assert_eq!(found.is_none(), custom, "{}", describe(object));
                refuse(&format!("{} {version}", case.file), &found.unwrap_or_default());
            }
        }
    }
}

#[test]
fn kubectl_decodes_every_workload() {
    let Some(tools) = Tools::find() else { return };
    for case in &CASES {
        for object in &case.render(&tools, Helm::Four, "1.37.0") {
            if ["Deployment", "StatefulSet"].contains(&object["kind"].as_str().unwrap()) {
                let found: Vec<_> = tools.decode_finding(object).into_iter().collect();
                refuse(case.file, &found);
            }
        }
    }
}

#[test]
fn what_is_rendered_keeps_our_own_rules() {
    let Some(tools) = Tools::find() else { return };
    for case in &CASES {
        for version in VERSIONS {
            let objects = case.render(&tools, Helm::Four, version);
            refuse(&format!("{} {version}", case.file), &rules::findings(&objects, case));
        }
    }
}

fn find<'a>(objects: &'a [Value], kind: &str, name: &str) -> &'a Value {
    objects
        .iter()
        .find(|object| object["kind"] == kind && object["metadata"]["name"] == name)
        .unwrap_or_else(|| panic!("there is no {kind} {name}"))
}

fn container(workload: &Value) -> &Value {
    &workload["spec"]["template"]["spec"]["containers"][0]
}

#[test]
fn a_startup_probe_is_sized_from_the_model() {
    let Some(tools) = Tools::find() else { return };
    for (file, size, rate) in [("glm5-values.yaml", 420, 3000), ("cpu-only-values.yaml", 20, 500)] {
        let objects = Case::of(file).render(&tools, Helm::Four, "1.37.0");
        let mut seen = 0;
        for workload in &objects {
            let probe = &container(workload)["startupProbe"];
            let (Some(failures), Some(period)) =
                (probe["failureThreshold"].as_u64(), probe["periodSeconds"].as_u64())
            else {
                continue;
            };
            let least = 2 * size * 1024 / rate + 120;
            let given = failures * period;
            assert!((least..least + 2 * period).contains(&given), "{file}: {given} for {least}");
            seen += 1;
        }
        assert!(seen >= 2, "{file}: {seen} probes");
    }
}

#[test]
fn a_stopping_coordinator_takes_requests_until_the_endpoint_lists_know() {
    let Some(tools) = Tools::find() else { return };
    // Before 1.30 Kubernetes cannot sleep, so that the coordinator waits instead.
    for (version, expected) in [("1.25.0", None), ("1.29.9", None), ("1.30.0", Some(5))] {
        let objects = Case::of("minimal-values.yaml").render(&tools, Helm::Three, version);
        let coordinator = find(&objects, "Deployment", "rel-shimmer-coordinator");
        let sleep = &container(coordinator)["lifecycle"]["preStop"]["sleep"]["seconds"];
        assert_eq!(sleep.as_u64(), expected, "{version}");
        let args = container(coordinator)["args"].as_array().unwrap().iter();
        let args = args.map(|arg| arg.as_str().unwrap());
        let delays: Vec<&str> = args.filter(|arg| arg.starts_with("--drain-delay")).collect();
        let expected: &[&str] = if expected.is_none() { &["--drain-delay=5s"] } else { &[] };
        assert_eq!(delays, expected, "{version}");
    }
}

/// The init container of each kind of volume, and what the policy lets out to the source.
#[test]
fn a_model_is_fetched_into_volumes_of_every_kind() {
    let Some(tools) = Tools::find() else { return };
    let digest = "5f3c1d1f0c6f4f6f8b7f4c2f6a1e9d3b5f3c1d1f0c6f4f6f8b7f4c2f6a1e9d3b";
    let endpoint = "model.download.endpoint=http://minio:9000";
    for (volume, source, port) in [
        ("model.claim.name=shared", "https://models/olmoe", 443),
        ("model.type=hostPath,model.hostPath.path=/srv/m", "http://models:8080/olmoe", 8080),
        ("model.type=emptyDir,model.emptyDir.sizeLimit=5Gi", "s3://models/olmoe", 443),
        (
            &format!("model.type=claimTemplate,model.claimTemplate.size=5Gi,{endpoint}"),
            "s3://m/o",
            9000,
        ),
    ] {
        let set = format!(
            "--set={volume},model.directory=olmoe,model.download.source={source},model.download.digest={digest}"
        );
        let objects = tools.render(Helm::Four, &chart_directory(), &[&set]).unwrap();
        for (kind, name) in
            [("Deployment", "rel-shimmer-coordinator"), ("StatefulSet", "rel-shimmer-default")]
        {
            let workload = find(&objects, kind, name);
            let spec = &workload["spec"]["template"]["spec"];
            let fetch = &spec["initContainers"][0];
            let args: Vec<_> = fetch["args"].as_array().unwrap().iter().collect();
            let digest = format!("--digest={digest}");
            assert_eq!(args, ["fetch", source, "--out=/model/olmoe", &digest, "--connections=8"]);
            assert_ne!(fetch["volumeMounts"][0]["readOnly"], true, "{volume}: it is written to");
            assert_eq!(spec["containers"][0]["volumeMounts"][0]["readOnly"], true, "{volume}");
            let given = &spec["volumes"][0]["persistentVolumeClaim"];
            assert!(given.is_null() || given["readOnly"].is_null(), "{volume}");
        }
        let policies = objects.iter().filter(|object| {
            let labels = &object["spec"]["podSelector"]["matchLabels"];
            let component = labels["app.kubernetes.io/component"].as_str();
            object["kind"] == "NetworkPolicy" && matches!(component, Some("coordinator" | "worker"))
        });
        let mut open = 0;
        for policy in policies {
            let ports = policy["spec"]["egress"].as_array().unwrap().iter();
            let ports = ports.flat_map(|rule| rule["ports"].as_array().unwrap());
            open += usize::from(ports.into_iter().any(|it| it["port"] == port));
        }
        assert_eq!(open, 2, "{source} can be reached");
    }
}

#[test]
fn grace_periods_are_values() {
    let Some(tools) = Tools::find() else { return };
    let args = [
        "--set=coordinator.terminationGracePeriodSeconds=901,coordinator.drainSeconds=800",
        "--set=worker.terminationGracePeriodSeconds=301",
    ];
    let objects = tools.render(Helm::Four, &chart_directory(), &args).unwrap();
    for (kind, name, expected) in [
        ("Deployment", "rel-shimmer-coordinator", 901),
        ("StatefulSet", "rel-shimmer-default", 301),
    ] {
        let pod = &find(&objects, kind, name)["spec"]["template"]["spec"];
        assert_eq!(pod["terminationGracePeriodSeconds"], expected, "{name}");
    }
}

#[test]
fn addresses_of_ipv6_pods_stand_in_brackets() {
    let Some(tools) = Tools::find() else { return };
    let advertised = |file: &str| {
        let objects = Case::of(file).render(&tools, Helm::Four, "1.37.0");
        let args =
            container(find(&objects, "Deployment", "rel-shimmer-coordinator"))["args"].clone();
        let args = args.as_array().unwrap().clone();
        let found =
            args.iter().filter_map(Value::as_str).find(|arg| arg.starts_with("--advertise="));
        found.unwrap().to_owned()
    };
    assert_eq!(advertised("minimal-values.yaml"), "--advertise=$(POD_IP):50051");
    assert_eq!(advertised("cpu-only-values.yaml"), "--advertise=[$(POD_IP)]:50051");
    let objects = Case::of("minimal-values.yaml").render(&tools, Helm::Four, "1.37.0");
    let text = serde_json::to_string(&objects).unwrap();
    assert!(text.contains("--listen=[::]:50051") && text.contains("--listen=[::]:50052"));
}

#[test]
fn shared_memory_reaches_the_pod_and_counts() {
    let Some(tools) = Tools::find() else { return };
    let objects = Case::of("glm5-values.yaml").render(&tools, Helm::Four, "1.37.0");
    let pod = &find(&objects, "StatefulSet", "rel-shimmer-six-gpu")["spec"]["template"]["spec"];
    let text = pod.to_string();
    assert!(
        text.contains(
            r#"{"name":"shared-memory","emptyDir":{"medium":"Memory","sizeLimit":"8192Mi"}}"#
        ),
        "{text}"
    );
    assert!(text.contains(r#"{"name":"shared-memory","mountPath":"/dev/shm"}"#), "{text}");
    let error = tools
        .render(Helm::Four, &chart_directory(), &["--set=worker.sharedMemoryMiB=32768"])
        .unwrap_err();
    assert!(error.contains("leaves nothing of resources.memory"), "{error}");
}

/// Dashboards and rules are whatever files lie there, also none.
#[test]
fn dashboards_and_rules_come_from_the_files_of_the_chart() {
    let Some(tools) = Tools::find() else { return };
    let copy = tempfile::tempdir().unwrap();
    let chart = copy.path().join("shimmer");
    super::mutations::copy_chart(&chart);
    for directory in ["dashboards", "rules"] {
        if chart.join(directory).exists() {
            fs::remove_dir_all(chart.join(directory)).unwrap();
        }
    }
    let on = "--set=metrics.dashboards.enabled=true,metrics.rules.configMap=true,metrics.rules.prometheusRule=true";
    let count = |chart: &std::path::Path| {
        let objects = tools.render(Helm::Four, chart, &[on]).unwrap();
        let wanted = ["ConfigMap", "PrometheusRule"];
        objects
            .into_iter()
            .filter(|object| wanted.iter().any(|kind| object["kind"] == *kind))
            .collect::<Vec<_>>()
    };
    assert_eq!(count(&chart).len(), 0);
    for directory in ["dashboards", "rules"] {
        fs::create_dir_all(chart.join(directory)).unwrap();
    }
    let dashboard = r#"{"title": "one {{ of }} $ours"}"#;
    fs::write(chart.join("dashboards/one_board.json"), dashboard).unwrap();
    let rule = "groups:\n  - name: ours\n    rules:\n      - alert: A\n        expr: up == 0\n        annotations:\n          text: \"{{ $labels.pod }}\"\n";
    fs::write(chart.join("rules/ours.yaml"), rule).unwrap();
    let made = count(&chart);
    assert_eq!(made.len(), 3);
    let board = find(&made, "ConfigMap", "rel-shimmer-dashboard-one-board");
    assert_eq!(board["data"]["one_board.json"], dashboard);
    assert_eq!(board["metadata"]["labels"]["grafana_dashboard"], "1");
    let text = &find(&made, "ConfigMap", "rel-shimmer-rules-ours")["data"]["ours.yaml"];
    assert_eq!(tools.parse(text.as_str().unwrap()), tools.parse(rule));
    let rules = find(&made, "PrometheusRule", "rel-shimmer-rules-ours");
    assert_eq!(rules["spec"], tools.parse(rule)[0]);
}
