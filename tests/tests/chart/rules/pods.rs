//! Pods that start, stay and end as they should: limits, probes, grace, updates, and where they may write.

use std::collections::BTreeSet;

use serde_json::Value;

use super::{Pod, Release, bytes, items, text};

pub(super) fn findings(release: &Release<'_>) -> Vec<String> {
    let checks = [
        resources,
        memory_volumes,
        grace,
        probes,
        update,
        security,
        written,
        kept,
        waits_for_nothing,
    ];
    let all = release.pods.iter();
    let of_pods = all.flat_map(|pod| {
        let found = checks.iter().flat_map(move |check| check(pod));
        found.map(move |finding| format!("{}: {finding}", pod.name()))
    });
    of_pods.chain(versions(release)).collect()
}

/// Members of two versions may refuse each other, and an update of one role alone does not end.
fn versions(release: &Release<'_>) -> Option<String> {
    let ours = release.pods.iter().filter(|pod| pod.is_ours());
    let images: BTreeSet<&str> =
        ours.flat_map(|pod| pod.containers()).map(|container| text(&container["image"])).collect();
    (images.len() > 1).then(|| format!("versions of the program are mixed: {images:?}"))
}

/// What ends is started again in place: the pod stays with its logs, and with the model in a volume.
fn kept(pod: &Pod<'_>) -> Vec<String> {
    let mut findings = Vec::new();
    if pod.owner["kind"] == "Pod" {
        return findings;
    }
    let policy = &pod.spec["restartPolicy"];
    if !(policy.is_null() || policy == "Always") {
        findings.push(format!("what ends is not started again in place: {policy}"));
    }
    if let Some(model) = pod.flag("container")
        && !mounts(pod.main(), model).any(|_| true)
    {
        findings.push(format!("the model at {model} goes with its container"));
    }
    findings
}

/// The program asks for names itself, at every connection; whoever asks before it only adds a way to fail.
fn waits_for_nothing(pod: &Pod<'_>) -> Vec<String> {
    let first = items(&pod.spec["initContainers"])
        .filter(|container| !container["command"].is_null() || container["args"][0] != "fetch");
    first.map(|container| format!("container {} delays the program", container["name"])).collect()
}

/// Mounts of a container that hold a path.
fn mounts<'a>(container: &'a Value, path: &str) -> impl Iterator<Item = &'a Value> {
    items(&container["volumeMounts"]).filter(move |mount| {
        let at = text(&mount["mountPath"]);
        path == at || path.strip_prefix(at).is_some_and(|rest| rest.starts_with('/'))
    })
}

/// A request without a limit takes the node down with the pod; a limit above the request is memory that may not be there.
fn resources(pod: &Pod<'_>) -> Vec<String> {
    let mut findings = Vec::new();
    for container in pod.containers() {
        let (requests, limits) =
            (&container["resources"]["requests"], &container["resources"]["limits"]);
        for kind in ["cpu", "memory"] {
            if limits[kind].is_null() {
                findings.push(format!("container {} has no limit of {kind}", container["name"]));
            }
        }
        if requests != limits {
            findings.push(format!("container {}: requests are not limits", container["name"]));
        }
    }
    findings
}

/// What lies in memory counts as the pod's memory; what lies on the node has a bound.
fn memory_volumes(pod: &Pod<'_>) -> Vec<String> {
    let limit: u64 = items(&pod.spec["containers"])
        .filter_map(|container| bytes(&container["resources"]["limits"]["memory"]))
        .sum();
    let mut findings = Vec::new();
    let mut in_memory = 0;
    for volume in items(&pod.spec["volumes"]) {
        let directory = &volume["emptyDir"];
        if directory.is_null() || directory["medium"] == "HugePages" {
            continue;
        }
        match bytes(&directory["sizeLimit"]) {
            None => findings.push(format!("volume {} has no bound", volume["name"])),
            Some(size) if directory["medium"] == "Memory" => in_memory += size,
            Some(_) => {}
        }
    }
    if in_memory >= limit {
        findings.push(format!("{in_memory} bytes of volumes in {limit} bytes of memory"));
    }
    findings
}

