//! Selectors find what they mean, and ports that are named exist where they are looked for.

use serde_json::Value;
use shimmer_tests::chart::describe;

use super::{Labels, Release, items, labels, matches, text};

pub(super) fn findings(release: &Release<'_>) -> Vec<String> {
    let mut findings = Vec::new();
    for pod in &release.pods {
        let selector = &pod.owner["spec"]["selector"]["matchLabels"];
        if pod.owner["kind"] == "Pod" {
            continue;
        }
        let selector = labels(selector);
        if selector.is_empty() || !matches(&selector, &pod.labels) {
            findings.push(format!("{} does not select its own pods", pod.name()));
        }
        let found: Vec<_> = release.selected(&selector).iter().map(|pod| pod.name()).collect();
        if found.len() > 1 {
            findings.push(format!("{} selects pods of {found:?}", pod.name()));
        }
        for (what, selector) in spreading(pod.spec) {
            if !matches(&selector, &pod.labels) {
                findings.push(format!("{}: {what} looks for other pods", pod.name()));
            }
        }
        if pod.owner["kind"] == "StatefulSet" {
            findings.extend(headless(release, pod.owner, &pod.labels));
        }
    }
    for service in release.kind("Service") {
        if release.selected(&labels(&service["spec"]["selector"])).is_empty() {
            findings.push(format!("{} selects no pod", describe(service)));
        }
    }
    for budget in release.kind("PodDisruptionBudget") {
        findings.extend(budget_findings(release, budget));
    }
    for scaler in release.kind("HorizontalPodAutoscaler") {
        let target = &scaler["spec"]["scaleTargetRef"];
        let is_target = |object: &&Value| {
            object["kind"] == target["kind"] && object["metadata"]["name"] == target["name"]
        };
        match release.objects.iter().find(is_target) {
            None => findings.push(format!("{} scales nothing", describe(scaler))),
            Some(object) if !object["spec"]["replicas"].is_null() => findings.push(format!(
                "{}: its target sets replicas again at each upgrade",
                describe(scaler)
            )),
            Some(_) => {}
        }
    }
    findings
}

/// Terms of a pod that are about pods of its own kind.
fn spreading(spec: &Value) -> Vec<(&'static str, Labels)> {
    let anti = &spec["affinity"]["podAntiAffinity"];
    let preferred = items(&anti["preferredDuringSchedulingIgnoredDuringExecution"])
        .map(|term| ("podAntiAffinity", &term["podAffinityTerm"]["labelSelector"]));
    let required = items(&anti["requiredDuringSchedulingIgnoredDuringExecution"])
        .map(|term| ("podAntiAffinity", &term["labelSelector"]));
    let spread = items(&spec["topologySpreadConstraints"])
        .map(|term| ("topologySpreadConstraints", &term["labelSelector"]));
    let all = preferred.chain(required).chain(spread);
    all.map(|(what, selector)| (what, labels(&selector["matchLabels"]))).collect()
}

fn headless(release: &Release<'_>, set: &Value, pod_labels: &Labels) -> Vec<String> {
    let name = &set["spec"]["serviceName"];
    let service = release.kind("Service").find(|service| &service["metadata"]["name"] == name);
    let Some(service) = service else {
        return vec![format!("{}: there is no service {name}", describe(set))];
    };
    let mut findings = Vec::new();
    if service["spec"]["clusterIP"] != "None" {
        findings.push(format!("{} needs no address: its pods have names", describe(service)));
    }
    if service["spec"]["publishNotReadyAddresses"] != true {
        findings.push(format!("{} hides pods that are not ready yet", describe(service)));
    }
    if !matches(&labels(&service["spec"]["selector"]), pod_labels) {
        findings.push(format!(
            "{} does not select the pods of {}",
            describe(service),
            describe(set)
        ));
    }
    findings
}