/// Whoever is killed before it has drained cuts answers.
fn grace(pod: &Pod<'_>) -> Vec<String> {
    let Some(drain) = pod.flag("drain-timeout") else { return Vec::new() };
    let drain: u64 = drain.trim_end_matches('s').parse().expect("the chart writes seconds");
    let sleep = pod.main()["lifecycle"]["preStop"]["sleep"]["seconds"].as_u64().unwrap_or(0);
    let delay = pod
        .flag("drain-delay")
        .map_or(0, |delay| delay.trim_end_matches('s').parse().expect("the chart writes seconds"));
    let grace = pod.spec["terminationGracePeriodSeconds"].as_u64().unwrap_or(30);
    match grace > drain + sleep + delay {
        true => Vec::new(),
        false => {
            vec![format!("grace of {grace} s for {sleep} s, {delay} s and a drain of {drain} s")]
        }
    }
}

fn probes(pod: &Pod<'_>) -> Vec<String> {
    if pod.owner["kind"] == "Pod" {
        return Vec::new();
    }
    let main = pod.main();
    let mut findings = Vec::new();
    let liveness = &main["livenessProbe"];
    if liveness["failureThreshold"].as_u64() < Some(3) {
        findings.push("one hiccup is a restart".to_owned());
    }
    if !liveness["initialDelaySeconds"].is_null()
        || !main["readinessProbe"]["initialDelaySeconds"].is_null()
    {
        findings.push("a pod that is ready waits for a delay".to_owned());
    }
    if main["readinessProbe"].is_null() {
        findings.push("it is ready before it works".to_owned());
    }
    if pod.is_ours() {
        for (probe, path) in [("livenessProbe", "/livez"), ("readinessProbe", "/readyz")] {
            if main[probe]["httpGet"]["path"] != path {
                findings.push(format!("{probe} asks for {}", main[probe]["httpGet"]["path"]));
            }
        }
        let startup = &main["startupProbe"];
        let budget = startup["failureThreshold"].as_u64().zip(startup["periodSeconds"].as_u64());
        if budget.is_none_or(|(failures, period)| failures * period < 120) {
            findings.push("a start of less than two minutes is a failure".to_owned());
        }
    }
    findings
}

/// An update ends: there is room for a new pod beside the old one, or the old one goes first.
fn update(pod: &Pod<'_>) -> Vec<String> {
    let spec = &pod.owner["spec"];
    if pod.owner["kind"] != "Deployment" || spec["strategy"]["type"] == "Recreate" {
        return Vec::new();
    }
    let rolling = &spec["strategy"]["rollingUpdate"];
    let mut findings = Vec::new();
    if rolling["maxSurge"] != 1 || rolling["maxUnavailable"] != 0 {
        findings.push(format!("an update by {rolling} loses a coordinator or never begins"));
    }
    let startup = &pod.main()["startupProbe"];
    let start = startup["failureThreshold"].as_u64().unwrap_or(0)
        * startup["periodSeconds"].as_u64().unwrap_or(0);
    if spec["progressDeadlineSeconds"].as_u64().unwrap_or(600) <= start {
        findings.push(format!("a rollout counts as failed before a start of {start} s is over"));
    }
    findings
}

fn security(pod: &Pod<'_>) -> Vec<String> {
    let mut findings = Vec::new();
    if pod.spec["automountServiceAccountToken"] != false {
        findings.push("it gets a token of the API server that it never uses".to_owned());
    }
    if pod.spec["enableServiceLinks"] != false {
        findings.push("it gets a variable for every service of the namespace".to_owned());
    }
    for container in pod.containers() {
        let security = &container["securityContext"];
        if security["readOnlyRootFilesystem"] != true {
            findings.push(format!("container {} can write its image", container["name"]));
        }
        let image = text(&container["image"]);
        let name = image.rsplit('/').next().unwrap_or_default();
        if !(name.contains(':') || image.contains("@sha256:")) || name.ends_with(":latest") {
            findings.push(format!("image {image} may be another one tomorrow"));
        }
    }
    findings
}

/// Every path that the program writes lies in a volume that it may write.
fn written(pod: &Pod<'_>) -> Vec<String> {
    let mut findings = Vec::new();
    for container in pod.containers() {
        let args: Vec<_> = items(&container["args"]).filter_map(Value::as_str).collect();
        for flag in ["usage", "journal", "out", "data-dir"] {
            let prefix = format!("--{flag}=");
            for path in args.iter().filter_map(|arg| arg.strip_prefix(&prefix)) {
                if !mounts(container, path).any(|mount| mount["readOnly"] != true) {
                    findings.push(format!("--{flag} writes {path}, where no volume is"));
                }
            }
        }
    }
    findings
}