fn budget_findings(release: &Release<'_>, budget: &Value) -> Vec<String> {
    let name = describe(budget);
    let found = release.selected(&labels(&budget["spec"]["selector"]["matchLabels"]));
    let [pod] = found.as_slice() else {
        return vec![format!("{name} is about {} workloads", found.len())];
    };
    let replicas = pod.owner["spec"]["replicas"].as_u64();
    let nothing = |value: &Value| match value {
        Value::Number(number) => number.as_u64() == Some(0),
        Value::String(percent) => percent.trim_end_matches('%').parse() == Ok(0),
        _ => false,
    };
    let (away, stay) = (&budget["spec"]["maxUnavailable"], &budget["spec"]["minAvailable"]);
    let all_stay = match stay {
        Value::Number(number) => replicas.is_some_and(|all| number.as_u64() >= Some(all)),
        Value::String(percent) => percent == "100%",
        _ => false,
    };
    match nothing(away) || all_stay || (away.is_null() && stay.is_null()) {
        true => vec![format!("{name} lets no pod go: a node could never be drained")],
        false => Vec::new(),
    }
}

/// Ports of services, probes and monitors.
pub(super) fn port_findings(release: &Release<'_>) -> Vec<String> {
    let mut findings = Vec::new();
    for service in release.kind("Service") {
        for port in items(&service["spec"]["ports"]) {
            let target = &port["targetPort"];
            for pod in release.selected(&labels(&service["spec"]["selector"])) {
                if !pod.has_port(target) {
                    findings.push(format!(
                        "{}: {} has no port {target}",
                        describe(service),
                        pod.name()
                    ));
                }
            }
        }
        // Clients must not reach operators, and operators ask coordinators that are not ready.
        let public = service["spec"]["publishNotReadyAddresses"] != true;
        let names: Vec<_> =
            items(&service["spec"]["ports"]).map(|port| text(&port["name"])).collect();
        if public && names != ["grpc"] {
            findings.push(format!("{} shows clients {names:?}", describe(service)));
        }
    }
    for pod in &release.pods {
        for container in pod.containers() {
            for probe in ["startupProbe", "livenessProbe", "readinessProbe"] {
                for kind in ["httpGet", "tcpSocket"] {
                    let port = &container[probe][kind]["port"];
                    let own = || items(&container["ports"]).any(|own| &own["name"] == port);
                    if !port.is_null() && !own() {
                        findings.push(format!("{}: {probe} looks at {port}", pod.name()));
                    }
                }
            }
        }
    }
    for monitor in release.kind("PodMonitor") {
        for endpoint in items(&monitor["spec"]["podMetricsEndpoints"]) {
            let ours = |pod: &&super::Pod<'_>| pod.owner["kind"] != "Pod";
            for pod in release.pods.iter().filter(ours) {
                if !pod.has_port(&endpoint["port"]) {
                    findings.push(format!(
                        "{}: {} has no such port",
                        describe(monitor),
                        pod.name()
                    ));
                }
            }
        }
    }
    for monitor in release.kind("ServiceMonitor") {
        let selector = labels(&monitor["spec"]["selector"]["matchLabels"]);
        let services: Vec<_> = release
            .kind("Service")
            .filter(|service| matches(&selector, &labels(&service["metadata"]["labels"])))
            .collect();
        // Of coordinators, of workers, and of an etcd of this release.
        let etcd = release.pods.iter().any(|pod| pod.owner["kind"] != "Pod" && !pod.is_ours());
        if services.len() != 2 + usize::from(etcd) {
            findings.push(format!("{} finds {} services", describe(monitor), services.len()));
        }
        for (service, endpoint) in services
            .iter()
            .flat_map(|service| items(&monitor["spec"]["endpoints"]).map(move |end| (service, end)))
        {
            if !items(&service["spec"]["ports"]).any(|port| port["name"] == endpoint["port"]) {
                findings.push(format!(
                    "{}: {} has no such port",
                    describe(monitor),
                    describe(service)
                ));
            }
        }
    }
    findings
}
